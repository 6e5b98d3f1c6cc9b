"""Several ordered lists over one set of chunks, without a pause and without garbage.

A queue of chunks per list is what ARC, 2Q and S3-FIFO are made of, and the same
chunk moves from one to another. Links are kept in arrays of integers, which grow by a
few per cent at a time and hold nothing that the garbage collector visits; a million
``OrderedDict`` entries move in one go when it grows.

Chunks of one run come, move and go together, and so they lie next to each other. What
takes many chunks at once moves each such stretch as one: it costs a lookup a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from kvtiers.policies.base import ChunkId
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.sharded import ShardedDict

_NOWHERE = -1
# Chunks that are looked up at once while a list is read. Most callers read a few only.
_FIRST_READ = 8
_LONGEST_READ = 512


class Rings:
    """Lists numbered from 0, each from its oldest to its newest chunk.

    A chunk is in at most one of them, and has a mark there: a small number that is 0
    when it comes, for whoever counts uses. All operations are O(1) a chunk.

    Args:
        count: how many lists.

    """

    def __init__(self, count: int) -> None:
        # Of these lists. Those made later are not counted.
        self.sizes = [0] * count
        self._nodes: ShardedDict[ChunkId, int] = ShardedDict()
        # A list is named by a node of its own, whose newer neighbour is the oldest chunk.
        self._links = Table("iiib")
        self._newer, self._older, self._ring, self._mark = self._links.columns
        self._chunk: Objects[ChunkId] = Objects()
        for _ in range(count):
            self.new_ring()

    # What there is ----------------------------------------------------------

    def where(self, chunk: ChunkId) -> int | None:
        """The list that ``chunk`` is in, None if in none."""
        node = self._nodes.get(chunk)
        return None if node is None else self._ring[node]

    def absent(self, chunks: Sequence[ChunkId], below: float = inf) -> list[ChunkId]:
        """Those of ``chunks`` that are in no list, or in none numbered below ``below``."""
        ring, nodes = self._ring, self._nodes.get_all(chunks)
        return [c for c, n in zip(chunks, nodes, strict=True) if n is None or ring[n] >= below]

    def where_all(self, chunks: Iterable[ChunkId]) -> list[int | None]:
        """The list that each of ``chunks`` is in, None if in none."""
        ring = self._ring
        return [None if node is None else ring[node] for node in self._nodes.get_all(chunks)]

    def is_empty(self, ring: int) -> bool:
        """Whether a list has no chunk."""
        return self._newer[ring] == ring

    def oldest(self, ring: int) -> Iterator[ChunkId]:
        """The chunks of a list, oldest first. Nothing may change while it is in use."""
        for nodes in self._read(ring):
            yield from self._chunk.get_all(nodes)

    def oldest_marked(self, ring: int) -> Iterator[tuple[ChunkId, int]]:
        """The same, each with its mark."""
        mark = self._mark
        for nodes in self._read(ring):
            yield from zip(self._chunk.get_all(nodes), [mark[n] for n in nodes], strict=True)

    # What comes and goes ----------------------------------------------------

    def append(self, chunk: ChunkId, ring: int) -> None:
        """Put ``chunk``, wherever it is, at the newest end of a list."""
        node = self._nodes.get(chunk)
        if node is None:
            self._add((chunk,), ring, self._older[ring])
        elif node != self._older[ring]:
            self._move(node, node, ring)

    def append_all(self, chunks: Sequence[ChunkId], ring: int) -> None:
        """Put ``chunks``, wherever they are, at the newest end of a list, in this order."""
        nodes = self._nodes.get_all(chunks)
        if None not in nodes:
            self._move_all(nodes, ring)  # type: ignore[arg-type]
        elif any(node is not None for node in nodes):
            for chunk in chunks:
                self.append(chunk, ring)
        else:
            self._add(chunks, ring, self._older[ring])

    def use_all(self, chunks: Iterable[ChunkId], below: int, ring: int) -> None:
        """Those of ``chunks`` in lists numbered below ``below``, to the newest end of one."""
        where, nodes = self._ring, self._nodes.get_all(chunks)
        self._move_all([n for n in nodes if n is not None and where[n] < below], ring)

    def mark_all(self, chunks: Iterable[ChunkId], highest: int) -> None:
        """Raise the marks of ``chunks`` by one, to no more than ``highest``."""
        mark = self._mark
        for node in self._nodes.get_all(chunks):
            if node is not None and mark[node] < highest:
                mark[node] += 1

    def set_mark(self, chunk: ChunkId, mark: int) -> None:
        """Give ``chunk``, which is in a list, that mark."""
        node = self._nodes.get(chunk)
        assert node is not None
        self._mark[node] = mark

    def prepend_all(self, chunks: Sequence[ChunkId], ring: int) -> None:
        """Put ``chunks``, wherever they are, at the oldest end of a list, in this order."""
        self.discard_all(chunks)
        self._add(chunks, ring, ring)

    def pass_marked(self, ring: int, to: int, after: Sequence[int]) -> None:
        """Move on what has earned it, from the oldest end of a list, until one has not.

        Args:
            ring: the list.
            to: the list that they come to the newest end of; may be the same.
            after: for each mark, the one that a chunk goes on with; negative if it does
                not. Lower than before if ``to`` is the same list, or this never ends.

        """
        newer, mark = self._newer, self._mark
        while (node := newer[ring]) != ring and (left := after[mark[node]]) >= 0:
            mark[node] = left
            self._move(node, node, to)

    def move_oldest(self, ring: int, to: int, count: int) -> list[ChunkId]:
        """Move the ``count`` oldest chunks of a list, or what it has, to the newest end of another.

        Returns them, oldest first.
        """
        nodes = list(islice(self._walk(ring), count))
        if nodes:
            self._move(nodes[0], nodes[-1], to)
        return self._chunk.get_all(nodes)

    def discard(self, chunk: ChunkId) -> None:
        """Take ``chunk`` out of its list, if it is in one."""
        node = self._nodes.pop(chunk, _NOWHERE)
        if node != _NOWHERE:
            self._unlink(node, node)
            self._chunk[node] = None
            self._links.free(node)

    def discard_all(self, chunks: Iterable[ChunkId]) -> None:
        """Take ``chunks`` out of their lists."""
        nodes = self._nodes.pop_all(chunks, _NOWHERE)
        if _NOWHERE in nodes:
            nodes = [node for node in nodes if node != _NOWHERE]
        for first, last in self._stretches(nodes):
            self._unlink(first, last)
        self._chunk.clear(nodes)
        self._links.free_all(nodes)

    def drop_oldest(self, ring: int) -> None:
        """Take the oldest chunk out of a list, if it has one."""
        node = self._newer[ring]
        if node != ring:
            self.discard(self._chunk[node])

    # Lists ------------------------------------------------------------------

    def new_ring(self) -> int:
        """One more list, which is empty. Its number."""
        node = self._links.new(0, 0, 0, 0)
        self._newer[node] = self._older[node] = self._ring[node] = node
        self._chunk.put(node, None)
        return node

    def drop_ring(self, ring: int) -> None:
        """An empty list that was made later is not needed any more."""
        self._links.free(ring)

    # Parts ------------------------------------------------------------------

    def _walk(self, ring: int) -> Iterator[int]:
        newer = self._newer
        node = newer[ring]
        while node != ring:
            yield node
            node = newer[node]

    def _read(self, ring: int) -> Iterator[list[int]]:
        walk, length = self._walk(ring), _FIRST_READ
        while nodes := list(islice(walk, length)):
            yield nodes
            length = min(2 * length, _LONGEST_READ)

    def _add(self, chunks: Sequence[ChunkId], ring: int, older: int) -> None:
        """New chunks, behind the node ``older`` of a list."""
        nodes = self._links.take(len(chunks))
        self._nodes.assign_each(chunks, nodes)
        self._chunk.put_all(nodes, chunks)
        newer_of, older_of, ring_of, mark = self._newer, self._older, self._ring, self._mark
        newest = newer_of[older]
        for node in nodes:
            newer_of[older], older_of[node] = node, older
            ring_of[node], mark[node] = ring, 0
            older = node
        newer_of[older], older_of[newest] = newest, older
        self._count(ring, len(nodes))

    def _move_all(self, nodes: Sequence[int], ring: int) -> None:
        for first, last in self._stretches(nodes):
            self._move(first, last, ring)

    def _stretches(self, nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The first and the last node of each stretch that lies in its list as it does here.

        A stretch may be moved or taken out before the next one is asked for.
        """
        if not nodes:
            return
        newer = self._newer
        first = last = nodes[0]
        for node in islice(nodes, 1, None):
            if newer[last] != node:
                yield first, last
                first = node
            last = node
        yield first, last

    def _move(self, first: int, last: int, ring: int) -> None:
        """A stretch of a list goes to the newest end of a list."""
        if self._ring[first] != ring:
            self._adopt(first, last, ring)
        self._cut(first, last)
        newest = self._older[ring]
        self._newer[newest], self._older[first] = first, newest
        self._newer[last], self._older[ring] = ring, last

    def _adopt(self, first: int, last: int, ring: int) -> None:
        """A stretch of another list is counted with this one from now on."""
        newer, ring_of, left = self._newer, self._ring, self._ring[first]
        node, count = first, 1
        while node != last:
            ring_of[node] = ring
            node = newer[node]
            count += 1
        ring_of[last] = ring
        self._count(left, -count)
        self._count(ring, count)

    def _unlink(self, first: int, last: int) -> None:
        newer, node, count = self._newer, first, 1
        while node != last:
            node = newer[node]
            count += 1
        self._count(self._ring[first], -count)
        self._cut(first, last)

    def _cut(self, first: int, last: int) -> None:
        older, newer = self._older[first], self._newer[last]
        self._newer[older], self._older[newer] = newer, older

    def _count(self, ring: int, change: int) -> None:
        if ring < len(self.sizes):
            self.sizes[ring] += change
