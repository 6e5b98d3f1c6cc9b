"""Least frequently used."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.rings import Rings

# The list of what was used once: there from the start, and never dropped.
_ONCE = 0


class _LfuTier(ChunkwiseTier):
    """A list for each count of uses, in the order in which chunks came to that count."""

    def setup(self) -> None:
        self._rings = Rings(1)
        # Counts that some chunk has, ascending; the list of each, and back.
        self._counts = [1]
        self._ring_of = {1: _ONCE}
        self._count_of = {_ONCE: 1}

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        where = self._rings.where_all(chunks)
        # Neighbours were mostly used together, so they move together.
        for ring, group in groupby(zip(where, chunks, strict=True), itemgetter(0)):
            if ring is not None:
                to = self._ring_for(self._count_of[ring] + 1)
                self._rings.append_all([chunk for _, chunk in group], to)
                self._drop_if_empty(ring)

    def insert(self, run: Run) -> None:
        self._rings.append_all(self._rings.absent(run.chunks[::-1]), _ONCE)

    def insert_oldest(self, run: Run) -> None:
        self._rings.prepend_all(self._rings.absent(run.chunks[::-1]), _ONCE)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        rings = {ring for ring in self._rings.where_all(chunks) if ring is not None}
        self._rings.discard_all(chunks)
        for ring in rings:
            self._drop_if_empty(ring)

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        for count in self._counts:
            yield from self._rings.oldest(self._ring_of[count])

    # Parts ------------------------------------------------------------------

    def _ring_for(self, count: int) -> int:
        ring = self._ring_of.get(count)
        if ring is None:
            ring = self._ring_of[count] = self._rings.new_ring()
            self._count_of[ring] = count
            insort(self._counts, count)
        return ring

    def _drop_if_empty(self, ring: int) -> None:
        if ring != _ONCE and self._rings.is_empty(ring):
            count = self._count_of.pop(ring)
            del self._ring_of[count]
            self._counts.remove(count)
            self._rings.drop_ring(ring)


class LfuPolicy(ChunkwisePolicy):
    """LFU, for each tier on its own, chunk by chunk.

    Evicts the chunk with the fewest uses since it came in, of several with as few the one
    that has had that many for the longest. In constant time, as in Shah, Mitra and Matani, "An
    O(1) algorithm for implementing the LFU cache eviction scheme" (2010). What is evicted
    is forgotten, its count too; what stays never loses a use.
    """

    name: ClassVar[str] = "lfu"
    tier_class = _LfuTier
