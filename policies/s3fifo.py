"""Three queues: a small one that new chunks have to get through, the main one, and ghosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.rings import Rings

# A ghost is a chunk that the tier no longer holds.
SMALL, MAIN, GHOST = range(3)
_SMALL_SHARE, _GHOST_SHARE = 0.1, 0.9
# A mark counts uses up to three; this one says that the chunk is not here yet.
_MOST_USES, _COMING = 3, 4
# What the oldest chunk of a queue goes on with, for each mark; negative if it goes.
_TO_MAIN = (-1, -1, 0, 0)
_AGAIN = (-1, 0, 1, 2, -1)


class _S3FifoTier(ChunkwiseTier):
    """The three queues of one tier.

    S3-FIFO evicts for one incoming chunk after the other, while a hierarchy makes room
    for a whole run at once. So ``remove`` first lets come in what made each eviction
    necessary, marked as not here yet, and ``insert`` lets the rest come. ``victims`` plays
    the same through without changing anything.
    """

    def setup(self) -> None:
        self._rings = Rings(3)
        self._small_limit = self._main_limit = inf
        self._ghost_limit = 0
        self._has_evicted = False
        # What was announced: what waits for its turn, the next one last; what found no room,
        # and whether it was a ghost; what has a place in the main queue; and what will be the
        # newest of the small one, where nothing else comes to that end meanwhile.
        self._coming: list[ChunkId] = []
        self._turn: tuple[ChunkId, bool] | None = None
        self._placed: list[ChunkId] = []
        self._newest_of_small: list[ChunkId] = []

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        # What a ghost is marked with does not matter: it comes back with a new mark.
        self._rings.mark_all(chunks, _MOST_USES)

    def announce(self, run: Run) -> int:
        # What the last run was admitted with has not arrived, and will not.
        self._rings.discard_all(self._placed)
        self._placed, self._newest_of_small, self._turn = [], [], None
        self._coming = self._rings.absent(run.chunks, GHOST)
        return super().announce(run)

    def insert(self, run: Run) -> None:
        self._learn_limit(run)
        arrived = set(run.chunks) if self._placed or self._newest_of_small else ()
        for chunk in self._placed:
            if chunk in arrived:
                self._rings.set_mark(chunk, 0)
            else:
                self._rings.discard(chunk)
        self._newest_of_small = [chunk for chunk in self._newest_of_small if chunk in arrived]
        known, turn = set(self._newest_of_small), self._turn
        for chunk in self._rings.absent(run.chunks[::-1], GHOST):
            if chunk not in known:
                self._place(*(turn if turn and turn[0] == chunk else self._leave_ghosts(chunk)))
        self._rings.append_all(self._newest_of_small, SMALL)
        self._placed, self._newest_of_small, self._coming, self._turn = [], [], [], None

    def insert_oldest(self, run: Run) -> None:
        self._learn_limit(run)
        for chunk in self._rings.absent(run.chunks, GHOST):
            full = self._rings.sizes[SMALL] >= self._small_limit
            self._rings.prepend_all((chunk,), MAIN if full else SMALL)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        rings = self._rings
        for chunk in chunks:
            if rings.where(chunk) not in (SMALL, MAIN):
                continue
            self._let_come()
            self._give_second_chances()
            self._has_evicted = True
            if rings.where(chunk) == SMALL and self._ghost_limit:
                rings.append(chunk, GHOST)
                if rings.sizes[GHOST] > self._ghost_limit:
                    rings.drop_oldest(GHOST)
            else:
                rings.discard(chunk)

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        plan = _Plan(self._rings, self._main_limit, self._ghost_limit)
        plan.sizes[SMALL] += len(self._newest_of_small)
        fresh = self._has_evicted
        for _, was_ghost in self._turns(plan):
            if plan.sizes[SMALL] + plan.sizes[MAIN] >= self._limit:
                fresh = True
                yield from plan.evict()
            full = not fresh and plan.sizes[SMALL] >= self._small_limit
            plan.sizes[MAIN if was_ghost or full else SMALL] += 1
        # The caller may skip some, or want more than what comes needs.
        while victim := plan.evict():
            yield from victim

    # Parts ------------------------------------------------------------------

    def _learn_limit(self, run: Run) -> None:
        super()._learn_limit(run)
        if self._limit < inf:
            self._small_limit = max(1, int(self._limit * _SMALL_SHARE))
            self._main_limit = self._limit - self._small_limit
            self._ghost_limit = int(self._limit * _GHOST_SHARE)

    def _turns(self, plan: _Plan) -> Iterator[tuple[ChunkId, bool]]:
        """What comes, and whether it is a ghost by the time it does."""
        if self._turn is not None:
            yield self._turn
        for chunk in reversed(self._coming):
            yield chunk, self._rings.where(chunk) == GHOST and plan.leave_ghosts(chunk)

    def _let_come(self) -> None:
        """Give a place to what has room, and ask the next one whether it is a ghost.

        That comes before room is made for it, as then the oldest ghost may be dropped.
        """
        while self._turn or self._coming:
            if self._turn is None:
                self._turn = self._leave_ghosts(self._coming.pop())
            if self._small_size() + self._rings.sizes[MAIN] >= self._limit:
                return
            chunk, was_ghost = self._turn
            if self._place(chunk, was_ghost) == MAIN:
                self._rings.set_mark(chunk, _COMING)
                self._placed.append(chunk)
            self._turn = None

    def _leave_ghosts(self, chunk: ChunkId) -> tuple[ChunkId, bool]:
        was_ghost = self._rings.where(chunk) == GHOST
        if was_ghost:
            self._rings.discard(chunk)
        return chunk, was_ghost

    def _place(self, chunk: ChunkId, was_ghost: bool) -> int:
        # While the tier fills up for the first time, the main queue takes what is too much.
        full = not self._has_evicted and self._small_size() >= self._small_limit
        if not was_ghost and not full:
            self._newest_of_small.append(chunk)
            return SMALL
        self._rings.append(chunk, MAIN)
        return MAIN

    def _small_size(self) -> int:
        return self._rings.sizes[SMALL] + len(self._newest_of_small)

    def _give_second_chances(self) -> None:
        """Move on what goes to the main queue, or to its end, before the next one is evicted."""
        rings = self._rings
        if rings.sizes[MAIN] <= self._main_limit:
            rings.pass_marked(SMALL, MAIN, _TO_MAIN)
            if not rings.is_empty(SMALL):
                return
        rings.pass_marked(MAIN, MAIN, _AGAIN)


class _Plan:
    """What the queues will be, while one chunk after the other arrives.

    Attributes:
        sizes: of the three.

    """

    def __init__(self, rings: Rings, main_limit: float, ghost_limit: int) -> None:
        self.sizes = list(rings.sizes)
        self._main_limit, self._ghost_limit = main_limit, ghost_limit
        self._small = rings.oldest_marked(SMALL)
        self._main = rings.oldest_marked(MAIN)
        self._ghosts = rings.oldest(GHOST)
        # What has come to the end of the main queue, with its mark.
        self._again: deque[tuple[ChunkId, int]] = deque()
        # Ghosts that are none any more.
        self._gone: set[ChunkId] = set()

    def leave_ghosts(self, chunk: ChunkId) -> bool:
        """A chunk that is a ghost now arrives. Whether it still is one then."""
        if chunk in self._gone:
            return False
        self._gone.add(chunk)
        self.sizes[GHOST] -= 1
        return True

    def evict(self) -> list[ChunkId]:
        """The next victim, as a list of one; empty if all have been named."""
        small_first = self.sizes[MAIN] <= self._main_limit
        return (
            (self._from_small() if small_first else []) or self._from_main() or self._from_small()
        )

    def _from_small(self) -> list[ChunkId]:
        for chunk, mark in self._small:
            self.sizes[SMALL] -= 1
            if _TO_MAIN[mark] < 0:
                self._remember()
                return [chunk]
            self.sizes[MAIN] += 1
            self._again.append((chunk, _TO_MAIN[mark]))
        return []

    def _from_main(self) -> list[ChunkId]:
        while entry := next(self._main, None) or (self._again.popleft() if self._again else None):
            chunk, mark = entry
            if mark == _COMING:
                continue
            if _AGAIN[mark] < 0:
                self.sizes[MAIN] -= 1
                return [chunk]
            self._again.append((chunk, _AGAIN[mark]))
        return []

    def _remember(self) -> None:
        if self.sizes[GHOST] < self._ghost_limit:
            self.sizes[GHOST] += 1
            return
        for ghost in self._ghosts:
            if ghost not in self._gone:
                self._gone.add(ghost)
                return


class S3FifoPolicy(ChunkwisePolicy):
    """S3-FIFO, for each tier on its own, chunk by chunk.

    Method: Yang et al., "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023),
    algorithm 1, with libCacheSim's reading of it: the small queue has a tenth of the tier,
    what was used twice in it goes on to the main queue, what was not becomes one of as many
    ghosts as nine tenths of the tier have chunks. A ghost that comes back goes to the main
    queue, which lets a chunk come round again once for each use, up to three. Until the first
    eviction what the small queue has no room for goes to the main queue.
    """

    name: ClassVar[str] = "s3fifo"
    tier_class = _S3FifoTier
