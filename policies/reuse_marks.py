"""Marks: what a node was last used for, since when, and what keeping it is worth.

All nodes that a request used for the same reason share a mark. A mark lives as long as a
node of some tier, or a request under way, has it. Row 0 is of what nothing is known of.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvtiers.policies.reuse_classes import ANY, FEATURES, UseClass
from kvtiers.policies.reuse_fit import BINS, Floats
from kvtiers.policies.reuse_hazard import HazardLearner, at_age, at_ages

UNKNOWN = 0
# Curves made anew at once: one to four milliseconds.
_MOST_OLD = 1024
# Classes whose curve is kept for another mark of the class.
_MOST_KNOWN = 1024
_SMALL = 64


class Marks:
    """Marks as rows of columns, and their indices by age."""

    def __init__(self, learner: HazardLearner) -> None:
        self._learner = learner
        self._used = 1
        self._free: list[int] = []
        self._holders = array("i", [0])
        self._strata = np.full(_SMALL, ANY, np.int64)
        self._features = np.zeros((_SMALL, FEATURES), np.float32)
        self._since = np.zeros(_SMALL)
        # Which have no curve, and which have one that was made before the last fit.
        self._stale = np.ones(_SMALL, bool)
        self._old = np.zeros(_SMALL, bool)
        self._curves = np.zeros((_SMALL, BINS + 1), np.float32)
        self._learned = 0
        # Curves of classes, since the last fit.
        self._known: dict[tuple[int, bytes], npt.NDArray[np.float32]] = {}
        self._known_at = 0

    def new(self, use: UseClass, since: float) -> int:
        """A mark with one holder."""
        if self._free:
            mark = self._free.pop()
            self._holders[mark] = 1
        else:
            mark = self._used
            self._used += 1
            self._holders.append(1)
            if mark == len(self._since):
                self._grow()
        self.change(mark, use, since)
        return mark

    def change(self, mark: int, use: UseClass, since: float) -> None:
        """More is known of what the mark stands for."""
        self._strata[mark] = use.stratum
        self._features[mark, : len(use.features)] = use.features
        self._features[mark, len(use.features) :] = 0
        self._since[mark] = since
        self._stale[mark] = True

    def since(self, mark: int) -> float:
        """When what the mark stands for was last used."""
        return float(self._since[mark])

    def hold(self, mark: int, count: int) -> None:
        """So many more holders, fewer if negative."""
        if mark == UNKNOWN:
            return
        self._holders[mark] += count
        if not self._holders[mark]:
            self._free.append(mark)

    def refresh(self) -> None:
        """If there was a fit since the last time, value everything anew when asked again."""
        if self._learned != self._learner.fits:
            self._learned = self._learner.fits
            self._old[: self._used] = True

    def worth(self, marks: npt.NDArray[np.int32], now: float) -> Floats:
        """Index of each mark now: expected hits per second of keeping a chunk."""
        stale = self._stale[marks]
        # The rest of the old ones when next asked.
        old = _distinct(marks[self._old[marks] & ~stale])[:_MOST_OLD]
        self._value(_distinct(marks[stale]) + old, now)
        return at_ages(self._curves, marks, now - self._since[marks])

    def worth_of_few(self, marks: Sequence[int], now: float) -> list[float]:
        """The same for as few as numpy takes longer to be called for than to compute."""
        if stale := {mark for mark in marks if self._stale[mark] or self._old[mark]}:
            self._value_few(stale)
        curves, since = self._curves, self._since
        return [at_age(curves, mark, now - since.item(mark)) for mark in marks]

    def worth_of_one(self, mark: int, now: float) -> float:
        """The same for one that may be asked for only once."""
        age = now - self._since.item(mark)
        if self._stale[mark] or self._old[mark]:
            return self._learner.at(self._strata.item(mark), self._features[mark], age)
        return at_age(self._curves, mark, age)

    def least(self, mark: int, now: float) -> float:
        """What one is not worth less than: quicker."""
        return self._learner.least(self._strata.item(mark), now - self._since.item(mark))

    def chances(self, marks: Sequence[int], now: float, within: float) -> list[float]:
        """Probability that what has each mark is used within so many seconds from now."""
        rows = np.array(marks, np.int32)
        ages = np.maximum(now - self._since[rows], 0.0)
        found = self._learner.chances(self._strata[rows], self._features[rows], ages, within)
        return [float(chance) for chance in found]

    # Parts ------------------------------------------------------------------

    def _value_few(self, stale: set[int]) -> None:
        if self._known_at != self._learner.fits or len(self._known) > _MOST_KNOWN:
            self._known_at = self._learner.fits
            self._known.clear()
        keys = {mark: (int(self._strata[mark]), self._features[mark].tobytes()) for mark in stale}
        new = sorted(mark for mark in stale if keys[mark] not in self._known)
        self._compute(np.array(new, np.int32))
        for mark in new:
            self._known[keys[mark]] = self._curves[mark].copy()
        for mark in stale.difference(new):
            self._curves[mark] = self._known[keys[mark]]
            self._stale[mark] = self._old[mark] = False

    def _value(self, stale: list[int], now: float) -> None:
        """Compute curves from the age that each mark has now; it gets no younger."""
        if stale:
            rows = np.array(stale, np.int32)
            rows = rows[np.argsort(self._since[rows])]
            self._compute(rows, now - self._since[rows])

    def _compute(self, stale: npt.NDArray[np.int32], ages: Floats | None = None) -> None:
        if len(stale):
            strata, features = self._strata[stale], self._features.take(stale, 0)
            self._curves[stale] = self._learner.curves(strata, features, ages)
            self._stale[stale] = self._old[stale] = False

    def _grow(self) -> None:
        self._strata = np.concatenate([self._strata, np.full_like(self._strata, ANY)])
        self._features = np.concatenate([self._features, np.zeros_like(self._features)])
        self._since = np.concatenate([self._since, np.zeros_like(self._since)])
        self._stale = np.concatenate([self._stale, np.ones_like(self._stale)])
        self._old = np.concatenate([self._old, np.zeros_like(self._old)])
        self._curves = np.concatenate([self._curves, np.zeros_like(self._curves)])


def _distinct(marks: npt.NDArray[np.int32]) -> list[int]:
    """Each of them once, in order. For as few as there mostly are, quicker than by numpy."""
    return sorted(set(marks.tolist()))
