"""Figures of tiers: what each holds, served and missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtiers.tiers.base import Usage
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.residency import CPU, GPU, Residency


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of one tier. ``counts`` are increases since they were last taken.

    ``read_seconds`` is what reading a chunk is expected to take, None if nobody knows.
    ``pinned`` is how many chunks are in use, None for tiers without pins.
    """

    name: str
    usage: Usage
    counts: Mapping[str, int]
    breaker: BreakerState = BreakerState.CLOSED
    read_seconds: float | None = None
    pinned: int | None = None


class Figures:
    """Counts and levels. One thread: the hierarchy's.

    Args:
        residency: the tiers, and the counts of those that are not lower ones.
        observed: tiers that somebody else manages: name -> how full it is.

    """

    def __init__(
        self, residency: Residency, observed: Mapping[str, Callable[[], Usage]] | None
    ) -> None:
        self._residency = residency
        self._observed = dict(observed or {})

    def count_served(self, gpu: int, served: Mapping[str, int], missed: int) -> None:
        """Of a request, chunks that the GPU held, that each tier served, and that none had.

        A chunk that a tier served was a miss in every tier above it.
        """
        self._residency.counts[GPU]["hits"] += gpu
        misses = missed + sum(served.values())
        self._residency.counts[GPU]["misses"] += misses
        for name, counts in self._all_counts():
            hits = served.get(name, 0)
            misses -= hits
            counts["hits"] += hits
            counts["misses"] += misses

    def take(self) -> list[TierStats]:
        """Figures of every tier, nearest to the GPU first; takes the counts."""
        residency = self._residency
        usages = {name: usage() for name, usage in self._observed.items()}
        usages[CPU] = residency.cpu.usage()
        breakers: dict[str, BreakerState] = {}
        for tier in residency.lower:
            usages[tier.name] = _usage_of(tier)
            breakers[tier.name] = tier.breaker.state
        stats = []
        for name, counts in self._all_counts(GPU):
            if name in usages:
                breaker = breakers.get(name, BreakerState.CLOSED)
                seconds = self._read_seconds(name)
                pinned = residency.slots.pinned if name == CPU else None
                stats.append(TierStats(name, usages[name], dict(+counts), breaker, seconds, pinned))
                counts.clear()
        return stats

    # Parts ------------------------------------------------------------------

    def _read_seconds(self, name: str) -> float | None:
        tier = self._residency.named(name)
        known = tier is not None and tier.reads.known
        return tier.reads.seconds(self._residency.chunk_bytes) if tier and known else None

    def _all_counts(self, *above: str) -> list[tuple[str, Counter[str]]]:
        counts = [(name, self._residency.counts[name]) for name in (*above, CPU)]
        return counts + [(tier.name, tier.counts) for tier in self._residency.lower]


def _usage_of(tier: LowerTier) -> Usage:
    if not tier.bound_is_kept:
        return Usage(tier.used, tier.used // tier.chunk_bytes, tier.capacity)
    usage = tier.tier.usage()
    tier.counts["evictions"] += usage.evicted - tier.evicted
    tier.evicted = usage.evicted
    return usage
