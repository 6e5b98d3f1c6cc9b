"""Policies from the literature: each tier on its own, chunk by chunk, no prefixes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar

from kvtiers.policies.base import (
    ChunkId,
    Policy,
    PolicyRequest,
    Run,
)


class ChunkwiseTier(ABC):
    """What such a policy keeps of one tier.

    The chunks of a run come tail first, as in vLLM's own prefix cache, so that of a run
    used once the tail goes first.

    Args:
        capacity: bytes, None if unbounded.

    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        # In chunks; unbounded until a run tells their size.
        self._limit = inf
        self.setup()

    def setup(self) -> None:  # noqa: B027 - most have something to make, but need not
        """Make what is kept. Last step of construction."""

    # What happens -----------------------------------------------------------

    @abstractmethod
    def use(self, chunks: Sequence[ChunkId]) -> None:
        """A request used ``chunks``, some of which may not be here; in this order."""

    def announce(self, run: Run) -> int:
        """``run`` is about to come. Returns how much of it, from its head, may."""
        self._learn_limit(run)
        return len(run)

    @abstractmethod
    def insert(self, run: Run) -> None:
        """``run`` is here. What of it was here before has not been used by that."""

    @abstractmethod
    def insert_oldest(self, run: Run) -> None:
        """``run`` is here, used once, before all that is here."""

    @abstractmethod
    def remove(self, chunks: Sequence[ChunkId]) -> None:
        """``chunks`` are gone: evicted, in this order, or lost."""

    # What to do -------------------------------------------------------------

    @abstractmethod
    def victims(self) -> Iterator[ChunkId]:
        """All chunks, those to go first; changes nothing."""

    # Parts ------------------------------------------------------------------

    def _learn_limit(self, run: Run) -> None:
        if self._capacity is not None:
            self._limit = self._capacity // run.chunk_bytes


class ChunkwisePolicy(Policy):
    """A ``ChunkwiseTier`` for each tier. Knows nothing of prefixes.

    It may evict a chunk that others in the tier need, which then serve nobody until it is
    back. Writes what it admits through to every tier, demotes nothing.
    """

    tier_class: ClassVar[type[ChunkwiseTier]]

    def setup(self) -> None:
        """One for each tier."""
        self._tiers = {tier.name: self.tier_class(tier.capacity) for tier in self.tiers}

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:  # noqa: ARG002
        """Count a use in the tier that served the run, and in those farther away.

        For a nearer tier it is the use that the copy was made for, and not a second one.
        """
        names = list(self._tiers)
        first = names.index(tier) if tier in self._tiers else 0
        chunks = run.chunks[::-1]
        for name in names[first:]:
            self._tiers[name].use(chunks)

    def admit(self, run: Run, tier: str) -> int:
        """What the tier takes of it. Notes what comes in: the next victims may depend on it."""
        return self._tiers[tier].announce(run)

    def on_insert(self, run: Run, tier: str) -> None:
        """Take the run in."""
        self._tiers[tier].insert(run)

    def on_found(self, run: Run, tier: str, age: float) -> None:  # noqa: ARG002
        """Take the run in as used once, before all that was named so far."""
        self._tiers[tier].insert_oldest(run)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Forget the chunks, or remember that they were there."""
        self._tiers[tier].remove(chunks)

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:  # noqa: ARG002
        """All chunks of ``tier``: first those that make room for what was admitted last."""
        return self._tiers[tier].victims()
