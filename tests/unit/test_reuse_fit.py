"""Hazards of reuse: what a fit finds in observations that were drawn from known ones."""

from dataclasses import astuple, replace

import numpy as np
import pytest
from kvtiers.policies.reuse_classes import FEATURES, LEFT, OUTPUT, OWN, SHARED
from kvtiers.policies.reuse_fit import Observations
from kvtiers.policies.reuse_hazard import HazardLearner, at_age, at_ages
from reuse_samples import features, fitted, observed, quick_and_slow


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


@pytest.mark.parametrize("fits", [1, 2])
@pytest.mark.parametrize("output", [-1, 5, 200])
@pytest.mark.parametrize("stratum", [OWN, SHARED, LEFT])
def test_at_every_age_one_class_is_worth_what_its_curve_says(
    fits: int, output: int, stratum: int
) -> None:
    seen, _ = quick_and_slow(3000)
    learner, (row,) = fitted(*[seen] * fits), features(output, 1)
    curves = learner.curves(np.array([stratum]), row[None])
    for age in (-1.0, 0.0, 1.0, 2.0, 37.0, 400.0, 64_000.0, 1e6):
        assert learner.at(stratum, row, age) == pytest.approx(at_age(curves, 0, age), rel=1e-5)


@pytest.mark.parametrize("fits", [1, 2])
def test_no_class_is_worth_less_than_the_least_and_one_that_hardly_comes_back_is_worth_that(
    fits: int,
) -> None:
    seen, _ = quick_and_slow(3000)
    learner, rng = fitted(*[seen] * fits), np.random.default_rng(1)
    for age in (0.0, 1.0, 30.0):
        least = learner.least(OWN, age)
        rows = rng.normal(0.0, 30.0, (300, FEATURES)).astype(np.float32)
        worth = [learner.at(OWN, row, age) for row in rows]
        assert min(worth) >= least > 0
        never = np.zeros(FEATURES, np.float32)
        never[OUTPUT] = [-1e6 * (i < 5) + 1e6 * (i == 5) for i in range(6)]
        assert learner.at(OWN, never, age) == pytest.approx(least, rel=1e-4)


def test_from_an_age_on_the_index_is_the_same_if_it_is_asked_for_only_from_there() -> None:
    seen, rows = quick_and_slow(3000)
    learner, strata = fitted(seen, seen), np.full(len(rows), OWN)
    ages = np.linspace(0.0, 5000.0, len(rows))
    curves, later = learner.curves(strata, rows), learner.curves(strata, rows, ages)
    marks = np.arange(len(rows), dtype=np.int32)
    assert np.array_equal(at_ages(later, marks, ages), at_ages(curves, marks, ages))
    # If a clock is set back, what is there is still worth something.
    assert (at_ages(later, marks, ages / 10) > 0).all()


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
