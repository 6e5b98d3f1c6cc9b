"""Which node a chunk is in: found at once at the ends of a node, by a search within it.

A dict that grows to a million entries stops the engine for 64 ms, so there are many, as in
``sharded``. But there a chunk's hash picks the dict; here all chunks of a run are in the same
one. So they lie next to each other in memory, and come and go in one call, without a line of
Python for each: in half the time. The price is that a chunk which is no end of a node is
looked for in all dicts, a few microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvtiers.policies.base import ChunkId
from kvtiers.policies.sharded import ShardedDict

_PARTS = 64
# The part of a chunk that came alone: none, as it is both ends.
_ALONE = -1


class RunIndex:
    """The number of each chunk's node.

    Whoever keeps the nodes keeps the number of their part too, and says which chunks are ends.
    """

    def __init__(self) -> None:
        self._ends: ShardedDict[ChunkId, int] = ShardedDict()
        self._parts: list[dict[ChunkId, int]] = [{} for _ in range(_PARTS)]
        self._next = 0
        self._inside = 0

    def __len__(self) -> int:
        """Entries: of ends, and of all chunks of nodes that have a part."""
        return len(self._ends) + self._inside

    def at_end(self, chunk: ChunkId) -> int | None:
        """The node that begins or ends with ``chunk``."""
        return self._ends.get(chunk)

    def at_ends(self, chunks: Iterable[ChunkId]) -> list[int | None]:
        """The same for each of them."""
        return self._ends.get_all(chunks)

    def find(self, chunk: ChunkId) -> int | None:
        """The node that ``chunk`` is in."""
        node = self._ends.get(chunk)
        if node is None and self._inside:
            for part in self._parts:
                if chunk in part:
                    return part[chunk]
        return node

    def add(self, chunks: Sequence[ChunkId], node: int) -> int:
        """Take in the chunks of a new node. Returns its part."""
        self.set_end(chunks[0], node)
        if len(chunks) == 1:
            return _ALONE
        self.set_end(chunks[-1], node)
        part = self._next = (self._next + 1) % _PARTS
        self._parts[part].update(dict.fromkeys(chunks, node))
        self._inside += len(chunks)
        return part

    def move(self, chunks: Sequence[ChunkId], part: int, node: int) -> None:
        """What was the end of a node becomes a node of the same part."""
        self.set_end(chunks[0], node)
        self.set_end(chunks[-1], node)
        self._parts[part].update(dict.fromkeys(chunks, node))

    def set_end(self, chunk: ChunkId, node: int) -> None:
        """A node begins or ends with ``chunk`` now."""
        self._ends[chunk] = node

    def remove(self, chunks: Sequence[ChunkId], part: int) -> None:
        """Forget chunks of one node, from its one end or from both."""
        self._ends.pop(chunks[0], 0)
        self._ends.pop(chunks[-1], 0)
        if part != _ALONE:
            # All of them without a line of Python for each.
            deque(map(self._parts[part].__delitem__, chunks), 0)
            self._inside -= len(chunks)
