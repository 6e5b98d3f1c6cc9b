"""Least recently used, by the use before the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.sharded import ShardedDict

_NOWHERE = -1
# The two rings, by the node that stands for each: all uses that count, and what was used once.
_USES, _ONCE = 0, 1


class _LruTwoTier(ChunkwiseTier):
    """A ring of uses, oldest first, with the last two of each chunk.

    A chunk is a row with two nodes, numbers 2 * row and 2 * row + 1. One stands for its last
    use, in the ring of uses. The other one stands there for the use before it, or, as long
    as there was none, for the chunk in the ring of those used once. So with each use one
    node of the chunk goes to the newest end, and the order of the uses before the last ones
    comes by itself: to read it is to pass over last uses. They come after the other use of
    the same chunk, so no more are passed than chunks were named.
    """

    def setup(self) -> None:
        self._rows: ShardedDict[ChunkId, int] = ShardedDict()
        self._ids: Objects[ChunkId] = Objects()
        # Neighbours of the first and of the second node; which one is the last use.
        self._table = Table("iiiib")
        newer, newer_2, older, older_2, self._last = self._table.columns
        self._newer, self._older = (newer, newer_2), (older, older_2)
        self._table.new(_USES, _ONCE, _USES, _ONCE, 0)
        self._ids.put(0, None)

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        last, nodes = self._last, list[int]()
        for row in self._rows.get_all(chunks):
            if row is not None:
                last[row] ^= 1
                nodes.append(2 * row + last[row])
        for first, end in self._stretches(nodes):
            self._cut(first, end)
            self._paste(first, end, self._older[0][0])

    def insert(self, run: Run) -> None:
        self._add(run, self._older[0][0], self._older[1][0])

    def insert_oldest(self, run: Run) -> None:
        self._add(run, _USES, _ONCE)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        rows = [row for row in self._rows.pop_all(chunks, _NOWHERE) if row != _NOWHERE]
        last = self._last
        for other in (0, 1):
            for first, end in self._stretches([2 * row + (last[row] ^ other) for row in rows]):
                self._cut(first, end)
        self._ids.clear(rows)
        self._table.free_all(rows)

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        ids, last = self._ids, self._last
        for node in self._walk(_ONCE):
            yield ids[node >> 1]
        for node in self._walk(_USES):
            if last[node >> 1] != node & 1:
                yield ids[node >> 1]

    # Parts ------------------------------------------------------------------

    def _add(self, run: Run, uses: int, once: int) -> None:
        """What is new of a run, behind these nodes of the two rings."""
        known = zip(run.chunks[::-1], self._rows.get_all(run.chunks[::-1]), strict=True)
        chunks = [chunk for chunk, row in known if row is None]
        if not chunks:
            return
        rows = self._table.take(len(chunks))
        self._rows.assign_each(chunks, rows)
        self._ids.put_all(rows, chunks)
        for row in rows:
            self._last[row] = 0
        self._chain([2 * row for row in rows], uses)
        self._chain([2 * row + 1 for row in rows], once)

    def _chain(self, nodes: Sequence[int], older: int) -> None:
        """Make neighbours of ``nodes``, which are all first or all second ones of a chunk."""
        which = nodes[0] & 1
        newer_of, older_of = self._newer[which], self._older[which]
        for node, following in zip(nodes, islice(nodes, 1, None), strict=False):
            newer_of[node >> 1], older_of[following >> 1] = following, node
        self._paste(nodes[0], nodes[-1], older)

    def _walk(self, ring: int) -> Iterator[int]:
        newer, newer_2 = self._newer
        node = newer_2[0] if ring else newer[0]
        while node != ring:
            yield node
            node = newer_2[node >> 1] if node & 1 else newer[node >> 1]

    def _stretches(self, nodes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """First and last node of what lies in a ring as it does here. Each may be cut at once."""
        newer, newer_2 = self._newer
        first = last = _NOWHERE
        for node in nodes:
            if last == _NOWHERE:
                first = node
            elif (newer_2[last >> 1] if last & 1 else newer[last >> 1]) != node:
                yield first, last
                first = node
            last = node
        if last != _NOWHERE:
            yield first, last

    def _cut(self, first: int, last: int) -> None:
        older = self._older[first & 1][first >> 1]
        newer = self._newer[last & 1][last >> 1]
        self._newer[older & 1][older >> 1] = newer
        self._older[newer & 1][newer >> 1] = older

    def _paste(self, first: int, last: int, older: int) -> None:
        """Put a stretch behind the node ``older``."""
        newer = self._newer[older & 1][older >> 1]
        self._newer[older & 1][older >> 1] = first
        self._older[first & 1][first >> 1] = older
        self._newer[last & 1][last >> 1] = newer
        self._older[newer & 1][newer >> 1] = last


class LruTwoPolicy(ChunkwisePolicy):
    """LRU-2, for each tier on its own, chunk by chunk.

    Method: O'Neil, O'Neil and Weikum, "The LRU-K Page Replacement Algorithm For Database Disk
    Buffering" (SIGMOD 1993), with K = 2 and libCacheSim's reading of it: nothing is
    remembered of what was evicted, and no two uses are taken for one. Chunks used once go
    first, the oldest of them before the others; then those whose last use but one is longest
    ago.
    """

    name: ClassVar[str] = "lru-2"
    tier_class = _LruTwoTier
