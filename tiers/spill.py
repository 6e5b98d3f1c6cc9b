"""Stores into lower tiers, behind the engine's back.

A tier that can't keep up drops stores, and they are counted; it never holds up a
load, and never pins more of the arena than its budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.policies import Run
from kvtiers.tiers.base import WriteOutcome
from kvtiers.tiers.directory import Chunk, State
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.residency import Residency
from kvtiers.tiers.workers import Op, OpKind


class Spill:
    """Writes chunks of the arena to lower tiers."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def write_through(self, run: Run) -> None:
        """A new run is in the arena: write it where the policy places it."""
        for name in self._residency.policy.place(run):
            tier = self._residency.named(name)
            if tier is not None:
                self.offer(tier, run)

    def offer(self, tier: LowerTier, run: Run) -> None:
        """Queue what of the run the policy admits to the tier and there is room for."""
        admitted = self._residency.policy.admit(run, tier.name)
        tier.counts["refused"] += len(run) - admitted
        head = run.chunks[:admitted]
        chunks = [chunk for key in head if (chunk := self._writable(tier, key)) is not None]
        room = min(len(chunks), tier.store_room())
        # Asked last: a breaker that lets a probe through must see one.
        if room and not tier.breaker.allows():
            room = 0
        tier.counts["dropped"] += len(chunks) - room
        for batch in tier.batches(chunks[:room]):
            self._submit(tier, batch)

    def _writable(self, tier: LowerTier, key: object) -> Chunk | None:
        chunk = self._residency.get(key)
        if chunk is None or chunk.state is not State.READY or chunk.where & tier.bit:
            return None
        return chunk

    def _submit(self, tier: LowerTier, batch: Sequence[Chunk]) -> None:
        table = self._residency.slots
        slots = [chunk.slot for chunk in batch]
        for slot in slots:
            table.pin(slot)
        keys = [self._residency.key_of(chunk) for chunk in batch]
        buffers = [table.memory(slot) for slot in slots]
        tier.submit(Op(OpKind.WRITE, keys, buffers, slots, epoch=self._residency.epoch))

    def written(self, tier: LowerTier, op: Op) -> None:
        """A store came back. Its pins are still on."""
        there: list[Chunk] = []
        for key, outcome in zip(op.keys, op.writes, strict=True):
            if outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS):
                there.append(self._residency.directory.ensure(key.hash))
            if outcome is WriteOutcome.STORED:
                tier.counts["bytes_written"] += self._residency.chunk_bytes
            elif outcome is WriteOutcome.REFUSED:
                tier.counts["refused"] += 1
        self._residency.now_in(tier, there)

    def cancel_queued(self, n: int) -> None:
        """Stores that only wait must not keep ``n`` slots from those who need them now."""
        table = self._residency.slots
        goal = table.pinned - n
        for tier in self._residency.lower:
            for op in tier.queued_stores():
                if table.pinned <= goal:
                    return
                if tier.cancel(op):
                    tier.counts["dropped"] += len(op.keys)
                    table.unpin(op.slots)
