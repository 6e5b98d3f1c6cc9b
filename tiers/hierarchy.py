"""The hierarchy: one state machine for chunks over tiers.

Locking design: by ownership. Everything here runs on one thread at a time, and never
blocks on a tier. In a live engine that is its scheduler thread, and while the engine
takes no steps another one that goes on in its place (see ``idle``): each public method
takes one lock. Tiers are called by their workers' threads; what they answer lies in a
deque until ``poll`` takes it in. So there is no callback to be surprised by, no order of
locks, and a tier that hangs delays nothing but the chunks asked of it.

What holds at all times (checked by tests/unit/test_hierarchy_machine.py):

- a chunk is READY only after all of its bytes are in its slot;
- a slot has at most one owner, and is given back only when it has none and
  nobody has it pinned (see ``slots``);
- a pinned slot is never evicted;
- every op that was submitted comes back once, and takes its pins with it.

The parts: ``residency`` (what is where), ``lookups`` (who waits for what), ``promotion``
(up), ``ahead`` (up before anybody's turn), ``spill`` (down), ``eviction`` (out; those that
``queued`` requests wait for last),
``copies`` (the engine's own), ``answers`` (what has ended, taken in), ``health`` (what a call
says of its tier), ``figures``. This module is what an engine calls.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from kvtiers.policies import ChunkId, Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.around import answers
from kvtiers.tiers.ahead import Ahead
from kvtiers.tiers.answers import Answers, Inbox
from kvtiers.tiers.base import ChunkKey, Namespace, Tier, Usage
from kvtiers.tiers.breaker import Breaker
from kvtiers.tiers.copies import EngineCopies
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Chunk, State, runs_of
from kvtiers.tiers.eviction import Eviction
from kvtiers.tiers.figures import Figures, TierStats
from kvtiers.tiers.health import Health
from kvtiers.tiers.heat import HeatInbox
from kvtiers.tiers.idle import IdleThread, owning
from kvtiers.tiers.lookups import Lookups
from kvtiers.tiers.lower import LowerTier, MakeWorkers
from kvtiers.tiers.promotion import Promotion
from kvtiers.tiers.queued import Queued
from kvtiers.tiers.requests import Lookup, RequestState
from kvtiers.tiers.residency import CPU, GPU, Residency
from kvtiers.tiers.spill import Spill
from kvtiers.tiers.units import portion_bytes
from kvtiers.tiers.workers import Op, OpKind, ThreadWorkers
from kvtiers.tiers.worth import Prefill, Worth

logger = logging.getLogger(__name__)

# Share of the arena that stores waiting for one lower tier may pin.
_STORE_SHARE = 0.25
# How often the policy is asked what to drop and what to fetch without need.
_CHORES_SECONDS = 1.0
# What a request waits at most for anything, if there is no lower tier to say so.
_DEFAULT_PATIENCE = 5.0
# For how long an engine that was seen is taken to be at work.
_AT_WORK_SECONDS = 0.1


class Hierarchy:
    """Directory, pins, moves, budgets, deadlines and breakers over all tiers.

    Args:
        cpu: the arena's tier.
        lower: further tiers by name, nearest first.
        make_policy: builds the policy from what it may know of the tiers.
        namespace: what the bytes of this engine mean.
        observed: tiers that somebody else manages, such as vLLM's prefix cache
            ("gpu"): name -> a function that says how full it is.
        clock: seconds, monotonic.
        make_workers: builds the threads of a tier (default: ``ThreadWorkers``).
        window: per group, how many chunks of a prefix are promoted before the engine
            considers the request, or of a run that the policy names; None is no bound.
        stores: False leaves the lower tiers to others: nothing is stored there, nothing evicted.
        away: lower tiers that do not answer now, by name, and why: they are left alone,
            and asked again by themselves.
        alone: whether nobody calls ``tick`` while the engine idles, so that a thread has to.
        prefill: how fast the engine computes. Without, all that can be loaded is.

    """

    def __init__(
        self,
        cpu: CpuTier,
        lower: Mapping[str, Tier],
        make_policy: Callable[[Sequence[TierInfo], Callable[[], float]], Policy],
        namespace: Namespace,
        *,
        observed: Mapping[str, Callable[[], Usage]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_workers: MakeWorkers | None = None,
        window: Mapping[int, int] | None = None,
        stores: bool = True,
        away: Mapping[str, str] | None = None,
        alone: bool = True,
        prefill: Prefill | None = None,
    ) -> None:
        self._clock = clock
        self.stores = stores
        self._lock = threading.RLock()
        self._idle: IdleThread | None = None
        # What the engine was told in this step holds until its ``tick``.
        self._in_step = False
        self._ticked = -math.inf
        self._inbox = Inbox()
        self._lower = self._make_lower(cpu, lower, make_workers or self._thread_workers)
        for tier in self._lower:
            tier.read_only = not stores
        patience = max((tier.deadline for tier in self._lower), default=_DEFAULT_PATIENCE)
        infos = self._tier_infos(cpu)
        self.policy = make_policy(infos, clock)
        self._residency = Residency(cpu, self._lower, self.policy, namespace, clock)
        self._spill = Spill(self._residency)
        self._queued = Queued()
        self._eviction = Eviction(self._residency, self._spill, self._queued)
        self._requests: dict[str, RequestState] = {}
        worth = Worth(self._residency, self._requests, prefill)
        self._promotion = Promotion(self._residency, self._eviction, worth, patience)
        self._copies = EngineCopies(self._residency, self._eviction)
        self._health = Health(self._residency, clock)
        self._heat = HeatInbox(self._residency, self.policy)
        self._ahead = Ahead(self._residency, self._promotion, self.policy, window)
        self._lookups = Lookups(
            self._residency, self._promotion, self._ahead, self._requests, worth, patience
        )
        self._answers = Answers(
            self._inbox,
            self._residency,
            self._lookups,
            self._promotion,
            self._spill,
            self._eviction,
            self._health,
        )
        self._figures = Figures(self._residency, observed)
        self._chores_due = 0.0
        for tier, info in zip(self._lower, infos[1:], strict=True):
            if tier.tier.keeps_itself:
                tier.tier.keep(info, make_policy, stores=stores)
        for tier in self._lower:
            self._begin(tier, (away or {}).get(tier.name))
        if alone:
            self._idle = IdleThread(self._rest, self._turn)

    def _make_lower(
        self, cpu: CpuTier, tiers: Mapping[str, Tier], make_workers: MakeWorkers
    ) -> list[LowerTier]:
        made: list[LowerTier] = []
        for index, (name, tier) in enumerate(tiers.items()):

            def done(op: Op, index: int = index) -> None:
                self._inbox.put(self._lower[index], op)
                self._wake()

            made.append(
                LowerTier(
                    name=name,
                    bit=1 << index,
                    tier=tier,
                    workers=make_workers(tier, done, tier.config.threads),
                    breaker=Breaker(self._clock),
                    store_breaker=Breaker(self._clock),
                    deadline=tier.config.deadline,
                    capacity=tier.usage().limit,
                    store_budget=max(1, int(cpu.arena.slots * _STORE_SHARE)) * tier.chunk_bytes,
                    chunk_bytes=tier.chunk_bytes,
                    headroom=tier.config.headroom,
                    submitted=self._wake,
                )
            )
        return made

    def _tier_infos(self, cpu: CpuTier) -> list[TierInfo]:
        """What a policy may know of the tiers, the arena's first."""
        quota = portion_bytes(cpu.config.tenant_quota, cpu.arena.nbytes)
        return [TierInfo(CPU, cpu.arena.nbytes, tenant_quota=quota)] + [
            TierInfo(
                t.name,
                t.capacity,
                t.tier.shared,
                t.tier.persistent,
                t.read_seconds,
                t.write_seconds,
                portion_bytes(t.tier.config.tenant_quota, t.capacity),
            )
            for t in self._lower
        ]

    def _begin(self, tier: LowerTier, why_away: str | None) -> None:
        if why_away is not None:
            self._health.away(tier, why_away)
        elif not tier.tier.keeps_itself:
            self._eviction.scan(tier)

    def _thread_workers(
        self, tier: Tier, done: Callable[[Op], None], threads: int
    ) -> ThreadWorkers:
        return ThreadWorkers(tier, done, self._clock, threads)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk."""
        return self._residency.chunk_bytes

    def shared_tier(self) -> Tier | None:
        """The nearest one that other engines may read and write too."""
        return next((tier.tier for tier in self._lower if tier.tier.shared), None)

    @property
    def namespace(self) -> Namespace:
        """What the bytes of this engine mean."""
        return self._residency.namespace

    # A request's way through ------------------------------------------------

    @owning
    def begin(
        self,
        facts: PolicyRequest,
        beyond_gpu: Sequence[Run] | None = None,
        windowed: frozenset[int] = frozenset(),
    ) -> None:
        """A request arrived: ask every lower tier about all of it, in one batch each.

        Args:
            facts: with ``runs``, one per KV-cache group.
            beyond_gpu: what of ``runs`` the GPU does not hold (default: all).
            windowed: groups that need only the last chunks of a prefix.

        """
        ask = facts.runs if beyond_gpu is None else beyond_gpu
        request = RequestState(facts, windowed, tuple(ask))
        self._requests[facts.request_id] = request
        self._queued.enter(facts)
        self.policy.on_request(facts)
        for run in ask:
            self._residency.learn(run)
        self._lookups.ask(request, [key for run in ask for key in run.chunks])
        self._lookups.plan(request)
        self._ahead.prefetch(facts)

    @owning
    def waits(self, request_id: str) -> bool:
        """Whether some of the request's chunks are still to be found or read.

        Until then, or until its patience ends, looking them up one by one would
        answer PENDING: an engine with many waiting requests saves a step's worth of
        lookups for each. O(1), never blocks.
        """
        if self._inbox.ops:
            self.poll()
        request = self._requests.get(request_id)
        if request is None or request.expired:
            return False
        self._lookups.consider(request)
        if not (request.unanswered or request.awaited or self._promotion.wanted_by(request)):
            return False
        return not self._lookups.ends(request)

    @owning
    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Whether ``key`` can be loaded for the request. O(1), never blocks."""
        self._in_step = True
        if self._inbox.ops:
            self.poll()
        chunk = self._residency.get(key)
        request = self._requests.get(request_id)
        ready = chunk is not None and chunk.state is State.READY
        if request is None:
            return Lookup.HIT if ready else Lookup.MISS
        if request.no_loads:
            return Lookup.MISS
        self._lookups.consider(request)
        if ready:
            # Should others of its prefix have to be read, it is held with them.
            request.wanted[key] = None
            return Lookup.HIT
        if request.expired or key in request.missed:
            return Lookup.MISS
        answer = self._pending_answer(request, key, chunk)
        if answer is Lookup.MISS:
            request.give_up((key,))
        elif self._lookups.ends(request):
            return Lookup.MISS
        return answer

    def _pending_answer(self, request: RequestState, key: bytes, chunk: Chunk | None) -> Lookup:
        if chunk is not None and not self._residency.is_nowhere(chunk):
            self._promotion.want(request, key)
            return Lookup.PENDING
        if key not in request.asked:
            self._lookups.ask(request, (key,))
        return Lookup.UNKNOWN if key in request.unanswered else Lookup.MISS

    @owning
    def load(self, request_id: str, keys: Sequence[bytes]) -> list[int]:
        """The engine copies these to the GPU now: their slots, pinned.

        A key that is not ready (it was, when the engine looked) gives -1, which
        the worker reports as a failed load.
        """
        return self._copies.load(request_id, keys)

    @owning
    def admitted(self, request_id: str, gpu_chunks: Mapping[int, int]) -> dict[int, dict[str, int]]:
        """The engine starts the request: count who served what, tell the policy.

        Args:
            request_id: the request, after ``load`` if it loads.
            gpu_chunks: per group, how many leading chunks the GPU held.

        Returns:
            Per group, how many chunks each tier served beside the GPU.

        """
        request = self._requests.get(request_id)
        served: dict[int, dict[str, int]] = {}
        if request is None:
            return served
        loaded = self._copies.loading(request_id)
        for run in request.facts.runs:
            held = min(gpu_chunks.get(run.group, 0), len(run))
            if held:
                self.policy.on_access(run.head(held), request.facts, GPU)
                self._spill.write_again(run.head(held))
            served[run.group] = self._account(request, run, held, loaded)
            self._tell_use(request, run, held, loaded)
        self._heat.used(request.facts.runs)
        request.start()
        self._queued.leave(request.facts)
        self._promotion.dismiss(request)
        self._ahead.forget(request)
        self.policy.on_start(request.facts)
        return served

    def _tell_use(
        self, request: RequestState, run: Run, held: int, loaded: Container[ChunkId]
    ) -> None:
        """Tell tiers that keep themselves of the last chunk that others served.

        To use a chunk is to use all before it, and a record for each would be too many.
        """
        for tier in self._lower:
            if not tier.tier.keeps_itself:
                continue
            for i in range(len(run) - 1, -1, -1):
                key = run.chunks[i]
                chunk = self._residency.get(key) if i < held or key in loaded else None
                if chunk is not None and chunk.where & tier.bit:
                    if request.source.get(chunk.key) != tier.name:
                        tier.tier.served_elsewhere([self._residency.key_of(chunk)])
                    break

    def _account(
        self, request: RequestState, run: Run, gpu: int, loaded: Container[ChunkId]
    ) -> dict[str, int]:
        """Who served how much of a run, beside its head, which the GPU held."""
        by_tier: dict[str, list[Chunk]] = {}
        missed = 0
        for key in run.chunks[gpu:]:
            chunk = self._residency.get(key)
            if chunk is not None and key in loaded:
                by_tier.setdefault(request.source.get(chunk.key, CPU), []).append(chunk)
            else:
                missed += 1
        for name, chunks in by_tier.items():
            for served in runs_of(chunks, self._residency.chunk_bytes):
                self.policy.on_access(served, request.facts, name)
                self._spill.write_again(served)
        if run.group in request.windowed:
            # What lies before the window was not looked for, so it was not missed.
            missed = 0
        counts = {name: len(chunks) for name, chunks in by_tier.items()}
        self._figures.count_served(gpu, counts, missed)
        return counts

    @owning
    def source_of(self, request_id: str, key: bytes) -> Tier | None:
        """The lower tier that a chunk was promoted from for this request, if it was.

        Of what the request was last admitted with.
        """
        request = self._requests.get(request_id)
        name = request.served.get(key) if request is not None else None
        tier = self._residency.named(name) if name is not None else None
        return tier.tier if tier is not None else None

    @owning
    def loaded(self, request_id: str) -> None:
        """The engine's copy to the GPU has ended, well or not."""
        self._copies.loaded(request_id)

    @owning
    def load_failed(self, request_id: str) -> None:
        """A load of the request failed: its chunks are dropped, and it loads no more.

        The engine asks again. With the same chunks it would load the same bytes for
        ever; with others it may wait for ever, since vLLM counts the blocks of the
        failed load against the room for the next one. ``loaded`` still follows.
        """
        loading = self._copies.loading(request_id)
        self.spoil(loading.values())
        request = self._requests.get(request_id)
        if request is not None:
            request.no_loads = True
            self._lookups.expire(request)

    @owning
    def end(self, request_id: str) -> None:
        """The request finished or was aborted. Its copies may still be under way."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._queued.leave(request.facts)
            self._promotion.dismiss(request)
            self._ahead.forget(request)
            self.policy.on_finish(request.facts)

    # Questions outside of a prompt's way through ----------------------------

    @owning
    def ask(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Ask every lower tier, in one batch each, where these are; promote nothing.

        For an engine that wants to know before it says what it needs. The request has
        begun, without runs; ``waits`` says whether answers are still to come.
        """
        self._lookups.ask(self._requests[request_id], keys)

    @owning
    def holds(self, key: bytes) -> bool:
        """Whether the arena has or is getting the chunk, or a tier that may be asked has it."""
        self._in_step = True
        chunk = self._residency.get(key)
        return chunk is not None and not self._residency.is_nowhere(chunk)

    @owning
    def room(self) -> int:
        """Chunks that could be stored now and go on to a lower tier at once.

        More would wait in backlogs, and be lost there if their slots are needed first.
        """
        rooms = [t.store_room() for t in self._lower if t.takes_stores and not t.backlog]
        return min(self._residency.slots.unpinned, max(rooms, default=0))

    @owning
    def reachable(self) -> bool:
        """Whether any lower tier may be stored in."""
        return any(tier.takes_stores for tier in self._lower)

    @owning
    def favoured(self, n_bytes: int) -> list[Run]:
        """What the policy would rather have the GPU keep, most valuable first, of that much."""
        runs: list[Run] = []
        for run in self.policy.favour(n_bytes):
            runs.append(run.head(n_bytes // run.chunk_bytes))
            n_bytes -= len(runs[-1]) * run.chunk_bytes
            if n_bytes < run.chunk_bytes:
                break
        return runs

    # Stores by the engine ---------------------------------------------------

    @owning
    def reserve(self, request_id: str, runs: Sequence[Run]) -> list[tuple[bytes, int]]:
        """Slots for chunks that the engine is about to store, as (key, slot).

        Leaves out what the arena has or is getting, what the policy does not
        admit, and what there is no room for (from the tail).
        """
        request = self._requests.get(request_id)
        if request is not None and not request.stores:
            return []
        taken: list[tuple[bytes, int]] = []
        for run in runs:
            admitted = self.policy.admit(run, CPU)
            self._residency.counts[CPU]["refused"] += len(run) - admitted
            taken += self._copies.reserve(run.head(admitted))
        return taken

    @owning
    def stored(self, keys: Iterable[bytes], success: bool = True) -> None:
        """The engine's copy into the arena has ended; what was not spoiled is readable now."""
        stored = self._copies.stored(keys, success)
        for run in stored:
            self._spill.write_through(run)
        self._heat.stored(stored)
        for tier in self._lower:
            self._eviction.enforce(tier)
        self._wake()

    @owning
    def measured(self, run: Run, heat: Sequence[float]) -> None:
        """Attention that the end of a prompt paid to each chunk of ``run``, 0 to 1.

        The policy hears of it once the chunks are stored.
        """
        self._heat.measured(run, heat)

    @property
    def heat_seconds(self) -> float:
        """What telling the policy of heat took so far, beside ``measured``."""
        return self._heat.seconds

    @owning
    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop chunks from the arena and from every tier that may be asked, without waiting.

        A store of such a chunk that is under way may bring it back.
        """
        self._eviction.remove(keys)

    @owning
    def storing(self, keys: Sequence[bytes]) -> bool:
        """Whether a store of such a chunk into a lower tier is under way."""
        wanted = {ChunkKey(self.namespace, key) for key in keys}
        return any(
            op.kind is OpKind.WRITE and not wanted.isdisjoint(op.keys)
            for tier in self._lower
            for op in tier.ops
        )

    @owning
    def removing(self) -> bool:
        """Whether some tier has not yet removed what it was told to."""
        return any(op.kind is OpKind.REMOVE for tier in self._lower for op in tier.ops)

    @owning
    def slots_of_stores(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of stores under way."""
        return self._copies.slots_of_stores(keys)

    @owning
    def spoil(self, slots: Iterable[int]) -> None:
        """The bytes in these slots can't be trusted: nobody will load them."""
        self._copies.spoil(slots)

    # Once per step ----------------------------------------------------------

    @owning
    def tick(self) -> None:
        """Take in answers, end waits, start moves."""
        self._go_on()
        self._in_step, self._ticked = False, self._clock()
        self._wake()

    def _go_on(self) -> None:
        self.poll()
        self._answers.take_in_scans()
        now = self._clock()
        for tier in self._lower:
            for op in tier.overdue(now):
                self._answers.overdue(tier, op)
            self._health.probe(tier)
        self._promotion.start()
        self._promotion.measure_again()
        if now >= self._chores_due:
            self._chores_due = now + _CHORES_SECONDS
            self._eviction.expire()
            for tier in self._lower:
                self._eviction.look_around(tier)
                # What kept it from making room, or use of it, may have ended without an op.
                self._eviction.enforce(tier)
                self._spill.resume(tier)
            self._ahead.anticipate()

    # While the engine idles --------------------------------------------------

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.wake()

    def _rest(self) -> float:
        """Seconds for which the engine is taken to be at work. Needs no lock."""
        if self._in_step:
            return _AT_WORK_SECONDS
        return self._ticked + _AT_WORK_SECONDS - self._clock()

    @owning
    def _turn(self) -> float | None:
        """Do what is due, unless the engine came meanwhile; seconds until more is, or None."""
        if not self._in_step and self.due() <= self._clock():
            self._go_on()
        due = self.due() - self._clock()
        return None if due == math.inf else due

    @owning
    def due(self) -> float:
        """When ``tick`` has something to do, on the hierarchy's clock; infinite if nothing."""
        if self._inbox.ops or self.behind():
            return -math.inf
        return min(
            self._promotion.due(),
            max(self._chores_due, self._chores_wanted()),
            *(min(tier.due(), self._health.probe_due(tier)) for tier in self._lower),
        )

    def _chores_wanted(self) -> float:
        """When the policy, or some tier, has need of chores."""
        if len(self._residency.directory) and _has_chores(self.policy):
            return -math.inf
        return min(map(self._eviction.look_due, self._lower), default=math.inf)

    @owning
    def behind(self) -> bool:
        """Whether there is more to take in of a scan, or to forget: then ``tick`` again soon."""
        if self._inbox.scans or self._residency.behind():
            return True
        return any(tier.sweep is not None for tier in self._lower)

    @owning
    def poll(self) -> None:
        """Take in what the workers have finished, but for scans: ``tick`` does these."""
        self._answers.take_in()

    # Reset, figures, end ----------------------------------------------------

    @owning
    def reset(self, namespace: Namespace) -> None:
        """Nothing stored so far may be served any more; delete nothing that others share.

        Slots that the engine's workers may still be writing to or reading from
        stay pinned until ``flushed``.
        """
        self._promotion.reset(self._requests.values())
        for request in self._requests.values():
            self._lookups.expire(request)
            request.stores = False
        self._copies.reset()
        self._heat.forget()
        for tier in self._lower:
            tier.backlog.clear()
        self._residency.start_epoch(namespace)
        for tier in self._lower:
            self._eviction.look_again(tier)

    @owning
    def flushed(self) -> None:
        """Every copy that was under way at the last reset has ended."""
        self._copies.flushed()

    @owning
    def stats(self) -> list[TierStats]:
        """Figures of every tier, nearest to the GPU first; takes the counts."""
        return self._figures.take()

    def memory(self, slot: int) -> memoryview:
        """The bytes of a slot that ``reserve`` or ``load`` gave out."""
        return self._residency.slots.memory(slot)

    @owning
    def idle(self) -> bool:
        """Whether no move is under way and no answer waits to be taken in."""
        nobodys = (OpKind.SCAN, OpKind.PROBE)
        ops = (op for tier in self._lower for op in tier.ops)
        return not self._inbox.ops and all(op.kind in nobodys for op in ops)

    @owning
    def pinned(self) -> int:
        """Slots that somebody uses."""
        return self._residency.slots.pinned

    def close(self, timeout: float = 5.0) -> None:
        """Let stores under way end, within ``timeout`` seconds, and release everything."""
        end = time.monotonic() + timeout
        if self._idle is not None:
            self._idle.close()
        while not self.idle() and time.monotonic() < end:
            self.poll()
            time.sleep(0.005)
        for tier in self._lower:
            stores = [op for op in tier.ops if op.kind is OpKind.WRITE]
            if lost := len(tier.backlog) + sum(len(op.keys) for op in stores):
                logger.warning(
                    "%d chunks had not reached the %s tier when there was no more time.",
                    lost,
                    tier.name,
                )
            tier.workers.close(max(0.0, end - time.monotonic()))
            tier.tier.close()
        self._residency.cpu.close()


def _has_chores(policy: Policy) -> bool:
    """Whether the policy ever wants chunks dropped, or promoted, without need."""
    return answers(policy, "expired") or answers(policy, "anticipate")
