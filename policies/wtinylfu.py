"""A small window for what is new, and a main part that takes what is used more than its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from math import inf
from operator import itemgetter
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.rings import Rings
from kvtiers.policies.sketch import FrequencySketch

# The main part is a segmented LRU: what was used there goes from probation to protection.
WINDOW, PROBATION, PROTECTED = range(3)
_WINDOW_SHARE, _PROTECTED_SHARE = 0.01, 0.8
# Uses in the main part after which all counts are halved, for each chunk that it has room for.
_USES_TO_HALVE = 32
# A tier of more chunks passes on what its window has too much from the start. Others wait for
# the first eviction, as libCacheSim's do: two microseconds for each chunk then, all at once.
_FILLS_AT_ONCE = 50_000
# Chunks that are estimated at once.
_BLOCK = 256

_Estimated = tuple[ChunkId, float]


class _WTinyLfuTier(ChunkwiseTier):
    """The three lists of one tier, and the sketch.

    What leaves the window is let into the main part if it was seen more often than what
    goes there next: one of the two is evicted. A run that is longer than the window pushes
    chunks of its own out of it, and ``announce`` holds this contest for them: so much of
    the run may come as has not lost, from its head.
    """

    def setup(self) -> None:
        self._rings = Rings(3)
        self._window_limit = self._main_limit = self._protected_limit = 0
        # A tier without a bound has no contests.
        self._sketch: FrequencySketch | None = None
        self._uses = 0
        self._coming: list[ChunkId] = []
        # Chunks that will leave the window for the main part when they have come.
        self._owed = 0

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        rings, where = self._rings, self._rings.where_all(chunks)
        found = list(zip(chunks, where, strict=True))
        rings.append_all([chunk for chunk, ring in found if ring == WINDOW], WINDOW)
        main = [chunk for chunk, ring in found if ring in (PROBATION, PROTECTED)]
        rings.append_all(main, PROTECTED)
        if self._sketch is not None:
            too_many = rings.sizes[PROTECTED] - self._protected_limit
            rings.move_oldest(PROTECTED, PROBATION, max(0, too_many))
            self._count_uses(self._sketch, main)

    def announce(self, run: Run) -> int:
        self._learn_limit(run)
        self._owed = 0
        self._coming = self._rings.absent(run.chunks[::-1])
        if self._sketch is None or len(self._coming) <= self._window_limit:
            return len(run)
        lost = set(self._coming).intersection(self._losers(self._sketch, compete=True))
        # Once when they came, once when they left the window.
        for _ in range(2):
            self._sketch.add_all([chunk for chunk in self._coming if chunk in lost])
        admitted = next((i for i, chunk in enumerate(run.chunks) if chunk in lost), len(run))
        refused = set(run.chunks[admitted:])
        self._coming = [chunk for chunk in self._coming if chunk not in refused]
        return admitted

    def insert(self, run: Run) -> None:
        self._learn_limit(run)
        new = self._rings.absent(run.chunks[::-1])
        self._rings.append_all(new, WINDOW)
        if self._sketch is not None:
            self._sketch.add_all(new)
            too_many = self._rings.sizes[WINDOW] - self._window_limit
            early = min(self._room_in_main(), too_many) if self._limit > _FILLS_AT_ONCE else 0
            self._let_in(self._sketch, max(self._owed, early))
        self._coming, self._owed = [], 0

    def insert_oldest(self, run: Run) -> None:
        self._learn_limit(run)
        self._rings.prepend_all(self._rings.absent(run.chunks[::-1]), WINDOW)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        sketch, rings = self._sketch, self._rings
        if sketch is None:
            rings.discard_all(chunks)
            return
        self._let_in(sketch, self._room_in_main())
        known = zip(rings.where_all(chunks), chunks, strict=True)
        for ring, group in groupby(known, itemgetter(0)):
            gone = [chunk for _, chunk in group]
            rings.discard_all(gone)
            if ring == WINDOW:
                sketch.add_all(gone)
            elif ring is not None:
                in_window = rings.sizes[WINDOW]
                self._let_in(sketch, len(gone))
                self._owed += max(0, len(gone) - in_window)

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        if self._sketch is None:
            return self._rings.oldest(WINDOW)
        return self._losers(self._sketch, compete=False)

    # Parts ------------------------------------------------------------------

    def _learn_limit(self, run: Run) -> None:
        super()._learn_limit(run)
        if self._limit < inf:
            limit = int(self._limit)
            self._window_limit = max(1, int(limit * _WINDOW_SHARE))
            self._main_limit = limit - self._window_limit
            self._protected_limit = int(self._main_limit * _PROTECTED_SHARE)
            if self._sketch is None:
                self._sketch = FrequencySketch(max(1, self._main_limit))

    def _room_in_main(self) -> int:
        sizes = self._rings.sizes
        return max(0, self._main_limit - sizes[PROBATION] - sizes[PROTECTED])

    def _let_in(self, sketch: FrequencySketch, count: int) -> None:
        """Move what is oldest in the window to the main part."""
        rings, sizes = self._rings, self._rings.sizes
        protected = max(0, self._protected_limit - sizes[PROTECTED])
        probation = max(0, self._main_limit - self._protected_limit - sizes[PROBATION])
        # Probation first, protection while it fills up, and probation if both are full.
        for ring, room in ((PROBATION, probation), (PROTECTED, protected), (PROBATION, count)):
            moved = rings.move_oldest(WINDOW, ring, min(room, count))
            sketch.add_all(moved)
            count -= len(moved)

    def _count_uses(self, sketch: FrequencySketch, chunks: Sequence[ChunkId]) -> None:
        every = _USES_TO_HALVE * self._main_limit
        while chunks:
            now = chunks[: max(1, every - self._uses)]
            sketch.add_all(now)
            self._uses += len(now)
            if self._uses >= every:
                self._uses = 0
                sketch.halve()
            chunks = chunks[len(now) :]

    def _losers(self, sketch: FrequencySketch, *, compete: bool) -> Iterator[ChunkId]:
        """Who loses while what was announced comes, chunk by chunk; then all others.

        With ``compete`` what comes may lose too. Otherwise it is named in no case.
        """
        contest = _Contest(self._rings, sketch, len(self._coming))
        room, free = self._room_in_main(), self._limit - sum(self._rings.sizes)
        # Who competes has been seen once more by then: when it came.
        seen = sketch.estimates(self._coming) if compete else [inf] * len(self._coming)
        for arrival in zip(self._coming, (count + 1 for count in seen), strict=True):
            if free > 0:
                free -= 1
            else:
                room -= contest.fill_main(room, self._main_limit - self._protected_limit)
                yield from contest.loser()
            contest.arrived.append(arrival)
        while not compete and (loser := contest.loser()):
            yield from loser


class _Contest:
    """The window against the main part, on copies.

    Attributes:
        arrived: what came into the window meanwhile, oldest first, with its estimate;
            infinite if it can't lose.

    """

    def __init__(self, rings: Rings, sketch: FrequencySketch, length: int) -> None:
        self.arrived: deque[_Estimated] = deque()
        self._sizes = list(rings.sizes)
        self._window, self._probation, self._protected = (
            _with_estimates(rings.oldest(ring), sketch, min(max(1, length), _BLOCK))
            for ring in (WINDOW, PROBATION, PROTECTED)
        )
        # What came from the window into probation, and into protection.
        self._probed: deque[_Estimated] = deque()
        self._guarded: deque[_Estimated] = deque()
        self._next: _Estimated | None = None

    def fill_main(self, room: int, probation_limit: float) -> int:
        """Let as many in as there is room for. Returns how many came."""
        for count in range(room):
            entry = self._leave_window()
            if entry is None:
                return count
            probation = self._sizes[PROBATION] < probation_limit
            self._sizes[PROBATION] += probation
            self._let_in(entry, self._probed if probation else self._guarded)
        return room

    def loser(self) -> list[ChunkId]:
        """The next one to go, as a list of one; empty if all have been named."""
        candidate, resident = self._leave_window(), self._resident()
        if candidate is None:
            self._next = None
        elif resident is None or candidate[1] <= resident[1]:
            return [] if candidate[1] == inf else [candidate[0]]
        else:
            self._next = None
            self._let_in(candidate, self._probed)
        return [] if resident is None else [resident[0]]

    def _leave_window(self) -> _Estimated | None:
        return next(self._window, None) or (self.arrived.popleft() if self.arrived else None)

    def _let_in(self, entry: _Estimated, part: deque[_Estimated]) -> None:
        # Who can't lose is not here yet. Who has left the window has been seen once more.
        if entry[1] < inf:
            part.append((entry[0], entry[1] + 1))

    def _resident(self) -> _Estimated | None:
        """Who goes next from the main part; the same one until it has lost."""
        if self._next is None:
            self._next = (
                next(self._probation, None)
                or (self._probed.popleft() if self._probed else None)
                or next(self._protected, None)
                or (self._guarded.popleft() if self._guarded else None)
            )
        return self._next


def _with_estimates(
    chunks: Iterable[ChunkId], sketch: FrequencySketch, length: int
) -> Iterator[_Estimated]:
    iterator = iter(chunks)
    while block := list(islice(iterator, length)):
        yield from zip(block, sketch.estimates(block), strict=True)
        length = min(2 * length, _BLOCK)


class WTinyLfuPolicy(ChunkwisePolicy):
    """W-TinyLFU, for each tier on its own, chunk by chunk.

    Method: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy"
    (ACM Transactions on Storage, 2017), with libCacheSim's reading of it: the window has a
    hundredth of the tier, four fifths of the rest are protected; a chunk is counted
    when it comes, when it leaves the window, and when it is used in the main part, and
    counts are halved after 32 such uses for each chunk that this has room for.
    """

    name: ClassVar[str] = "w-tinylfu"
    tier_class = _WTinyLfuTier
