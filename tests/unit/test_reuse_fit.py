"""Hazards of reuse: what a fit finds in observations that were drawn from known ones."""

from dataclasses import astuple, replace

import numpy as np
import numpy.typing as npt
import pytest
from kvtiers.policies.reuse_classes import FEATURES, OWN, SHARED, Turn, own
from kvtiers.policies.reuse_fit import Observations, Shorts
from kvtiers.policies.reuse_hazard import HazardLearner

Floats = npt.NDArray[np.float64]


def features(output_tokens: int, n: int) -> Shorts:
    """Those of first turns with an output of that length."""
    turn = Turn(0, -1.0, 0.0, 4, 4, None, output_tokens)
    found = np.zeros((n, FEATURES), np.float32)
    values = own(turn, repeated=False).features
    found[:, : len(values)] = values
    return found


def observed(times: Floats, rows: Shorts, given_up: float, begin: float = 0.0) -> Observations:
    """Uses after these times, those later than ``given_up`` censored there."""
    seen = times > begin
    end, n = np.minimum(times, given_up)[seen], int(seen.sum())
    used = (times < given_up)[seen].astype(float)
    strata = np.full(n, OWN)
    new = np.full(n, -1.0)
    return Observations(strata, rows[seen], np.full(n, begin), end, new, used, np.ones(n))


def fitted(*all_seen: Observations) -> HazardLearner:
    learner = HazardLearner()
    for seen in all_seen:
        learner.learn(seen)
        while learner.busy:
            learner.work(1)
    return learner


def quick_and_slow(
    n: int, slow: float = 500.0, swapped: bool = False
) -> tuple[Observations, Shorts]:
    """Uses after 50 s or later, told apart by the output, and their features, in this order."""
    rng = np.random.default_rng(1)
    times = np.concatenate([rng.exponential(50.0, n), rng.exponential(slow, n)])
    rows = np.concatenate([features(10, n), features(400, n)])
    return observed(times, rows[::-1] if swapped else rows, 400.0), rows


def goes_by_age(learner: HazardLearner) -> bool:
    """Whether the index tells nothing apart."""
    rows = np.concatenate([features(10, 1), features(400, 1)])
    quick, slow = learner.curves(np.array([OWN, OWN]), rows)
    return np.array_equal(quick, slow)


@pytest.mark.parametrize("begin", [0.0, 30.0])
def test_a_hazard_is_learned_from_uses_and_from_waiting(begin: float) -> None:
    """Uses after an exponential time of mean 100 s, given up on after 200 s."""
    times = np.random.default_rng(1).exponential(100.0, 6400)
    rows = features(100, 6400)
    learner = fitted(observed(times, rows, 200.0, begin))
    ages = np.array([30.0, 60.0, 100.0, 150.0])
    chances = learner.chances(np.full(4, OWN), rows[:4], ages, 20.0)
    assert chances == pytest.approx(np.full(4, 1 - np.exp(-0.2)), rel=0.2)


def test_the_index_of_a_constant_hazard_is_the_hazard_once_that_tells_more_than_age() -> None:
    seen, rows = quick_and_slow(3000)
    by_age = fitted().curves(np.array([OWN, OWN]), rows[[0, -1]])
    assert np.array_equal(by_age[0], by_age[1])
    assert (np.diff(by_age) < 0).all()
    # Of the first fit nothing was asked yet.
    assert np.array_equal(fitted(seen).curves(np.array([OWN, OWN]), rows[[0, -1]]), by_age)
    quick, slow = fitted(seen, seen).curves(np.array([OWN, OWN]), rows[[0, -1]])[:, 6:12]
    assert quick == pytest.approx(np.full(6, 1 / 50), rel=0.35)
    assert slow == pytest.approx(np.full(6, 1 / 500), rel=0.35)


def test_a_feature_that_tells_quick_from_slow_is_found() -> None:
    seen, rows = quick_and_slow(3000)
    learner = fitted(seen, seen, seen)
    chances = learner.chances(np.array([OWN, OWN]), rows[[0, -1]], np.zeros(2), 50.0)
    assert chances == pytest.approx([1 - np.exp(-1), 1 - np.exp(-0.1)], rel=0.15)
    # What is not known yet is taken as in between.
    (unknown,) = learner.chances(np.array([OWN]), features(-1, 1), np.zeros(1), 50.0)
    assert chances[1] < unknown < chances[0]


def test_what_stands_for_several_counts_so_often() -> None:
    """One in three is used at once: three times as often as when each counts once."""
    n = 1200
    end = np.where(np.arange(n) % 3 == 0, 1.0, 100.0)
    used = (end == 1.0).astype(float)
    rows, strata = np.zeros((n, FEATURES), np.float32), np.full(n, SHARED)
    chances = []
    for weight in (1.0, 5.0):
        weights = np.where(used, 1.0, weight)
        learner = fitted(Observations(strata, rows, np.zeros(n), end, -np.ones(n), used, weights))
        chances += learner.chances(strata[:1], rows[:1], np.zeros(1), 2.0).tolist()
    # Of 3 and of 11 that were looked at; some of the two seconds after the use.
    assert chances[0] > 2 * chances[1]


@pytest.mark.parametrize("slow", [75.0, 150.0, 500.0])
def test_a_model_that_was_wrong_is_not_believed_until_the_next_was_right(slow: float) -> None:
    seen, rows = quick_and_slow(3000, slow)
    turned, _ = quick_and_slow(3000, slow, swapped=True)
    assert not goes_by_age(fitted(seen, seen))
    assert goes_by_age(fitted(seen, seen, turned))
    found = fitted(seen, seen, turned, turned)
    assert not goes_by_age(found)
    chances = found.chances(np.array([OWN, OWN]), rows[[0, -1]], np.zeros(2), 50.0)
    assert chances == pytest.approx([1 - np.exp(-50 / slow), 1 - np.exp(-1)], rel=0.15)


def test_what_stands_for_several_proves_so_much() -> None:
    """Two of three say the same: not enough, unless each of them stands for some."""
    seen, _ = quick_and_slow(2000)
    against, _ = quick_and_slow(1000, swapped=True)
    for weight, by_age in (1.0, True), (5.0, False):
        weighty = replace(seen, weight=np.full(len(seen), weight))
        assert goes_by_age(fitted(seen, together(weighty, against))) == by_age


def together(*parts: Observations) -> Observations:
    columns = zip(*(astuple(part) for part in parts), strict=True)
    return Observations(*map(np.concatenate, columns))


def test_a_result_counts_only_when_the_fit_is_over() -> None:
    times = np.random.default_rng(1).exponential(100.0, 6400)
    rows, learner = features(100, 6400), HazardLearner()
    before = learner.chances(np.array([OWN]), rows[:1], np.zeros(1), 50.0)
    learner.learn(observed(times, rows, 200.0))
    learner.work(2000)
    assert learner.busy
    assert learner.fits == 0
    assert learner.chances(np.array([OWN]), rows[:1], np.zeros(1), 50.0) == before
    learner.work(10**6)
    assert not learner.busy
    assert learner.fits == 1
    assert learner.chances(np.array([OWN]), rows[:1], np.zeros(1), 50.0) != before
