"""A base for policies that can say what a chunk is worth.

An author writes one function::

    class FewestUses(ScoredPolicy):
        def score(self, chunk: ChunkFacts, now: float) -> float:
            return chunk.uses / (1.0 + now - chunk.last_used)

and gets eviction of the lowest score, leaves of the prefix forest first.

How exact it is: a leaf is scored anew when it is used or measured, when a search
for victims meets it, and in turn, four leaves for each run that is inserted. A score
that changes with uses only, or rises with time, is therefore exact. One that falls
as time goes by is out of date by at most the time in which a quarter as many runs
come in as the tier has leaves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from kvtiers.policies.base import (
    ChunkId,
    Policy,
    PolicyRequest,
    Run,
)
from kvtiers.policies.leaf_heap import ChunkFacts, LeafHeap
from kvtiers.policies.sharded import ShardedDict

_RESCORED_PER_INSERT = 4


class ScoredPolicy(Policy):
    """Evicts the leaf with the lowest ``score``. See the module's text for how exactly.

    Hooks may be overridden to learn more: what they note of a chunk must be noted
    before they call ``super()``, which scores it.
    """

    def setup(self) -> None:
        """Facts of each chunk, and a heap of leaves per tier."""
        self._facts: ShardedDict[ChunkId, ChunkFacts] = ShardedDict()
        self._heaps = {tier.name: LeafHeap(self.score) for tier in self.tiers}

    @abstractmethod
    def score(self, chunk: ChunkFacts, now: float) -> float:
        """Value per byte of keeping ``chunk``, in any unit; the lowest goes first.

        Must depend on nothing but ``chunk``, ``now`` and what the hooks were
        told, change nothing, and not be NaN.
        """

    def facts(self, chunk: ChunkId) -> ChunkFacts | None:
        """What is known of ``chunk``, None if no tier holds it."""
        return self._facts.get(chunk)

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:  # noqa: ARG002
        """Count a use of each chunk, whichever tiers hold it."""
        now = self.clock()
        for facts in self._known(run):
            if facts is not None:
                facts.uses += 1
                facts.last_used = now
                self._refresh(facts, now)

    def on_heat(self, run: Run, heat: Sequence[float]) -> None:
        """Note the heat of each chunk that some tier holds."""
        now = self.clock()
        for facts, measured in zip(self._known(run), heat, strict=False):
            if facts is not None:
                facts.heat = measured
                self._refresh(facts, now)

    def on_insert(self, run: Run, tier: str) -> None:
        """Keep facts from now on of what no tier had."""
        now, heap = self.clock(), self._heaps[tier]
        known = list(self._known(run))
        for i in reversed(range(len(run))):
            facts = known[i] or self._new(run, i, now)
            if heap.add(facts, now):
                facts.copies += 1
        heap.rescore(_RESCORED_PER_INSERT, now)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Forget a chunk with its last copy."""
        now, heap = self.clock(), self._heaps[tier]
        for chunk in chunks:
            facts = heap.remove(chunk, now)
            if facts is not None:
                facts.copies -= 1
                if not facts.copies:
                    del self._facts[chunk]

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:  # noqa: ARG002
        """All chunks of ``tier``, the lowest score first among those with no child left."""
        return self._heaps[tier].ascending(self.clock())

    def _known(self, run: Run) -> Iterator[ChunkFacts | None]:
        """The facts of each chunk of the run, which may tell some of them their parent."""
        parent = run.parent
        for chunk in run.chunks:
            facts = self._facts.get(chunk)
            # What a scan found has no known parent until a request names both.
            if facts is not None and facts.parent is None and parent is not None:
                facts.parent = parent
                for heap in self._heaps.values():
                    heap.learn_parent(facts)
            yield facts
            parent = chunk

    def _new(self, run: Run, i: int, now: float) -> ChunkFacts:
        facts = self._facts[run.chunks[i]] = ChunkFacts(
            chunk=run.chunks[i],
            parent=run.chunks[i - 1] if i else run.parent,
            position=run.start + i,
            nbytes=run.chunk_bytes,
            group=run.group,
            tenant=run.tenant,
            inserted=now,
            last_used=now,
        )
        return facts

    def _refresh(self, facts: ChunkFacts, now: float) -> None:
        for heap in self._heaps.values():
            heap.refresh(facts, now)
