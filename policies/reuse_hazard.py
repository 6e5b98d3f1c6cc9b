"""How soon what was used is used again: hazards by age, learned while they are used.

The model is Cox's (1972) proportional hazards in Kaplan and Meier's (1958) setting: what
was not used again yet is a censored observation, not a missing one. Each stratum has a
hazard that is constant over half octaves of age, events over exposure; each value of each
feature multiplies it by a factor for each octave of age. The factors are kept as
logarithms and learned by Newton steps of one coordinate each, on small batches: observed
minus expected events over the information seen so far, which shrinks to no effect where
little was seen.

From the survival S(t) that follows, an item of age a has the index

    max over t > a of  P(used by t) / E[time it is kept until used or t]
                    =  (S(a) - S(t)) / integral of S from a to t,

which is Gittins' (1979): the best rate of hits per second of space that any time to give up
gives. The item of the lowest index goes first.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtiers.policies.reuse_classes import ANY, LEFT, ROWS, STRATA

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Half octaves of age: the first ends after _FIRST seconds, so the last after 18 hours.
BINS: Final = 30
_FIRST = 2.0
_OCTAVES = BINS // 2
_EDGES: Final = np.concatenate([[0.0], _FIRST * 2 ** (np.arange(BINS) / 2)])
_WIDTHS: Final = np.diff(_EDGES)
_EDGE_LIST: Final[list[float]] = _EDGES.tolist()

# Where a hazard has no data it falls with age a little faster than LRU's order needs.
_DECAY = 2**-0.6
# Events that the prior of a hazard counts for: that of a stratum, of all strata.
_OWN_EVENTS, _ALL_EVENTS = 8.0, 4.0
# The same for a factor over all ages, and for how it differs in an octave.
_FACTOR_EVENTS, _OCTAVE_EVENTS = 10.0, 30.0
_STEP = 0.5
_MOST = 4.0
_TINY = 1e-12
# What a session went on without goes before all else, in the order of its index.
_LEFT_SHARE = 1e-3
# Curves computed together: what fits a processor's cache.
_AT_ONCE = 128


def bins_of(ages: Floats) -> Ints:
    """The half octave of each age in seconds."""
    found: Ints = np.minimum(
        np.maximum(np.searchsorted(_EDGES, ages, side="right") - 1, 0), BINS - 1
    )
    return found


class HazardLearner:
    """Hazards of all classes.

    Attributes:
        seen: uses learned from.
        batches: calls of ``learn``: between two, a class has one curve.

    """

    def __init__(self) -> None:
        self.seen = self.batches = 0
        self._events = np.zeros((STRATA, BINS))
        self._exposure = np.zeros((STRATA, BINS))
        # Logarithms of factors: over all ages, and by octave. Row 0 is no feature.
        self._whole = np.zeros(ROWS)
        self._part = np.zeros((ROWS, _OCTAVES))
        self._information = np.zeros((ROWS, _OCTAVES))
        # Before anything was seen, an order by age: LRU's.
        self._hazard = np.tile(0.3 / (_EDGES[:-1] + 10.0), (STRATA, 1))

    def learn(self, strata: Ints, rows: Ints, begin: Floats, end: Floats, used: Floats) -> None:
        """Take in what happened to some items between two ages of each.

        Args:
            strata: of the items, shape (n,).
            rows: of their features, shape (n, FEATURES).
            begin: ages in seconds from which on they were looked at, shape (n,).
            end: ages until which they were, shape (n,).
            used: 1 where the item was used at ``end``, else 0.

        """
        self.seen += int(used.sum())
        self.batches += 1
        factors = self._factors(rows)
        times = np.minimum(end[:, None], _EDGES[1:]) - np.maximum(begin[:, None], _EDGES[:-1])
        exposure = np.maximum(times, 0.0) * np.repeat(factors, 2, axis=1)
        last = bins_of(end)
        expected = (exposure * self._hazard[strata]).reshape(-1, _OCTAVES, 2).sum(axis=2)
        missed = -expected
        np.add.at(missed, (np.arange(len(last)), last // 2), used)
        np.add.at(self._exposure, strata, exposure)
        np.add.at(self._events, (strata, last), used)
        self._step(rows, missed, expected)
        self._smooth()

    def curves(self, strata: Ints, rows: Ints) -> npt.NDArray[np.float32]:
        """The index at the beginning of each half octave, shape (n, BINS + 1)."""
        hazard = self._hazard[strata] * np.repeat(self._factors(rows), 2, axis=1)
        hazard = np.maximum(hazard, _TINY)
        lasting = np.exp(-hazard * _WIDTHS)
        # Mostly of one mark or two, where each of numpy's calls costs more than what it does:
        # its functions of these names, for one, take three times as long as their ufuncs.
        survival = np.ones((len(strata), BINS + 1))
        np.multiply.accumulate(lasting, 1, None, survival[:, 1:])
        kept = np.zeros((len(strata), BINS + 1))
        np.add.accumulate(survival[:, :-1] * (1 - lasting) / hazard, 1, None, kept[:, 1:])
        index = np.zeros((len(strata), BINS + 1), np.float32)
        for begin in range(0, len(strata), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            hits = survival[part, None, :-1] - survival[part, :, None]
            costs = kept[part, :, None] - kept[part, None, :-1]
            # Times before the age itself give no hits and are never the best.
            rates = hits / np.maximum(costs, _TINY)
            np.maximum.reduce(rates, 1, None, index[part, :-1])
        index[:, BINS] = index[:, BINS - 1] / 2
        if (left := strata == LEFT).any():
            index[left] *= _LEFT_SHARE
        return index

    # Parts ------------------------------------------------------------------

    def _factors(self, rows: Ints) -> Floats:
        logs = (self._part[rows] + self._whole[rows][:, :, None]).sum(axis=1)
        factors: Floats = np.exp(np.minimum(np.maximum(logs, -_MOST), _MOST))
        return factors

    def _step(self, rows: Ints, missed: Floats, expected: Floats) -> None:
        gradient, seen = np.zeros_like(self._part), np.zeros_like(self._part)
        for feature in rows.T:
            np.add.at(gradient, feature, missed)
            np.add.at(seen, feature, expected)
        self._information += seen
        total = self._information.sum(axis=1)
        self._whole += _STEP * gradient.sum(axis=1) / (total + _FACTOR_EVENTS)
        around = _neighbours(self._information)
        self._part += _STEP * _neighbours(gradient) / (around + _OCTAVE_EVENTS)
        self._whole[0] = self._part[0] = 0.0

    def _smooth(self) -> None:
        """Hazards from events and exposure: few events give what the age before suggests."""
        events, exposure = self._events.copy(), self._exposure.copy()
        events[ANY], exposure[ANY] = events.sum(axis=0), exposure.sum(axis=0)
        hazard = (events[ANY].sum() + 1) / (exposure[ANY].sum() + 1000)
        ratio = np.ones(STRATA)
        for b in range(BINS):
            prior = hazard * _DECAY
            hazard = (events[ANY, b] + _ALL_EVENTS) / (exposure[ANY, b] + _ALL_EVENTS / prior)
            expected = hazard * ratio
            found = (events[:, b] + _OWN_EVENTS) / (exposure[:, b] + _OWN_EVENTS / expected)
            found[ANY] = hazard
            self._hazard[:, b] = found
            ratio = found / hazard


def _neighbours(columns: Floats) -> Floats:
    """Each column and half of the two beside it."""
    mixed = columns.copy()
    mixed[:, 1:] += 0.5 * columns[:, :-1]
    mixed[:, :-1] += 0.5 * columns[:, 1:]
    return mixed


def at_ages(curves: npt.NDArray[np.float32], rows: npt.NDArray[np.int32], ages: Floats) -> Floats:
    """The curve of each row at one age, shape (n,)."""
    b = bins_of(ages)
    part = np.minimum((ages - _EDGES[b]) / _WIDTHS[b], 1.0)
    found: Floats = curves[rows, b] * (1 - part) + curves[rows, b + 1] * part
    return found


def at_age(curve: npt.NDArray[np.float32], age: float) -> float:
    """One curve at one age."""
    b = min(max(bisect_right(_EDGE_LIST, age) - 1, 0), BINS - 1)
    begin, end = _EDGE_LIST[b], _EDGE_LIST[b + 1]
    part = min((age - begin) / (end - begin), 1.0)
    return float(curve[b]) * (1 - part) + float(curve[b + 1]) * part
