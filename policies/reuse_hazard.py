"""How soon what was used is used again, and what keeping it is worth.

From the hazards of ``reuse_fit`` follows the survival S(t): the probability that what was
used at time 0 was not used by t. An item of age a has the index

    max over t > a of  P(used by t) / E[time it is kept until used or t]
                    =  (S(a) - S(t)) / integral of S from a to t,

which is Gittins' (1979): the best rate of hits per second of space that any time to give up
gives. The item of the lowest index goes first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtiers.policies.reuse_classes import LEFT, OUTPUT, STRATA
from kvtiers.policies.reuse_fit import (
    BINS,
    BLOCK,
    EDGES,
    FALLING,
    OUTPUTS,
    Fit,
    Floats,
    Hazards,
    Ints,
    Observations,
    Shorts,
    bins_of,
)
from kvtiers.policies.reuse_point import Point

_WIDTHS: Final = np.diff(EDGES)
_EDGE_LIST: Final[list[float]] = EDGES.tolist()
_TINY = 1e-12
_BY_AGE: Final = FALLING.astype(np.float32)
# What a session went on without goes before all else, in the order of its index.
_LEFT_SHARE = 1e-3
# Curves computed together: what fits a processor's cache.
_AT_ONCE = 16


class HazardLearner:
    """Hazards of all classes, fitted anew from time to time.

    Attributes:
        fits: how often; between two, a class has one curve.

    """

    def __init__(self) -> None:
        self.fits = 0
        self._hazards = Hazards.unknown()
        self._fit: Fit | None = None
        self._pieces: Iterator[int] = iter(())
        # Of each stratum, as far as somebody asked since the last fit.
        self._points: list[Point | None] = [None] * STRATA

    @property
    def busy(self) -> bool:
        """Whether a fit is under way."""
        return self._fit is not None

    def learn(self, seen: Observations) -> None:
        """Begin a fit; what one that is under way has found so far is lost."""
        self._fit = Fit(seen, self._hazards)
        self._pieces = self._fit.pieces()

    def work(self, observations: int) -> None:
        """Go on with the fit, by about so many observations; its result counts once it ends."""
        while self._fit is not None and observations > 0:
            done = next(self._pieces, None)
            if done is None:
                self._hazards, self._fit = self._fit.hazards, None
                self._points = [None] * STRATA
                self.fits += 1
            else:
                observations -= done

    def curves(
        self, strata: Ints, features: Shorts, ages: Floats | None = None
    ) -> npt.NDArray[np.float32]:
        """The index at the beginning of each half octave, shape (n, BINS + 1).

        LRU's as long as the hazards have not told more than age does, but for what a session
        went on without.

        Args:
            strata: of each class.
            features: likewise.
            ages: from which on it is asked for, 0 if None; quickest if they are in order.

        """
        if not self._hazards.proof.holds:
            return _after_all(np.tile(_BY_AGE, (len(strata), 1)), strata)
        if ages is None:
            ages = np.zeros(len(strata))
        unknown = np.isnan(features[:, OUTPUT.start])
        if not unknown.any():
            return self._curves(strata, features, ages)
        # The mean over outputs that there may be: what is admitted and turns out to be worth
        # little is soon gone, and what is not admitted is gone for good.
        counts = np.where(unknown, OUTPUTS, 1)
        rows = np.repeat(np.arange(len(strata)), counts)
        filled, begins = features.take(rows, 0), np.cumsum(counts) - counts
        filled[unknown[rows], OUTPUT] = self._hazards.outputs[strata[unknown]].reshape(
            -1, OUTPUT.stop - OUTPUT.start
        )
        each = self._curves(strata[rows], filled, ages[rows])
        index: npt.NDArray[np.float32] = np.add.reduceat(each, begins)
        return index / counts.astype(np.float32)[:, None]

    def at(self, stratum: int, features: Shorts, age: float) -> float:
        """The index of one class at one age."""
        b, part = _place(age)
        ends = self._point(stratum).index(features, b) if self._hazards.proof.holds else _by_age(b)
        return _share(stratum) * _between(*ends, part)

    def least(self, stratum: int, age: float) -> float:
        """What no class of the stratum is worth less than at an age, at once."""
        b, part = _place(age)
        ends = self._point(stratum).least(b) if self._hazards.proof.holds else _by_age(b)
        return _share(stratum) * _between(*ends, part)

    def chances(self, strata: Ints, features: Shorts, ages: Floats, within: float) -> Floats:
        """Probability that what has these ages is used within so many seconds."""
        hazards = self._hazards.of(strata, features)
        begin, end = ages[:, None], ages[:, None] + within
        times = np.maximum(np.minimum(end, EDGES[1:]) - np.maximum(begin, EDGES[:-1]), 0.0)
        # The last half octave has no end.
        times[:, -1] = np.maximum(end[:, 0] - np.maximum(begin[:, 0], EDGES[-2]), 0.0)
        used: Floats = -np.expm1(-(times * hazards).sum(axis=1))
        return used

    # Parts ------------------------------------------------------------------

    def _point(self, stratum: int) -> Point:
        point = self._points[stratum]
        if point is None:
            point = self._points[stratum] = Point(self._hazards, stratum)
        return point

    def _curves(self, strata: Ints, features: Shorts, ages: Floats) -> npt.NDArray[np.float32]:
        index = np.zeros((len(strata), BINS + 1), np.float32)
        for begin in range(0, len(strata), BLOCK):
            part = slice(begin, begin + BLOCK)
            survival, kept = self._survival(strata[part], features[part])
            _fill(index[part], survival, kept, ages[part])
        index[:, BINS] = index[:, BINS - 1] / 2
        return _after_all(index, strata)

    def _survival(self, strata: Ints, features: Shorts) -> tuple[Floats, Floats]:
        """S at the edges of the half octaves, and its integral up to them."""
        hazard = np.maximum(self._hazards.of(strata, features), _TINY)
        lasting = np.exp(-hazard * _WIDTHS)
        # Mostly of one mark or two, where each of numpy's calls costs more than what it does:
        # its functions of these names, for one, take three times as long as their ufuncs.
        survival = np.ones((len(strata), BINS + 1))
        np.multiply.accumulate(lasting, 1, None, survival[:, 1:])
        kept = np.zeros((len(strata), BINS + 1))
        np.add.accumulate(survival[:, :-1] * (1 - lasting) / hazard, 1, None, kept[:, 1:])
        return survival, kept


def _fill(index: Shorts, survival: Floats, kept: Floats, ages: Floats) -> None:
    """The best rates, from each beginning of a half octave on."""
    for begin in range(0, len(index), _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        # Nobody will ask for ages that are over, and most of those valued anew are old.
        first, _ = _place(float(np.minimum.reduce(ages[part])))
        hits = survival[part, None, first:-1] - survival[part, first:, None]
        costs = kept[part, first:, None] - kept[part, None, first:-1]
        # Times before the age itself give no hits and are never the best.
        np.maximum(costs, _TINY, costs)
        rates = np.divide(hits, costs, hits)
        np.maximum.reduce(rates, 1, None, index[part, first:-1])
        # Unless a clock is set back.
        index[part, :first] = index[part, first, None]


def _by_age(b: int) -> tuple[float, float]:
    """LRU's index at both ends of a half octave."""
    return _BY_AGE.item(b), _BY_AGE.item(b + 1)


def _share(stratum: int) -> float:
    return _LEFT_SHARE if stratum == LEFT else 1.0


def _after_all(index: npt.NDArray[np.float32], strata: Ints) -> npt.NDArray[np.float32]:
    """The same with what a session went on without below all else."""
    if (left := strata == LEFT).any():
        index[left] *= _LEFT_SHARE
    return index


def at_ages(curves: npt.NDArray[np.float32], rows: npt.NDArray[np.int32], ages: Floats) -> Floats:
    """The curve of each row at one age, shape (n,)."""
    b = bins_of(ages)
    part = np.minimum((ages - EDGES[b]) / _WIDTHS[b], 1.0)
    found: Floats = curves[rows, b] * (1 - part) + curves[rows, b + 1] * part
    return found


def at_age(curves: npt.NDArray[np.float32], row: int, age: float) -> float:
    """The curve of one row at one age."""
    b, part = _place(age)
    return _between(curves.item(row, b), curves.item(row, b + 1), part)


def _place(age: float) -> tuple[int, float]:
    """The half octave of an age, and where in it."""
    b = min(max(bisect_right(_EDGE_LIST, age) - 1, 0), BINS - 1)
    begin, end = _EDGE_LIST[b], _EDGE_LIST[b + 1]
    return b, min((age - begin) / (end - begin), 1.0)


def _between(begin: float, end: float, part: float) -> float:
    return begin * (1 - part) + end * part
