"""A tier that does not answer at start, or went away and came back with less."""

from collections.abc import Iterator

import pytest
from hierarchy_kit import CHUNK, DictTier, Stack, prefix
from kvtiers.policies import Run
from kvtiers.tiers import Entry
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind

# More than the hierarchy waits between two scans, and than a breaker's first probe.
SOON = 30.0


def away(*runs: Run, capacity: int | None = None) -> Stack:
    tier = DictTier(capacity)
    for run in runs:
        tier.put(run)
    return Stack(8, {"far": tier}, away={"far": "nobody answers"})


def state(stack: Stack) -> BreakerState:
    return stack.h.stats()[-1].breaker


def break_down(stack: Stack) -> None:
    """Lookups fail until the breaker opens."""
    workers = stack.workers["far"]
    for number in range(5):
        stack.begin(f"down{number}", prefix(f"down{number}", 1))
        workers.end_failed(workers.of(OpKind.CONTAINS)[0])
    stack.h.poll()
    assert state(stack) is BreakerState.OPEN


def come_back(stack: Stack) -> None:
    """After a while a probe is answered, and then what follows from it."""
    stack.clock.now += SOON
    stack.settle()
    assert state(stack) is BreakerState.CLOSED
    stack.clock.now += SOON
    stack.settle()


def test_a_tier_that_is_away_at_start_is_not_asked_and_costs_nothing() -> None:
    run = prefix("p", 3)
    stack = away(run)
    stack.begin("r", run)
    assert stack.look("r", run) == [Lookup.MISS] * 3
    stack.store(prefix("q", 2))
    stack.h.tick()
    assert state(stack) is BreakerState.OPEN
    assert stack.workers["far"].submitted == []


def test_why_it_is_away_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stack = away()
    stack.begin("r", prefix("p", 3))
    stack.h.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "The far tier is left alone for now and probed again by itself: nobody answers"
    ]


def test_one_that_comes_back_is_probed_used_and_looked_through() -> None:
    run = prefix("p", 3)
    stack = away(run)
    come_back(stack)
    assert stack.workers["far"].count(OpKind.SCAN) == 1
    asked = stack.workers["far"].count(OpKind.CONTAINS)
    stack.begin("r", run)
    assert stack.workers["far"].count(OpKind.CONTAINS) == asked, "the scan has found all of it"
    stack.settle()
    assert stack.look("r", run) == [Lookup.HIT] * 3


def test_what_it_holds_counts_for_its_bound_once_it_is_back() -> None:
    stack = away(prefix("old", 10), capacity=10 * CHUNK)
    come_back(stack)
    assert stack.h.stats()[-1].usage.nbytes <= 9 * CHUNK, "evicted down from its bound"
    assert stack.workers["far"].count(OpKind.REMOVE) >= 1


def test_other_tiers_are_looked_through_at_start() -> None:
    near = DictTier()
    stack = Stack(8, {"near": near, "far": DictTier()}, away={"far": "nobody answers"})
    assert [op.kind for op in stack.workers["near"].submitted] == [OpKind.SCAN]


def test_one_that_was_restarted_empty_is_uncounted_and_its_chunks_are_misses() -> None:
    run = prefix("p", 4)
    tier = DictTier()
    tier.put(run)
    stack = Stack(8, {"far": tier})
    stack.settle()
    assert stack.h.stats()[-1].usage.chunks == 4
    break_down(stack)
    tier.chunks.clear()
    come_back(stack)
    assert stack.h.stats()[-1].usage.chunks == 0
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [Lookup.MISS] * 4
    stack.h.end("r")
    stack.store(run)
    stack.settle()
    assert stack.h.stats()[-1].usage.chunks == 4, "stored anew"


class Unlistable(DictTier):
    def scan(self) -> Iterator[Entry]:
        raise OSError("no listing today")


def test_a_scan_that_fails_is_tried_again_and_keeps_nobody_from_the_tier() -> None:
    stack = Stack(8, {"far": Unlistable()})
    for _ in range(8):
        stack.settle()
        stack.clock.now += SOON
    assert stack.workers["far"].count(OpKind.SCAN) == 8
    [stats] = [stats for stats in stack.h.stats() if stats.name == "far"]
    assert (stats.breaker, stats.counts["failures"]) == (BreakerState.CLOSED, 8)
