"""The contract against the vLLM that is installed, and compat's reading of it."""

import ast
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtiers.connector import contract
from kvtiers.connector.compat import (
    SUPPORTED,
    IncompatibleVllmError,
    RequestFacts,
    check,
    completed_jobs,
    request_facts,
    vllm_version,
)
from kvtiers.connector.contract import CONTRACT, check_runtime
from kvtiers.connector.contract_kinds import (
    Class,
    DuckType,
    Function,
    Method,
    Named,
    Signature,
    overridden,
)
from kvtiers.connector.contract_sources import ClassSource, SourceTree
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload import base
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

BASE = "vllm.v1.kv_offload.base"
INSTANCES = {"current_platform": "Platform"}
"""Variables of vLLM's modules, and the class that the contract has for each."""


def test_the_installed_vllm_keeps_the_contract() -> None:
    assert vllm_version().startswith(SUPPORTED)
    assert check_runtime() == []
    check()


def test_everything_missing_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self: object, key: object, req_context: object) -> None: ...

    monkeypatch.delattr(base, "make_offload_key")
    monkeypatch.delattr(base.OffloadingManager, "get_load_source")
    monkeypatch.setattr(base.OffloadingManager, "touch", touch)
    monkeypatch.setattr(base.OffloadingSpec, "__abstractmethods__", frozenset({"get_codec"}))
    with pytest.raises(IncompatibleVllmError) as error:
        check()
    text = str(error.value)
    for missing in (
        f"function {BASE}.make_offload_key",
        "method OffloadingManager.get_load_source",
        "parameter 'keys' of OffloadingManager.touch",
        "OffloadingManager.touch without the new parameter 'key'",
        "OffloadingSpec without the new abstract method get_codec",
        f"cannot run on vLLM {vllm_version()}",
        "Supported: vLLM 0.32, 0.33",
    ):
        assert missing in text
    assert "\n" not in text


def test_a_class_or_module_that_is_gone_is_named() -> None:
    entries = [
        Class(BASE, "Gone", "reason one"),
        Class("vllm.no.such.module", "Gone", "reason two"),
        Function("vllm.no.such.module", Method("gone", "", "reason three")),
        Named(BASE, "Gone", "reason four"),
    ]
    assert [str(problem) for problem in check_runtime(entries)] == [
        f"class {BASE}.Gone (reason one)",
        "class vllm.no.such.module.Gone (reason two)",
        "function vllm.no.such.module.gone (reason three)",
        f"name {BASE}.Gone (reason four)",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "fine"),
    [
        (Method("f", "a b", ""), {"a": True, "b": True}, True),
        (Method("f", "a b", ""), {"a": True, "b": True, "c": False}, True),
        (Method("f", "a b", ""), {"a": True, "b": True, "c": True}, False),
        (Method("f", "a b", ""), {"b": True, "a": True}, False),
        (Method("f", "a b", ""), {"a": True}, False),
        (overridden("f", "a", ""), {"a": True, "b": False}, False),
        (overridden("f", "a", "", newer="b"), {"a": True, "b": False}, True),
        (overridden("f", "a", "", newer="b"), {"a": True}, True),
    ],
)
def test_signatures_are_compared_by_who_calls(
    ours: Method, theirs: dict[str, bool], fine: bool
) -> None:
    assert (not list(ours.compare("C", Signature(theirs)))) == fine


def test_static_and_class_methods_lose_the_right_parameter() -> None:
    class Example:
        def plain(self, a: int, *, b: int = 0) -> None: ...
        @classmethod
        def of_class(cls, a: int, **rest: int) -> None: ...
        @staticmethod
        def static(a: int) -> None: ...

    found = {
        name: Signature.of_object(vars(Example)[name], bound=True)
        for name in ("plain", "of_class", "static")
    }
    assert found == {
        "plain": Signature({"a": True, "b": False}),
        "of_class": Signature({"a": True}, open=True),
        "static": Signature({"a": True}),
    }


def test_a_runtime_check_imports_nothing_that_the_connector_would_not() -> None:
    modules = {entry.module for entry in CONTRACT if isinstance(entry, Class) and entry.runtime}
    heavy = ("vllm.v1.engine", "vllm.v1.worker", "vllm.v1.core.sched.scheduler", "cpu_attn")
    assert not [module for module in modules if module.startswith(heavy)]
    assert all(importlib.import_module(module) for module in modules)


def request(**options: object) -> Request:
    params = SamplingParams(max_tokens=1, extra_args=options.pop("extra_args", None))
    return Request("r1", [1, 2, 3], params, None, **options)


def test_facts_of_a_request_that_says_nothing() -> None:
    assert request_facts(request()) == RequestFacts("r1", prompt_tokens=3)


def test_facts_of_a_request_that_says_all() -> None:
    hint = KvHintAction("1", "return", "1", {"seconds": 30})
    facts = request_facts(
        request(
            cache_salt="tenant",
            session_id="chat-7",
            kv_hints=KvHintsEnvelope("1", "m", [hint]),
            extra_args={"kv_transfer_params": {"priority": 2, "session_id": "other"}},
        )
    )
    assert facts == RequestFacts(
        request_id="r1",
        tenant="tenant",
        session="chat-7",
        prompt_tokens=3,
        hints={"return": {"seconds": 30}, "priority": 2, "session_id": "other"},
    )


@pytest.mark.parametrize("params", [["not", "a", "mapping"], "text", 5])
def test_nonsense_from_a_client_is_ignored(params: object) -> None:
    odd = request(extra_args={"kv_transfer_params": params})
    assert request_facts(odd).hints == {}


def test_a_session_can_come_as_a_hint() -> None:
    hinted = request(extra_args={"kv_transfer_params": {"session_id": "chat-9"}})
    assert request_facts(hinted).session == "chat-9"


def test_completed_jobs_of_a_step() -> None:
    meta = OffloadingWorkerMetadata()
    meta.mark_completed(5)
    assert completed_jobs(KVConnectorOutput(kv_connector_worker_meta=meta)) == {5: 1}
    assert completed_jobs(KVConnectorOutput()) == {}
    assert completed_jobs(SimpleNamespace(kv_connector_worker_meta=object())) == {}


def test_every_import_from_vllm_is_in_the_contract() -> None:
    """A new import is a new reliance: it needs an entry with its reason."""
    named = set()
    for entry in CONTRACT:
        if isinstance(entry, Class | Named):
            named.add(entry.name)
        elif isinstance(entry, Function):
            named.add(entry.method.name)
    imported = {
        INSTANCES.get(alias.name, alias.name)
        for path in Path(contract.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imported) > 10
    assert imported - named == set()


def test_the_arena_has_all_that_it_may_be_asked_for_as_vllms_region() -> None:
    from kvtiers.connector.copy_device import ArenaRegion

    source = ast.parse(inspect.getsource(ArenaRegion)).body[0]
    assert isinstance(source, ast.ClassDef)
    ours = ClassSource(SourceTree(Path("nowhere")), "ours", source).attributes()
    (stand_in,) = [entry for entry in CONTRACT if isinstance(entry, DuckType)]
    assert stand_in.provides <= ours
