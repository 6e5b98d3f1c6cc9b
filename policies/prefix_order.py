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
one per chunk of the run that is not there. See docs/design/policies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.sharded import ShardedDict


class _Chain:
    """A path of the forest.

    Attributes:
        start: position of the first chunk.
        parent: the chunk before the first, None if there is none or it is unknown.
        chunks: ids, head first.
        segments: what the chain is divided into, tail first, so that the most
            recent one is at the end of the list.

    """

    __slots__ = ("chunks", "parent", "segments", "start")

    def __init__(
        self,
        start: int,
        parent: ChunkId | None,
        chunks: list[ChunkId],
        segments: list[_Segment],
    ) -> None:
        self.start = start
        self.parent = parent
        self.chunks = chunks
        self.segments = segments
        for segment in segments:
            segment.chain = self

    @property
    def end(self) -> int:
        return self.start + len(self.chunks)

    def locate(self, chunk: ChunkId, hint: int) -> int:
        """Position of ``chunk``, probably ``hint``.

        Only probably: a chunk that a scan found may not know its position.
        """
        i = hint - self.start
        if 0 <= i < len(self.chunks) and self.chunks[i] == chunk:
            return hint
        return self.start + self.chunks.index(chunk)


class _Segment:
    """Positions ``begin`` to ``end`` (exclusive) of a chain, and its place in the ring."""

    __slots__ = ("begin", "chain", "end", "newer", "older")

    def __init__(self, chain: _Chain, begin: int, end: int) -> None:
        self.chain = chain
        self.begin = begin
        self.end = end
        self.newer = self
        self.older = self

    def link_before(self, newer: _Segment) -> None:
        """Become the next older neighbour of ``newer``."""
        older = newer.older
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older


class PrefixOrder:
    """Chunks of one tier, from the least to the most recently used.

    Iterating yields each chunk once, a child always before its parent. Nothing
    may be changed while an iterator is in use.
    """

    def __init__(self) -> None:
        self._chains: ShardedDict[ChunkId, _Chain] = ShardedDict()
        self._ring = _Segment(_Chain(0, None, [], []), 0, 0)

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._chains

    def __iter__(self) -> Iterator[ChunkId]:
        segment = self._ring.newer
        while segment is not self._ring:
            chain = segment.chain
            stretch = chain.chunks[segment.begin - chain.start : segment.end - chain.start]
            yield from reversed(stretch)
            segment = segment.newer

    def add(self, run: Run) -> None:
        """Take in what is missing of ``run``, and use all of it."""
        chunks, known = run.chunks, self._chains
        i, n = 0, len(chunks)
        while i < n:
            begin = i
            while i < n and chunks[i] not in known:
                i += 1
            if i > begin:
                parent = chunks[begin - 1] if begin else run.parent
                self._append(chunks[begin:i], run.start + begin, parent)
            i += 1
        self.use(run)

    def add_oldest(self, run: Run) -> None:
        """Take in what is missing of ``run`` as older than all that is there."""
        for i in range(len(run)):
            if run.chunks[i] not in self._chains:
                parent = run.chunks[i - 1] if i else run.parent
                self._add_oldest(run.chunks[i], run.start + i, parent)

    def _add_oldest(self, chunk: ChunkId, position: int, parent: ChunkId | None) -> None:
        segment = _Segment(self._ring.chain, position, position + 1)
        self._chains[chunk] = _Chain(position, parent, [chunk], [segment])
        segment.link_before(self._ring.newer)

    def use(self, run: Run) -> None:
        """Make what is there of ``run`` the most recent, its head before its tail."""
        chunks, get = run.chunks, self._chains.get
        chain = None
        i = len(chunks) - 1
        while i >= 0:
            found = get(chunks[i])
            if found is None:
                i -= 1
                continue
            chain = found
            end = chain.locate(chunks[i], run.start + i) + 1
            self._refresh(chain, end)
            i -= end - chain.start
            if i >= 0:
                chain.parent = chunks[i]
            elif i == -1 and run.parent is not None:
                chain.parent = run.parent
        if chain is not None:
            self._use_ancestors(chain)

    def discard(self, chunk: ChunkId) -> None:
        """Forget ``chunk``, if it is there; what follows it stays.

        O(1) for the last chunk of a chain, which the oldest always is.
        """
        chain = self._chains.get(chunk)
        if chain is None:
            return
        position = chain.locate(chunk, chain.end - 1)
        if position + 1 < chain.end:
            chain = self._split(chain, position + 1)
        self._drop_last(chain)

    def _append(self, chunks: Sequence[ChunkId], start: int, parent: ChunkId | None) -> None:
        """Put new chunks behind ``parent``. The ``use`` that follows gives them a segment."""
        chain = None if parent is None else self._chains.get(parent)
        if chain is None or chain.end != start or chain.chunks[-1] != parent:
            chain = _Chain(start, parent, [], [])
        chain.chunks.extend(chunks)
        self._chains.assign(chunks, chain)

    def _use_ancestors(self, chain: _Chain) -> None:
        # Runs that are no forest, against what they promise, must not hang an engine.
        seen = {chain}
        while chain.parent is not None:
            above = self._chains.get(chain.parent)
            if above is None or above in seen:
                return
            seen.add(above)
            self._refresh(above, above.locate(chain.parent, chain.start - 1) + 1)
            chain = above

    def _refresh(self, chain: _Chain, end: int) -> None:
        """Make the chunks of ``chain`` up to position ``end`` its most recent segment."""
        segments = chain.segments
        segment = None
        while segments and segments[-1].end <= end:
            segment = segments.pop()
            segment.unlink()
        if segments:
            segments[-1].begin = end
        if segment is None:
            segment = _Segment(chain, chain.start, end)
        segment.begin, segment.end = chain.start, end
        segments.append(segment)
        segment.link_before(self._ring)

    def _split(self, chain: _Chain, at: int) -> _Chain:
        """Cut ``chain`` before position ``at``; returns the part with its head.

        The shorter part moves, so that taking a chain apart chunk by chunk
        costs O(log n) a chunk, whatever the order.
        """
        head_segments, tail_segments = self._divide(chain.segments, at)
        cut = at - chain.start
        head_chunks, tail_chunks = chain.chunks[:cut], chain.chunks[cut:]
        if len(head_chunks) < len(tail_chunks):
            head = _Chain(chain.start, chain.parent, head_chunks, head_segments)
            self._chains.assign(head_chunks, head)
            chain.start, chain.parent = at, head_chunks[-1]
            chain.chunks, chain.segments = tail_chunks, tail_segments
            return head
        tail = _Chain(at, head_chunks[-1], tail_chunks, tail_segments)
        self._chains.assign(tail_chunks, tail)
        chain.chunks, chain.segments = head_chunks, head_segments
        return chain

    @staticmethod
    def _divide(segments: list[_Segment], at: int) -> tuple[list[_Segment], list[_Segment]]:
        """Split a chain's segments at a position, both parts still tail first."""
        i = 0
        while segments[i].begin >= at:
            i += 1
        head, tail = segments[i:], segments[:i]
        last = head[0]
        if last.end > at:
            rest = _Segment(last.chain, at, last.end)
            rest.link_before(last)
            last.end = at
            tail.append(rest)
        return head, tail

    def _drop_last(self, chain: _Chain) -> None:
        del self._chains[chain.chunks.pop()]
        segment = chain.segments[0]
        segment.end -= 1
        if segment.begin == segment.end:
            segment.unlink()
            del chain.segments[0]
