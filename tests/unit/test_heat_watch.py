"""From a scheduler's step to measurements, and from readings to the policy."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hierarchy_kit import Stack, ToldOfHeat, prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector import heat_book
from kvtiers.connector.heat import (
    NO_COST,
    NO_REPORT,
    NO_STEP,
    HeatCost,
    HeatJob,
    HeatReport,
    HeatSettings,
    HeatStep,
)
from kvtiers.connector.heat_book import HeatBook, HeatPlan
from kvtiers.connector.heat_budget import HeatBudget
from kvtiers.connector.heat_log import HeatLog
from kvtiers.connector.heat_probe import HeatProbe
from kvtiers.connector.heat_watch import HeatWatch
from kvtiers.connector.transfer import TieredMetadata, TieredWorkerMetadata
from kvtiers.policies import Run
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
    made, jobs = plan(every=3), []
    for _ in range(9):
        jobs.append(made.job(run(2), [1, 2, 3, 4], 0, 16))
        if jobs[-1] is not None:
            answer(made, jobs[-1].number, probe_s=0.0)
    assert [job and (job.number, job.turn) for job in jobs] == [
        *(None, None, (1, 0), None, None, (2, 1), None, None, (3, 2))
    ]


def answer(made: HeatPlan, number: int, probe_s: float, prefill_s: float = 0.0) -> None:
    """The number of a job, what it took, and what computing prompts did meanwhile."""
    made.spent(HeatCost(probe_s, prefill_s, probe_s, prefill_s), measured=True)
    assert len(list(made.answered({(number, 0, 0): mass(2)}))) == 1
    made.settled()


def for_nothing(made: HeatPlan) -> HeatPlan:
    """After a first prompt that took no time to measure."""
    assert asked(made)
    answer(made, 1, probe_s=0.0)
    return made


def asked(made: HeatPlan) -> bool:
    return made.job(run(2), [1, 2, 3, 4], 0, 16) is not None


def computing(seconds: float) -> HeatCost:
    """Prompts and nothing else, by both clocks."""
    return HeatCost(prefill_s=seconds, prefill_cpu_s=seconds)


def test_measuring_waits_until_computing_has_paid_for_it() -> None:
    made = plan(budget=0.01)
    assert asked(made), "of the first nobody knows what it takes"
    assert not asked(made), "of the first there is one"
    answer(made, 1, probe_s=0.25, prefill_s=25.0)
    # That is paid for, and the next is not: it will take as much.
    assert not asked(made)
    made.spent(computing(24.5))
    assert not asked(made)
    made.spent(computing(0.75))
    assert asked(made)
    assert not asked(made), "what was saved is set aside for the one under way"


@pytest.mark.parametrize(
    "dear", [HeatCost(probe_s=1.0, prefill_s=50.0), HeatCost(probe_cpu_s=1.0, prefill_cpu_s=50.0)]
)
def test_neither_the_clock_nor_the_processors_may_be_overdrawn(dear) -> None:
    made = plan(budget=0.01)
    made.spent(computing(1.0))
    made.spent(dear)
    assert not asked(made)
    made.spent(computing(50.0))
    assert asked(made)


def test_what_a_prompt_will_take_is_told_by_its_tokens() -> None:
    made = plan(budget=0.5)
    made.job(run(2), [1, 2, 3, 4], 0, 16)
    answer(made, 1, probe_s=0.16)
    made.spent(computing(0.5))  # 0.25 less what was spent: enough for 9 tokens
    assert not asked(made)
    made.spent(computing(0.2))  # enough for 19
    assert made.job(run(3), list(range(8)), 0, 24) is None
    assert asked(made)


def test_a_prompt_that_takes_more_than_is_ever_saved_waits_for_half_of_that() -> None:
    made = plan(budget=0.5)
    assert asked(made)
    answer(made, 1, probe_s=4.0)
    made.spent(computing(8.9))
    assert not asked(made)
    made.spent(computing(0.2))
    assert asked(made)
    assert not asked(made)


@pytest.mark.parametrize("dear", [0.4, 1.0, 1.2, 30.0])
def test_however_dear_measuring_is_and_whatever_steps_take_it_goes_on(dear: float) -> None:
    made, measured = plan(budget=0.01), 0
    for _ in range(20_000):
        made.delayed(1e-5)
        if (job := made.job(run(2), [1, 2, 3, 4], 0, 16)) is not None:
            measured += 1
            answer(made, job.number, probe_s=dear)
        made.spent(computing(1.0))
        made.delayed(1e-5)
    assert measured == pytest.approx(200 / dear, abs=2)


def test_a_night_of_steps_without_prompts_is_paid_back_in_a_minute() -> None:
    made = for_nothing(plan(budget=0.01))
    made.delayed(100.0)
    made.spent(computing(99.0))
    assert not asked(made)
    made.spent(computing(2.0))
    assert asked(made)


def test_what_measuring_took_is_owed_all_the_same() -> None:
    made = plan(budget=0.01)
    assert asked(made)
    answer(made, 1, probe_s=3.0)
    made.delayed(100.0)
    made.spent(computing(299.0))
    assert not asked(made)


def test_what_answers_from_before_a_reset_took_is_no_price_of_those_after() -> None:
    made = plan(budget=0.5)
    watch = HeatWatch(made, HeatBook(LAYERS))
    assert asked(made)
    watch.forget()
    list(watch.told(HeatReport({(1, 0, 0): mass(2)}, HeatCost(probe_s=0.5, probe_cpu_s=0.5))))
    made.spent(computing(1.1))
    assert asked(made)
    answer(made, 2, probe_s=0.01)
    assert asked(made), "that is what one takes, and what is left is five times as much"


def test_the_first_is_by_itself_whatever_was_saved() -> None:
    made = plan(budget=0.01)
    made.spent(computing(500.0))
    assert asked(made)
    assert not asked(made)


def test_an_answer_that_never_comes_is_paid_for_and_ends_nothing() -> None:
    made = plan(budget=0.01)
    assert asked(made)
    made.spent(computing(99.0))
    assert not asked(made)
    made.spent(computing(2.0))
    assert asked(made)


def test_what_is_under_way_at_a_reset_is_given_back() -> None:
    made = plan(budget=0.01)
    assert asked(made)
    made.forget()
    assert asked(made)


def test_of_two_ranks_both_prices_count() -> None:
    made = plan(ranks=2, budget=0.5)
    assert asked(made)
    for rank in range(2):
        made.spent(HeatCost(probe_s=0.1), measured=True)
        list(made.answered({(1, 0, rank): mass(2)}))
        made.settled()
    made.spent(computing(0.7))  # 0.15 are left: one rank's 0.1 would do
    assert not asked(made)
    made.spent(computing(0.2))
    assert asked(made)


def test_a_change_of_load_does_not_spend_what_was_saved_for_hours() -> None:
    budget = HeatBudget(0.01)
    budget.spent(computing(36_000.0))
    budget.spent(HeatCost(probe_s=1.5))
    assert budget.reserve(1) is None
    budget.spent(computing(51.0))
    assert budget.reserve(1) is not None


@settings(max_examples=200, deadline=None)
@given(
    share=st.floats(0.001, 1.0),
    per_token=st.tuples(st.floats(0.0, 0.1), st.floats(0.0, 0.1)),
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), max_size=4), st.floats(0.0, 20.0), st.floats(0.0, 40.0)
        ),
        max_size=60,
    ),
    ahead=st.integers(0, 2),
)
def test_in_any_window_no_more_than_the_budget_is_spent_but_by_what_was_saved(
    share, per_token, steps, ahead
) -> None:
    """Of both clocks, where a token ever takes the same."""
    budget, under_way = HeatBudget(share), deque()
    left, saved = np.zeros(2), np.zeros(2)
    dearest = 9 * np.array(per_token)

    def end_of_step() -> None:
        nonlocal left, saved
        reserves, wall, cpu = under_way.popleft()
        tokens = sum(reserve.tokens for reserve in reserves)
        probe = tokens * np.array(per_token)
        whole = probe + np.array((wall, cpu))
        budget.spent(HeatCost(probe[0], whole[0], probe[1], whole[1]), measured=tokens > 0)
        for reserve in reserves:
            budget.give_back(reserve)
        if tokens:
            budget.learn(tokens)
        left = left + share * whole - probe
        assert np.all(left >= -dearest - 1e-9), "from the start on only the first is on credit"
        assert np.all(left >= saved - 1.0 - dearest - 1e-9), "nor is more than a second saved"
        late = sum(reserve.tokens for reserves, *_ in under_way for reserve in reserves)
        saved = np.maximum(saved, left - late * np.array(per_token))

    for prompts, wall, cpu in steps:
        # An engine schedules some steps ahead of those that have ended.
        made = [budget.reserve(tokens) for tokens in prompts]
        under_way.append(([reserve for reserve in made if reserve], wall, cpu))
        if len(under_way) > ahead:
            end_of_step()
    while under_way:
        end_of_step()


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
    made = for_nothing(plan())
    for name in "abc":
        made.job(run(2, name), [1, 2, 3, 4], 0, 16)
    told = list(made.answered({(n, 0, 0): mass(2) for n in (2, 3, 4)}))
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
    scheduled = {name: n for name, (_, n) in {**new, **cached}.items()}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
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
    made = HeatWatch(for_nothing(plan(window=4)), HeatBook(LAYERS))
    told = made.step(output, statuses, lambda name, _: run(3, name))
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
    ((chunks, heat),) = made.told(HeatReport({(1, 3, 0): measured}))
    assert (chunks.chunks, chunks.start, chunks.parent) == (("a1", "a2"), 1, "a0")
    assert heat == pytest.approx([0.1, 0.2])


class Account:
    """A watch by a clock that stands still but where a test says otherwise, and its account."""

    def __init__(self, ranks: int = 1) -> None:
        self.now, self.cost = 0.0, NO_COST
        made = plan(ranks=ranks, budget=0.01)
        self.watch = HeatWatch(made, HeatBook(LAYERS), clock=lambda: self.now)
        spent = made._budget.spent

        def noted(cost: HeatCost, *, measured: bool = False) -> None:
            self.cost += cost
            spent(cost, measured=measured)

        made._budget.spent = noted

    def step(self, chunks_of: Any = lambda *_: run(3)) -> HeatStep:
        return self.watch.step(step({"r": (0, 24)}, {}), {"r": status(24, range(9))}, chunks_of)


def test_what_is_done_with_heat_counts_for_every_rank_and_once_of_the_processors() -> None:
    account = Account(ranks=2)
    assert account.step().jobs
    report = HeatReport({(1, 3, 0): mass(3), (1, 3, 1): mass(3)}, HeatCost(1.0, 2.0, 3.0, 4.0))
    for _ in account.watch.told(report):
        account.now += 0.25  # what the policy makes of it
    assert account.cost == HeatCost(1.5, 2.0, 3.25, 4.0)


def test_looking_for_ends_of_prompts_is_in_the_cost() -> None:
    account = Account()

    def slowly(*_: Any) -> Run:
        account.now += 0.25
        return run(3)

    account.step(slowly)
    assert account.cost == HeatCost(probe_s=0.25, probe_cpu_s=0.25)


def test_the_way_of_what_was_measured_is_in_the_cost() -> None:
    account = Account()
    list(account.watch.told(HeatReport(post_s=0.5)))
    assert account.cost == HeatCost(probe_s=0.5, probe_cpu_s=0.5)


def test_what_the_policy_hears_later_is_in_the_cost(monkeypatch) -> None:
    account = Account()
    stack = Stack(8, policy=ToldOfHeat)
    monkeypatch.setattr(stack.h._heat, "_clock", lambda: account.now)
    hear = stack.h.policy.on_heat

    def slowly(*heard: Any) -> None:
        account.now += 0.25
        hear(*heard)

    monkeypatch.setattr(stack.h.policy, "on_heat", slowly)
    account.watch.opened(stack.h)
    stack.h.measured(prefix("a", 3), [0.1, 0.2, 0.3])
    stack.store(prefix("a", 3))
    assert len(stack.h.policy.heard) == 1
    for _ in range(2):  # it is told once
        list(account.watch.told(NO_REPORT))
        assert account.cost == HeatCost(probe_s=0.25, probe_cpu_s=0.25)


def test_what_logging_takes_is_in_the_cost(tmp_path) -> None:
    account = Account()
    log = HeatLog(tmp_path / "heat.jsonl", clock=lambda: 0.25)
    account.watch._log = log
    log.note(run(3), {0: mass(3)})
    log.close()
    for _ in range(2):  # it is told once
        list(account.watch.told(NO_REPORT))
        assert account.cost == HeatCost(probe_s=0.25, probe_cpu_s=0.25)


def test_a_step_of_decodes_is_told_without_a_look_at_each() -> None:
    account = Account()
    output = step({}, {"one": (24, 1), "other": (30, 1)})
    output.scheduled_cached_reqs = None
    assert account.watch.step(output, {}, lambda *_: run(3)) is NO_STEP
    assert account.cost == NO_COST


def test_jobs_and_readings_travel_with_vllms_own_messages() -> None:
    job = HeatJob(1, 0, 24, 4, 5, BLOCK, CHUNK_TOKENS)
    plain = OffloadingConnectorMetadata(load_jobs={1: "load"}, store_jobs={2: "store"})
    told = HeatStep((job,), 0.5)
    sent = pickle.loads(pickle.dumps(TieredMetadata.extend(plain, told)))
    assert (sent.load_jobs, sent.store_jobs, sent.heat) == ({1: "load"}, {2: "store"}, told)
    one = TieredWorkerMetadata(heat=HeatReport({(1, 0, 0): mass(2)}, HeatCost(1.0, 20.0)))
    other = TieredWorkerMetadata(
        completed_jobs={3: 1}, heat=HeatReport({(1, 0, 1): mass(2, 2.0)}, HeatCost(2.0, 30.0))
    )
    for merged in (
        one.aggregate(other),
        one.aggregate(OffloadingWorkerMetadata()).aggregate(other),
        pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(other))),
    ):
        assert merged.heat.readings.keys() == {(1, 0, 0), (1, 0, 1)}
        np.testing.assert_array_equal(merged.heat.readings[1, 0, 1], mass(2, 2.0))
        assert merged.heat.cost == HeatCost(3.0, 50.0)
        assert merged.completed_jobs == {3: 1}


def test_messages_tell_what_their_way_took_on_both_sides(monkeypatch) -> None:
    times = iter(range(0, 100, 5))
    monkeypatch.setattr("kvtiers.connector.heat_post.perf_counter", lambda: float(next(times)))
    there = pickle.dumps(HeatReport({(1, 0, 0): mass(2)}))
    assert next(times) == 10, "it was looked at before and after"
    report = pickle.loads(there)
    assert report.post_s == 5 + 5
    assert (report + report).post_s == 20
    step = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(HeatStep((), 1.0)))))
    assert step.post_s == 20


# The hierarchy ----------------------------------------------------------------


def test_the_policy_hears_once_the_chunks_are_stored() -> None:
    stack = Stack(8, policy=ToldOfHeat)
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
    stack = Stack(8, policy=ToldOfHeat)
    stack.h.measured(prefix("a", 2), [0.1, 0.2])
    stack.h.reset(Namespace("second"))
    stack.h.flushed()
    stack.store(prefix("a", 2))
    assert stack.h.policy.heard == []


def test_prompts_that_are_never_stored_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.heat._MOST_WAITING", 1)
    stack = Stack(8, policy=ToldOfHeat)
    for name in "ab":
        stack.h.measured(prefix(name, 2), [0.1, 0.2])
    for name in "ab":
        stack.store(prefix(name, 2))
    assert [told.chunks for told, _ in stack.h.policy.heard] == [prefix("b", 2).chunks]
