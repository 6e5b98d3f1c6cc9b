"""Adaptive replacement: recency and frequency, balanced by what was evicted too soon."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.rings import Rings

# The paper's names. A ghost is a chunk that the tier no longer holds.
T1, T2, B1, B2 = range(4)
_GHOST_OF = {T1: B1, T2: B2}


class _ArcTier(ChunkwiseTier):
    """The four lists of one tier, and the target size of ``T1``.

    ARC decides for one incoming chunk after the other, while a hierarchy makes room for
    a whole run at once. So ``announce`` notes what comes, ``victims`` plays its arrival
    through without changing anything, ``remove`` sets aside what was really evicted,
    and ``insert`` does for each chunk what ARC does, in ARC's order.
    """

    def setup(self) -> None:
        self._rings = Rings(4)
        self._target = 0.0
        self._coming: Sequence[ChunkId] = ()
        # Evicted for what comes, with the list each was in.
        self._evicted: list[tuple[ChunkId, int]] = []

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        self._rings.use_all(chunks, B1, T2)

    def announce(self, run: Run) -> int:
        admitted = super().announce(run)
        # What the last run was admitted with has not arrived, and will not.
        self._bury_evicted(len(self._evicted))
        self._coming = self._rings.absent(run.chunks[::-1], B1)
        return admitted

    def insert(self, run: Run) -> None:
        self._learn_limit(run)
        coming, self._coming = self._rings.absent(run.chunks[::-1], B1), ()
        self._bury_evicted(len(self._evicted) - len(coming))
        scale = self._scale()
        evicted, self._evicted = self._evicted, []
        # The first ones found room; from then on each took the place of another.
        free = len(coming) - len(evicted)
        ghosts = _Ghosts(self._rings)
        arrived: tuple[list[ChunkId], list[ChunkId]] = ([], [])
        for i, (chunk, ring) in enumerate(zip(coming, self._rings.where_all(coming), strict=True)):
            ghost = ghosts.leave(chunk, ring)
            scale.learn(ghost)
            if i >= free:
                self._evict(scale, ghost, ghosts, *evicted[i - free])
            to = T1 if ghost is None else T2
            arrived[to].append(chunk)
            scale.sizes[to] += 1
        self._target = scale.target
        ghosts.settle()
        for to in (T1, T2):
            self._rings.append_all(arrived[to], to)

    def insert_oldest(self, run: Run) -> None:
        self._learn_limit(run)
        self._rings.prepend_all(self._rings.absent(run.chunks[::-1], B1), T1)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        known = list(zip(chunks, self._rings.where_all(chunks), strict=True))
        held = [(chunk, ring) for chunk, ring in known if ring is not None and ring in _GHOST_OF]
        self._rings.discard_all([chunk for chunk, _ in held])
        self._evicted += held
        if not self._coming:
            self._bury_evicted(len(self._evicted))

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        scale, ghosts = self._scale(), _Ghosts(self._rings)
        evicted = iter(self._evicted)
        left = {ring: self._rings.oldest(ring) for ring in (T1, T2)}
        held = scale.sizes[T1] + scale.sizes[T2]
        for chunk, ring in zip(self._coming, self._rings.where_all(self._coming), strict=True):
            ghost = ghosts.leave(chunk, ring)
            scale.learn(ghost)
            if held < self._limit:
                held += 1
            elif gone := next(evicted, None):
                # Room is made in parts: the first ones have theirs.
                self._evict(scale, ghost, ghosts, *gone)
            else:
                ghosts.drop(scale.trim(ghost))
                yield from _next(scale, ghost, left)
            scale.sizes[T1 if ghost is None else T2] += 1
        # The caller may skip some, or want more than what comes needs.
        for _, ring in evicted:
            scale.evict(ring)
        while True:
            scale.trim(None)
            found = _next(scale, None, left)
            if not found:
                return
            yield from found

    # Parts ------------------------------------------------------------------

    def _scale(self) -> _Scale:
        """As it was before room was made for what comes."""
        scale = _Scale(self._rings.sizes, self._target, self._limit)
        for _, ring in self._evicted:
            scale.sizes[ring] += 1
        return scale

    def _evict(
        self, scale: _Scale, ghost: int | None, ghosts: _Ghosts, victim: ChunkId, ring: int
    ) -> None:
        ghosts.drop(scale.trim(ghost))
        scale.evict(ring)
        if scale.remembers:
            ghosts.new[_GHOST_OF[ring]].append(victim)

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


class _Ghosts:
    """The ghosts, while one chunk after the other arrives; nothing changes until ``settle``.

    Attributes:
        new: chunks that have become ghosts, by their list, the oldest first.

    """

    def __init__(self, rings: Rings) -> None:
        self.new: dict[int, deque[ChunkId]] = {B1: deque(), B2: deque()}
        self._rings = rings
        self._oldest = {ring: rings.oldest(ring) for ring in (B1, B2)}
        # Ghosts that are none any more.
        self._gone: set[ChunkId] = set()

    def leave(self, chunk: ChunkId, ring: int | None) -> int | None:
        """``chunk`` arrives, and is in that list now. The one it is in by then: no ghost stays."""
        if ring is None or chunk in self._gone:
            return None
        self._gone.add(chunk)
        return ring

    def drop(self, ring: int | None) -> None:
        """The oldest ghost of a list is none any more, if there is a list."""
        if ring is None:
            return
        for ghost in self._oldest[ring]:
            if ghost not in self._gone:
                self._gone.add(ghost)
                return
        if self.new[ring]:
            self.new[ring].popleft()

    def settle(self) -> None:
        """Forget and remember for good."""
        self._rings.discard_all(self._gone)
        for ring, chunks in self.new.items():
            self._rings.append_all(chunks, ring)


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


class ArcPolicy(ChunkwisePolicy):
    """ARC, for each tier on its own, chunk by chunk.

    Method: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache"
    (FAST 2003), figure 4, with libCacheSim's reading of it for a cache that is not
    full: then ghosts teach, and none is dropped. Chunks used once (``T1``) and more often
    (``T2``) compete for the tier; a hit among the ghosts of one (``B1``, ``B2``) moves
    the target size of ``T1`` in its favour.
    """

    name: ClassVar[str] = "arc"
    tier_class = _ArcTier
