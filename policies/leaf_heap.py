"""The chunks of a tier in ascending order of a score, children before parents.

Only leaves of the prefix forest can be evicted, so only leaves stand in a heap,
with the score of the moment they were put there. A chunk that stops being a leaf
or gets another score leaves its entry behind (lazy deletion); the heap is rebuilt
when such entries are the majority, which is O(1) a call amortised.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtiers.policies.base import ChunkId
from kvtiers.policies.sharded import ShardedDict

_SMALL = 16


@dataclass(slots=True, eq=False)
class ChunkFacts:
    """What is known of a chunk that some tier holds; the same object for all tiers.

    Attributes:
        chunk: its id.
        parent: the chunk before it, None if there is none or it is unknown.
        position: index in its prefix, counted in chunks.
        nbytes: size.
        group: KV-cache group.
        tenant: who it belongs to, "" if unknown.
        inserted: when the first tier got it, on the policy's clock.
        last_used: when it was last accessed, or inserted.
        uses: accesses, and one for the request that computed it.
        heat: attention mass last measured, 0 if never.
        copies: tiers that hold it.

    """

    chunk: ChunkId
    parent: ChunkId | None
    position: int
    nbytes: int
    group: int
    tenant: str
    inserted: float
    last_used: float
    uses: int = 1
    heat: float = 0.0
    copies: int = 0


class _Node:
    """A chunk in the tier. ``entry`` is the serial of its valid heap entry, 0 for none."""

    __slots__ = ("entry", "facts")

    def __init__(self, facts: ChunkFacts) -> None:
        self.facts = facts
        self.entry = 0


class LeafHeap:
    """One tier's chunks, ready to be named in ascending order of ``score(facts, now)``."""

    def __init__(self, score: Callable[[ChunkFacts, float], float]) -> None:
        self._score = score
        self._nodes: ShardedDict[ChunkId, _Node] = ShardedDict()
        # By the parent's id, whether or not the tier holds the parent itself.
        self._children: ShardedDict[ChunkId, int] = ShardedDict()
        self._heap: list[tuple[float, int, _Node]] = []
        self._leaves = 0
        self._serial = 0
        self._hand = 0

    def add(self, facts: ChunkFacts, now: float) -> bool:
        """Take in a chunk; False if it was there. Cheapest from tail to head of a run."""
        if facts.chunk in self._nodes:
            return False
        node = self._nodes[facts.chunk] = _Node(facts)
        self._count_child(facts.parent)
        if not self._children.get(facts.chunk):
            self._push(node, now)
        return True

    def remove(self, chunk: ChunkId, now: float) -> ChunkFacts | None:
        """Forget a chunk, whose parent may become a leaf; None if it was not there."""
        node = self._nodes.get(chunk)
        if node is None:
            return None
        del self._nodes[chunk]
        self._invalidate(node)
        if node.facts.parent is not None:
            self._uncount_child(node.facts.parent, now)
        self._compact()
        return node.facts

    def learn_parent(self, facts: ChunkFacts) -> None:
        """``facts.parent`` was None and is known now."""
        if facts.chunk in self._nodes:
            self._count_child(facts.parent)

    def refresh(self, chunk: ChunkId, now: float) -> None:
        """The chunk's score may have changed."""
        node = self._nodes.get(chunk)
        if node is not None and node.entry:
            self._push(node, now)

    def rescore(self, n: int, now: float) -> None:
        """Bring the next ``n`` leaves up to date, in turn."""
        n = min(n, self._leaves)
        while n:
            self._hand = (self._hand + 1) % len(self._heap)
            score, serial, node = self._heap[self._hand]
            if node.entry == serial:
                n -= 1
                if self._score(node.facts, now) != score:
                    self._push(node, now)

    def ascending(self, now: float) -> Iterator[ChunkId]:
        """Every chunk once, the lowest score first among those with no child left.

        Changes nothing: the heap is walked from its root with a second heap of
        candidates, O(log k) for the k-th chunk.
        """
        candidates: list[tuple[float, int, int, _Node]] = []
        done: dict[ChunkId, int] = {}
        serials = itertools.count(self._serial + 1)
        self._candidate(candidates, 0)
        while candidates:
            score, serial, i, node = heapq.heappop(candidates)
            if i >= 0:
                self._candidate(candidates, 2 * i + 1)
                self._candidate(candidates, 2 * i + 2)
                if node.entry != serial:
                    continue
                current = self._score(node.facts, now)
                if current > score:
                    heapq.heappush(candidates, (current, serial, -1, node))
                    continue
            yield node.facts.chunk
            parent = self._freed_parent(node, done)
            if parent is not None:
                fresh = (self._score(parent.facts, now), next(serials), -1, parent)
                heapq.heappush(candidates, fresh)

    def _candidate(self, candidates: list[tuple[float, int, int, _Node]], i: int) -> None:
        if i < len(self._heap):
            score, serial, node = self._heap[i]
            heapq.heappush(candidates, (score, serial, i, node))

    def _freed_parent(self, node: _Node, done: dict[ChunkId, int]) -> _Node | None:
        """The parent of a chunk just named, if that was the last of its children."""
        parent = node.facts.parent
        if parent is None:
            return None
        done[parent] = done.get(parent, 0) + 1
        return self._nodes.get(parent) if done[parent] == self._children.get(parent) else None

    def _count_child(self, parent: ChunkId | None) -> None:
        if parent is None:
            return
        self._children[parent] = (self._children.get(parent) or 0) + 1
        above = self._nodes.get(parent)
        if above is not None:
            self._invalidate(above)

    def _uncount_child(self, parent: ChunkId, now: float) -> None:
        left = (self._children.get(parent) or 0) - 1
        if left > 0:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._nodes.get(parent)
        if above is not None:
            self._push(above, now)

    def _invalidate(self, node: _Node) -> None:
        if node.entry:
            node.entry = 0
            self._leaves -= 1

    def _push(self, node: _Node, now: float) -> None:
        if not node.entry:
            self._leaves += 1
        self._serial += 1
        node.entry = self._serial
        heapq.heappush(self._heap, (self._score(node.facts, now), self._serial, node))
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * self._leaves + _SMALL:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)
            self._hand = 0
