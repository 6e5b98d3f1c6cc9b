"""What keeping something is worth that a request uses of which the output is not known yet.

It is the mean over outputs that there may be (``reuse_hazard``). Asked for once or more with
each request, at one age, of one class that is hardly ever the same again. So what does not
depend on the class is made ready when hazards are learned, and of the index no more is
computed than the age needs: numpy's calls, some microseconds each with cold caches, are most
of what it takes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from kvtiers.policies.reuse_classes import FEATURES, OUTPUT
from kvtiers.policies.reuse_fit import (
    BINS,
    EDGES,
    GROUP_OF,
    GROUPS,
    MOST,
    OUTPUTS,
    Hazards,
    Shorts,
)

_TINY = 1e-12
_KNOWN: Final = np.ones(FEATURES, bool)
_KNOWN[OUTPUT] = False
_BINS: Final = np.arange(BINS)


class Unfinished:
    """The classes of one stratum of which the output is not known.

    Args:
        hazards: the model.
        stratum: which.

    """

    def __init__(self, hazards: Hazards, stratum: int) -> None:
        mean, scale = hazards.mean[stratum], hazards.scale[stratum]
        coefficients = hazards.coefficients[stratum]
        # Of the linear form: what features add, and the rest of it with each output.
        self._slopes = np.where(_KNOWN, coefficients / scale, 0.0)
        outputs = (hazards.outputs[stratum] - mean[OUTPUT]) / scale[OUTPUT]
        self._levels = outputs @ coefficients[:, OUTPUT].T - self._slopes @ mean
        # From the factors of the groups of ages to minus the cumulative hazard at each edge,
        # and to the hazards.
        base = np.maximum(hazards.base[stratum], _TINY)
        alone = np.zeros((GROUPS, BINS))
        alone[GROUP_OF, _BINS] = base
        lasting = np.zeros((GROUPS, BINS + 1))
        np.cumsum(alone * -np.diff(EDGES), axis=1, out=lasting[:, 1:])
        self._table = np.hstack([lasting, alone])
        self._kept = np.zeros((OUTPUTS, BINS + 1))

    def index(self, features: Shorts, b: int) -> tuple[float, float]:
        """At the beginning and at the end of half octave ``b``."""
        known = features.astype(np.float64)
        known[OUTPUT] = 0.0
        factors = np.dot(self._slopes, known) + self._levels
        np.minimum(factors, MOST, factors)
        np.maximum(factors, -MOST, factors)
        np.exp(factors, factors)
        both = np.dot(factors, self._table)
        survival, hazards, kept = both[:, : BINS + 1], both[:, BINS + 1 :], self._kept
        np.exp(survival, survival)
        times = survival[:, :-1] - survival[:, 1:]
        np.divide(times, hazards, times)
        np.add.accumulate(times, 1, None, kept[:, 1:])
        rates = survival[:, b : b + 2, None] - survival[:, None, b + 1 :]
        costs = kept[:, None, b + 1 :] - kept[:, b : b + 2, None]
        np.maximum(costs, _TINY, costs)
        np.divide(rates, costs, rates)
        begin, end = _mean(np.maximum.reduce(rates, 2).astype(np.float32))
        return begin, begin / 2 if b == BINS - 1 else end


def _mean(rows: Shorts) -> list[float]:
    found: list[float] = (np.add.reduce(rows, 0) / np.float32(OUTPUTS)).tolist()
    return found
