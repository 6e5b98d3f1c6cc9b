"""Uses drawn from known hazards, and what is learned from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from kvtiers.policies.reuse_classes import FEATURES, OWN, Turn, UseClass, own
from kvtiers.policies.reuse_fit import Observations, Shorts
from kvtiers.policies.reuse_hazard import HazardLearner

Floats = npt.NDArray[np.float64]


QUICK, SLOW = 10, 400
"""Tokens of an output that tells when the next use comes, see ``quick_and_slow``."""


def answered(output_tokens: int) -> UseClass:
    """The class of first turns with an output of that length."""
    return own(Turn(0, -1.0, 0.0, 4, 4, None, output_tokens), repeated=False)


def features(output_tokens: int, n: int) -> Shorts:
    """Those of that class."""
    found = np.zeros((n, FEATURES), np.float32)
    values = answered(output_tokens).features
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


def learn(learner: HazardLearner, *all_seen: Observations) -> None:
    """Fit to these, one after the other."""
    for seen in all_seen:
        learner.learn(seen)
        while learner.busy:
            learner.work(1)


def fitted(*all_seen: Observations) -> HazardLearner:
    """A learner of these."""
    learner = HazardLearner()
    learn(learner, *all_seen)
    return learner


def quick_and_slow(
    n: int, slow: float = 500.0, swapped: bool = False
) -> tuple[Observations, Shorts]:
    """Uses after 50 s or later, told apart by the output, and their features, in this order."""
    rng = np.random.default_rng(1)
    times = np.concatenate([rng.exponential(50.0, n), rng.exponential(slow, n)])
    rows = np.concatenate([features(QUICK, n), features(SLOW, n)])
    return observed(times, rows[::-1] if swapped else rows, 400.0), rows
