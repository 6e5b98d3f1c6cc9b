"""Stores into lower tiers, behind the engine's back.

A store never holds up a load, and those under way never pin more of the arena than
their budget. What finds no room waits in a backlog, which pins nothing: it is stored
when there is room, if the arena still has it then. So a prompt larger than the budget
arrives whole, and a tier that can't keep up loses what is evicted before its turn;
that is counted. Dropping at once would leave holes, and what lies behind a hole of a
prefix is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

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
        admitted = {tier.name: 0 for tier in self._residency.lower if self._may_write(tier)}
        for name in self._residency.policy.place(run):
            tier = self._residency.named(name)
            if tier is not None and name in admitted:
                admitted[name] = self.offer(tier, run)
                tier.counts["refused"] += len(run) - admitted[name]
        for tier in self._residency.lower:
            if tier.name in admitted:
                self._declined(tier, run.tail(admitted[tier.name]))

    def write_again(self, run: Run) -> None:
        """A run was used once more: write what the arena has of it where it is wanted by now."""
        for name in self._residency.policy.place_again(run):
            tier = self._residency.named(name)
            if tier is not None and self._may_write(tier):
                self.offer(tier, run)

    def _may_write(self, tier: LowerTier) -> bool:
        return not tier.read_only and self._residency.may_hold(tier)

    def _declined(self, tier: LowerTier, run: Run) -> None:
        """Remember what the policy did not want there, to count it if it stays so."""
        for key in run.chunks:
            chunk = self._residency.get(key)
            if chunk is not None:
                chunk.declined |= tier.bit

    def offer(self, tier: LowerTier, run: Run) -> int:
        """Queue what of the run the policy admits to the tier and there is room for.

        Returns how many chunks, from the head, it admitted.
        """
        if tier.read_only:
            return 0
        admitted = self._residency.policy.admit(run, tier.name)
        self._queue(tier, run.head(admitted))
        return admitted

    def _queue(self, tier: LowerTier, run: Run) -> None:
        lacking: list[object] = []
        for key in run.chunks:
            chunk = self._writable(tier, key)
            if chunk is not None:
                chunk.declined &= ~tier.bit
                lacking.append(key)
        if not tier.breaker.closed() or (lacking and not tier.store_breaker.allows()):
            tier.counts["dropped"] += len(lacking)
            return
        tier.backlog.update((key, None) for key in lacking if isinstance(key, bytes))
        # Of more than the arena has slots, the first were evicted long ago.
        excess = max(0, len(tier.backlog) - self._residency.cpu.arena.slots)
        for key in list(islice(tier.backlog, excess)):
            del tier.backlog[key]
        tier.counts["dropped"] += excess
        self.resume(tier)

    def resume(self, tier: LowerTier) -> None:
        """Queue what of the backlog there is room for, in the order in which it came."""
        room = tier.store_room()
        if not tier.backlog or not room:
            return
        for batch in tier.batches(self._next_of(tier, room)):
            self._submit(tier, batch)

    def _next_of(self, tier: LowerTier, n: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while tier.backlog and len(chunks) < n:
            key = next(iter(tier.backlog))
            del tier.backlog[key]
            chunk = self._writable(tier, key)
            if chunk is not None:
                chunks.append(chunk)
            elif not self._residency.is_in(tier, key):
                tier.counts["dropped"] += 1
        return chunks

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
                there.append(self._residency.directory.ensure(key.hash, tenant=key.tenant))
            if outcome is WriteOutcome.STORED:
                tier.counts["bytes_written"] += self._residency.chunk_bytes
                tier.wrote = True
            elif outcome is WriteOutcome.REFUSED:
                tier.counts["refused"] += 1
                # Makes room, which ``TAKEN`` would not be helped by.
                tier.refused += self._residency.chunk_bytes
            elif outcome is WriteOutcome.TAKEN:
                tier.counts["refused"] += 1
        self._residency.now_in(tier, there)

    def give_up(self, tier: LowerTier) -> None:
        """The tier keeps failing: drop what waits for it, as far as it has not begun."""
        tier.counts["dropped"] += len(tier.backlog)
        tier.backlog.clear()
        for op in tier.queued_stores():
            self._cancel(tier, op)

    def cancel_queued(self, n: int) -> None:
        """Stores that only wait must not keep ``n`` slots from those who need them now."""
        table = self._residency.slots
        goal = table.pinned - n
        for tier in self._residency.lower:
            for op in tier.queued_stores():
                if table.pinned <= goal:
                    return
                self._cancel(tier, op)

    def _cancel(self, tier: LowerTier, op: Op) -> None:
        if tier.cancel(op):
            tier.counts["dropped"] += len(op.keys)
            self._residency.slots.unpin(op.slots)
