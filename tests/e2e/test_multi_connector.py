"""Beside another connector: its loads must not overwrite what is still being stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, Engine, cpu
from faulty import FOLDER_VARIABLE
from faulty_bench import CHUNKS, TOKENS, Bench, Question, faulty_config
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.connector import TieredKVConnector
from models import prompts
from partner import PartnerConnector, TalkingPartner

ALL = CHUNKS * BLOCK
PARTNER = {
    "kv_connector": PartnerConnector.__name__,
    "kv_connector_module_path": PartnerConnector.__module__,
    "kv_role": "kv_both",
}


def both(first: str, policy: str = "recompute") -> dict[str, Any]:
    ours, partner = faulty_config([cpu()]), dict(PARTNER)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "connectors": [ours, partner] if first == "kvtiers" else [partner, ours]
        },
    }


class MultiEngine(Engine):
    """Looks into our connector among the two."""

    @property
    def connector(self) -> TieredKVConnector:
        connectors = self.scheduler.connector.sub_connectors
        return next(c for c in connectors if isinstance(c, TieredKVConnector))


# Before the engines that the other tests share: one process has one engine at a time.
def test_the_failure_policy_must_be_set_where_vllm_reads_it(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='write "kv_load_failure_policy": "recompute" beside'):
        MultiEngine(
            llama,
            transfer=both("kvtiers", policy="fail"),
            environment={FOLDER_VARIABLE: str(tmp_path)},
        )


def test_behind_one_whose_workers_speak_at_start_it_is_refused_at_start(
    llama: Path, tmp_path: Path
) -> None:
    transfer = both("partner")
    first = transfer["kv_connector_extra_config"]["connectors"][0]
    first["kv_connector"] = TalkingPartner.__name__
    with pytest.raises(ConfigError, match="Put TieredKVConnector before the others"):
        MultiEngine(llama, transfer=transfer, environment={FOLDER_VARIABLE: str(tmp_path)})


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module", params=["kvtiers", "partner"])
def bench(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    # Few blocks, so that those of a finished request are soon given to others. vLLM 0.32
    # counts a failed load's blocks twice, so there must be twice those of a request.
    blocks = 13 if model.name == "llama" else 49
    with Bench(
        model,
        folder,
        make=MultiEngine,
        config=both(request.param),
        blocks=blocks,
        max_model_len=(CHUNKS + 1) * BLOCK,
    ) as bench:
        yield bench


def partner_of(bench: Bench) -> PartnerConnector:
    connectors = bench.engine.scheduler.connector.sub_connectors
    return next(c for c in connectors if isinstance(c, PartnerConnector))


def ours_is_first(bench: Bench) -> bool:
    return bench.engine.scheduler.connector.sub_connectors[0] is bench.engine.connector


def known_to_partner_only(bench: Bench) -> Question:
    """A prompt whose store failed here."""
    question = bench.question()
    partner_of(bench).learning = True
    bench.faults.order("store", "fail")
    assert bench.ask(question) == 0
    partner_of(bench).learning = False
    bench.forget()
    return question


def until_next(bench: Bench, blocks: set[int]) -> None:
    """Ask others until vLLM is about to give these blocks to somebody."""
    free = bench.engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    for prompt in prompts(60, 2 * BLOCK, seed=99):
        if blocks & {block.block_id for block in free.get_all_free_blocks()[:3]}:
            return
        bench.answer_to(bench.engine.submit(prompt[: BLOCK + 1], 1))
    pytest.fail("the blocks never came to the head of vLLM's queue")


def test_the_partner_loads_what_only_it_has(bench: Bench) -> None:
    question = known_to_partner_only(bench)
    assert bench.ask(question) == ALL
    assert bench.fates("load") == []


def test_ours_loads_what_only_it_has(bench: Bench) -> None:
    partner_of(bench).learning = False
    question = bench.stored()
    assert bench.ask(question) == ALL
    assert bench.fates("load") == ["ok"]


def test_a_load_of_the_partner_waits_for_stores_from_the_blocks_it_gets(bench: Bench) -> None:
    theirs = known_to_partner_only(bench)
    ours = bench.question()
    bench.faults.order("store", "ok", held=True)
    bench.check(ours, bench.answer_to(bench.engine.submit(ours.prompt, TOKENS)))
    (store,) = bench.faults.jobs("store")
    assert store["held"]
    until_next(bench, set(store["blocks"]))
    answer = bench.answer_to(bench.engine.submit(theirs.prompt, TOKENS))
    bench.check(theirs, answer)
    assert answer.cached == ALL
    assert partner_of(bench).blocks & set(store["blocks"]), "the case did not arise"
    bench.faults.release()
    bench.quiet()
    bench.forget()
    assert bench.ask(ours) == ALL
    assert bench.fates("load") == ["ok"]


def test_after_a_failed_load_of_ours_the_partner_is_asked(bench: Bench) -> None:
    question = bench.question()
    partner_of(bench).learning = True
    assert bench.ask(question) == 0
    bench.forget()
    bench.faults.order("load", "garbage")
    assert bench.ask(question) == ALL
    assert bench.fates("load") == (["garbage"] if ours_is_first(bench) else [])


def test_a_failed_load_that_nobody_can_replace_is_recomputed(bench: Bench) -> None:
    partner_of(bench).learning = False
    question = bench.stored()
    bench.faults.order("load", "garbage")
    assert bench.ask(question) == 0
    assert bench.fates("load") == ["garbage"]
