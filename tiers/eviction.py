"""Making room, in the policy's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

from kvtiers.policies import ChunkId
from kvtiers.policies.around import answers
from kvtiers.tiers.base import ChunkKey
from kvtiers.tiers.directory import Chunk, State, runs_of
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.queued import Queued
from kvtiers.tiers.residency import CPU, Residency
from kvtiers.tiers.spill import Spill
from kvtiers.tiers.workers import Op, OpKind

# How often a tier is looked through again, if there is reason to: not more often than
# this, nor for more than a twentieth of the time.
_RESCAN_SECONDS = 20.0
_SCAN_COST = 20.0
# The same if the last look failed, or it was away since: nothing can be evicted from a tier
# of which nothing is known, so that a full one takes no stores until then.
_RESCAN_UNSEEN_SECONDS = 5.0
# Where no bound is to be kept, it is only for not remembering for ever what is gone.
_RESCAN_UNBOUNDED_SECONDS = 600.0
# Where victims are demoted, the coldest share of the arena, up to so many chunks, is copied
# down ahead of need: a prompt needs many slots at once, and a copy takes its time.
_AHEAD_SHARE, _MOST_AHEAD = 1 / 4, 1024
# They are looked through again when that part of them has gone.
_LOOK_SHARE = 1 / 4
# What is evicted in one step of the engine: in a few milliseconds.
_REMOVED_AT_ONCE = 512
# Hints, per op that came back.
_FORGOTTEN_AT_ONCE = 512


class Eviction:
    """Frees slots of the arena and keeps lower tiers under their bounds."""

    def __init__(self, residency: Residency, spill: Spill, queued: Queued) -> None:
        self._residency = residency
        self._spill = spill
        self._queued = queued
        self._demotes = answers(residency.policy, "demote")
        self._ahead = max(1, min(_MOST_AHEAD, int(residency.cpu.arena.slots * _AHEAD_SHARE)))
        # Of the coldest, those that the policy was asked about, and slots until the next look.
        self._judged = frozenset[bytes]()
        self._look_in = 0

    def can_free(self, n: int) -> bool:
        """Whether ``n`` slots are or could be free. Evicts nothing, but cancels queued stores."""
        table = self._residency.slots
        if table.unpinned < n:
            self._spill.cancel_queued(n - table.unpinned)
        return table.unpinned >= n

    def make_room(self, n: int) -> int:
        """Free up to ``n`` slots. Returns how many of them there are."""
        slots = self._residency.slots
        if self._demotes:
            self._demote_ahead(n)
            if slots.free < n:
                self._drop(self._coldest(n - slots.free, self._has_its_copy))
        if slots.free < n:
            self._drop(self._coldest(n - slots.free))
        if slots.free < n:
            # Of these, some have left the arena otherwise: only their store kept the slot.
            self._spill.cancel_queued(n - slots.free)
            self._drop(self._coldest(max(0, n - slots.free)))
        return min(n, slots.free)

    def _coldest(self, n: int, wanted: Callable[[Chunk], bool] = lambda _: True) -> list[Chunk]:
        """Up to ``n`` chunks that nobody uses, in the policy's order.

        Those that requests in the queue wait for come after all others. Of what is wanted
        besides, only those are looked through that are copied down ahead.
        """
        victims = self._residency.policy.victims(CPU, n * self._residency.chunk_bytes)
        found = map(self._residency.get, self._queued.last(victims))
        free = (chunk for chunk in found if chunk is not None and self._evictable(chunk))
        return list(islice(filter(wanted, islice(free, n + self._ahead)), n))

    def _evictable(self, chunk: Chunk) -> bool:
        return chunk.state is State.READY and not self._residency.slots.is_pinned(chunk.slot)

    def _has_its_copy(self, chunk: Chunk) -> bool:
        """Whether dropping it loses nothing that the policy would rather keep."""
        return bool(chunk.where) or (chunk.key in self._judged and not self._awaited(chunk))

    def _drop(self, victims: Sequence[Chunk]) -> None:
        self._residency.counts[CPU]["evictions"] += len(victims)
        self._residency.drop(victims)

    def _demote_ahead(self, n: int) -> None:
        """Have the coldest chunks copied down before their slots are needed.

        A copy pins its chunk, and until one begins the chunk can be read as well. What has
        none when its slot is needed goes after those that have theirs.

        Args:
            n: slots that are needed now.

        """
        self._look_in -= n
        short = n + self._ahead - self._residency.slots.free
        if short <= 0 or self._look_in > 0:
            return
        self._look_in = int(self._ahead * _LOOK_SHARE)
        coldest = self._coldest(short)
        self._demote_of([chunk for chunk in coldest if chunk.key not in self._judged])
        self._judged = frozenset(chunk.key for chunk in coldest)

    def _demote_of(self, candidates: Sequence[Chunk]) -> None:
        """Start copying down what only the arena has, if the policy wants it kept.

        What it wants is wanted with all that comes before it: behind a hole in a prefix
        nothing serves anybody.
        """
        for run in runs_of(candidates, self._residency.chunk_bytes):
            for n in range(len(run), 0, -1):
                chunk = self._residency.get(run.chunks[n - 1])
                target = self._demotion_target(chunk) if chunk is not None else None
                if target is not None:
                    admitted = self._spill.offer(target, run.head(n))
                    target.counts["refused"] += n - admitted
                    break

    def _demotion_target(self, chunk: Chunk) -> LowerTier | None:
        name = None if chunk.where else self._residency.policy.demote(chunk.key, CPU)
        tier = None if name is None else self._residency.named(name)
        if tier is None or not tier.breaker.closed():
            return None
        # If it is lost now, that is for want of room.
        chunk.declined &= ~tier.bit
        return tier

    def enforce(self, tier: LowerTier) -> None:
        """Start evicting from a lower tier that is above its high watermark, or refuses chunks.

        What is known of one that keeps itself is forgotten instead, beyond what it can hold.
        """
        if tier.tier.keeps_itself:
            self._forget_some(tier)
        if tier.bound_is_kept:
            return
        full = tier.used + tier.storing > (tier.low if tier.emptying else tier.high)
        tier.emptying &= full
        if not (full or tier.refused) or not self._may_evict(tier):
            return
        if tier.stale and self._may_scan(tier):
            # It may only seem full: what others removed was not uncounted.
            self.scan(tier)
        need = int(tier.used + tier.storing - tier.low) if full else 0
        if tier.refused:
            # Not more than a few per cent at once: it may have refused for another reason.
            some = max(int(tier.used * tier.headroom / 2), tier.chunk_bytes)
            need = max(need, min(tier.refused, some))
        victims = self._victims(tier, need)
        tier.emptying |= full and len(victims) == _REMOVED_AT_ONCE
        if victims:
            self._remove(tier, victims)
        elif self._may_scan(tier):
            # Somebody else fills the same place: look what is there.
            self.scan(tier)

    def _forget_some(self, tier: LowerTier) -> None:
        """Others evict from it unheard: the coldest hints are the first that are wrong."""
        excess = min(tier.hints - tier.most_hints, _FORGOTTEN_AT_ONCE)
        if excess > 0:
            self._residency.gone_from(tier, self._victims(tier, excess * tier.chunk_bytes))

    @staticmethod
    def _may_evict(tier: LowerTier) -> bool:
        busy = tier.read_only or tier.removing or tier.strange
        return not busy and tier.breaker.closed()

    def look_around(self, tier: LowerTier) -> None:
        """Look what a tier holds that was away, or that others store in too.

        The bound of a shared tier is for all of it together, and what it drops by itself
        is not said. One that was away may have come back empty, or with what nobody has
        seen yet.
        """
        if self._residency.clock() >= self.look_due(tier):
            self.scan(tier)

    def look_again(self, tier: LowerTier) -> None:
        """After a reset: look at once what the tier holds, if that has to be known."""
        tier.scanned_at = -math.inf
        self.look_around(tier)

    def look_due(self, tier: LowerTier) -> float:
        """When ``look_around`` has reason to look; infinite if it has none."""
        others = tier.tier.shared and tier.wrote
        if tier.tier.keeps_itself:
            return math.inf
        if not (others or tier.unseen) or tier.looking or not tier.breaker.closed():
            return math.inf
        rest = _scan_rest(tier)
        if not tier.unseen and tier.capacity is None:
            rest = max(rest, _RESCAN_UNBOUNDED_SECONDS)
        return tier.scanned_at + rest

    def _may_scan(self, tier: LowerTier) -> bool:
        if tier.looking or tier.tier.keeps_itself:
            return False
        return self._residency.clock() >= tier.scanned_at + _scan_rest(tier)

    def _victims(self, tier: LowerTier, need: int) -> list[ChunkId]:
        """Chunks to evict now: a part of what is needed, if that would take long."""
        ordered = self._queued.last(self._residency.policy.victims(tier.name, need))
        unread = (victim for victim in ordered if not tier.is_read(victim))
        return list(islice(unread, min(-(-need // tier.chunk_bytes), _REMOVED_AT_ONCE)))

    def _remove(self, tier: LowerTier, victims: Sequence[ChunkId]) -> None:
        tier.refused = 0
        keys = self._residency.gone_from(tier, victims)
        # After a reset the policy names some that nobody knows any more.
        if keys:
            tier.counts["evictions"] += len(keys)
            tier.removing = True
            tier.submit(Op(OpKind.REMOVE, keys, epoch=self._residency.epoch))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop these everywhere, though nothing lacks room.

        Every tier that may be asked is told, as the directory need not know all it has.
        """
        residency = self._residency
        found = [residency.get(key) for key in keys]
        chunks = [chunk for chunk in found if chunk is not None]
        named = [ChunkKey(residency.namespace, key) for key in keys]
        for tier in residency.lower:
            if tier.breaker.closed() and residency.may_hold(tier):
                held = [chunk.key for chunk in chunks if chunk.where & tier.bit]
                residency.gone_from(tier, held)
                tier.submit(Op(OpKind.REMOVE, named, epoch=residency.epoch))
        residency.drop([chunk for chunk in chunks if chunk.state is State.READY])

    def expire(self) -> None:
        """Drop what the policy no longer wants kept, though there is room for it."""
        policy = self._residency.policy
        expired = islice(policy.expired(CPU), _REMOVED_AT_ONCE)
        chunks = [self._residency.get(key) for key in expired]
        dead = [c for c in chunks if c is not None and self._evictable(c) and not self._awaited(c)]
        self._residency.counts[CPU]["evictions"] += len(dead)
        self._residency.drop(dead)
        for tier in self._residency.lower:
            if not self._may_evict(tier) or tier.bound_is_kept:
                continue
            unread = (key for key in policy.expired(tier.name) if not tier.is_read(key))
            victims = list(islice(unread, _REMOVED_AT_ONCE))
            if victims:
                self._remove(tier, victims)

    def _awaited(self, chunk: Chunk) -> bool:
        """Whether its turn to be stored in a lower tier, which lacks it, is still to come."""
        return any(chunk.key in tier.backlog for tier in self._residency.lower)

    def scan(self, tier: LowerTier) -> None:
        """Find out, in the background, what the tier holds."""
        tier.scanned_at = self._residency.clock()
        tier.scanning, tier.unseen, tier.stale, tier.wrote = True, False, False, False
        tier.since = set()
        # What is found comes last used first: to evict then would be to evict the hottest.
        tier.strange |= next(self._residency.policy.victims(tier.name, 1), None) is None
        tier.submit(Op(OpKind.SCAN, epoch=self._residency.epoch))


def _scan_rest(tier: LowerTier) -> float:
    """Seconds between the starts of two scans, at least."""
    least = _RESCAN_UNSEEN_SECONDS if tier.unseen else _RESCAN_SECONDS
    return max(least, _SCAN_COST * tier.scan_seconds)
