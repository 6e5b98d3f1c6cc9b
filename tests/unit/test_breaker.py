"""When a tier is left alone, and when it is tried again."""

from __future__ import annotations

import pytest
from hierarchy_kit import Clock
from kvtiers.tiers.breaker import Breaker, BreakerState


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, threshold=3, cooldown=1.0, max_cooldown=4.0)


def opened(breaker: Breaker) -> Breaker:
    assert [breaker.failure("read") for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_open_it_only_in_a_row(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.failure("read")
        breaker.failure("read")
        breaker.success("read")
    assert breaker.state is BreakerState.CLOSED
    opened(breaker)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()
    assert not breaker.closed()


def test_after_the_cooldown_one_probe_goes_through(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 0.9
    assert not breaker.allows()
    clock.now += 0.1
    assert [breaker.allows(), breaker.allows()] == [True, False]
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_good_probe_closes_it(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    breaker.allows()
    breaker.success("read")
    assert breaker.closed()
    assert breaker.allows()


def test_each_bad_probe_doubles_the_cooldown_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    waits = []
    for _ in range(4):
        start = clock.now
        while not breaker.allows():
            clock.now += 0.5
        waits.append(clock.now - start)
        assert breaker.failure("read")
    assert waits == [1.0, 2.0, 4.0, 4.0]


def test_a_closed_breaker_starts_again_with_a_short_cooldown(
    breaker: Breaker, clock: Clock
) -> None:
    opened(breaker)
    clock.now += 1
    breaker.allows()
    breaker.failure("read")
    clock.now += 2
    breaker.allows()
    breaker.success("read")
    opened(breaker)
    clock.now += 1
    assert breaker.allows()


def test_a_probe_that_never_answers_does_not_shut_the_tier_out_for_ever(
    breaker: Breaker, clock: Clock
) -> None:
    opened(breaker)
    clock.now += 1
    assert breaker.allows()
    clock.now += 1
    assert breaker.allows()


def test_late_failures_of_an_open_breaker_change_nothing(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    assert not any(breaker.failure("read") for _ in range(10))
    clock.now += 1
    assert breaker.allows()


def test_quick_lookups_do_not_hide_reads_that_hang(breaker: Breaker) -> None:
    for _ in range(2):
        assert not breaker.failure("read")
        breaker.success("contains")
    assert breaker.failure("read")


def test_a_lookup_as_probe_closes_it_on_probation(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    waits = []
    for _ in range(3):
        start = clock.now
        while not breaker.allows():
            clock.now += 0.5
        waits.append(clock.now - start)
        breaker.success("contains")
        assert breaker.closed(), "reads get their chance"
        assert breaker.failure("read"), "one, not three"
    assert waits == [1.0, 2.0, 4.0]
    clock.now += 4
    breaker.allows()
    breaker.success("contains")
    breaker.success("read")
    assert [breaker.failure("read") for _ in range(3)] == [False, False, True]
    clock.now += 1
    assert breaker.allows(), "it is trusted as at first"
