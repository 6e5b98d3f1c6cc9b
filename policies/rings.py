"""Several ordered lists over one set of chunks, without a pause and without garbage.

A queue of chunks per list is what ARC, 2Q and S3-FIFO are made of, and the same
chunk moves from one to another. Links are kept in arrays of integers, which grow by a
few per cent at a time and hold nothing that the garbage collector visits; a million
``OrderedDict`` entries move in one go when it grows.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtiers.policies.base import ChunkId
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.sharded import ShardedDict

_UNLINKED = -1


class Rings:
    """Lists numbered from 0, each from its oldest to its newest chunk.

    A chunk is in at most one of them. All operations are O(1).

    Args:
        count: how many lists.

    """

    def __init__(self, count: int) -> None:
        self.sizes = [0] * count
        self._nodes: ShardedDict[ChunkId, int] = ShardedDict()
        # The first nodes are the rings' own: their newer neighbour is the oldest chunk.
        self._links = Table("iii")
        self._newer, self._older, self._ring = self._links.columns
        self._chunk: Objects[ChunkId] = Objects()
        for ring in range(count):
            self._chunk.put(self._links.new(ring, ring, ring), None)

    def where(self, chunk: ChunkId) -> int | None:
        """The list that ``chunk`` is in, None if in none."""
        node = self._nodes.get(chunk)
        return None if node is None else self._ring[node]

    def append(self, chunk: ChunkId, ring: int) -> None:
        """Put ``chunk``, wherever it is, at the newest end of a list."""
        self._put(chunk, ring, self._older[ring])

    def prepend(self, chunk: ChunkId, ring: int) -> None:
        """Put ``chunk``, wherever it is, at the oldest end of a list."""
        self._put(chunk, ring, ring)

    def discard(self, chunk: ChunkId) -> None:
        """Take ``chunk`` out of its list, if it is in one."""
        node = self._nodes.get(chunk)
        if node is not None:
            self._unlink(node)
            self._chunk[node] = None
            self._links.free(node)
            del self._nodes[chunk]

    def oldest(self, ring: int) -> Iterator[ChunkId]:
        """The chunks of a list, oldest first. Nothing may change while it is in use."""
        node = self._newer[ring]
        while node != ring:
            yield self._chunk[node]
            node = self._newer[node]

    def drop_oldest(self, ring: int) -> None:
        """Take the oldest chunk out of a list, if it has one."""
        node = self._newer[ring]
        if node != ring:
            self.discard(self._chunk[node])

    def _put(self, chunk: ChunkId, ring: int, older: int) -> None:
        node = self._nodes.get(chunk)
        if node is None:
            node = self._new(chunk)
        elif node == older:
            # It is at that end already.
            return
        else:
            self._unlink(node)
        newer = self._newer[older]
        self._older[node], self._newer[node] = older, newer
        self._newer[older] = self._older[newer] = node
        self._ring[node] = ring
        self.sizes[ring] += 1

    def _new(self, chunk: ChunkId) -> int:
        node = self._nodes[chunk] = self._links.new(_UNLINKED, _UNLINKED, _UNLINKED)
        self._chunk.put(node, chunk)
        return node

    def _unlink(self, node: int) -> None:
        older, newer = self._older[node], self._newer[node]
        self._newer[older], self._older[newer] = newer, older
        self.sizes[self._ring[node]] -= 1
