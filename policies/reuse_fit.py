"""Hazards of reuse, and how they are fitted to what was observed.

The model is Cox's (1972) proportional hazards, with effects that change with age, in
Kaplan and Meier's (1958) setting: what was not used again yet is a censored observation,
not a missing one. Each stratum has a hazard that is constant over half octaves of age,
events over exposure. The features of a class multiply it by the exponential of a linear
form, with coefficients of their own for each of a few groups of ages. Newton's method finds
them; a ridge pulls those of each group to the mean over all groups, and that to none.

A fit takes longer than a scheduler may wait, so it is done in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtiers.policies.reuse_classes import ANY, FAMILIES, FEATURES, OUTPUT, STRATA
from kvtiers.policies.reuse_proof import Proof, falling

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# What is kept of each observation is as short as it may be.
Shorts = npt.NDArray[np.float32]

# Half octaves of age: the first ends after _FIRST seconds, so the last after 18 hours.
BINS: Final = 30
_FIRST = 2.0
EDGES: Final = np.concatenate([[0.0], _FIRST * 2 ** (np.arange(BINS) / 2)])
# What ranks as LRU does: hazards that only fall with age.
FALLING: Final = 0.3 / (EDGES + 10.0)
# Groups of ages that have coefficients of their own: the half octaves that each begins with.
_CUTS = np.array([0, 5, 7, 9, 11, 13, 15, 16, 18])
GROUPS: Final = len(_CUTS)
_EACH: Final = np.arange(BINS)
GROUP_OF: Final = np.searchsorted(_CUTS, _EACH, side="right") - 1

# Outputs that stand for one that is not known yet.
OUTPUTS: Final = 5

# Where a hazard has no data it falls with age a little faster than LRU's order needs.
_DECAY = 2**-0.6
# Events that the prior of a hazard counts for: that of a stratum, of all strata.
_OWN_EVENTS, _ALL_EVENTS = 3.0, 1.5
# The same for a coefficient of a group, around the mean over groups, and for that mean.
_GROUP_EVENTS, _EVENTS = 100.0, 5.0
# The same for what they are held against, around a hazard that is the same at all ages.
_FLAT_EVENTS = 0.5
# Newton's steps, as there is a fit to start from, and the most that each changes the logarithm
# of a hazard.
_STEPS, _LARGEST = 3, 1.0
MOST: Final = 5.0
# Fewer observations than this say nothing of features.
_FEW = 20
# Observations looked at in one piece of the work: about a millisecond.
PIECE: Final = 1024
# Of a piece, rows that are computed with at once: for what is longer than that, temporary arrays
# are such that malloc asks the system for each, which takes several times as long as to fill them.
BLOCK: Final = 400
# Multiplications of a product of matrices that OpenBLAS leaves to one thread: to wake others takes
# longer than all of them.
_ONE_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class Observations:
    """What was seen of some items between two ages of each.

    Attributes:
        strata: shape (n,).
        features: shape (n, FEATURES), NaN where unknown.
        begin, end: ages in seconds.
        known: age up to which the fit before knew of it.
        used: 1 where the item was used at ``end``, else 0.
        weight: how many items it stands for.

    """

    strata: Ints
    features: Shorts
    begin: Floats
    end: Floats
    known: Floats
    used: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.strata)


@dataclass(frozen=True, slots=True)
class Hazards:
    """The model.

    Attributes:
        base: hazard of each stratum in each half octave, per second.
        mean, scale: of the features of each stratum; coefficients are of features less
            the mean over the scale.
        coefficients: shape (STRATA, GROUPS, FEATURES).
        outputs: features of a few typical outputs, shape (STRATA, OUTPUTS, some features).
        by_age: what they are held against: hazards of all that never rise, shape (BINS,).
        proof: whether they have told more than that.

    """

    base: Floats
    mean: Floats
    scale: Floats
    coefficients: Floats
    outputs: Floats
    by_age: Floats
    proof: Proof

    @classmethod
    def unknown(cls) -> Hazards:
        """Before anything was seen: an order by age, LRU's."""
        shape = STRATA, FEATURES
        by_age = FALLING[:-1]
        return cls(
            np.tile(by_age, (STRATA, 1)),
            np.zeros(shape),
            np.ones(shape),
            np.zeros((STRATA, GROUPS, FEATURES)),
            np.zeros((STRATA, OUTPUTS, OUTPUT.stop - OUTPUT.start)),
            by_age,
            Proof(),
        )

    def of(self, strata: Ints, features: Shorts) -> Floats:
        """The hazard of each item in each half octave, shape (n, BINS)."""
        # numpy takes rows by this method in a fraction of the time that an index takes.
        scaled = _scaled(features, self.mean.take(strata, 0), self.scale.take(strata, 0))
        logs = np.matmul(self.coefficients.take(strata, 0), scaled[:, :, None])[:, :, 0]
        hazards: Floats = self.base.take(strata, 0) * _factors(logs).take(GROUP_OF, 1)
        return hazards


def bins_of(ages: Floats) -> Ints:
    """The half octave of each age in seconds."""
    found: Ints = np.minimum(
        np.maximum(np.searchsorted(EDGES, ages, side="right") - 1, 0), BINS - 1
    )
    return found


class Fit:
    """One fit, piece by piece.

    Args:
        seen: what is fitted to.
        start: the fit before.

    Attributes:
        hazards: the result, once ``pieces`` is exhausted.

    """

    def __init__(self, seen: Observations, start: Hazards) -> None:
        self.hazards = replace(
            start,
            base=start.base.copy(),
            mean=start.mean.copy(),
            scale=start.scale.copy(),
            coefficients=start.coefficients.copy(),
            outputs=start.outputs.copy(),
        )
        self._events = np.zeros((STRATA, BINS))
        np.add.at(self._events, (seen.strata, bins_of(seen.end)), seen.used * seen.weight)
        # What has no features: nothing to fit but its hazard.
        self._bare = np.zeros((STRATA, BINS))
        self._seen = seen
        self._start = start

    def pieces(self) -> Iterator[int]:
        """Do the work. Yields after each piece how many observations it had to do with."""
        yield from self._prove()
        families, at_risk = list[_Family](), np.zeros(BINS)
        for members in FAMILIES:
            # One stratum after the other, so that each of them is a slice.
            each = [np.flatnonzero(self._seen.strata == stratum) for stratum in members]
            rows = np.concatenate(each)
            family = _Family(members, [len(found) for found in each])
            for part in _parts(rows):
                for few in _parts(part, BLOCK):
                    at_risk += family.take(self._seen, few)
                yield len(part)
            if len(rows) < _FEW:
                self._bare += family.bare()
                continue
            family.scale(self.hazards)
            families.append(family)
            yield len(rows) // 4
        rest = np.flatnonzero(self._seen.strata == ANY)
        if len(rest):
            self._bare[ANY] += _times(self._seen, rest).sum(axis=0)
        self._hold_against(at_risk + self._bare[ANY])
        for _ in range(_STEPS):
            exposure = self._bare.copy()
            for family in families:
                exposure += family.exposure(self.hazards.coefficients[family.members[0]])
                yield family.size // 2
            _smooth(self.hazards.base, self._events, exposure)
            for family in families:
                yield from self._improve(family)

    def _prove(self) -> Iterator[int]:
        """Ask the fit before what it had said of the time since."""
        seen, proof = self._seen, self._start.proof.older()
        begin = np.maximum(seen.begin, seen.known)
        news = seen.end > begin
        for part in _parts(np.arange(len(seen))):
            for rows in _parts(part[news[part]], BLOCK):
                proof = proof.further(self._said_more(rows, begin[rows]), seen.weight[rows])
            yield len(part)
        self.hazards = replace(self.hazards, proof=proof)

    def _said_more(self, rows: Ints, begin: Floats) -> Floats:
        """By how much the fit before did better than hazards by age, from these ages on."""
        seen, start = self._seen, self._start
        hazards = start.of(seen.strata[rows], seen.features.take(rows, 0))
        last = bins_of(seen.end[rows])
        ratio = np.log(hazards[np.arange(len(rows)), last] / start.by_age[last])
        found: Floats = np.where(seen.used[rows] > 0, ratio, 0.0)
        found -= (_between(begin, seen.end[rows]) * (hazards - start.by_age)).sum(axis=1)
        return found

    def _hold_against(self, exposure: Floats) -> None:
        """Fit what the next fit is asked to tell more than."""
        events = self._events.sum(axis=0)
        rate = (events.sum() + 1) / (exposure.sum() + 1000)
        by_age = falling(events + _FLAT_EVENTS, exposure + _FLAT_EVENTS / rate)
        self.hazards = replace(self.hazards, by_age=by_age)

    def _improve(self, family: _Family) -> Iterator[int]:
        """One of Newton's steps for each group of ages."""
        some = family.varying
        before = self.hazards.coefficients[family.members[0]][:, some]
        mean, steps = before.mean(axis=0), np.zeros_like(before)
        family.expect(self.hazards.base)
        for group in range(GROUPS):
            rows, derivatives = family.at_risk(group), np.zeros((len(some) + 1, len(some) + 2))
            for part in _parts(rows):
                derivatives += family.derivatives(part, group)
                yield len(part)
            if len(rows):
                steps[group] = _step(before[group], mean, derivatives)
        after = before + family.within_reach(steps)
        for group in range(GROUPS):
            if not len(family.at_risk(group)):
                after[group] = mean
        for stratum in family.members:
            self.hazards.coefficients[stratum][:, some] = after


class _Family:
    """The observations of the strata of a family, as the fit needs them.

    Args:
        members: strata.
        sizes: how many observations of each; they come one stratum after the other.

    Attributes:
        size: how many observations.
        varying: the features that vary. The others say nothing, and are not looked at.

    """

    def __init__(self, members: tuple[int, ...], sizes: Sequence[int]) -> None:
        self.members = members
        self.size = size = sum(sizes)
        self.varying: Ints = np.arange(FEATURES)
        self._ends = [0, *accumulate(sizes)]
        self._filled = 0
        # The last column is 1: the level, which the hazards of the strata take up.
        self._features = np.ones((size, FEATURES + 1), np.float32)
        self._times = np.zeros((size, BINS), np.float32)
        self._used = np.zeros(size, np.float32)
        self._group = np.zeros(size, np.int64)
        # Of each feature: how many there are, their sum, and that of their squares.
        self._known, self._sums, self._squares = np.zeros((3, FEATURES + 1))
        # Of each group of ages: the factor of the hazard, the events expected, who is at risk.
        self._factors = np.empty((size, GROUPS), np.float32)
        self._expected = np.empty((size, GROUPS), np.float32)
        self._at_risk: dict[int, Ints] = {}

    def take(self, seen: Observations, rows: Ints) -> Shorts:
        """Take in some observations. Returns their time at risk by half octave."""
        part = slice(self._filled, self._filled + len(rows))
        self._filled = part.stop
        self._features[part, :-1] = seen.features.take(rows, 0)
        times = self._times[part] = _times(seen, rows)
        self._used[part] = seen.used[rows] * seen.weight[rows]
        self._group[part] = GROUP_OF[bins_of(seen.end[rows])]
        known = ~np.isnan(self._features[part])
        filled = np.where(known, self._features[part], 0).astype(np.float64)
        self._known += known.sum(axis=0)
        self._sums += filled.sum(axis=0)
        self._squares += (filled**2).sum(axis=0)
        at_risk: Shorts = times.sum(axis=0)
        return at_risk

    def scale(self, hazards: Hazards) -> None:
        """Measure features from their means in units of their spread."""
        members, shares = list(self.members), (np.arange(OUTPUTS) + 0.5) / OUTPUTS
        places = (shares * self.size).astype(np.int64)
        ranked = np.argpartition(self._features[:, OUTPUT.stop - 1], places)[places]
        hazards.outputs[members] = self._features[ranked, OUTPUT]
        mean = (self._sums / np.maximum(self._known, 1))[:-1]
        squares = (self._squares / np.maximum(self._known, 1))[:-1]
        spread = np.sqrt(np.maximum(squares - mean**2, 0))
        # What does not vary says nothing.
        spread[spread < 1e-4] = np.inf
        same = np.isfinite(spread)
        rescaled = np.where(same, spread, 0) / hazards.scale[members[0]]
        hazards.coefficients[members] *= np.where(np.isfinite(rescaled), rescaled, 0)
        hazards.mean[members], hazards.scale[members] = mean, spread
        some = self.varying = np.flatnonzero(same)
        scaled = np.ones((self.size, len(some) + 1), np.float32)
        for _, part in self._blocks():
            scaled[part, :-1] = _scaled(self._features[part, some], mean[some], spread[some])
        self._features = scaled

    def bare(self) -> Floats:
        """Time at risk by stratum and half octave."""
        found = np.zeros((STRATA, BINS))
        for stratum, part in self._blocks():
            found[stratum] += self._times[part].sum(axis=0)
        return found

    def exposure(self, coefficients: Floats) -> Floats:
        """The same as if all had the stratum's own hazard."""
        found = np.zeros((STRATA, BINS))
        slopes = coefficients[:, self.varying].T.astype(np.float32)
        for stratum, part in self._blocks():
            factors = self._factors[part] = _factors(self._features[part, :-1] @ slopes)
            found[stratum] += (self._times[part].T @ factors)[_EACH, GROUP_OF]
        return found

    def expect(self, base: Floats) -> None:
        """How many events these hazards expect, by group of ages, with the factors as they are."""
        hazards = np.zeros((STRATA, BINS, GROUPS), np.float32)
        hazards[:, _EACH, GROUP_OF] = base
        for stratum, part in self._blocks():
            self._expected[part] = (self._times[part] @ hazards[stratum]) * self._factors[part]

    def at_risk(self, group: int) -> Ints:
        """Observations that have to do with a group of ages."""
        if group not in self._at_risk:
            times = self._times[:, group == GROUP_OF].any(axis=1)
            used = (self._group == group) & (self._used > 0)
            self._at_risk[group] = np.flatnonzero(times | used)
        return self._at_risk[group]

    def within_reach(self, steps: Floats) -> Floats:
        """As much of each group's step as changes the logarithm of no hazard by too much.

        Newton's method trusts the curvature where it stands: from hazards that are far too low it
        steps far beyond the ones that are right.
        """
        changes = np.empty((self.size, GROUPS), np.float32)
        for _, part in self._blocks():
            changes[part] = np.abs(self._features[part, :-1] @ steps.T.astype(np.float32))
        largest = [changes[self.at_risk(group), group].max(initial=0) for group in range(GROUPS)]
        found: Floats = steps / np.maximum(1.0, np.array(largest)[:, None] / _LARGEST)
        return found

    def derivatives(self, rows: Ints, group: int) -> Shorts:
        """Of the likelihood of some observations: the second, and in the last column the first."""
        n = self._features.shape[1]
        found, each = np.zeros((n, n + 1), np.float32), _ONE_THREAD // (n * (n + 1))
        for begin in range(0, len(rows), each):
            part = rows[begin : begin + each]
            features, expected = self._features.take(part, 0), self._expected[:, group][part]
            weighted = np.empty((len(part), n + 1), np.float32)
            np.multiply(features, expected[:, None], out=weighted[:, :-1])
            observed = self._used[part] * (self._group[part] == group)
            np.subtract(observed, expected, out=weighted[:, -1])
            found += features.T @ weighted
        return found

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        """All observations of each stratum, so many at once."""
        for stratum, (begin, end) in zip(self.members, pairwise(self._ends), strict=True):
            for first in range(begin, end, BLOCK):
                yield stratum, slice(first, min(end, first + BLOCK))


def _times(seen: Observations, rows: Ints) -> Shorts:
    """Seconds that each was looked at in each half octave, times its weight."""
    times = _between(seen.begin[rows], seen.end[rows]) * seen.weight[rows, None]
    found: Shorts = times.astype(np.float32)
    return found


def _between(begin: Floats, end: Floats) -> Floats:
    """Seconds of each half octave that lie between two ages, shape (n, BINS)."""
    times = np.minimum(end[:, None], EDGES[1:]) - np.maximum(begin[:, None], EDGES[:-1])
    found: Floats = np.maximum(times, 0.0)
    return found


def _step(before: Floats, mean: Floats, derivatives: Floats) -> Floats:
    """Newton's, after the level is taken out, which is the hazards' to find."""
    curvature, gradient = derivatives[:, :-1], derivatives[:, -1]
    level, total = curvature[:-1, -1], curvature[-1, -1] + 1.0
    ridge = _GROUP_EVENTS + _EVENTS / GROUPS
    slope = gradient[:-1] - level * gradient[-1] / total
    slope -= _GROUP_EVENTS * (before - mean) + _EVENTS / GROUPS * before
    bend = curvature[:-1, :-1] - np.outer(level, level) / total + ridge * np.eye(len(before))
    step: Floats = np.linalg.solve(bend, slope)
    return step


def _smooth(base: Floats, events: Floats, exposure: Floats) -> None:
    """Hazards from events and exposure: few events give what the age before suggests."""
    all_events, all_exposure = events.sum(axis=0), exposure.sum(axis=0)
    hazard = (all_events.sum() + 1) / (all_exposure.sum() + 1000)
    ratio = np.ones(STRATA)
    for b in range(BINS):
        prior = hazard * _DECAY
        hazard = (all_events[b] + _ALL_EVENTS) / (all_exposure[b] + _ALL_EVENTS / prior)
        expected = hazard * ratio
        base[:, b] = (events[:, b] + _OWN_EVENTS) / (exposure[:, b] + _OWN_EVENTS / expected)
        base[ANY, b] = hazard
        ratio = base[:, b] / hazard


def _scaled(features: npt.NDArray[np.floating], mean: Floats, scale: Floats) -> Floats:
    scaled: Floats = (features - mean) / scale
    return np.where(np.isnan(scaled), 0.0, scaled)


def _factors(logs: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    found: npt.NDArray[np.floating] = np.exp(np.minimum(np.maximum(logs, -MOST), MOST))
    return found


def _parts(rows: Ints, size: int = PIECE) -> list[Ints]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]
