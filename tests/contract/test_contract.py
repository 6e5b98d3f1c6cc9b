"""The contract against the sources of every supported release, and against broken ones."""

from pathlib import Path

import pytest
from kvtiers.connector.compat import SUPPORTED, describe
from kvtiers.connector.contract import RELEASE_DIFFERENCES, check_sources
from kvtiers.connector.contract_sources import SourceTree

pytestmark = pytest.mark.contract

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE = "vllm.v1.kv_offload.base"
OFF_SCHED = f"{V1}.offloading.scheduler"


@pytest.mark.parametrize("release", ["v032", "v033"])
def test_release_keeps_the_contract(release: str, request: pytest.FixtureRequest) -> None:
    sources: Path = request.getfixturevalue(release)
    assert SourceTree(sources).version.startswith(f"0.{release[-2:]}.")
    assert [str(problem) for problem in check_sources(sources)] == []


@pytest.mark.parametrize(("release", "way"), [("v032", "0.32"), ("v033", "0.33")])
def test_releases_differ_as_declared(
    release: str, way: str, request: pytest.FixtureRequest
) -> None:
    tree = SourceTree(request.getfixturevalue(release))
    assert way in SUPPORTED
    assert {entry.name: entry.observe(tree) for entry in RELEASE_DIFFERENCES} == {
        entry.name: [way] for entry in RELEASE_DIFFERENCES
    }


BREAKS = {
    "class renamed": (
        BASE,
        "class OffloadingSpec(",
        "class OffloadSpec(",
        f"class {BASE}.OffloadingSpec",
    ),
    "method removed": (
        BASE,
        "def on_schedule_end(",
        "def on_step_end(",
        "method OffloadingManager.on_schedule_end",
    ),
    "method removed from a base of ours": (
        f"{V1}.base",
        "def get_transfer_results(",
        "def get_transfer_outcome(",
        "method OffloadingConnector.get_transfer_results",
    ),
    "parameter renamed": (
        f"{V1}.offloading_connector",
        'self, request: "Request", num_computed_tokens: int',
        'self, request: "Request", num_local_tokens: int',
        "parameter 'num_computed_tokens' of OffloadingConnector.get_num_new_matched_tokens",
    ),
    "parameter added to what we override": (
        BASE,
        "        req_context: ReqContext,\n    ) -> LoadStoreSpec:",
        "        req_context: ReqContext,\n        deadline: float = 0,\n    ) -> LoadStoreSpec:",
        "OffloadingManager.prepare_load without the new parameter 'deadline'",
    ),
    "parameters swapped": (
        f"{V1}.offloading.metrics",
        "        gauge_name: str,\n        gauge_value: int | float,\n",
        "        gauge_value: int | float,\n        gauge_name: str,\n",
        "order of the parameters of OffloadingConnectorStats.set_gauge",
    ),
    "abstract method added": (
        BASE,
        "    def touch(self",
        "    @abstractmethod\n    def renew(self): ...\n\n    def touch(self",
        "OffloadingManager without the new abstract method renew",
    ),
    "enum member removed": (
        BASE,
        "HIT_PENDING = auto()",
        "WAIT = auto()",
        "LookupResult.HIT_PENDING",
    ),
    "field added without a default": (
        BASE,
        "    evicted_keys: list[OffloadKey]\n",
        "    evicted_keys: list[OffloadKey]\n    cost: int\n",
        "PrepareStoreOutput without the new field 'cost'",
    ),
    "attribute of instances renamed": (
        OFF_SCHED,
        "self._jobs",
        "self._transfers",
        "attribute OffloadingConnectorScheduler._jobs",
    ),
    "function takes more": (
        BASE,
        "def get_offload_group_idx(key: OffloadKey)",
        "def get_offload_group_idx(key: OffloadKey, base: int)",
        f"{BASE}.get_offload_group_idx without the new parameter 'base'",
    ),
    "stand-in asked for more": (
        "vllm.v1.kv_offload.cpu.gpu_worker",
        "region.total_size_bytes",
        "region.file_size_bytes",
        "vllm.v1.kv_offload.cpu.gpu_worker asks for 'file_size_bytes' of our stand-in",
    ),
    "failed transfers accepted": (
        f"{V1}.offloading.worker",
        "assert transfer_result.success",
        "failed |= not transfer_result.success",
        "transfers must be reported as good",
    ),
    "flush waited for before it is submitted": (
        f"{V1}.offloading.worker",
        "        # Pop jobs_to_flush from store_jobs",
        "        self.worker.wait(set())\n        # Pop jobs_to_flush from store_jobs",
        "flushed stores are submitted before they are waited for",
    ),
    "policy read before the connector exists": (
        "vllm.v1.core.sched.scheduler",
        "            self.connector = KVConnectorFactory.create_connector(",
        "            early = kv_transfer_config.kv_load_failure_policy\n"
        "            self.connector = KVConnectorFactory.create_connector(",
        "the failure policy is read after the connector exists",
    ),
    "connector hears of the step before the failure": (
        "vllm.v1.core.sched.scheduler",
        "        failed_kv_load_req_ids: set[str] = set()\n",
        "        failed_kv_load_req_ids: set[str] = set()\n"
        "        self._update_from_kv_xfer_finished(kv_connector_output)\n",
        "a failed load is handled before the connector hears of the step",
    ),
    "a third way to end a step": (
        OFF_SCHED,
        "self.manager.on_schedule_end(",
        "self.manager.finish_step(",
        "on_schedule_end and the step's stores: none of the known ways",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_named(name: str, broken) -> None:
    module, old, new, expected = BREAKS[name]
    problems = check_sources(broken(module, old, new))
    assert any(problem.what.startswith(expected) for problem in problems), problems
    assert expected in describe(problems, "0.99.0")


def test_an_empty_folder_breaks_every_line(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    names = {problem.what for problem in check_sources(tmp_path)}
    assert f"class {BASE}.OffloadingManager" in names
    assert f"function {BASE}.make_offload_key" in names
    assert "on_schedule_end and the step's stores: none of the known ways" in names
