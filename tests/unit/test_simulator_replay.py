"""Replays through policies, and the optimum, against the plainest code that could be right."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.policies import POLICIES, PolicyRequest, Run
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.lru import LruPolicy
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.replay import replay
from kvtiers.simulator.trace import Trace, TraceRequest
from small_traces import CHUNK_TOKENS, chat, prompts, prompts_of, trace_of, with_outputs


def hits_of(trace: Trace, policy_class: type, capacity: int) -> list[int]:
    hits: list[int] = []
    replay(trace, lambda tiers, clock: policy_class(tiers, clock=clock), capacity, hits=hits)
    return hits


def leading(held: set[int] | frozenset[int], prompt: Sequence[int]) -> int:
    return next((i for i, chunk in enumerate(prompt) if chunk not in held), len(prompt))


# LRU -------------------------------------------------------------------------------


def leaf_first_lru(prompts: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Evicts the least recently used leaf, found by looking at all of them."""
    used: dict[int, tuple[int, int]] = {}
    parents = {c: p for prompt in prompts for p, c in pairwise(prompt)}
    hits = []
    for now, prompt in enumerate(prompts):
        hits.append(leading(set(used), prompt))
        for depth, chunk in enumerate(prompt):
            if chunk in used:
                used[chunk] = (now, -depth)
        for depth, chunk in enumerate(prompt):
            if chunk in used:
                continue
            if len(used) >= capacity:
                inner = {parents.get(each) for each in used}
                leaves = [each for each in used if each not in inner and each not in prompt]
                if not leaves:
                    break
                del used[min(leaves, key=used.__getitem__)]
            used[chunk] = (now, -depth)
    return hits


@given(prompts=prompts(most=25), capacity=st.integers(1, 12))
def test_lru_hits_what_evicting_the_least_recent_leaf_hits(
    prompts: list[list[int]], capacity: int
) -> None:
    assert hits_of(trace_of(prompts), LruPolicy, capacity) == leaf_first_lru(prompts, capacity)


def test_lru_hits_the_same_on_conversations() -> None:
    made = chat(random.Random(1), 300)
    hits = hits_of(trace_of(made), LruPolicy, 60)
    assert hits == leaf_first_lru(made, 60)
    assert 0 < sum(hits) < sum(hits_of(trace_of(made), LruPolicy, 10_000))


# The optimum -------------------------------------------------------------------------


def best_by_search(trace: Trace, capacity: int) -> int:
    """The most hits of all ways to keep at most so many chunks after each request."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            now = hits + leading(held, request.chunks())
            pool = held.union(request.chunks(), *request.output_stretches)
            for kept in combinations(pool, min(capacity, len(pool))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), now)
        best = following
    return max(best.values())


@settings(max_examples=150, deadline=None)
@given(prompts=prompts(most=7, depth=3, width=2), capacity=st.integers(1, 4))
def test_the_optimum_is_what_a_search_of_all_ways_finds(
    prompts: list[list[int]], capacity: int
) -> None:
    trace = trace_of(prompts)
    tally = optimum(trace, Future.of(trace), capacity)
    assert tally.hit_tokens == best_by_search(trace, capacity) * CHUNK_TOKENS


@settings(max_examples=150, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 4))
def test_so_it_is_where_outputs_bring_chunks_that_are_asked_for_later(
    data: st.DataObject, capacity: int
) -> None:
    made = trace_of(data.draw(prompts(most=7, depth=3, width=2)))
    n = len(made.requests)
    trace = with_outputs(made, data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    tally = optimum(trace, Future.of(trace), capacity)
    assert tally.hit_tokens == best_by_search(trace, capacity) * CHUNK_TOKENS
    assert sum(hits_of(trace, LruPolicy, capacity)) * CHUNK_TOKENS <= tally.hit_tokens


def min_by_chunks(prompts: Sequence[Sequence[int]], capacity: int) -> tuple[list[int], int]:
    """Keeps single chunks by next use, deepest first among equals. Hits, and chunks written."""
    held: set[int] = set()
    hits, written = [], 0
    depths = {chunk: depth for prompt in prompts for depth, chunk in enumerate(prompt)}
    for i, prompt in enumerate(prompts):
        hits.append(leading(held, prompt))
        nexts = {
            chunk: next((j for j in range(i + 1, len(prompts)) if chunk in prompts[j]), None)
            for chunk in held.union(prompt)
        }
        used = [chunk for chunk, use in nexts.items() if use is not None]
        kept = set(sorted(used, key=lambda chunk: (nexts[chunk], depths[chunk]))[:capacity])
        written += len(kept - held)
        held = kept
    return hits, written


@given(prompts=prompts(most=25), capacity=st.integers(1, 12))
def test_the_optimum_keeps_what_is_used_soonest_shallow_before_deep(
    prompts: list[list[int]], capacity: int
) -> None:
    trace, hits = trace_of(prompts), list[int]()
    tally = optimum(trace, Future.of(trace), capacity, hits=hits)
    assert (hits, tally.written_chunks) == min_by_chunks(prompts, capacity)


@pytest.mark.parametrize("name", POLICIES.names())
@pytest.mark.parametrize("capacity", [5, 20, 60, 200])
def test_no_policy_beats_the_optimum(name: str, capacity: int) -> None:
    trace = trace_of(chat(random.Random(capacity), 300))
    best = optimum(trace, Future.of(trace), capacity)
    assert sum(hits_of(trace, POLICIES.get(name), capacity)) * CHUNK_TOKENS <= best.hit_tokens


# What the driver tells -----------------------------------------------------------------


class Told(LruPolicy):
    """Notes each call, and admits no more than it is told to."""

    most = 1000

    def setup(self) -> None:
        super().setup()
        self.calls: list[tuple[object, ...]] = []

    def on_request(self, request: PolicyRequest) -> None:
        self.calls.append(("request", tuple(request.runs[0].chunks), request.arrival, self.clock()))

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
        self.calls.append(("access", *run.chunks))
        super().on_access(run, request, tier)

    def on_start(self, request: PolicyRequest) -> None:
        self.calls.append(("start",))

    def admit(self, run: Run, tier: str) -> int:
        self.calls.append(("admit", *run.chunks))
        return min(self.most, len(run))

    def on_remove(self, chunks, tier: str) -> None:
        self.calls.append(("remove", *chunks))
        super().on_remove(chunks, tier)

    def on_insert(self, run: Run, tier: str) -> None:
        self.calls.append(("insert", *run.chunks))
        assert (run.parent is None) == (run.start == 0)
        super().on_insert(run, tier)

    def on_finish(self, request: PolicyRequest) -> None:
        last = tuple(request.runs[0].chunks)
        self.calls.append(("finish", last, request.output_tokens, request.finish_reason))


def calls_of(trace: Trace, capacity: int, most: int = 1000) -> list[tuple[object, ...]]:
    made: list[Told] = []

    class Policy(Told):
        pass

    Policy.most = most

    def make(tiers, clock) -> Told:
        made.append(Policy(tiers, clock=clock))
        return made[0]

    replay(trace, make, capacity)
    return made[0].calls


def test_a_hit_a_miss_and_room_come_in_the_order_of_the_contract() -> None:
    assert calls_of(trace_of([[0, 1], [2, 3], [0, 4]]), capacity=3) == [
        ("request", (0, 1), 0.0, 0.0),
        ("start",),
        ("admit", 0, 1),
        ("insert", 0, 1),
        ("finish", (0, 1), 1, ""),
        ("request", (3, 4), 1.0, 1.0),
        ("start",),
        ("admit", 3, 4),
        ("remove", 1),
        ("insert", 3, 4),
        ("finish", (3, 4), 1, ""),
        ("request", (0, 2), 2.0, 2.0),
        ("access", 0),
        ("start",),
        ("admit", 2),
        ("remove", 4),
        ("insert", 2),
        ("finish", (0, 2), 1, ""),
    ]


def test_a_prompt_larger_than_the_tier_leaves_its_head_there() -> None:
    calls = calls_of(trace_of([[0, 1, 2], [0, 1, 2]]), capacity=2)
    assert [call for call in calls if call[0] in ("access", "remove", "insert")] == [
        ("insert", 0, 1),
        ("access", 0, 1),
    ]


def test_only_what_the_policy_admits_is_inserted() -> None:
    calls = calls_of(trace_of([[0, 1, 2]]), capacity=9, most=2)
    assert ("insert", 0, 1) in calls


def test_chunks_of_the_output_are_known_at_the_end_and_stored_after_it() -> None:
    request = TraceRequest(
        0, 0.0, 32, 16, (range(2),), (range(2, 3),), finish_reason="stop", tenant="t"
    )
    again = TraceRequest(1, 1.0, 48, 0, (range(3),))
    trace = Trace("made", 16, [request, again], 3)
    calls = calls_of(trace, capacity=9)
    assert calls[3:7] == [
        ("insert", 0, 1),
        ("finish", (0, 1, 2), 16, "stop"),
        ("admit", 2),
        ("insert", 2),
    ]
    assert hits_of(trace, LruPolicy, 9) == [0, 3]


def test_the_turn_is_told_as_a_hint_beside_the_others() -> None:
    told: list[object] = []

    class Listening(LruPolicy):
        def on_request(self, request: PolicyRequest) -> None:
            told.append(request.hints)

    request = TraceRequest(0, 0.0, 16, stretches=(range(1),), turn=3, hints={"model": "m"})
    hits_of(Trace("made", 16, [request], 1), Listening, 9)
    assert told == [{"model": "m", "turn": 3}]


class Expiring(LruPolicy):
    """Lets nothing live."""

    def expired(self, tier: str):
        return list(self.victims(tier, 0))


def test_expired_chunks_are_gone_a_second_later() -> None:
    assert hits_of(trace_of([[0, 1], [0, 1]]), Expiring, 9) == [0, 0]


def test_what_comes_before_the_score_warms_up_only() -> None:
    trace = trace_of([[0, 1], [0, 1, 2], [0, 1, 2, 3]])
    tally = replay(trace, lambda tiers, clock: ArcPolicy(tiers, clock=clock), 9, score_from=2)
    assert (tally.requests, tally.input_tokens, tally.hit_tokens) == (1, 64, 48)
    assert (tally.written_chunks, tally.removed_chunks) == (1, 0)
    assert tally.token_hit_ratio == 0.75


def test_prompts_of_a_made_trace_are_paths() -> None:
    """The helper renumbers chunks, and keeps what is equal equal."""
    made = chat(random.Random(3), 50)
    renamed: dict[int, int] = {}
    for before, after in zip(made, prompts_of(trace_of(made)), strict=True):
        assert [renamed.setdefault(b, a) for b, a in zip(before, after, strict=True)] == after
