"""The order in which a tier's chunks were last used, children before parents.

To use a chunk is to use its prefix: attention reads all of it. So a use of a run
refreshes the run and whatever unbroken stretch of chunks precedes it, and makes
the head more recent than the tail. It follows that no chunk is older than a chunk
that needs it, and that the oldest chunk is always a leaf of the prefix forest:
exactly the order in which "evict the least recently used leaf" would evict.

Chunks are not kept one by one. Three facts make whole stretches cheap:

    chain    a path of the forest, chunks of consecutive positions. An id has one
             parent, so finding a run's last chunk in a chain finds all before it.
    segment  a stretch of a chain that was last used as one. Along a chain the
             segments only get older, so a use of the chain's first n chunks
             replaces the segments it covers by one: each use adds at most one
             segment to a chain, and each is removed once.
    ring     all segments of the tier, oldest first, doubly linked. It never moves
             an entry but to the newest end.

A use costs one lookup per chain on the path, however long the chains are, and
one per chunk of the run that is not there.

Chunks, chains and segments are rows of columns and refer to each other by number:
nothing here is an object that the garbage collector walks. See docs/design/policies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.sharded import ShardedDict

_NONE = -1
# No segment: the row that no ring and no chain uses.
_END = 0


class Chains:
    """Chunks, chains and segments, of one order or of several over different chunks.

    An order of its own takes tens of kilobytes though it is empty; one that shares these,
    a few hundred bytes.
    """

    def __init__(self) -> None:
        self.rows: ShardedDict[ChunkId, int] = ShardedDict()
        # A chunk's chain, its position in the prefix, and the row of the chunk before it,
        # which only means something within the chain.
        self.chunks = Table("iii")
        self.ids: Objects[ChunkId] = Objects()
        # A chain's first position, and its segments with the head and with the tail.
        self.chains = Table("iii")
        # The chunk before the first; None if there is none or it is unknown.
        self.parents: Objects[ChunkId | None] = Objects()
        # The row of a segment's last chunk; its neighbours in the ring; those in its chain,
        # towards the head and towards the tail.
        self.segments = Table("iiiii")
        self.segments.new(_NONE, _END, _END, _END, _END)


class PrefixOrder:
    """Chunks of one tier, from the least to the most recently used.

    Iterating yields each chunk once, a child always before its parent. Nothing
    may be changed while an iterator is in use.

    Args:
        chains: shared with other orders, of which no two may hold the same chunk.

    """

    def __init__(self, chains: Chains | None = None) -> None:
        chains = Chains() if chains is None else chains
        self._rows, self._ids, self._parent = chains.rows, chains.ids, chains.parents
        self._chunks, self._chains, self._segments = chains.chunks, chains.chains, chains.segments
        self._chain, self._position, self._before = chains.chunks.columns
        self._start, self._head, self._tail = chains.chains.columns
        self._last, self._newer, self._older, self._above, self._below = chains.segments.columns
        # A segment without chunks, while there are others.
        self._ring = _END

    def __len__(self) -> int:
        """Chunks of all orders that share the chains."""
        return len(self._rows)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._rows

    def __iter__(self) -> Iterator[ChunkId]:
        ids, before = self._ids, self._before
        # Of the row that is no segment this is the row itself: then the ring is empty.
        segment = self._newer[self._ring]
        while segment != self._ring:
            row = self._last[segment]
            for _ in range(self._begin(segment), self._position[row] + 1):
                yield ids[row]
                row = before[row]
            segment = self._newer[segment]

    def add(self, run: Run) -> None:
        """Take in what is missing of ``run``, and use all of it."""
        chunks = run.chunks
        there = [row is not None for row in self._rows.get_all(chunks)]
        ends = [i for i in range(1, len(there)) if there[i] != there[i - 1]]
        for begin, end in pairwise([0, *ends, len(there)]):
            if begin < end and not there[begin]:
                parent = chunks[begin - 1] if begin else run.parent
                self._append(chunks[begin:end], run.start + begin, parent)
        self.use(run)

    def add_oldest(self, run: Run) -> None:
        """Take in what is missing of ``run`` as older than all that is there."""
        for i in range(len(run)):
            if run.chunks[i] not in self._rows:
                parent = run.chunks[i - 1] if i else run.parent
                row = self._new_chunk(run.chunks[i], run.start + i, _NONE)
                self._new_chain(row, parent, self._newer[self._its_ring()])

    def use(self, run: Run) -> None:
        """Make what is there of ``run`` the most recent, its head before its tail."""
        chunks, get = run.chunks, self._rows.get
        chain = _NONE
        i = len(chunks) - 1
        while i >= 0:
            row = get(chunks[i])
            if row is None:
                i -= 1
                continue
            chain = self._refresh(row)
            i -= self._position[row] + 1 - self._start[chain]
            if i >= 0:
                self._parent[chain] = chunks[i]
            elif i == -1 and run.parent is not None:
                self._parent[chain] = run.parent
        if chain != _NONE:
            self._use_ancestors(chain)

    def parent_of(self, chunk: ChunkId) -> ChunkId | None:
        """The chunk before ``chunk``, None if there is none or it is unknown."""
        row = self._rows.get(chunk)
        if row is None:
            return None
        chain = self._chain[row]
        if self._position[row] > self._start[chain]:
            return self._ids[self._before[row]]
        return self._parent[chain]

    def discard(self, chunk: ChunkId) -> None:
        """Forget ``chunk``, if it is there; what follows it stays.

        O(1) for the last chunk of a chain, which the oldest always is.
        """
        self.discard_all((chunk,))

    def discard_all(self, chunks: Sequence[ChunkId]) -> None:
        """Forget those of ``chunks`` that are there; what follows them stays.

        Quick where they come as they are iterated over: ends of segments, the last chunk first.
        """
        rows = self._rows.pop_all(chunks, _NONE)
        i = 0
        while i < len(rows):
            if rows[i] != _NONE:
                i = self._drop_segment_end(rows, i)
            else:
                i += 1
        rows = [row for row in rows if row != _NONE]
        self._ids.clear(rows)
        self._chunks.free_all(rows)
        self._drop_empty_ring()

    # Parts ------------------------------------------------------------------

    def _drop_segment_end(self, rows: Sequence[int], i: int) -> int:
        """Drop what ``rows`` has in turn of a segment, from ``i`` on. Returns where that ends."""
        row, before = rows[i], self._before
        if not self._is_last(row):
            self._cut_behind(row)
        chain = self._chain[row]
        segment = self._tail[chain]
        left = self._position[row] + 1 - self._begin(segment)
        while left and i < len(rows) and rows[i] == row:
            row, left, i = before[row], left - 1, i + 1
        if left:
            self._last[segment] = row
        else:
            self._drop_segment(chain, segment)
        return i

    def _drop_empty_ring(self) -> None:
        if self._ring != _END and self._newer[self._ring] == self._ring:
            self._segments.free(self._ring)
            self._ring = _END

    def _its_ring(self) -> int:
        if self._ring == _END:
            ring = self._ring = self._new_segment(_NONE)
            self._newer[ring] = self._older[ring] = ring
        return self._ring

    def _new_segment(self, last: int) -> int:
        return self._segments.new(last, _END, _END, _END, _END)

    def _new_chunk(self, chunk: ChunkId, position: int, before: int) -> int:
        """A row for ``chunk`` in the chain of ``before``, if there is one."""
        chain = _NONE if before == _NONE else self._chain[before]
        row = self._rows[chunk] = self._chunks.new(chain, position, before)
        self._ids.put(row, chunk)
        return row

    def _new_chain(self, row: int, parent: ChunkId | None, newer: int) -> None:
        """A chain of one chunk, its segment the next older neighbour of ``newer``."""
        segment = self._new_segment(row)
        self._link(segment, newer)
        self._chain[row] = self._number_chain(self._position[row], segment, segment, parent)

    def _number_chain(self, start: int, head: int, tail: int, parent: ChunkId | None) -> int:
        chain = self._chains.new(start, head, tail)
        self._parent.put(chain, parent)
        return chain

    def _append(self, chunks: Sequence[ChunkId], start: int, parent: ChunkId | None) -> None:
        """Put new chunks behind ``parent``. The ``use`` that follows says how recent they are."""
        row = None if parent is None else self._rows.get(parent)
        if row is None or self._position[row] + 1 != start or not self._is_last(row):
            row = self._new_chunk(chunks[0], start, _NONE)
            self._new_chain(row, parent, self._its_ring())
            chunks, start = chunks[1:], start + 1
        chain = self._chain[row]
        chains, positions, before = self._chain, self._position, self._before
        rows = self._chunks.take(len(chunks))
        self._rows.assign_each(chunks, rows)
        self._ids.put_all(rows, chunks)
        for position, new in enumerate(rows, start):
            chains[new], positions[new], before[new] = chain, position, row
            row = new
        self._last[self._tail[chain]] = row

    def _use_ancestors(self, chain: int) -> None:
        # Runs that are no forest, against what they promise, must not hang an engine.
        seen = {chain}
        while (parent := self._parent[chain]) is not None:
            row = self._rows.get(parent)
            if row is None or self._chain[row] in seen:
                return
            chain = self._refresh(row)
            seen.add(chain)

    def _refresh(self, row: int) -> int:
        """Make a chunk and all before it in its chain the most recent segment of the chain."""
        chain, position, last, below = self._chain[row], self._position, self._last, self._below
        end = position[row]
        following, kept = self._head[chain], _END
        while following != _END and position[last[following]] <= end:
            covered, following = following, below[following]
            self._unlink(covered)
            if kept != _END:
                self._segments.free(kept)
            kept = covered
        if kept == _END:
            kept = self._new_segment(row)
        last[kept], self._above[kept] = row, _END
        self._head[chain] = kept
        self._join(chain, kept, following)
        self._link(kept, self._its_ring())
        return chain

    def _join(self, chain: int, upper: int, lower: int) -> None:
        """``lower`` follows ``upper`` along a chain, or nothing does if it is ``_END``."""
        self._below[upper] = lower
        if lower == _END:
            self._tail[chain] = upper
        else:
            self._above[lower] = upper

    def _is_last(self, row: int) -> bool:
        return self._last[self._tail[self._chain[row]]] == row

    def _begin(self, segment: int) -> int:
        """Position of the segment's first chunk."""
        above = self._above[segment]
        if above != _END:
            return self._position[self._last[above]] + 1
        return self._start[self._chain[self._last[segment]]]

    def _cut_behind(self, row: int) -> None:
        """Make a chunk the last of its chain, and a chain of what follows it.

        The shorter part moves, so that taking a chain apart chunk by chunk
        costs O(log n) a chunk, whatever the order.
        """
        chain = self._chain[row]
        upper = self._segment_of(row)
        lower = self._divide(upper, row)
        tail, start, at = self._tail[chain], self._start[chain], self._position[row] + 1
        end = self._position[self._last[tail]] + 1
        self._below[upper] = self._above[lower] = _END
        if at - start < end - at:
            moved = self._number_chain(start, self._head[chain], upper, self._parent[chain])
            self._start[chain], self._head[chain] = at, lower
            self._parent[chain] = self._ids[row]
            self._renumber(row, at - start, moved)
        else:
            moved = self._number_chain(at, lower, tail, self._ids[row])
            self._tail[chain] = upper
            self._renumber(self._last[tail], end - at, moved)

    def _segment_of(self, row: int) -> int:
        position, last, above = self._position, self._last, self._above
        segment = self._tail[self._chain[row]]
        while above[segment] != _END and position[last[above[segment]]] >= position[row]:
            segment = above[segment]
        return segment

    def _divide(self, segment: int, row: int) -> int:
        """End a segment with a chunk of it. Returns the segment that comes behind."""
        if self._last[segment] == row:
            return self._below[segment]
        rest = self._new_segment(self._last[segment])
        self._link(rest, segment)
        self._join(self._chain[row], rest, self._below[segment])
        self._last[segment] = row
        return rest

    def _renumber(self, row: int, count: int, chain: int) -> None:
        for _ in range(count):
            self._chain[row] = chain
            row = self._before[row]

    def _drop_segment(self, chain: int, segment: int) -> None:
        """Without its last segment a chain has nothing left, unless there is one above."""
        above = self._above[segment]
        self._unlink(segment)
        self._segments.free(segment)
        if above != _END:
            self._join(chain, above, _END)
        else:
            self._parent[chain] = None
            self._chains.free(chain)

    def _link(self, segment: int, newer: int) -> None:
        """Become the next older neighbour of ``newer``."""
        older = self._older[newer]
        self._older[segment], self._newer[segment] = older, newer
        self._newer[older] = self._older[newer] = segment

    def _unlink(self, segment: int) -> None:
        older, newer = self._older[segment], self._newer[segment]
        self._newer[older], self._older[newer] = newer, older
