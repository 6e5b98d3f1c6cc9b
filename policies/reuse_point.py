"""What keeping a chunk of one class is worth at one age, without the rest of its curve.

It is asked for once or more with each request that is to be admitted, before its output is
known, and hardly ever for a class that was there before. So what does not depend on the class
is made ready once for all that ask until hazards are learned anew, and of the index no more
is computed than the age needs: numpy's calls, some microseconds each where caches are cold,
are most of what it takes. See ``reuse_hazard`` for what is computed.
"""

from __future__ import annotations

from math import isnan
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
    Floats,
    Hazards,
    Shorts,
)

_TINY = 1e-12
# Lower by more than what is lost where numbers are rounded.
_BELOW = 1 - 1e-5
_BINS: Final = np.arange(BINS)
_KNOWN: Final = np.ones(FEATURES, bool)
_KNOWN[OUTPUT] = False


class Point:
    """The index of the classes of one stratum.

    Args:
        hazards: the model.
        stratum: which.

    """

    def __init__(self, hazards: Hazards, stratum: int) -> None:
        mean, scale = hazards.mean[stratum], hazards.scale[stratum]
        coefficients = hazards.coefficients[stratum]
        # The linear form as what features add to a level for each group of ages; and where the
        # output is not known, what the others add to one for each output that there may be.
        self._slopes = coefficients / scale
        self._level = -(self._slopes @ mean)[None]
        self._others = np.where(_KNOWN, self._slopes, 0.0)
        self._levels = hazards.outputs[stratum] @ self._slopes[:, OUTPUT].T + self._level
        # From the factors of the groups of ages to minus the cumulative hazard at each edge,
        # and to the hazards.
        alone, cumulative = np.zeros((GROUPS, BINS)), np.zeros((GROUPS, BINS + 1))
        alone[GROUP_OF, _BINS] = np.maximum(hazards.base[stratum], _TINY)
        np.cumsum(alone * np.diff(EDGES), axis=1, out=cumulative[:, 1:])
        self._table = np.hstack([-cumulative, alone])
        self._kept = np.zeros((OUTPUTS, BINS + 1))
        # The index at each edge if features made all hazards as low as they can. Higher ones at
        # whatever ages make whatever time to give up give more hits, and end the wait sooner.
        lowest = np.full((1, GROUPS), -MOST)
        ends = [self._rates(lowest.copy(), b)[0].tolist() for b in range(BINS)]
        self._least = [_BELOW * begin for begin, _ in ends] + [_BELOW * ends[-1][0] / 2]

    def index(self, features: Shorts, b: int) -> tuple[float, float]:
        """At the beginning and at the end of half octave ``b``."""
        values = features.astype(np.float64)
        if isnan(values.item(OUTPUT.start)):
            values[OUTPUT] = 0.0
            logs = np.dot(self._others, values) + self._levels
        else:
            logs = np.dot(self._slopes, values) + self._level
        rates = self._rates(logs, b).astype(np.float32)
        begin, end = (np.add.reduce(rates, 0) / np.float32(len(rates))).tolist()
        return begin, begin / 2 if b == BINS - 1 else end

    def least(self, b: int) -> tuple[float, float]:
        """What no class is worth less than, likewise."""
        return self._least[b], self._least[b + 1]

    def _rates(self, logs: Floats, b: int) -> Floats:
        np.minimum(logs, MOST, logs)
        np.maximum(logs, -MOST, logs)
        both = np.dot(np.exp(logs, logs), self._table)
        survival, hazards = both[:, : BINS + 1], both[:, BINS + 1 :]
        np.exp(survival, survival)
        times = survival[:, :-1] - survival[:, 1:]
        np.divide(times, hazards, times)
        kept = self._kept[: len(logs)]
        np.add.accumulate(times, 1, None, kept[:, 1:])
        hits = survival[:, b : b + 2, None] - survival[:, None, b + 1 :]
        costs = kept[:, None, b + 1 :] - kept[:, b : b + 2, None]
        np.maximum(costs, _TINY, costs)
        found: Floats = np.maximum.reduce(np.divide(hits, costs, hits), 2)
        return found
