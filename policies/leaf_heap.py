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


_Entry = tuple[float, int, ChunkFacts]  # score, serial number, leaf


class LeafHeap:
    """One tier's chunks, ready to be named in ascending order of ``score(facts, now)``."""

    def __init__(self, score: Callable[[ChunkFacts, float], float]) -> None:
        self._score = score
        self._facts: ShardedDict[ChunkId, ChunkFacts] = ShardedDict()
        # By the parent's id, whether or not the tier holds the parent itself.
        self._children: ShardedDict[ChunkId, int] = ShardedDict()
        # The leaves, each with the serial number of its one valid entry in the heap.
        self._leaves: ShardedDict[ChunkId, int] = ShardedDict()
        self._heap: list[_Entry] = []
        self._serial = 0
        self._hand = 0
        self._stale = 0

    def add(self, facts: ChunkFacts, now: float) -> bool:
        """Take in a chunk; False if it was there. Cheapest from tail to head of a run."""
        if facts.chunk in self._facts:
            return False
        self._facts[facts.chunk] = facts
        self._count_child(facts.parent)
        if facts.chunk not in self._children:
            self._push(facts, now)
        return True

    def remove(self, chunk: ChunkId, now: float) -> ChunkFacts | None:
        """Forget a chunk, whose parent may become a leaf; None if it was not there."""
        facts = self._facts.get(chunk)
        if facts is None:
            return None
        del self._facts[chunk]
        self._invalidate(chunk)
        if facts.parent is not None:
            self._uncount_child(facts.parent, now)
        self._tidy()
        return facts

    def learn_parent(self, facts: ChunkFacts) -> None:
        """``facts.parent`` was None and is known now."""
        if facts.chunk in self._facts:
            self._count_child(facts.parent)

    def refresh(self, facts: ChunkFacts, now: float) -> None:
        """The chunk's score may have changed."""
        if facts.chunk in self._leaves:
            self._push(facts, now)

    def rescore(self, n: int, now: float) -> None:
        """Bring the next ``n`` leaves up to date, in turn.

        Only a score that fell needs it: ``ascending`` sees the others rise.
        """
        n = min(n, len(self._heap) - self._stale)
        while n:
            self._hand = (self._hand + 1) % len(self._heap)
            score, serial, facts = self._heap[self._hand]
            if self._leaves.get(facts.chunk) == serial:
                n -= 1
                if self._score(facts, now) < score:
                    self._push(facts, now)

    def ascending(self, now: float) -> Iterator[ChunkId]:
        """Every chunk once, the lowest score first among those with no child left.

        Changes nothing: the heap is walked from its root with a second heap of
        candidates, O(log k) for the k-th chunk.
        """
        candidates: list[tuple[float, int, int, ChunkFacts]] = []
        done: dict[ChunkId, int] = {}
        serials = itertools.count(self._serial + 1)
        self._candidate(candidates, 0)
        while candidates:
            score, serial, i, facts = heapq.heappop(candidates)
            if i >= 0:
                self._candidate(candidates, 2 * i + 1)
                self._candidate(candidates, 2 * i + 2)
                if self._leaves.get(facts.chunk) != serial:
                    continue
                current = self._score(facts, now)
                if current > score:
                    heapq.heappush(candidates, (current, serial, -1, facts))
                    continue
            yield facts.chunk
            parent = self._freed_parent(facts, done)
            if parent is not None:
                fresh = (self._score(parent, now), next(serials), -1, parent)
                heapq.heappush(candidates, fresh)

    def _candidate(self, candidates: list[tuple[float, int, int, ChunkFacts]], i: int) -> None:
        if i < len(self._heap):
            score, serial, facts = self._heap[i]
            heapq.heappush(candidates, (score, serial, i, facts))

    def _freed_parent(self, facts: ChunkFacts, done: dict[ChunkId, int]) -> ChunkFacts | None:
        """The parent of a chunk just named, if that was the last of its children."""
        parent = facts.parent
        if parent is None:
            return None
        done[parent] = done.get(parent, 0) + 1
        return self._facts.get(parent) if done[parent] == self._children.get(parent) else None

    def _count_child(self, parent: ChunkId | None) -> None:
        if parent is not None:
            self._children[parent] = (self._children.get(parent) or 0) + 1
            self._invalidate(parent)

    def _uncount_child(self, parent: ChunkId, now: float) -> None:
        left = (self._children.get(parent) or 0) - 1
        if left > 0:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._facts.get(parent)
        if above is not None:
            self._push(above, now)

    def _invalidate(self, chunk: ChunkId) -> None:
        if chunk in self._leaves:
            del self._leaves[chunk]
            self._stale += 1

    def _push(self, facts: ChunkFacts, now: float) -> None:
        self._invalidate(facts.chunk)
        self._serial += 1
        self._leaves[facts.chunk] = self._serial
        heapq.heappush(self._heap, (self._score(facts, now), self._serial, facts))
        self._tidy()

    def _tidy(self) -> None:
        """Drop stale entries: at the root, where every search would meet them, or if too many."""
        heap, leaves = self._heap, self._leaves
        while heap and leaves.get(heap[0][2].chunk) != heap[0][1]:
            heapq.heappop(heap)
            self._stale -= 1
        if self._stale > len(heap) // 2 + _SMALL:
            self._heap = [entry for entry in heap if leaves.get(entry[2].chunk) == entry[1]]
            heapq.heapify(self._heap)
            self._stale = self._hand = 0
