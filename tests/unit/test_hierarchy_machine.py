"""The hierarchy against a model of its engine and of tiers that fail, stall and lie.

The engine's requests, copies, aborts and resets, the tiers' answers, and time are
all rules of one state machine, so hypothesis looks for an order of them that breaks
an invariant. ``KVTIERS_MACHINE_EXAMPLES`` sets how long it looks.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import hierarchy_kit as kit
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvtiers.policies import Policy, PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.placement import Placement, with_placement
from kvtiers.policies.quota import QuotaPolicy
from kvtiers.tiers import (
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    Tier,
    WriteOutcome,
    directory,
    findings,
)
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import State
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import Op, OpKind
from kvtiers.tiers.worth import Prefill

EXAMPLES = int(os.environ.get("KVTIERS_MACHINE_EXAMPLES", "60"))
STEPS = int(os.environ.get("KVTIERS_MACHINE_STEPS", "60"))

SLOTS = 12
WINDOW = 2
DEPTH = 5
WINDOWED = frozenset({1})
PATHS = st.sampled_from(["aa", "ab", "ac", "ba"])
RARELY = st.sampled_from([False, False, False, True])
MISS, CORRUPT = ReadOutcome.MISS, ReadOutcome.CORRUPT
GARBAGE = b"\xff" * kit.CHUNK


@dataclass
class Job:
    """A store of the engine: which keys it owes which slots."""

    slots: dict[bytes, int]
    written: set[bytes] = field(default_factory=set)
    spoiled: set[bytes] = field(default_factory=set)


@dataclass
class Request:
    runs: tuple[Run, ...]
    deferred_since: float | None = None
    stale: bool = False


def chain(path: str, n: int, group: int) -> Run:
    """Prompts share their first two chunks, and their tenant, if their paths begin alike."""
    names = [f"{path[0] if i < 2 else path}{i}g{group}" for i in range(n)]
    return Run(tuple(kit.key(name) for name in names), 0, kit.CHUNK, group, tenant=path[0])


class Machine(RuleBasedStateMachine):
    """See the module's text. Subclasses say which tiers there are."""

    policy: type[Policy] = LruPolicy
    window: ClassVar[Mapping[int, int] | None] = None
    prefill: ClassVar[Prefill | None] = None
    tenant_quota: ClassVar[int | None] = None

    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        raise NotImplementedError

    @initialize()
    def build(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        tiers = self.tiers(Path(self.folder.name))
        self.stack = kit.Stack(
            SLOTS,
            tiers,
            self.policy,
            self.window,
            prefill=self.prefill,
            tenant_quota=self.tenant_quota,
        )
        self.h = self.stack.h
        self.cpu = self.stack.cpu
        self.clock = self.stack.clock
        self.requests: dict[str, Request] = {}
        self.loads: dict[str, dict[bytes, int]] = {}
        self.jobs: list[Job] = []
        # Requests that came, by chunk.
        self.asked: Counter[object] = Counter()
        # The engine's copies from before a reset: (slot, writes).
        self.stale: list[tuple[int, bool]] = []
        # Slots whose chunk a failed load has dropped, though others use them.
        self.dropped: set[int] = set()
        self.serial = 0
        self.epoch = 0
        # Checks since the last reset: one after the other would meet little to reset.
        self.age = 0
        for tier in self.h._lower:
            workers = self.stack.workers[tier.name]
            workers.submit = self.watched(tier, workers.submit)  # type: ignore[method-assign]

    def watched(self, tier: Any, submit: Any) -> Any:
        def checked(op: Op) -> None:
            if op.kind is not OpKind.SCAN:
                assert tier.breaker.state is not BreakerState.OPEN, f"{op.kind} while open"
                assert tier.breaker_of(op.kind).state is not BreakerState.OPEN
            submit(op)

        return checked

    # The engine -------------------------------------------------------------

    @rule(
        path=PATHS,
        n=st.integers(1, DEPTH),
        hybrid=st.booleans(),
        on_gpu=st.integers(0, 2),
    )
    def arrive(self, path: str, n: int, hybrid: bool, on_gpu: int) -> None:
        self.serial += 1
        name = f"r{self.serial}"
        runs = tuple(chain(path, n, group) for group in range(1 + hybrid))
        self.requests[name] = Request(runs)
        self.asked.update(chunk for run in runs for chunk in run.chunks)
        beyond = [run.tail(min(on_gpu, n)) for run in runs]
        self.h.begin(PolicyRequest(name, runs), beyond, WINDOWED if hybrid else frozenset())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """The engine asks, but has no room to start the request."""
        self.look_for(data.draw(st.sampled_from(sorted(self.requests))))

    @rule()
    def step(self) -> None:
        """One step of the engine: it starts what it can."""
        for name in list(self.requests):
            keys = self.look_for(name)
            if keys is not None:
                self.start(name, keys)
        self.h.tick()

    def look_for(self, name: str) -> list[bytes] | None:
        if name in self.loads:
            return None
        request = self.requests[name]
        keys = self.lookup(name, request)
        if keys is None:
            self.check_patience(request)
        else:
            request.deferred_since = None
        return keys

    def start(self, name: str, keys: list[bytes]) -> None:
        if keys:
            slots = self.h.load(name, keys)
            assert -1 not in slots, "a chunk that was a hit in this step can't be loaded"
            self.loads[name] = dict(zip(keys, slots, strict=True))
        self.h.admitted(name, {})
        state = self.h._requests[name]
        waits = state.held or state.awaited or state.wanted
        assert not waits, "it started, and still waits"

    def lookup(self, name: str, request: Request) -> list[bytes] | None:
        """What vLLM would load; None if it has to ask again."""
        full = [k for k in request.runs[0].chunks if isinstance(k, bytes)]
        deferred = False
        n = 0
        for k in full:
            answer = self.ask(name, k)
            if answer is Lookup.MISS:
                break
            deferred |= answer is not Lookup.HIT
            n += answer is not Lookup.UNKNOWN
        if len(request.runs) == 1:
            return None if deferred else full[:n]
        window = [k for k in request.runs[1].chunks[:n] if isinstance(k, bytes)]
        end = self.window_lookup(name, window)
        if deferred or end is None:
            return None
        return full[:end] + window[max(0, end - WINDOW) : end]

    def window_lookup(self, name: str, keys: list[bytes]) -> int | None:
        deferred = pending = False
        hits = 0
        for index in range(len(keys) - 1, -1, -1):
            answer = self.ask(name, keys[index])
            if answer is Lookup.HIT or answer is Lookup.PENDING:
                pending |= answer is Lookup.PENDING
                hits += 1
            else:
                deferred |= answer is Lookup.UNKNOWN
                pending, hits = False, 0
            if hits == min(WINDOW, len(keys)):
                return None if deferred or pending else index + hits
        return None if deferred or pending else hits

    def ask(self, name: str, chunk_key: bytes) -> Lookup:
        answer = self.h.lookup(name, chunk_key)
        if answer is Lookup.HIT:
            chunk = self.h._residency.directory.get(chunk_key)
            assert chunk is not None
            assert chunk.state is State.READY
        return answer

    def check_patience(self, request: Request) -> None:
        if request.deferred_since is None:
            request.deferred_since = self.clock()
        waited = self.clock() - request.deferred_since
        assert waited < self.h._lookups._patience, "a request waits for ever"

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), fails=RARELY)
    def end_load(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loads)))
        if fails:
            self.dropped |= set(self.loads[name].values())
            self.h.load_failed(name)
        loaded = self.loads.pop(name)
        self.h.loaded(name)
        if fails and name in self.requests:
            for k in loaded:
                assert self.h.lookup(name, k) is Lookup.MISS, "a failed load is tried again"

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), start=st.integers(0, DEPTH), n=st.integers(1, DEPTH))
    def reserve(self, data: st.DataObject, start: int, n: int) -> None:
        self.store(data.draw(st.sampled_from(sorted(self.requests))), start, n)

    def store(self, name: str, start: int, n: int) -> None:
        request = self.requests[name]
        runs = [run.tail(min(start, len(run))).head(n) for run in request.runs]
        taken = self.h.reserve(name, [run for run in runs if len(run)])
        if request.stale:
            assert not taken, "KV from before a reset is stored after it"
        busy = {k for job in self.jobs for k in job.slots}
        assert not busy & {k for k, _ in taken}, "two stores of one chunk at once"
        if taken:
            self.jobs.append(Job(dict(taken)))

    @rule(path=PATHS, n=st.integers(1, DEPTH), hybrid=st.booleans())
    def compute(self, path: str, n: int, hybrid: bool) -> None:
        """A request comes, finds nothing or does not look, is stored, and goes."""
        self.arrive(path, n, hybrid, 0)
        name = f"r{self.serial}"
        self.h.admitted(name, {})
        self.store(name, 0, n)
        if self.jobs:
            self.finish_store(self.jobs[-1], True)
        del self.requests[name]
        self.h.end(name)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), wrong=RARELY)
    def copy_into_arena(self, data: st.DataObject, wrong: bool) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        k = data.draw(st.sampled_from(sorted(job.slots)))
        if k in job.written:
            return
        job.written.add(k)
        slot = job.slots[k]
        self.cpu.arena.slot(slot)[:] = kit.truth(k, self.h.namespace) if not wrong else GARBAGE
        if wrong:
            job.spoiled.add(k)
            assert self.h.slots_of_stores([k]) == [slot]
            self.h.spoil([slot, slot])

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fails=RARELY)
    def end_store(self, data: st.DataObject, fails: bool) -> None:
        self.finish_store(data.draw(st.sampled_from(self.jobs)), not fails)

    def finish_store(self, job: Job, success: bool) -> None:
        for k, slot in job.slots.items():
            if success and k not in job.written:
                self.cpu.arena.slot(slot)[:] = kit.truth(k, self.h.namespace)
        self.jobs.remove(job)
        self.h.stored(list(job.slots), success)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[name]
        self.h.end(name)

    @precondition(lambda self: self.age > 15)
    @rule()
    def reset(self) -> None:
        self.age = 0
        self.epoch += 1
        self.stale += [(slot, True) for job in self.jobs for slot in job.slots.values()]
        self.stale += [(slot, False) for load in self.loads.values() for slot in load.values()]
        self.jobs.clear()
        self.loads.clear()
        for request in self.requests.values():
            request.stale = True
        self.h.reset(Namespace(f"epoch{self.epoch}", shareable=False))

    @precondition(lambda self: any(writes for _, writes in self.stale))
    @rule(data=st.data())
    def copy_from_before_the_reset(self, data: st.DataObject) -> None:
        slots = sorted({slot for slot, writes in self.stale if writes})
        self.cpu.arena.slot(data.draw(st.sampled_from(slots)))[:] = GARBAGE

    @precondition(lambda self: self.stale)
    @rule()
    def flushed(self) -> None:
        self.stale.clear()
        self.h.flushed()

    @rule()
    def tick(self) -> None:
        self.h.tick()
        for request in self.h._requests.values():
            assert not request.held or request.hold_until > self.clock(), "held for ever"

    @rule()
    def idle_turn(self) -> None:
        """What the thread does that goes on while the engine idles: all that is due."""
        self.h._turn()
        busy = self.h._in_step or self.h.behind()
        assert busy or self.h.due() > self.clock(), "it would take turns without an end"

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 1.1, 2.6, 5.1, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    # The tiers --------------------------------------------------------------

    def some_op(self, data: st.DataObject, *kinds: OpKind) -> tuple[kit.ManualWorkers, Op] | None:
        ops = [
            (workers, op)
            for workers in self.stack.workers.values()
            for op in workers.running + workers.queued
            if not kinds or op.kind in kinds
        ]
        return ops[data.draw(st.integers(0, len(ops) - 1))] if ops else None

    def has_ops(self) -> bool:
        return any(w.running or w.queued for w in self.stack.workers.values())

    @precondition(has_ops)
    @rule(data=st.data())
    def op_begins(self, data: st.DataObject) -> None:
        found = self.some_op(data)
        if found is not None and not found[1].started:
            found[0].begin(found[1])

    @precondition(has_ops)
    @rule(data=st.data())
    def op_ends_well(self, data: st.DataObject) -> None:
        found = self.some_op(data)
        if found is not None:
            workers, op = found
            if not op.started:
                workers.begin(op)
            if op in workers.running:
                workers.end(op)

    @precondition(has_ops)
    @rule(kinds=st.sampled_from([(), (OpKind.CONTAINS, OpKind.SCAN), (OpKind.WRITE,)]))
    def many_ops_end_well(self, kinds: tuple[OpKind, ...]) -> None:
        for workers in self.stack.workers.values():
            workers.run(*kinds)

    @precondition(has_ops)
    @rule(data=st.data(), how=st.sampled_from(["raises", "raises late", "answers", "loses"]))
    def op_ends_badly(self, data: st.DataObject, how: str) -> None:
        found = self.some_op(data)
        if found is None:
            return
        workers, op = found
        if not op.started:
            op.started, op.began = True, self.clock()
        for buffer in op.buffers if op.kind is OpKind.READ else ():
            buffer[: kit.CHUNK // 2] = GARBAGE[: kit.CHUNK // 2]
        if how == "raises late" and op.kind is OpKind.WRITE:
            # The answer was lost, not the chunk.
            workers.tier.write(op.keys[:1], op.buffers[:1])
        if op.kind is OpKind.READ and how == "loses":
            workers.tier.remove(op.keys)
            workers.end_reads(op, data.draw(st.sampled_from([MISS, CORRUPT])))
        elif op.kind is OpKind.READ and how == "answers":
            workers.end_reads(op, ReadOutcome.FAILED)
        elif op.kind is OpKind.WRITE and how == "answers":
            workers.end_writes(op, WriteOutcome.REFUSED)
        else:
            workers.end_failed(op)

    @precondition(has_ops)
    @rule(data=st.data())
    def read_scribbles(self, data: st.DataObject) -> None:
        """Also one that was given up, or is of an earlier epoch."""
        found = self.some_op(data, OpKind.READ)
        if found is not None and found[1].started:
            for buffer in found[1].buffers:
                buffer[:] = GARBAGE

    @rule(data=st.data(), happens=RARELY)
    def somebody_removes(self, data: st.DataObject, happens: bool) -> None:
        """Another engine evicts from a shared tier."""
        for tier in self.stack.tiers.values():
            keys = [entry.key for entry in tier.scan() if entry.key is not None]
            if keys and happens:
                tier.remove([data.draw(st.sampled_from(sorted(keys, key=lambda k: k.hash)))])

    # What must hold ---------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.age += 1
        self.ready_chunks_hold_their_bytes()
        self.loads_read_true_bytes()
        self.lower_tiers_hold_true_bytes()
        self.every_slot_has_one_place()
        self.pins_are_counted()
        self.used_slots_are_not_given_away()
        self.pinned_chunks_are_not_evicted()
        self.one_read_a_chunk()
        self.everybody_agrees_on_what_is_where()
        self.capacities_hold()
        self.waiting_is_bookkept()
        self.tenants_are_bookkept()

    def ops(self) -> Iterable[Op]:
        for workers in self.stack.workers.values():
            yield from workers.queued
            yield from workers.running
        for _, op in [*self.h._inbox.ops, *self.h._inbox.scans]:
            yield op

    def ready_chunks_hold_their_bytes(self) -> None:
        for chunk in self.h._residency.directory:
            if chunk.state is State.READY:
                held = bytes(self.cpu.arena.slot(chunk.slot))
                assert held == kit.truth(chunk.key, self.h.namespace), "wrong bytes are readable"

    def loads_read_true_bytes(self) -> None:
        for load in self.loads.values():
            for k, slot in load.items():
                held = bytes(self.cpu.arena.slot(slot))
                assert held == kit.truth(k, self.h.namespace), "a slot changed under a load"

    def lower_tiers_hold_true_bytes(self) -> None:
        for tier in self.stack.tiers.values():
            keys = [entry.key for entry in tier.scan() if entry.key is not None]
            buffer = memoryview(bytearray(kit.CHUNK))
            for k in keys if isinstance(tier, kit.DictTier | CpuTier) else ():
                assert tier.read([k], [buffer]) == [ReadOutcome.HIT]
                assert bytes(buffer) == kit.truth(k.hash, k.namespace), "wrong bytes went down"

    def every_slot_has_one_place(self) -> None:
        table = self.h._residency.slots
        owned = {c.slot: c for c in self.h._residency.directory if c.slot >= 0}
        free = self.cpu._free
        assert len(set(free)) == len(free), "a slot is free twice"
        for slot in range(SLOTS):
            owner = table.owner(slot)
            assert owner == owned.get(slot), "owner table and directory differ"
            orphan = owner is None and table.is_pinned(slot)
            assert (slot in free) + (owner is not None) + orphan == 1, f"slot {slot} leaked"
            if slot in free:
                assert not table.is_pinned(slot)
        assert len(owned) == sum(c.slot >= 0 for c in self.h._residency.directory)

    def pins_are_counted(self) -> None:
        pins: Counter[int] = Counter()
        for op in self.ops():
            pins.update(op.slots)
        for load in self.loads.values():
            pins.update(load.values())
        for job in self.jobs:
            pins.update(job.slots.values())
        pins.update(slot for slot, _ in self.stale)
        for name, request in self.h._requests.items():
            pins.update(request.held)
            assert bool(request.held) == (name in self.h._promotion._holding)
        table = self.h._residency.slots
        assert list(table._pins) == [pins[slot] for slot in range(SLOTS)]
        assert self.h.pinned() == len(pins)

    def used_slots_are_not_given_away(self) -> None:
        owner = self.h._residency.slots.owner
        for job in self.jobs:
            for k, slot in job.slots.items():
                chunk = owner(slot)
                assert chunk is None or (chunk.key == k and chunk.state is State.FILLING)
        for load in self.loads.values():
            for k, slot in load.items():
                chunk = owner(slot)
                assert chunk is None or chunk.key == k
        for op in self.ops():
            for k, slot in zip(op.keys, op.slots, strict=False):
                chunk = owner(slot)
                assert chunk is None or (chunk.key == k.hash and op.epoch == self.epoch)

    def pinned_chunks_are_not_evicted(self) -> None:
        owner = self.h._residency.slots.owner
        used = {slot for load in self.loads.values() for slot in load.values()}
        used |= {slot for request in self.h._requests.values() for slot in request.held}
        for op in self.ops():
            if op.kind is OpKind.WRITE and op.epoch == self.epoch:
                used |= set(op.slots)
        self.dropped = {slot for slot in self.dropped & used if owner(slot) is None}
        assert {slot for slot in used if owner(slot) is None} == self.dropped

    def one_read_a_chunk(self) -> None:
        reads = Counter(
            k
            for op in self.ops()
            if op.kind is OpKind.READ and not op.given_up and op.epoch == self.epoch
            for k in op.keys
        )
        assert all(n == 1 for n in reads.values()), "a chunk is promoted twice at once"

    def everybody_agrees_on_what_is_where(self) -> None:
        residency = self.h._residency
        ready = {c.key for c in residency.directory if c.state is State.READY}
        assert self.stack.ready() == ready
        assert all(k.namespace == self.h.namespace for k in self.cpu._slots)
        named = set(self.h.policy.victims("cpu", 1 << 62))
        assert named >= ready
        assert residency.behind() or named == ready, "an earlier epoch is not forgotten"
        for chunk in residency.directory:
            assert (chunk.slot >= 0) == (chunk.state is not State.ABSENT)
            assert chunk.slot >= 0 or chunk.where, "the directory keeps what is nowhere"
            assert chunk.state is State.READY or not chunk.declined
        for tier in residency.lower:
            there = {c.key for c in residency.directory if c.where & tier.bit}
            named = set(self.h.policy.victims(tier.name, 1 << 62))
            assert named >= there | set(tier.foreign)
            assert residency.behind() or named == there | set(tier.foreign)

    def capacities_hold(self) -> None:
        for tier in self.h._lower:
            usage = tier.tier.usage()
            assert usage.limit is None or usage.nbytes <= usage.limit
            writes = [op for op in tier.ops if op.kind is OpKind.WRITE]
            assert tier.storing == sum(len(op.keys) for op in writes) * tier.chunk_bytes
            assert tier.storing <= tier.store_budget

    def waiting_is_bookkept(self) -> None:
        promotion, queued = self.h._promotion, self.h._queued
        in_queue = [r for r in self.h._requests.values() if not r.started]
        waited_for = Counter(k for r in in_queue for run in r.facts.runs for k in run.chunks)
        assert {
            k: queued._requests.get(k) for p in queued._requests.parts() for k in p
        } == waited_for
        assert set(promotion._wanting) <= set(self.h._requests)
        assert set(promotion._holding) <= set(self.h._requests)
        taken = self.h._ahead._taken
        assert sum(taken.values()) <= SLOTS // 2
        for name in taken:
            assert not self.h._requests[name].considered, "its turn has come"
        for name, request in self.h._requests.items():
            for k in request.awaited:
                chunk = self.h._residency.directory.get(k)
                assert chunk is not None
                assert chunk.state is State.PROMOTING, "waits for what nobody reads"
                assert request in promotion._waiters[k]
            if request.expired:
                assert not request.awaited
                assert name not in promotion._wanting
        for k in promotion._waiters:
            chunk = self.h._residency.directory.get(k)
            assert chunk is not None
            assert chunk.state is State.PROMOTING, "waiters of what nobody reads"

    def tenants_are_bookkept(self) -> None:
        policy = self.h.policy
        for name, ledger in policy._ledgers.items() if isinstance(policy, QuotaPolicy) else ():
            owned = [k for part in ledger._numbers.parts() for k in part]
            assert set(owned) <= set(policy.victims(name, 1)), "charged for what is not there"
            holdings = [ledger._holdings[ledger._numbers.get(k)] for k in owned]
            charged = Counter(holding.account.tenant for holding in holdings)
            assert {t: n * kit.CHUNK for t, n in charged.items()} == {
                tenant: account.nbytes for tenant, account in ledger._accounts.items()
            }
            for tenant, account in ledger._accounts.items():
                assert set(account.order) <= set(owned)
                assert (tenant in ledger._above) == (account.nbytes > ledger._quota)

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        try:
            self.wind_down()
        finally:
            self.h.close(0.0)
            self.folder.cleanup()

    def wind_down(self) -> None:
        """Everything ends: nothing may be left over."""
        for name in list(self.requests):
            self.h.end(name)
        for name in list(self.loads):
            self.h.loaded(name)
        for job in self.jobs:
            self.h.stored(list(job.slots), success=False)
        self.h.flushed()
        self.requests, self.loads, self.jobs, self.stale = {}, {}, [], []
        self.stack.settle()
        self.holds()
        promotion = self.h._promotion
        left = (promotion._wanting, promotion._waiters, promotion._holding, self.h._requests)
        assert not any((*left, self.h._ahead._taken, self.h._queued._waiting))
        assert not self.h._copies._storing
        assert not self.h._copies._loading
        assert self.h.pinned() == 0
        assert self.h.idle()
        if isinstance(self.h.policy, QuotaPolicy):
            # Nothing is pinned. First what is still to be stored, then what is to go.
            for _ in range(8):
                self.clock.now += 2.0
                self.stack.settle()
            assert not self.h.policy._ledgers["cpu"]._above, "a tenant is above its quota"
        for tier in self.h._lower:
            assert (tier.storing, tier.removing, len(tier.reading)) == (0, False, 0)
            assert not tier.ops


def filled(tier: Tier, *runs: Run) -> Tier:
    """With what an earlier engine stored there."""
    for run in runs:
        keys = [ChunkKey(kit.FIRST, k, i) for i, k in enumerate(run.chunks)]
        buffers = [memoryview(kit.truth(k.hash)) for k in keys]
        assert set(tier.write(keys, buffers)) == {WriteOutcome.STORED}
    return tier


class NoLowerTier(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        return {}


class OneDict(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        runs = [chain(path, DEPTH, group) for path in ("aa", "ba") for group in (0, 1)]
        return {"dict": filled(kit.DictTier(), *runs)}


class Window(OneDict):
    """Requests that wait are promoted in part, and hold nothing, before they are looked at."""

    window: ClassVar[Mapping[int, int] | None] = {0: 2, 1: 1}


class FullDict(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        tier = kit.DictTier(8 * kit.CHUNK, headroom=0.0)
        return {"dict": filled(tier, chain("aa", 5, 0))}


class KeptTier(kit.DictTier):
    """Evicts by itself, unheard: the hierarchy neither scans it nor evicts from it."""

    keeps_itself = True

    def _write(self, chunk_key: ChunkKey, buffer: memoryview) -> WriteOutcome:
        if (len(self.chunks) + 1) * kit.CHUNK > (self.capacity or 0):
            del self.chunks[next(iter(self.chunks))]
        return super()._write(chunk_key, buffer)


class Kept(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        return {"dict": filled(KeptTier(8 * kit.CHUNK), chain("aa", 5, 0), chain("aa", 3, 1))}

    @invariant()
    def hints_are_bounded(self) -> None:
        if hasattr(self, "h"):
            [tier] = self.h._lower
            held = sum(bool(c.where & tier.bit) for c in self.h._residency.directory)
            assert tier.hints == held
            assert self.stack.workers["dict"].count(OpKind.SCAN) == 0
            assert tier.counts["evictions"] == 0


class Demoting(Machine):
    policy = kit.DemotingLru

    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        return {"dict": kit.DictTier(16 * kit.CHUNK)}


class StillFs(FsTier):
    """Real files under the hierarchy's own bound: what a thread evicts can't be repeated.

    Nor may the order of a scan hang on the wall clock.
    """

    keeps_itself = False

    def scan(self) -> Iterator[Entry]:
        found = sorted(super().scan(), key=lambda entry: entry.where)
        return (replace(entry, last_used=float(age)) for age, entry in enumerate(found))


class Files(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        config = FsTier.Config(path=folder / "fs", capacity=12 * 2 * kit.CHUNK, threads=2)
        return {"fs": filled(StillFs(config, kit.CHUNK), chain("aa", 5, 0), chain("aa", 5, 1))}


class SecondArena(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        config = CpuTier.Config(capacity=12 * kit.CHUNK)
        return {"slow": filled(CpuTier(config, kit.CHUNK), chain("ab", 5, 0))}


class TwoTiers(Machine):
    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        far = filled(kit.DictTier(), *(chain(p, 5, g) for p in ("ab", "ba") for g in (0, 1)))
        near = kit.DictTier(6 * kit.CHUNK, headroom=0.5)
        return {"near": filled(near, chain("aa", 4, 0)), "far": far}


class Computer:
    """An engine that computes a chunk in a second, more or less."""

    def seconds(self, run: Run) -> float | None:
        return float(len(run)) if run.start < 3 else None

    def busy(self) -> float:
        return 0.5


class Weighing(TwoTiers):
    """What takes too long is computed; nothing else may come of it."""

    prefill = Computer()


class Tenants(FullDict):
    """Each of the two tenants may have a part of each tier, less than a prompt of two groups."""

    tenant_quota: ClassVar[int | None] = 4 * kit.CHUNK

    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        tier = kit.DictTier(8 * kit.CHUNK, headroom=0.0, tenant_quota=3 * kit.CHUNK)
        return {"dict": filled(tier, chain("aa", 5, 0))}


def under(rule: Placement) -> Any:
    """Makes an LRU policy under this rule."""
    return staticmethod(lambda infos, clock: with_placement(LruPolicy(infos, clock=clock), rule))


class Reused(TwoTiers):
    """What one request has asked for goes no further than the arena."""

    policy = under(Placement("reused"))

    def watched(self, tier: Any, submit: Any) -> Any:
        inner = super().watched(tier, submit)

        def checked(op: Op) -> None:
            if op.kind is OpKind.WRITE:
                assert all(self.asked[k.hash] > 1 for k in op.keys), "written at first sight"
            inner(op)

        return checked


class WorthOnEviction(TwoTiers):
    policy = under(Placement("worth", "on_eviction"))


class LittleByLittle(TwoTiers):
    """What takes many steps with a million chunks takes many with a few."""

    def tiers(self, folder: Path) -> Mapping[str, Tier]:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(directory, "_PART", 1)
        self.patch.setattr(findings, "_BATCH", 1)
        return super().tiers(folder)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "patch"):
            self.patch.undo()


def suite(machine: type[Machine], share: float = 1.0) -> Any:
    case = machine.TestCase
    case.settings = settings(
        max_examples=max(1, int(EXAMPLES * share)),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestNoLowerTier = suite(NoLowerTier, 0.5)
TestOneDict = suite(OneDict)
TestWindow = suite(Window)
TestFullDict = suite(FullDict)
TestKept = suite(Kept)
TestDemoting = suite(Demoting)
TestFiles = suite(Files, 0.5)
TestSecondArena = suite(SecondArena, 0.5)
TestTwoTiers = suite(TwoTiers)
TestWeighing = suite(Weighing)
TestTenants = suite(Tenants)
TestReused = suite(Reused, 0.5)
TestWorthOnEviction = suite(WorthOnEviction, 0.5)
TestLittleByLittle = suite(LittleByLittle)
