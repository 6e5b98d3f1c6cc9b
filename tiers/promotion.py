"""Promotion: reading chunks of lower tiers into the arena, for those who wait.

Requests are served in the order in which they asked, and each gets room for all
of its prefix or waits its turn: half a prefix in the arena helps nobody and
keeps others out (vllm#49902). Two requests for one chunk share its read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvtiers.policies import Run
from kvtiers.tiers.base import ReadOutcome
from kvtiers.tiers.directory import Chunk, State, runs_of
from kvtiers.tiers.eviction import Eviction
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.requests import RequestState
from kvtiers.tiers.residency import CPU, Residency
from kvtiers.tiers.workers import Op, OpKind
from kvtiers.tiers.worth import LATE, Worth

# Who waits for slots is weighed again as often as this.
_WEIGH_SECONDS = 0.02


class Promotion:
    """Wants, reads, and holds.

    A *hold* is a pin for a request on what is in the arena already, until the
    rest has come and the request is admitted, or ``patience`` seconds.
    """

    def __init__(
        self, residency: Residency, eviction: Eviction, worth: Worth, patience: float
    ) -> None:
        self._residency = residency
        self._eviction = eviction
        self._worth = worth
        self._patience = patience
        self._wanting: dict[str, RequestState] = {}
        self._waiters: dict[bytes, list[RequestState]] = {}
        self._holding: dict[str, RequestState] = {}

    def want(self, request: RequestState, key: bytes) -> None:
        """The request would like this chunk in the arena. Cheap if it said so before."""
        if key not in request.awaited:
            request.wanted[key] = None
            self._wanting[request.facts.request_id] = request

    def wanted_by(self, request: RequestState) -> bool:
        """Whether the request waits for its turn."""
        return request.facts.request_id in self._wanting

    def forget(self, request: RequestState) -> None:
        """The request wants nothing any more; reads under way land for others."""
        request.wanted.clear()
        request.awaited.clear()
        self._wanting.pop(request.facts.request_id, None)

    def release(self, request: RequestState) -> None:
        """The request needs no hold any more."""
        self._residency.slots.unpin(request.held)
        request.held.clear()
        self._holding.pop(request.facts.request_id, None)

    def dismiss(self, request: RequestState) -> None:
        """The request waits no longer: it started, or it ended."""
        self.release(request)
        self.forget(request)

    def start(self) -> None:
        """Begin what there is room for, in order. Also ends holds that grew old."""
        now = self._residency.clock()
        for request in [r for r in self._holding.values() if r.hold_until <= now]:
            self.release(request)
        for request_id, request in list(self._wanting.items()):
            if not self._promote(request):
                return
            self._wanting.pop(request_id, None)

    def due(self) -> float:
        """When the next hold is too old."""
        return min((request.hold_until for request in self._holding.values()), default=math.inf)

    def prefetch(self, run: Run) -> None:
        """Promote the leading chunks of a run that lower tiers hold, for nobody yet.

        Only while no request waits for slots: theirs come first.
        """
        missing: list[bytes] = []
        for key in run.chunks:
            chunk = self._residency.get(key)
            if chunk is None or self._residency.is_nowhere(chunk):
                break
            if chunk.state is State.ABSENT:
                missing.append(chunk.key)
        if not self._wanting:
            self._read_for_nobody(missing)

    def measure_again(self) -> None:
        """Read a little from tiers that were too slow, as they may be quick by now."""
        for keys in self._worth.to_measure() if not self._wanting else ():
            chunks = [chunk for key in keys if (chunk := self._residency.get(key)) is not None]
            there = [c for c in chunks if not self._residency.is_nowhere(c)]
            self._read_for_nobody([c.key for c in there if c.state is State.ABSENT])

    def _read_for_nobody(self, keys: Iterable[bytes]) -> None:
        # A policy's run is not ours to trust, and one chunk in two slots would cost one of them.
        unique = list(dict.fromkeys(keys))
        if unique:
            self._announce(unique)
            room = self._eviction.make_room(len(unique))
            self._read(unique[:room], [])

    def let_go(self, request: RequestState) -> None:
        """Give up what is sooner computed than loaded; before its turn, do not fetch it yet."""
        slow = self._worth.too_slow(request)
        if not slow:
            return
        if request.considered:
            self._worth.computes(request, slow)
            request.give_up(slow)
        else:
            # Asked for again when the engine looks.
            for key in slow:
                request.wanted.pop(key, None)
        chunks = [self._residency.get(key) for key in request.wanted]
        if all(chunk is not None and chunk.state is State.READY for chunk in chunks):
            # The engine finds these without waiting.
            request.wanted.clear()
            self._wanting.pop(request.facts.request_id, None)

    def _promote(self, request: RequestState) -> bool:
        """Returns False if the request has to wait for slots."""
        now = self._residency.clock()
        if now >= request.weigh_at:
            request.weigh_at = now + _WEIGH_SECONDS
            self.let_go(request)
        missing = self._hold_what_is_there(request)
        # What can never be in the arena together with the rest is not worth waiting for.
        most = self._residency.cpu.arena.slots - len(request.held)
        wanted = missing[:most]
        if not self._eviction.can_free(len(wanted)) and self._others_pin(request):
            return False
        self._announce(wanted)
        room = self._eviction.make_room(len(wanted))
        if room < len(wanted) and self._others_pin(request):
            return False
        request.give_up(missing[room:])
        request.awaited.update(missing[:room])
        self._read(missing[:room], [request])
        request.wanted.clear()
        return True

    def _others_pin(self, request: RequestState) -> bool:
        """Whether slots are in use that will come back without the request's doing."""
        return self._residency.slots.pinned > len(request.held)

    def _hold_what_is_there(self, request: RequestState) -> list[bytes]:
        """Hold the wanted chunks that the arena has or is getting; return the others."""
        missing: list[bytes] = []
        for key in list(request.wanted):
            chunk = self._residency.get(key)
            if chunk is None or self._residency.is_nowhere(chunk):
                request.give_up((key,))
            elif chunk.state is State.ABSENT:
                missing.append(key)
            else:
                self._hold(request, chunk)
        return missing

    def _hold(self, request: RequestState, chunk: Chunk) -> None:
        if chunk.state is State.PROMOTING:
            if chunk.key not in request.awaited:
                request.awaited.add(chunk.key)
                self._waiters.setdefault(chunk.key, []).append(request)
        elif chunk.state is State.READY and chunk.slot not in request.held:
            self._residency.slots.pin(chunk.slot)
            request.held.add(chunk.slot)
            request.hold_until = self._residency.clock() + self._patience
            self._holding[request.facts.request_id] = request

    def _announce(self, keys: Sequence[bytes]) -> None:
        """Tell the policy what comes. Whatever it answers: a request waits for these."""
        chunks = [chunk for key in keys if (chunk := self._residency.get(key)) is not None]
        for run in runs_of(chunks, self._residency.chunk_bytes):
            self._residency.policy.admit(run, CPU)

    def _read(self, keys: Sequence[bytes], waiters: Sequence[RequestState]) -> None:
        by_tier: dict[str, list[Chunk]] = {}
        for key in keys:
            chunk = self._residency.get(key)
            tier = self._residency.source(chunk) if chunk is not None else None
            assert chunk is not None
            assert tier is not None
            by_tier.setdefault(tier.name, []).append(chunk)
            self._waiters[key] = list(waiters)
        for tier in self._residency.lower:
            for batch in tier.batches(by_tier.get(tier.name, ())):
                self._submit(tier, batch)

    def _submit(self, tier: LowerTier, batch: Sequence[Chunk]) -> None:
        slots = [self._residency.take_slot(chunk, State.PROMOTING) for chunk in batch]
        keys = [self._residency.key_of(chunk) for chunk in batch]
        buffers = [self._residency.slots.memory(slot) for slot in slots]
        deadline = self._residency.clock() + tier.deadline
        epoch = self._residency.epoch
        tier.submit(Op(OpKind.READ, keys, buffers, slots, epoch=epoch, deadline=deadline))

    def landed(self, tier: LowerTier, op: Op) -> None:
        """A read came back. Its pins are still on, so nothing of it can be evicted yet."""
        ready: list[Chunk] = []
        for slot, outcome in zip(op.slots, op.reads, strict=True):
            chunk = self._residency.slots.owner(slot)
            if chunk is None:
                continue
            if outcome is ReadOutcome.HIT:
                ready.append(chunk)
            else:
                self._failed(tier, chunk, outcome)
        self._residency.ready(ready)
        tier.counts["bytes_read"] += len(ready) * self._residency.chunk_bytes
        served: dict[str, RequestState] = {}
        for chunk in ready:
            for request in self._waiters.pop(chunk.key, ()):
                if chunk.key in request.awaited:
                    request.awaited.discard(chunk.key)
                    request.source[chunk.key] = tier.name
                    self._hold(request, chunk)
                    served[request.facts.request_id] = request
        expected = tier.reads.seconds(len(op.keys) * self._residency.chunk_bytes)
        for request in served.values() if op.seconds > LATE * expected else ():
            self.let_go(request)

    def give_up(self, op: Op) -> None:
        """A read is overdue. Its slots stay pinned until the tier lets go of them."""
        for slot in op.slots:
            chunk = self._residency.slots.owner(slot)
            if chunk is not None:
                self._missed(chunk)

    def _missed(self, chunk: Chunk) -> None:
        for request in self._waiters.pop(chunk.key, ()):
            request.give_up((chunk.key,))
        self._residency.drop((chunk,))

    def _failed(self, tier: LowerTier, chunk: Chunk, outcome: ReadOutcome) -> None:
        if outcome in (ReadOutcome.CORRUPT, ReadOutcome.UNREADABLE):
            tier.counts[outcome.value] += 1
        # Somebody else removes chunks there.
        tier.stale |= outcome is ReadOutcome.MISS
        # Also what could not be read. If it is there a lookup finds it, and if the tier has
        # to replace it, it is only offered it anew where it is not taken to have it.
        self._residency.gone_from(tier, (chunk.key,))
        if self._residency.source(chunk) is None:
            self._missed(chunk)
        else:
            self._turn_to_the_next(chunk)

    def _turn_to_the_next(self, chunk: Chunk) -> None:
        """Another tier has the chunk: who waited for the read now waits for one from there.

        Their patience is what it was, so that they wait no longer for it.
        """
        for request in self._waiters.pop(chunk.key, ()):
            if chunk.key in request.awaited:
                request.awaited.discard(chunk.key)
                self.want(request, chunk.key)
        self._residency.drop((chunk,))

    def reset(self, requests: Iterable[RequestState]) -> None:
        """Nobody waits for anything any more."""
        for request in requests:
            self.dismiss(request)
        self._waiters.clear()
