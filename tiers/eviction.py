"""Making room, in the policy's order."""

from __future__ import annotations

from kvtiers.policies import ChunkId
from kvtiers.tiers.directory import Chunk, State, runs_of
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.residency import CPU, Residency
from kvtiers.tiers.spill import Spill
from kvtiers.tiers.workers import Op, OpKind

# A full root in which we know no victims is scanned again, but not at once.
_RESCAN_SECONDS = 60.0


class Eviction:
    """Frees slots of the arena and keeps lower tiers under their bounds."""

    def __init__(self, residency: Residency, spill: Spill) -> None:
        self._residency = residency
        self._spill = spill

    def make_room(self, n: int) -> int:
        """Free up to ``n`` slots. Returns how many of them there are.

        May forget chunks that only a lower tier held, so look up afterwards what
        was looked up before.
        """
        slots = self._residency.slots
        if slots.free < n:
            self._evict(n - slots.free)
        if slots.free < n and self._spill.cancel_queued():
            self._evict(n - slots.free)
        return min(n, slots.free)

    def _evict(self, n: int) -> None:
        victims: list[Chunk] = []
        demotions: list[tuple[Chunk, LowerTier]] = []
        for key in self._residency.policy.victims(CPU, n * self._residency.chunk_bytes):
            chunk = self._residency.get(key)
            if chunk is None or not self._evictable(chunk):
                continue
            target = self._demotion_target(chunk)
            if target is not None:
                demotions.append((chunk, target))
            else:
                victims.append(chunk)
                if len(victims) >= n:
                    break
        for chunk, target in demotions:
            # It can go once the copy below is made; others go now in its place.
            for run in runs_of((chunk,), self._residency.chunk_bytes):
                self._spill.write(target, run)
        self._residency.counts[CPU]["evictions"] += len(victims)
        self._residency.drop(victims)

    def _evictable(self, chunk: Chunk) -> bool:
        return chunk.state is State.READY and not self._residency.slots.is_pinned(chunk.slot)

    def _demotion_target(self, chunk: Chunk) -> LowerTier | None:
        if chunk.where:
            return None
        name = self._residency.policy.demote(chunk.key, CPU)
        tier = self._residency.named(name) if name is not None else None
        if tier is None or not tier.store_room() or not tier.breaker.closed():
            return None
        return tier

    def enforce(self, tier: LowerTier) -> None:
        """Start evicting from a lower tier that is above its high watermark."""
        if tier.removing or tier.used + tier.storing <= tier.high:
            return
        need = int(tier.used + tier.storing - tier.low)
        victims = self._victims(tier, need)
        if victims:
            tier.counts["evictions"] += len(victims)
            tier.removing = True
            keys = self._residency.gone_from(tier, victims)
            tier.submit(Op(OpKind.REMOVE, keys, epoch=self._residency.epoch))
        elif self._residency.clock() >= tier.scanned_at + _RESCAN_SECONDS:
            # Somebody else fills the same root: look what is there.
            self.scan(tier)

    def _victims(self, tier: LowerTier, need: int) -> list[ChunkId]:
        victims: list[ChunkId] = []
        for victim in self._residency.policy.victims(tier.name, need):
            if isinstance(victim, bytes) and tier.reading[victim]:
                continue
            victims.append(victim)
            if len(victims) * tier.chunk_bytes >= need:
                break
        return victims

    def scan(self, tier: LowerTier) -> None:
        """Find out, in the background, what the tier holds."""
        tier.scanned_at = self._residency.clock()
        tier.submit(Op(OpKind.SCAN, epoch=self._residency.epoch))
