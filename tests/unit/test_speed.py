"""How fast a tier is, from calls of which some are odd."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kvtiers.tiers.robust_line import robust_line
from kvtiers.tiers.speed import Speed

MIB = 1 << 20
amounts = st.lists(st.integers(1, 64), min_size=9, max_size=9)
seconds = st.floats(1e-5, 10.0)


def measured(*points: tuple[int, float]) -> Speed:
    speed = Speed()
    for amount, took in points:
        speed.observe(amount, took)
    return speed


def test_nothing_is_known_before_some_calls() -> None:
    assert Speed().seconds(MIB) == 0.0
    assert not measured((MIB, 1.0), (MIB, 1.0)).known
    assert measured((MIB, 1.0), (MIB, 1.0), (MIB, 1.0)).known


@given(seconds, seconds, amounts)
def test_latency_and_bandwidth_are_told_apart_where_calls_differ_in_size(
    latency: float, per_mib: float, sizes: list[int]
) -> None:
    speed = measured(*((n * MIB, latency + per_mib * n) for n in (1, 2, 4, 8, *sizes[4:])))
    assert speed.seconds(100 * MIB) == pytest.approx(latency + 100 * per_mib, rel=1e-6)
    assert speed.seconds(0) == pytest.approx(latency, rel=1e-3, abs=1e-6 * (latency + per_mib))


def test_of_calls_of_one_size_nobody_can_tell_so_the_worse_is_assumed() -> None:
    speed = measured(*[(4, 2.0)] * 9)
    assert speed.seconds(8) == pytest.approx(4.0), "no latency at all"
    assert speed.seconds(1) == pytest.approx(2.0), "nothing but latency"


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=9, max_size=9), st.integers(0, 8))
def test_one_call_that_stalls_changes_nothing(sizes: list[int], which: int) -> None:
    apart = [(i, j) for i, j in itertools.combinations(range(9), 2) if sizes[i] != sizes[j]]
    # In half of what says anything of the slope, it is as good as the rest.
    assume(2 * sum(which in pair for pair in apart) != len(apart) or not apart)
    points = [(size, 0.01 * size) for size in sizes]
    points[which] = (sizes[which], 100.0)
    assert measured(*points).seconds(8) == pytest.approx(0.08)


@pytest.mark.parametrize(("before", "after"), [(0.01, 1.0), (1.0, 0.01)])
def test_a_change_is_known_once_most_calls_say_so(before: float, after: float) -> None:
    points = [(1, before)] * 9
    assert measured(*points, *[(1, after)] * 4).seconds(1) == pytest.approx(before)
    assert measured(*points, *[(1, after)] * 5).seconds(1) == pytest.approx(after)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e3)), min_size=1))
def test_whatever_was_measured_no_estimate_is_negative(points: list[tuple[float, float]]) -> None:
    base, slope = robust_line(points) or (0.0, 0.0)
    assert base >= 0
    assert slope >= 0
