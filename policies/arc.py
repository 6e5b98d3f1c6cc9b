"""Adaptive replacement: recency and frequency, balanced by what was evicted too soon."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import ClassVar

from kvtiers.policies.base import (
    ChunkId,
    Policy,
    PolicyRequest,
    Run,
)
from kvtiers.policies.rings import Rings

# The paper's names. A ghost is a chunk that the tier no longer holds.
T1, T2, B1, B2 = range(4)
_GHOST_OF = {T1: B1, T2: B2}


class ArcPolicy(Policy):
    """ARC, for each tier on its own, chunk by chunk.

    Method: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache"
    (FAST 2003), figure 4, with libCacheSim's reading of it for a cache that is not
    full: then ghosts teach, and none is dropped. Chunks used once (``T1``) and more often
    (``T2``) compete for the tier; a hit among the ghosts of one (``B1``, ``B2``) moves
    the target size of ``T1`` in its favour.

    ARC knows nothing of prefixes. It may evict a chunk that others in the tier need,
    which then serve nobody until it is back. Admits everything, writes it through to
    every tier, demotes nothing.

    The chunks of a run come tail first, as in vLLM's own prefix cache, so that of a run
    used once the tail goes first.
    """

    name: ClassVar[str] = "arc"

    def setup(self) -> None:
        """Four lists per tier."""
        self._caches = {tier.name: _ArcTier(tier.capacity) for tier in self.tiers}

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:  # noqa: ARG002
        """Count a use in the tier that served the run, and in those farther away.

        For a nearer tier it is the use that the copy was made for, and not a second one.
        """
        names = list(self._caches)
        first = names.index(tier) if tier in self._caches else 0
        for name in names[first:]:
            self._caches[name].use(run)

    def admit(self, run: Run, tier: str) -> int:
        """All of it. Notes what comes in, on which the next victims depend."""
        self._caches[tier].announce(run)
        return len(run)

    def on_insert(self, run: Run, tier: str) -> None:
        """Take the run in: among the frequent ones what is known as a ghost."""
        self._caches[tier].insert(run)

    def on_found(self, run: Run, tier: str, age: float) -> None:  # noqa: ARG002
        """Take the run in as used once, before all that was named so far."""
        self._caches[tier].insert_oldest(run)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Remember the chunks as ghosts."""
        self._caches[tier].remove(chunks)

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:  # noqa: ARG002
        """All chunks of ``tier``: first those that make room for what was admitted last."""
        return self._caches[tier].victims()


class _ArcTier:
    """The four lists of one tier, and the target size of ``T1``.

    ARC decides for one incoming chunk after the other, while a hierarchy makes room for
    a whole run at once. So ``announce`` notes what comes, ``victims`` plays its arrival
    through without changing anything, ``remove`` sets aside what was really evicted,
    and ``insert`` does for each chunk what ARC does, in ARC's order.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        # In chunks; unbounded until a run tells their size.
        self._limit = inf
        self._rings = Rings(4)
        self._target = 0.0
        self._coming: tuple[ChunkId, ...] = ()
        # Evicted for what comes, with the list each was in.
        self._evicted: list[tuple[ChunkId, int]] = []

    # What happens -----------------------------------------------------------

    def use(self, run: Run) -> None:
        rings = self._rings
        for chunk in reversed(run.chunks):
            if rings.where(chunk) in (T1, T2):
                rings.append(chunk, T2)

    def announce(self, run: Run) -> None:
        self._learn_limit(run)
        # What the last run was admitted with has not arrived, and will not.
        self._bury_evicted(len(self._evicted))
        self._coming = self._missing(run)

    def insert(self, run: Run) -> None:
        self._learn_limit(run)
        coming, self._coming = self._missing(run), ()
        self._bury_evicted(len(self._evicted) - len(coming))
        evicted, self._evicted = self._evicted, []
        # The first ones found room; from then on each took the place of another.
        free = len(coming) - len(evicted)
        scale = _Scale(self._rings.sizes, self._target, self._limit)
        for _, ring in evicted:
            scale.sizes[ring] += 1
        for i, chunk in enumerate(coming):
            ghost = self._ghost(chunk)
            scale.learn(ghost)
            # Before room is made for it, which may drop the oldest ghost.
            self._rings.discard(chunk)
            if i >= free:
                self._evict(scale, ghost, *evicted[i - free])
            ring = T1 if ghost is None else T2
            self._rings.append(chunk, ring)
            scale.sizes[ring] += 1
        self._target = scale.target

    def insert_oldest(self, run: Run) -> None:
        self._learn_limit(run)
        for chunk in run.chunks:
            if self._rings.where(chunk) not in (T1, T2):
                self._rings.prepend(chunk, T1)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in chunks:
            ring = self._rings.where(chunk)
            if ring is not None and ring in _GHOST_OF:
                self._rings.discard(chunk)
                self._evicted.append((chunk, ring))
        if not self._coming:
            self._bury_evicted(len(self._evicted))

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        scale = _Scale(self._rings.sizes, self._target, self._limit)
        left = {ring: self._rings.oldest(ring) for ring in (T1, T2, B1, B2)}
        held = scale.sizes[T1] + scale.sizes[T2]
        # Ghosts that are none any more once this much has come.
        gone: set[ChunkId] = set()
        for chunk in self._coming:
            ghost = None if chunk in gone else self._ghost(chunk)
            scale.learn(ghost)
            gone.add(chunk)
            if held < self._limit:
                held += 1
            else:
                dropped = scale.trim(ghost)
                gone.update(_first(left[dropped], gone) if dropped is not None else ())
                yield from _next(scale, ghost, left)
            scale.sizes[T1 if ghost is None else T2] += 1
        # The caller may skip some, or want more than what comes needs.
        while True:
            scale.trim(None)
            found = _next(scale, None, left)
            if not found:
                return
            yield from found

    # Parts ------------------------------------------------------------------

    def _missing(self, run: Run) -> tuple[ChunkId, ...]:
        where = self._rings.where
        return tuple(chunk for chunk in reversed(run.chunks) if where(chunk) not in (T1, T2))

    def _ghost(self, chunk: ChunkId) -> int | None:
        ring = self._rings.where(chunk)
        return ring if ring in (B1, B2) else None

    def _learn_limit(self, run: Run) -> None:
        if self._capacity is not None:
            self._limit = self._capacity // run.chunk_bytes

    def _evict(self, scale: _Scale, ghost: int | None, victim: ChunkId, ring: int) -> None:
        dropped = scale.trim(ghost)
        if dropped is not None:
            self._rings.drop_oldest(dropped)
        scale.evict(ring)
        if scale.remembers:
            self._rings.append(victim, _GHOST_OF[ring])

    def _bury_evicted(self, n: int) -> None:
        """Remember chunks that went for no other: room was made ahead, or they were lost."""
        rings, limit = self._rings, self._limit
        for chunk, ring in self._evicted[: max(0, n)] if limit < inf else ():
            rings.append(chunk, _GHOST_OF[ring])
            while rings.sizes[T1] + rings.sizes[B1] > limit and rings.sizes[B1]:
                rings.drop_oldest(B1)
            while sum(rings.sizes) > 2 * limit and rings.sizes[B2]:
                rings.drop_oldest(B2)
        del self._evicted[: max(0, n)]


class _Scale:
    """Sizes of the lists and the target, while one chunk after the other arrives.

    Attributes:
        sizes: of the four lists.
        target: what ``T1`` should have, the paper's ``p``.
        remembers: whether what is evicted next becomes a ghost.

    """

    def __init__(self, sizes: Sequence[int], target: float, limit: float) -> None:
        self.sizes = list(sizes)
        self.target = target
        self.remembers = True
        self._limit = limit

    def learn(self, ghost: int | None) -> None:
        """Cases II and III: a ghost of that list arrives, and is a ghost no longer."""
        sizes = self.sizes
        if ghost == B1:
            self.target = min(self.target + max(sizes[B2] / sizes[B1], 1), self._limit)
        elif ghost == B2:
            self.target = max(self.target - max(sizes[B1] / sizes[B2], 1), 0)
        if ghost is not None:
            sizes[ghost] -= 1

    def trim(self, ghost: int | None) -> int | None:
        """Case IV: the list whose oldest ghost is dropped, for a chunk that was none."""
        sizes = self.sizes
        self.remembers = True
        dropped = None
        if ghost is None and sizes[T1] + sizes[B1] >= self._limit:
            # If all that was seen once is in T1, there is no room for a ghost either.
            self.remembers = sizes[B1] > 0
            dropped = B1 if sizes[B1] else None
        elif ghost is None and sum(sizes) >= 2 * self._limit and sizes[B2]:
            dropped = B2
        if dropped is not None:
            sizes[dropped] -= 1
        return dropped

    def replace(self, ghost: int | None) -> int:
        """REPLACE: the list to evict from."""
        t1 = self.sizes[T1]
        over = t1 > self.target or (t1 == self.target and ghost == B2)
        return T1 if not self.remembers or (t1 > 0 and over) else T2

    def evict(self, ring: int) -> None:
        """A chunk of that list goes."""
        self.sizes[ring] -= 1
        if self.remembers:
            self.sizes[_GHOST_OF[ring]] += 1


def _next(scale: _Scale, ghost: int | None, left: Mapping[int, Iterator[ChunkId]]) -> list[ChunkId]:
    """The next victim, as a list of one; empty if all have been named."""
    wanted = scale.replace(ghost)
    for ring in (wanted, T1 + T2 - wanted):
        for chunk in left[ring]:
            scale.evict(ring)
            return [chunk]
    return []


def _first(ghosts: Iterator[ChunkId], gone: Container[ChunkId]) -> list[ChunkId]:
    """The oldest of the ghosts that is still one, as a list of one."""
    return list(islice((ghost for ghost in ghosts if ghost not in gone), 1))
