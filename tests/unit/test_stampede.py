"""Many requests for one cold prefix: each of its chunks is read once, whoever comes when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hierarchy_kit import CHUNK, DEADLINE, DictTier, Stack, prefix
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import ReadOutcome
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind

HIT, MISS = Lookup.HIT, Lookup.MISS
CROWD = [f"r{n}" for n in range(16)]
PREFIX = prefix("p", 4)


def over(*runs: Run, slots: int = 32, names: Sequence[str] = ("disk",), **options: object) -> Stack:
    """An arena over tiers that all hold the runs, which others have stored there just now."""
    tiers = {name: DictTier() for name in names}
    stack = Stack(slots, tiers, **options)  # type: ignore[arg-type]
    stack.settle()
    for tier in tiers.values():
        for run in runs:
            tier.put(run)
    return stack


def reads(stack: Stack, *names: str) -> Counter[bytes]:
    """How often each chunk was read, from these tiers or all."""
    return Counter(
        key.hash
        for name in names or stack.workers
        for op in stack.workers[name].submitted
        if op.kind is OpKind.READ
        for key in op.keys
    )


def once(*runs: Run) -> Counter[object]:
    return Counter(key for run in runs for key in run.chunks)


@pytest.mark.parametrize("window", [None, {0: 0}, {0: 2}, {0: 99}], ids=str)
def test_requests_that_come_at_once_share_one_read(window: dict[int, int] | None) -> None:
    stack = over(PREFIX, window=window)
    for name in CROWD:
        stack.begin(name, PREFIX)
    stack.settle()
    for name in CROWD:
        stack.look(name, PREFIX)
    stack.settle()
    assert [stack.look(name, PREFIX) for name in CROWD] == [[HIT] * 4] * len(CROWD)
    assert reads(stack) == once(PREFIX)
    assert stack.counts()["disk"]["bytes_read"] == 4 * CHUNK


def test_two_tiers_that_both_hold_it_are_not_both_read() -> None:
    stack = over(PREFIX, names=("near", "far"))
    for name in CROWD:
        stack.begin(name, PREFIX)
    # One answers before the other, and some requests come in between.
    stack.workers["far"].run(OpKind.CONTAINS)
    for name in ("late", "later"):
        stack.h.tick()
        stack.begin(name, PREFIX)
    stack.settle()
    assert reads(stack) == once(PREFIX)


def test_what_a_policy_has_fetched_by_itself_is_not_fetched_again() -> None:
    class Eager(LruPolicy):
        def prefetch(self, request: PolicyRequest) -> Sequence[Run]:
            return (PREFIX,)

    stack = over(PREFIX, policy=Eager)
    for key in PREFIX.chunks:
        assert isinstance(key, bytes)
        stack.h._residency.now_in(stack.h._lower[0], [stack.h._residency.directory.ensure(key)])
    stack.begin("other", prefix("q", 1))
    assert reads(stack) == once(PREFIX)
    for name in CROWD:
        stack.begin(name, PREFIX)
    stack.settle()
    assert reads(stack) == once(PREFIX)
    assert all(stack.look(name, PREFIX) == [HIT] * 4 for name in CROWD)


def test_one_that_is_preempted_finds_what_the_others_wait_for() -> None:
    stack = over(PREFIX)
    for name in CROWD:
        stack.begin(name, PREFIX)
    stack.settle()
    stack.load(CROWD[0], PREFIX)
    stack.h.loaded(CROWD[0])
    assert stack.look(CROWD[0], PREFIX) == [HIT] * 4
    stack.load(CROWD[0], PREFIX)
    stack.settle()
    assert reads(stack) == once(PREFIX)


def test_groups_of_a_hybrid_are_read_once_each() -> None:
    full, window = prefix("p", 6, group=0), prefix("p", 6, group=1)
    stack = over(full, window)
    for name in CROWD:
        stack.begin(name, full, window, windowed=frozenset({1}))
    tail = window.tail(4)
    for _ in range(4):
        for name in CROWD:
            stack.look(name, full)
            stack.look(name, tail)
        stack.settle()
    assert all(stack.look(name, full) == [HIT] * 6 for name in CROWD)
    assert reads(stack) == once(full, tail)


@pytest.mark.parametrize("outcome", [ReadOutcome.FAILED, ReadOutcome.MISS, ReadOutcome.CORRUPT])
def test_after_a_read_that_failed_none_of_those_who_shared_it_reads_again(
    outcome: ReadOutcome,
) -> None:
    stack = over(PREFIX)
    disk = stack.workers["disk"]
    for name in CROWD:
        stack.begin(name, PREFIX)
    disk.run(OpKind.CONTAINS)
    stack.h.tick()
    for op in disk.of(OpKind.READ):
        disk.begin(op)
        disk.end_reads(op, outcome)
    for _ in range(3):
        assert all(stack.look(name, PREFIX) == [MISS] * 4 for name in CROWD)
        stack.settle()
    assert reads(stack) == once(PREFIX)


def test_after_a_read_that_was_too_late_none_of_those_who_shared_it_reads_again() -> None:
    stack = over(PREFIX)
    disk = stack.workers["disk"]
    for name in CROWD:
        stack.begin(name, PREFIX)
    disk.run(OpKind.CONTAINS)
    stack.h.tick()
    for op in disk.of(OpKind.READ):
        disk.begin(op)
    stack.clock.now += DEADLINE
    for _ in range(3):
        stack.h.tick()
        assert all(stack.look(name, PREFIX) == [MISS] * 4 for name in CROWD)
    assert reads(stack) == once(PREFIX)


@pytest.mark.parametrize("outcome", [ReadOutcome.FAILED, ReadOutcome.MISS, ReadOutcome.CORRUPT])
def test_what_the_nearer_tier_has_lost_all_get_from_the_next_by_one_read(
    outcome: ReadOutcome,
) -> None:
    stack = over(PREFIX, names=("near", "far"))
    near = stack.workers["near"]
    for name in CROWD:
        stack.begin(name, PREFIX)
    for workers in stack.workers.values():
        workers.run(OpKind.CONTAINS)
    stack.h.tick()
    for op in near.of(OpKind.READ):
        near.begin(op)
        near.end_reads(op, outcome)
    assert all(stack.h.waits(name) for name in CROWD)
    stack.settle()
    assert all(stack.look(name, PREFIX) == [HIT] * 4 for name in CROWD)
    assert reads(stack, "near") == reads(stack, "far") == once(PREFIX)


def test_a_tier_that_is_too_slow_is_not_followed_by_another_wait() -> None:
    stack = over(PREFIX, names=("near", "far"))
    for name in CROWD:
        stack.begin(name, PREFIX)
    for workers in stack.workers.values():
        workers.run(OpKind.CONTAINS)
    stack.h.tick()
    for op in stack.workers["near"].of(OpKind.READ):
        stack.workers["near"].begin(op)
    stack.clock.now += DEADLINE
    stack.h.tick()
    assert not any(stack.h.waits(name) for name in CROWD)
    assert all(stack.look(name, PREFIX) == [MISS] * 4 for name in CROWD)


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "look", "tick", "contains", "reads"]), st.integers(0, 5)),
    max_size=60,
)


@given(STEPS, st.sampled_from([None, 0, 2]))
def test_in_whatever_order_they_come_each_chunk_is_read_once(
    steps: list[tuple[str, int]], window: int | None
) -> None:
    stack = over(PREFIX, names=("near", "far"), window=None if window is None else {0: window})
    begun: set[str] = set()
    for step, number in steps:
        name = CROWD[number]
        if step == "begin" and name not in begun:
            begun.add(name)
            # Each knows only a part of it, and all want the same head.
            stack.begin(name, PREFIX.head(1 + number % 4))
        elif step == "look" and name in begun:
            stack.look(name, PREFIX.head(1 + number % 4))
        elif step == "tick":
            stack.h.tick()
        elif step in ("contains", "reads"):
            kind = OpKind.CONTAINS if step == "contains" else OpKind.READ
            list(stack.workers.values())[number % 2].run(kind)
    stack.settle()
    for name in begun:
        stack.look(name, PREFIX.head(1))
    stack.settle()
    assert all(count == 1 for count in reads(stack).values())
    if begun:
        assert reads(stack)
