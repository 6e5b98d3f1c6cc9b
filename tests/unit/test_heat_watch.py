"""From a scheduler's step to measurements, and from readings to the policy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hierarchy_kit import Stack, prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector import heat_book
from kvtiers.connector.heat import HeatCost, HeatJob, HeatSettings, HeatStep
from kvtiers.connector.heat_book import HeatBook, HeatPlan
from kvtiers.connector.heat_budget import HeatBudget
from kvtiers.connector.heat_probe import HeatProbe
from kvtiers.connector.heat_watch import HeatWatch
from kvtiers.connector.transfer import TieredMetadata, TieredWorkerMetadata
from kvtiers.policies import Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import Namespace
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK, CHUNK_TOKENS, LAYERS, HEADS = 4, 8, 4, 2


# Which prompts are measured ---------------------------------------------------


def plan(ranks: int = 1, **settings: float) -> HeatPlan:
    return HeatPlan(HeatSettings(**settings), 0, BLOCK, CHUNK_TOKENS, ranks)


def run(chunks: int, name: str = "a") -> Run:
    return Run(tuple(f"{name}{i}" for i in range(chunks)))


def test_the_end_of_a_prompt_is_measured_by_what_the_step_computes() -> None:
    job = plan(window=16).job(run(5), [9, 8, 7, 6, 5], before=10, computed=8)
    assert job == HeatJob(1, 0, 18, 8, 5, BLOCK, CHUNK_TOKENS)
    job = plan(window=3).job(run(5), [9, 8, 7, 6], before=0, computed=16)
    assert (job.queries, job.last_block) == (3, 6)


def test_a_prompt_with_nothing_but_the_sink_is_not_measured() -> None:
    assert plan().job(run(1), [1, 2, 3, 4], 0, 15) is None
    assert plan().job(run(2), [1, 2, 3, 4], 0, 15) is None, "its second chunk is not whole"


def test_every_nth_prompt_is_measured_and_layers_turn_with_each() -> None:
    made = plan(every=3)
    jobs = [made.job(run(2), [1, 2, 3, 4], 0, 16) for _ in range(9)]
    assert [job and (job.number, job.turn) for job in jobs] == [
        *(None, None, (1, 0), None, None, (2, 1), None, None, (3, 2))
    ]


def test_measuring_waits_until_computing_has_paid_for_it() -> None:
    made = plan(budget=0.01)

    def asked() -> bool:
        return made.job(run(2), [1, 2, 3, 4], 0, 16) is not None

    assert asked(), "of the first nobody knows what it takes"
    made.spent(HeatCost(probe_s=0.25, prefill_s=12.5))
    assert not asked()
    made.spent(HeatCost(prefill_s=12.0))
    assert not asked()
    made.spent(HeatCost(prefill_s=0.75))
    assert asked()


def test_a_change_of_load_does_not_spend_what_was_saved_for_hours() -> None:
    budget = HeatBudget(0.01)
    budget.spent(HeatCost(prefill_s=36_000.0))
    budget.spent(HeatCost(probe_s=1.5))
    assert not budget.allows()
    budget.spent(HeatCost(prefill_s=51.0))
    assert budget.allows()


@settings(max_examples=100, deadline=None)
@given(
    share=st.floats(0.001, 1.0),
    prompts=st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 20.0)), max_size=60),
)
def test_no_more_than_the_budget_is_spent_but_by_what_is_under_way(share, prompts) -> None:
    budget, spent, computed, dearest = HeatBudget(share), 0.0, 0.0, 0.0
    for probe_s, rest_s in prompts:
        probe_s = probe_s if budget.allows() else 0.0
        budget.spent(HeatCost(probe_s, probe_s + rest_s))
        spent, computed = spent + probe_s, computed + probe_s + rest_s
        dearest = max(dearest, probe_s)
        assert spent <= share * computed + dearest + 1e-9


def test_answers_of_all_ranks_are_one_and_come_with_the_chunks_asked_for() -> None:
    made = plan(ranks=2)
    made.job(run(3), list(range(8)), 0, 20)
    readings = {(1, 2, 1): mass(2, 5.0), (1, 2, 0): mass(2, 3.0), (1, 0, 0): mass(2, 1.0)}
    ((chunks, measured),) = made.answered(readings)
    assert chunks.chunks == ("a0", "a1")
    assert measured.keys() == {0, 2}
    np.testing.assert_array_equal(measured[2], [[3, 3], [3, 3], [5, 5], [5, 5]])
    assert list(made.answered(readings)) == [], "each is told once"


def test_an_answer_waits_for_the_rank_that_is_late() -> None:
    made = plan(ranks=2)
    made.job(run(2), [1, 2, 3, 4], 0, 16)
    assert list(made.answered({(1, 0, 1): mass(2, 5.0)})) == []
    ((_, measured),) = made.answered({(1, 0, 0): mass(2, 3.0)})
    np.testing.assert_array_equal(measured[0], [[3, 3], [3, 3], [5, 5], [5, 5]])


def test_what_was_asked_before_a_reset_is_not_told() -> None:
    made = plan()
    made.job(run(2), [1, 2, 3, 4], 0, 16)
    made.forget()
    assert list(made.answered({(1, 0, 0): mass(2)})) == []


def test_answers_that_never_come_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr(heat_book, "_MOST_JOBS", 2)
    made = plan()
    for name in "abc":
        made.job(run(2, name), [1, 2, 3, 4], 0, 16)
    told = list(made.answered({(n, 0, 0): mass(2) for n in (1, 2, 3)}))
    assert [chunks.chunks[0] for chunks, _ in told] == ["b0", "c0"]


# What is kept of it -----------------------------------------------------------


def mass(chunks: int, value: float = 1.0) -> np.ndarray:
    return np.full((HEADS, chunks), value, np.float32)


def test_a_chunks_heat_is_the_mean_over_what_was_measured_of_it() -> None:
    book = HeatBook(LAYERS)
    assert book.note(run(3), {0: mass(3, 0.2), 2: mass(3, 0.4)}) == pytest.approx([0.3] * 3)
    assert book.note(run(2), {1: mass(2, 0.6)}) == pytest.approx([0.4, 0.4])
    heat = book.heat("a1")
    np.testing.assert_allclose(heat, [[0.2] * 2, [0.6] * 2, [0.4] * 2, [0.0] * 2], atol=1e-6)
    assert book.heat("b0") is None


def test_requests_that_share_a_chunk_share_a_moving_average() -> None:
    book = HeatBook(LAYERS)
    book.note(run(2), {0: mass(2, 1.0)})
    assert book.note(run(2), {0: mass(2, 0.0)}) == pytest.approx([0.7, 0.7])
    assert book.note(run(2), {0: mass(2, 0.0)}) == pytest.approx([0.49, 0.49])


def test_columns_are_positions_in_the_prefix() -> None:
    book = HeatBook(LAYERS)
    measured = np.tile(np.float32([0.9, 0.1, 0.2, 0.3]), (HEADS, 1))
    assert book.note(run(4).tail(1), {0: measured}) == pytest.approx([0.1, 0.2, 0.3])


def test_the_book_has_a_bound_and_forgets_what_was_measured_longest_ago(monkeypatch) -> None:
    monkeypatch.setattr(heat_book, "_MOST_BYTES", 4 * LAYERS * HEADS * 4)
    book = HeatBook(LAYERS)
    for name in "abc":
        book.note(run(2, name), {0: mass(2)})
    assert len(book) == 4
    assert book.heat("a1") is None
    assert book.note(run(2, "a"), {1: mass(2, 0.5)}) == [0.5, 0.5], "a row is given out empty"
    tail = book.note(run(9, "d"), {0: mass(9)})
    assert len(tail) == 4
    assert book.heat("d8") is not None


def test_a_model_with_draft_layers_behind_its_own_is_no_trouble() -> None:
    assert HeatBook(LAYERS).note(run(2), {0: mass(2), LAYERS: mass(2, 9.0)}) == [1.0, 1.0]


def test_other_weights_attend_to_other_things() -> None:
    book = HeatBook(LAYERS)
    book.note(run(2), {0: mass(2)})
    book.forget()
    assert book.heat("a0") is None
    assert book.note(run(2), {1: mass(2, 0.5)}) == [0.5, 0.5]


# The scheduler's step ---------------------------------------------------------


def watch() -> HeatWatch:
    return HeatWatch(plan(window=4), HeatBook(LAYERS))


def status(prompt: int, blocks: Sequence[int]) -> Any:
    groups = [SimpleNamespace(group_idx=1), SimpleNamespace(group_idx=0)]
    states = [SimpleNamespace(block_ids=[]), SimpleNamespace(block_ids=list(blocks))]
    return SimpleNamespace(
        req=SimpleNamespace(num_prompt_tokens=prompt),
        config=SimpleNamespace(kv_group_configs=groups),
        group_states=states,
    )


def step(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """Requests as ``name: (before, computed)``."""
    return SimpleNamespace(
        num_scheduled_tokens={name: n for name, (_, n) in {**new, **cached}.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=n) for name, (n, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[n for n, _ in cached.values()]
        ),
    )


def test_only_ends_of_prompts_are_measured() -> None:
    blocks = list(range(10, 20))
    statuses = {name: status(24, blocks) for name in ("whole", "first part", "last", "decodes")}
    output = step(
        {"whole": (0, 24), "first part": (0, 16), "unknown": (0, 24)},
        {"last": (16, 8), "decodes": (24, 1)},
    )
    told = watch().step(output, statuses, lambda name, _: run(3, name))
    assert [(job.tokens, job.queries, job.last_block) for job in told.jobs] == [(24, 4, 15)] * 2
    assert told.prefill == (24 + 16 + 8) / (24 + 16 + 24 + 8 + 1)
    assert watch().step(output, statuses, lambda *_: None).jobs == ()


def test_a_step_of_decodes_computes_no_prompt() -> None:
    output = step({}, {"decodes": (24, 1)})
    assert watch().step(output, {"decodes": status(24, range(9))}, lambda *_: run(3)) == HeatStep()
    assert watch().step(step({}, {}), {}, lambda *_: run(3)) == HeatStep()


def test_without_being_asked_for_or_without_full_attention_nothing_is_measured(caplog) -> None:
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS))
    names = SimpleNamespace(static_forward_context={"full": "its layer", "windowed": "another"})
    engine = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(world_size=1, rank=0),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=names,
    )
    groups = [
        SimpleNamespace(group_idx=number, tokens_per_block=4, tokens_per_chunk=8)
        for number in range(2)
    ]

    def cache(*specs: Any) -> Any:
        kinds = [(spec, ["windowed" if spec == "windowed" else "full"]) for spec in specs]
        groups = [SimpleNamespace(kv_cache_spec=s, layer_names=names) for s, names in kinds]
        return SimpleNamespace(kv_cache_groups=groups)

    def made(settings: HeatSettings | None, *specs: Any) -> HeatWatch | None:
        return HeatWatch.of_engine(settings, engine, cache(*specs), groups)

    assert made(None, full) is None
    assert HeatProbe.of_worker(None, engine, cache(full)) is None
    assert caplog.records == []
    assert made(HeatSettings(), "windowed", "windowed") is None
    assert "Attention heat is not measured (no KV cache group" in caplog.text
    assert HeatProbe.of_worker(HeatSettings(), engine, cache("windowed")) is None
    assert made(HeatSettings(), "windowed", full)._plan.group == 1
    probe = HeatProbe.of_worker(HeatSettings(), engine, cache("windowed", full))
    assert probe._modules == {"full": "its layer"}


def test_the_policy_is_told_of_what_follows_the_sink() -> None:
    made = watch()
    made.step(step({"r": (0, 24)}, {}), {"r": status(24, range(9))}, lambda *_: run(3))
    measured = np.tile(np.float32([0.9, 0.1, 0.2]), (HEADS, 1))
    ((chunks, heat),) = made.told({(1, 3, 0): measured})
    assert (chunks.chunks, chunks.start, chunks.parent) == (("a1", "a2"), 1, "a0")
    assert heat == pytest.approx([0.1, 0.2])


def test_what_the_scheduler_takes_counts_for_every_rank() -> None:
    now = 0.0
    made = HeatWatch(plan(ranks=2, budget=0.01), HeatBook(LAYERS), clock=lambda: now)

    def asked() -> bool:
        parts = step({"r": (0, 24)}, {})
        return made.step(parts, {"r": status(24, range(9))}, lambda *_: run(3)).jobs != ()

    assert asked()
    for _ in made.told({(1, 3, 0): mass(3), (1, 3, 1): mass(3)}):
        now += 0.25  # what the policy makes of it
    made.spent(HeatCost(prefill_s=49.0))
    assert not asked()
    made.spent(HeatCost(prefill_s=2.0))
    assert asked()


def test_jobs_and_readings_travel_with_vllms_own_messages() -> None:
    job = HeatJob(1, 0, 24, 4, 5, BLOCK, CHUNK_TOKENS)
    plain = OffloadingConnectorMetadata(load_jobs={1: "load"}, store_jobs={2: "store"})
    told = HeatStep((job,), 0.5)
    sent = pickle.loads(pickle.dumps(TieredMetadata.extend(plain, told)))
    assert (sent.load_jobs, sent.store_jobs, sent.heat) == ({1: "load"}, {2: "store"}, told)
    one = TieredWorkerMetadata(heat={(1, 0, 0): mass(2)}, heat_cost=HeatCost(1.0, 20.0))
    other = TieredWorkerMetadata(
        completed_jobs={3: 1}, heat={(1, 0, 1): mass(2, 2.0)}, heat_cost=HeatCost(2.0, 30.0)
    )
    for merged in (
        one.aggregate(other),
        one.aggregate(OffloadingWorkerMetadata()).aggregate(other),
    ):
        assert merged.heat.keys() == {(1, 0, 0), (1, 0, 1)}
        assert merged.heat_cost == HeatCost(3.0, 50.0)
        assert merged.completed_jobs == {3: 1}


# The hierarchy ----------------------------------------------------------------


class Told(LruPolicy):
    """Notes what it is told of heat, and what it held then."""

    def setup(self) -> None:
        super().setup()
        self.heard: list[tuple[Run, list[float]]] = []

    def on_heat(self, run: Run, heat: Sequence[float]) -> None:
        assert run.chunks[-1] in list(self.victims("cpu", 1))
        self.heard.append((run, list(heat)))


def test_the_policy_hears_once_the_chunks_are_stored() -> None:
    stack = Stack(8, policy=Told)
    chunks = prefix("a", 3)
    stack.h.measured(chunks.tail(1), [0.1, 0.2])
    assert stack.h.policy.heard == []
    stack.store(chunks.head(2))
    assert stack.h.policy.heard == []
    stack.store(chunks.tail(2))
    assert stack.h.policy.heard == [(chunks.tail(1), [0.1, 0.2])]
    stack.h.measured(chunks, [0.3, 0.4, 0.5])
    assert len(stack.h.policy.heard) == 2


def test_what_was_measured_before_a_reset_is_forgotten() -> None:
    stack = Stack(8, policy=Told)
    stack.h.measured(prefix("a", 2), [0.1, 0.2])
    stack.h.reset(Namespace("second"))
    stack.h.flushed()
    stack.store(prefix("a", 2))
    assert stack.h.policy.heard == []


def test_prompts_that_are_never_stored_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.heat._MOST_WAITING", 1)
    stack = Stack(8, policy=Told)
    for name in "ab":
        stack.h.measured(prefix(name, 2), [0.1, 0.2])
    for name in "ab":
        stack.store(prefix(name, 2))
    assert [told.chunks for told, _ in stack.h.policy.heard] == [prefix("b", 2).chunks]
