"""The prefix forest of one tier, cut into stretches that were last used together.

A **node** is a stretch of neighbouring chunks of one prefix. A child hangs only from the
last chunk of its parent: where a run forks off the middle of a node, the node is cut in two.
So what is looked at to find a leaf is a node, not a chunk, and a prompt of a hundred
thousand tokens costs one dictionary lookup and one comparison of tuples for each request
that its prefix was built by.

Children are counted by the id of the chunk they follow, whether the tier holds that chunk
or not: a chunk that was lost in the middle leaves what followed it without a parent, and
finds it again when it comes back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtiers.policies.base import ChunkId
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.run_index import RunIndex
from kvtiers.policies.sharded import ShardedDict

NO_NODE = -1
NOTHING: Final = object()
"""What is before the first chunk of a prompt."""


class Nodes:
    """Chunks of one tier as nodes; each node has the number of the mark it was last given.

    Args:
        marked: told that one more node (1) or one less (-1) has a mark.

    """

    def __init__(self, marked: Callable[[int, int], None]) -> None:
        self._marked = marked
        self._index = RunIndex()
        self._chunks: Objects[tuple[ChunkId, ...] | None] = Objects()
        # The chunk before the node's first; ``NOTHING`` if there is none, None if unknown.
        self._above: Objects[ChunkId | None] = Objects()
        # How many nodes follow a chunk.
        self._children: ShardedDict[ChunkId, int] = ShardedDict()
        # Those of them that the tier does not hold: few, unless a tier loses much.
        self._lost: dict[ChunkId, None] = {}
        # Nodes of which it is unknown what they follow.
        self._loose = 0
        # Chunks left of the tuple; the mark; the session that made it; whether it is a leaf;
        # how often it was used; the part of the index.
        self._table = Table("iiiiii")
        self._size, self._mark, self._owner, self._leaf, self._uses, self._part = (
            self._table.columns
        )
        # Leaves that came, or got another mark, since ``take_changed``.
        self._changed: set[int] = set()
        self.held = 0

    def node_of(self, chunk: ChunkId) -> int:
        """The node that ``chunk`` is in, ``NO_NODE`` if the tier does not hold it."""
        node = self._index.find(chunk)
        return NO_NODE if node is None else node

    def node_behind(self, chunk: ChunkId, parent: ChunkId | None) -> int:
        """The same, quicker where it is known what ``chunk`` follows."""
        node, _ = self._locate(chunk, parent)
        return NO_NODE if node is None else node

    def mark_of(self, node: int) -> int:
        """The mark that a node was last given."""
        return self._mark[node]

    def owner_of(self, node: int) -> int:
        """The session that the node's chunks were made for."""
        return self._owner[node]

    def children_of(self, node: int) -> int:
        """How many nodes follow this one."""
        return self._children.get(self.last_chunk(node)) or 0

    def last_chunk(self, node: int) -> ChunkId:
        """The chunk at the end of a node."""
        chunks = self._chunks[node]
        assert chunks is not None
        return chunks[self._size[node] - 1]

    def begins_prompt(self, chunk: ChunkId) -> bool:
        """Whether ``chunk`` is there, and known to be the first of a prompt."""
        node = self._index.at_end(chunk)
        return node is not None and self._above[node] is NOTHING and self._first(node) == chunk

    def parent_of(self, node: int) -> int:
        """The node before this one, ``NO_NODE`` if there is none here."""
        above = self._above[node]
        # A child hangs from the end of its parent.
        found = None if above is None else self._index.at_end(above)
        return NO_NODE if found is None else found

    def size_of(self, node: int) -> int:
        """Chunks of a node."""
        return self._size[node]

    # What happens -----------------------------------------------------------

    def cover(self, chunks: Sequence[ChunkId], parent: ChunkId | None) -> Iterator[int]:
        """The nodes that make up what the tier has of a run, head first, cut to fit it."""
        for i, node, at, same in self._stretches(chunks, parent):
            found = self._cut(node, at) if at else node
            if same < self._size[found]:
                self._cut(found, same)
            self._learn_parent(found, chunks[i - 1] if i else parent)
            yield found

    def leading(self, chunks: Sequence[ChunkId], parent: ChunkId | None) -> int:
        """How many chunks of a run, from its head, are there."""
        held = 0
        for i, _, _, same in self._stretches(chunks, parent):
            if i > held:
                break
            held += same
        return held

    def absent(self, chunks: Sequence[ChunkId], parent: ChunkId | None) -> list[tuple[int, int]]:
        """Begin and end of each stretch of a run that the tier has nothing of."""
        found, begin = [], 0
        for i, _, _, same in self._stretches(chunks, parent):
            if begin < i:
                found.append((begin, i))
            begin = i + same
        if begin < len(chunks):
            found.append((begin, len(chunks)))
        return found

    def marks_of(
        self, chunks: Sequence[ChunkId], parent: ChunkId | None
    ) -> list[tuple[int, int, int]]:
        """Begin, end and mark of each stretch of a run that the tier has."""
        stretches = self._stretches(chunks, parent)
        return [(i, i + same, self._mark[node]) for i, node, _, same in stretches]

    def learn_parents(self, chunks: Sequence[ChunkId], parent: ChunkId | None) -> None:
        """What is before these chunks is known now, as it need not be of what a scan found."""
        if not self._loose:
            return
        for chunk, node in zip(chunks, self._index.at_ends(chunks), strict=True):
            if node is not None and self._first(node) == chunk:
                self._learn_parent(node, parent)
            parent = chunk

    def uses_of(self, node: int) -> int:
        """How often a node was used, by the request that stored it too."""
        return self._uses[node]

    def count_use(self, node: int) -> None:
        """The node was used once more."""
        self._uses[node] += 1

    def set_mark(self, node: int, mark: int) -> None:
        """Give a node a mark."""
        old = self._mark[node]
        if old != mark:
            self._mark[node] = mark
            self._marked(mark, 1)
            self._marked(old, -1)
        if self._leaf[node]:
            self._changed.add(node)

    def add(self, chunks: Sequence[ChunkId], parent: ChunkId | None, mark: int, owner: int) -> None:
        """Take in chunks of which the tier has none.

        Args:
            chunks: neighbours, head first.
            parent: the chunk before them, ``NOTHING`` if there is none, None if unknown.
            mark: for their node.
            owner: the session they were made for.

        """
        node = self._new(tuple(chunks), parent, mark, owner)
        self.held += len(chunks)
        last = chunks[-1]
        back = self._found_again(chunks) if self._lost and self._any_lost(chunks) else []
        for chunk in back:
            if chunk != last:
                node = self._cut(node, self._index_in(node, chunk) + 1)
        self._set_leaf(node, last not in back)

    def discard(self, chunks: Sequence[ChunkId]) -> None:
        """Forget those of ``chunks`` that are there; what follows them stays.

        Quick where whole ends of nodes come, their last chunk first, as they are evicted.
        """
        i, n = 0, len(chunks)
        while i < n:
            node = self._index.find(chunks[i])
            if node is None:
                i += 1
                continue
            if self.last_chunk(node) != chunks[i]:
                self._cut(node, self._index_in(node, chunks[i]) + 1)
            if not self._leaf[node]:
                self._lost[chunks[i]] = None
            same = self._match_end(node, chunks, i)
            self._index.remove(chunks[i : i + same], self._part[node])
            self._shorten(node, same)
            i += same

    # What to do -------------------------------------------------------------

    def leaves(self) -> npt.NDArray[np.int64]:
        """The rows of all leaves."""
        found: npt.NDArray[np.int64] = np.flatnonzero(np.frombuffer(self._leaf, np.int32))
        return found

    def marks(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The marks of these rows."""
        marks: npt.NDArray[np.int32] = np.frombuffer(self._mark, np.int32).take(rows)
        return marks

    def take_changed(self) -> None:
        """From here on ``changed`` starts anew."""
        self._changed.clear()

    def changed(self) -> set[int]:
        """Leaves whose rank may have changed since ``take_changed``."""
        return self._changed

    def is_leaf(self, node: int) -> bool:
        """Whether nothing follows the node."""
        return bool(self._leaf[node])

    def ascending(
        self, ranked: Iterator[tuple[float, int]], score: Callable[[int], float]
    ) -> Iterator[tuple[float, int]]:
        """All nodes with their scores, children before parents, the lowest score first.

        Args:
            ranked: the leaves in ascending order of their scores.
            score: that of a node that becomes a leaf on the way.

        """
        freed: list[tuple[float, int]] = []
        done: dict[int, int] = {}
        ahead = next(ranked, None)
        while ahead is not None or freed:
            if freed and (ahead is None or freed[0] < ahead):
                found = heapq.heappop(freed)
            else:
                assert ahead is not None
                found, ahead = ahead, next(ranked, None)
            yield found
            parent = self.parent_of(found[1])
            if parent != NO_NODE:
                done[parent] = done.get(parent, 0) + 1
                if done[parent] == self.children_of(parent):
                    heapq.heappush(freed, (score(parent), parent))

    def tail_first(self, node: int) -> Iterator[ChunkId]:
        """The chunks of a node, the last one first."""
        chunks = self._chunks[node]
        assert chunks is not None
        return reversed(chunks[: self._size[node]])

    # Parts ------------------------------------------------------------------

    def _learn_parent(self, node: int, parent: ChunkId | None) -> None:
        if parent is None or self._above[node] is not None:
            return
        self._loose -= 1
        if parent is NOTHING:
            self._above[node] = NOTHING
        else:
            self._hang(node, parent)

    def _any_lost(self, chunks: Sequence[ChunkId]) -> bool:
        return not self._lost.keys().isdisjoint(chunks)

    def _found_again(self, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Those of ``chunks`` that nodes follow which were left without them."""
        back = [chunk for chunk in chunks if chunk in self._lost]
        for chunk in back:
            del self._lost[chunk]
        return back

    def _first(self, node: int) -> ChunkId:
        chunks = self._chunks[node]
        assert chunks is not None
        return chunks[0]

    def _index_in(self, node: int, chunk: ChunkId) -> int:
        chunks = self._chunks[node]
        assert chunks is not None
        return chunks.index(chunk)

    def _stretches(
        self, chunks: Sequence[ChunkId], parent: ChunkId | None
    ) -> Iterator[tuple[int, int, int, int]]:
        """Where the tier has something of a run: where in it, the node, where in that, how much.

        One lookup a node; and one for each chunk that is not there, where it might still have
        what follows. Otherwise the first that is not there is the last that is looked at.
        """
        n = len(chunks)
        gaps = self._loose or (self._lost and self._any_lost(chunks))
        node, at = self._locate(chunks[0], parent) if n else (None, 0)
        i = 0
        while i < n:
            if node is None:
                if not gaps:
                    return
                i += 1
            else:
                same = self._match(node, at, chunks, i)
                ends = at + same == self._size[node]
                yield i, node, at, same
                i += same
                if not (ends or gaps):
                    return
            # What is before this chunk is not there or ends a node, so it begins one.
            node, at = self._index.at_end(chunks[i]) if i < n else None, 0

    def _locate(self, chunk: ChunkId, parent: ChunkId | None) -> tuple[int | None, int]:
        """The node that a chunk is in, and where in that."""
        node = self._index.at_end(chunk)
        if node is not None:
            return node, 0 if self._first(node) == chunk else self._size[node] - 1
        if parent is NOTHING:
            return None, 0
        above = None if parent is None else self._index.at_end(parent)
        if above is None:
            node = self._index.find(chunk)
            return node, 0 if node is None else self._index_in(node, chunk)
        # Within a node it would come right behind its parent.
        mine, size = self._chunks[above], self._size[above]
        assert mine is not None
        follows = size > 1 and mine[0] == parent and mine[1] == chunk
        return (above, 1) if follows else (None, 0)

    def _match(self, node: int, at: int, chunks: Sequence[ChunkId], begin: int) -> int:
        """How many chunks of a node, from ``at`` on, the run has from ``begin`` on."""
        mine = self._chunks[node]
        assert mine is not None
        n = min(self._size[node] - at, len(chunks) - begin)
        if mine[at + n - 1] == chunks[begin + n - 1]:
            # An id has one parent, so all before it are equal.
            return n
        return next(i for i in range(n) if mine[at + i] != chunks[begin + i])

    def _match_end(self, node: int, chunks: Sequence[ChunkId], begin: int) -> int:
        """How many chunks of a node, from its end, come in turn from ``begin`` on."""
        mine, size = self._chunks[node], self._size[node]
        assert mine is not None
        n = min(size, len(chunks) - begin)
        if mine[size - n] == chunks[begin + n - 1]:
            end = list(mine[size - n : size])
            end.reverse()
            if end == list(chunks[begin : begin + n]):
                return n
        return next(i for i in range(n) if mine[size - 1 - i] != chunks[begin + i])

    def _new(
        self, chunks: tuple[ChunkId, ...], parent: ChunkId | None, mark: int, owner: int
    ) -> int:
        node = self._table.new(len(chunks), mark, owner, 0, 1, 0)
        self._chunks.put(node, chunks)
        self._above.put(node, parent)
        self._part[node] = self._index.add(chunks, node)
        self._marked(mark, 1)
        if parent is None:
            self._loose += 1
        elif parent is not NOTHING:
            self._hang(node, parent)
        return node

    def _hang(self, node: int, parent: ChunkId) -> None:
        self._above[node] = parent
        self._children[parent] = (self._children.get(parent) or 0) + 1
        above = self.node_of(parent)
        if above == NO_NODE:
            self._lost[parent] = None
        elif self.last_chunk(above) != parent:
            self._cut(above, self._index_in(above, parent) + 1)
        else:
            self._set_leaf(above, False)

    def _cut(self, node: int, at: int) -> int:
        """Cut a node before its chunk number ``at``. Returns the node of what follows."""
        chunks = self._chunks[node]
        assert chunks is not None
        rest = chunks[at : self._size[node]]
        copied = self._mark[node], self._owner[node], 0, self._uses[node], self._part[node]
        tail = self._table.new(len(rest), *copied)
        self._chunks.put(tail, rest)
        self._chunks[node] = chunks[:at]
        self._size[node] = at
        self._above.put(tail, chunks[at - 1])
        self._children[chunks[at - 1]] = (self._children.get(chunks[at - 1]) or 0) + 1
        self._index.move(rest, self._part[node], tail)
        self._index.set_end(chunks[at - 1], node)
        self._marked(self._mark[node], 1)
        self._set_leaf(tail, rest[-1] not in self._children)
        self._set_leaf(node, False)
        return tail

    def _set_leaf(self, node: int, leaf: bool) -> None:
        if not leaf:
            self._changed.discard(node)
        elif not self._leaf[node]:
            self._changed.add(node)
        self._leaf[node] = int(leaf)

    def _shorten(self, node: int, count: int) -> None:
        """A node has lost so many chunks at its end."""
        self.held -= count
        self._size[node] -= count
        if self._size[node]:
            self._index.set_end(self.last_chunk(node), node)
            self._set_leaf(node, True)
        else:
            self._free(node)

    def _free(self, node: int) -> None:
        above = self._above[node]
        self._chunks[node] = self._above[node] = None
        self._leaf[node] = 0
        self._changed.discard(node)
        self._marked(self._mark[node], -1)
        self._table.free(node)
        if above is None:
            self._loose -= 1
        if above is None or above is NOTHING:
            return
        left = (self._children.get(above) or 0) - 1
        if left > 0:
            self._children[above] = left
            return
        del self._children[above]
        self._lost.pop(above, None)
        parent = self._index.at_end(above)
        if parent is not None:
            self._set_leaf(parent, True)
