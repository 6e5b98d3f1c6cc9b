"""What the hierarchy's tests share: chunks whose bytes follow from their key, tiers
in memory, and workers without threads that do what a test tells them, when it says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtiers.policies import Policy, PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.quota import with_quotas
from kvtiers.tiers import ALIGNMENT, ChunkKey, Entry, Namespace, Tier, TierConfig, Usage
from kvtiers.tiers.base import ReadOutcome, WriteOutcome
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import Op, OpKind, call, fail, scan
from kvtiers.tiers.worth import Prefill

CHUNK = ALIGNMENT
DEADLINE = 5.0
FIRST = Namespace("first")


def key(name: str) -> bytes:
    """A chunk's key, spread like a hash."""
    return hashlib.sha256(name.encode()).digest()[:16]


def prefix(name: str, n: int, group: int = 0, tenant: str = "") -> Run:
    """A prompt of ``n`` chunks. Prompts of one name and different length share a prefix."""
    chunks = tuple(key(f"{tenant}{name}{i}g{group}") for i in range(n))
    return Run(chunks, 0, CHUNK, group, tenant=tenant)


def truth(chunk_key: bytes, namespace: Namespace = FIRST) -> bytes:
    """The only right content of a chunk."""
    return hashlib.shake_128(namespace.id.encode() + chunk_key).digest(CHUNK)


class Clock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class DictTier(Tier):
    """Chunks in a dict."""

    def __init__(
        self,
        capacity: int | None = None,
        *,
        deadline: float = DEADLINE,
        headroom: float = 0.2,
        tenant_quota: float | None = None,
    ) -> None:
        config = TierConfig(
            type="dict",
            deadline=deadline,
            threads=2,
            headroom=headroom,
            tenant_quota=tenant_quota,
        )
        super().__init__(config, CHUNK)
        self.capacity = capacity
        self.chunks: dict[ChunkKey, bytes] = {}
        self.calls: list[str] = []

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self.calls.append("contains")
        return [k in self.chunks for k in keys]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        self.calls.append("read")
        return [self._read(k, buffer) for k, buffer in zip(keys, buffers, strict=True)]

    def _read(self, chunk_key: ChunkKey, buffer: memoryview) -> ReadOutcome:
        if chunk_key not in self.chunks:
            return ReadOutcome.MISS
        buffer[:] = self.chunks[chunk_key]
        return ReadOutcome.HIT

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        self.calls.append("write")
        return [self._write(k, buffer) for k, buffer in zip(keys, buffers, strict=True)]

    def _write(self, chunk_key: ChunkKey, buffer: memoryview) -> WriteOutcome:
        if chunk_key in self.chunks:
            return WriteOutcome.EXISTS
        if self.capacity is not None and (len(self.chunks) + 1) * CHUNK > self.capacity:
            return WriteOutcome.REFUSED
        self.chunks[chunk_key] = bytes(buffer)
        return WriteOutcome.STORED

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        self.calls.append("remove")
        return sum(self.chunks.pop(k, None) is not None for k in keys)

    def scan(self) -> Iterator[Entry]:
        for age, k in enumerate(list(self.chunks)):
            yield Entry(k, CHUNK, float(age))

    def usage(self) -> Usage:
        return Usage(len(self.chunks) * CHUNK, len(self.chunks), self.capacity)

    def put(self, run: Run, namespace: Namespace = FIRST) -> None:
        """As if an earlier engine had stored it."""
        for k in run.chunks:
            assert isinstance(k, bytes)
            self.chunks[ChunkKey(namespace, k)] = truth(k, namespace)


class ManualWorkers:
    """``Workers`` that begin and end an op when the test says so, in any order."""

    def __init__(self, tier: Tier, done: Callable[[Op], None], clock: Clock) -> None:
        self.tier = tier
        self.done = done
        self.clock = clock
        self.queued: list[Op] = []
        self.running: list[Op] = []
        self.submitted: list[Op] = []
        self.cancelled: list[Op] = []

    def submit(self, op: Op) -> None:
        self.submitted.append(op)
        self.queued.append(op)

    def cancel(self, op: Op) -> bool:
        if op not in self.queued:
            return False
        self.queued.remove(op)
        self.cancelled.append(op)
        return True

    def close(self, timeout: float) -> None:
        self.queued.clear()

    def count(self, kind: OpKind) -> int:
        """How many ops of a kind were ever submitted."""
        return sum(op.kind is kind for op in self.submitted)

    def of(self, kind: OpKind) -> list[Op]:
        """Ops of a kind that have not ended."""
        return [op for op in self.running + self.queued if op.kind is kind]

    def begin(self, op: Op) -> None:
        """A thread takes the op. One whose deadline has passed fails, as in ``ThreadWorkers``."""
        self.queued.remove(op)
        op.began = self.clock()
        op.started = True
        self.running.append(op)
        if self.clock() >= op.deadline:
            self.end_failed(op)

    def end(self, op: Op) -> None:
        """The tier does what it should."""
        self._leave(op)
        if op.kind is OpKind.SCAN:
            scan(self.tier, op, self.done, lambda: False)
            return
        call(self.tier, op)
        self.done(op)

    def end_failed(self, op: Op, error: BaseException | None = None) -> None:
        """The tier's call raises."""
        self._leave(op)
        fail(op, error or OSError("the test says so"))
        self.done(op)

    def end_reads(self, op: Op, outcome: ReadOutcome) -> None:
        """A read ends with the same outcome for all of its chunks."""
        self._leave(op)
        op.reads = [outcome] * len(op.keys)
        self.done(op)

    def end_writes(self, op: Op, outcome: WriteOutcome) -> None:
        """A write ends with the same outcome for all of its chunks."""
        self._leave(op)
        op.writes = [outcome] * len(op.keys)
        self.done(op)

    def _leave(self, op: Op) -> None:
        if op.started and not op.seconds:
            op.seconds = self.clock() - op.began
        if op in self.queued:
            self.queued.remove(op)
        else:
            self.running.remove(op)

    def run(self, *kinds: OpKind) -> int:
        """End all ops (of these kinds) well, in order. Returns how many."""
        ops = [op for op in self.running + self.queued if not kinds or op.kind in kinds]
        for op in ops:
            if op.started:
                self.end(op)
            else:
                self.begin(op)
                if op in self.running:
                    self.end(op)
        return len(ops)


class DemotingLru(LruPolicy):
    """Writes nothing through; what the arena evicts goes to the first lower tier."""

    def place(self, run: Run) -> Sequence[str]:
        return ()

    def demote(self, chunk: object, from_tier: str) -> str | None:
        return self.tiers[1].name if len(self.tiers) > 1 and from_tier == "cpu" else None


class ToldOfHeat(LruPolicy):
    """Notes what it is told of heat, of which it has to have the chunks by then."""

    def setup(self) -> None:
        super().setup()
        self.heard: list[tuple[Run, list[float]]] = []

    def on_heat(self, run: Run, heat: Sequence[float]) -> None:
        assert run.chunks[-1] in list(self.victims("cpu", 1))
        self.heard.append((run, list(heat)))


class Stack:
    """A hierarchy with manual workers and a clock, and an engine's way of using it."""

    def __init__(
        self,
        slots: int,
        lower: Mapping[str, Tier] | None = None,
        policy: Callable[..., Policy] = LruPolicy,
        window: Mapping[int, int] | None = None,
        away: Mapping[str, str] | None = None,
        stores: bool = True,
        prefill: Prefill | None = None,
        tenant_quota: float | None = None,
    ) -> None:
        self.clock = Clock()
        self.workers: dict[str, ManualWorkers] = {}
        self.tiers = dict(lower or {})
        names = iter(self.tiers)

        def make_workers(tier: Tier, done: Callable[[Op], None], threads: int) -> ManualWorkers:
            workers = self.workers[next(names)] = ManualWorkers(tier, done, self.clock)
            return workers

        self.cpu = CpuTier(CpuTier.Config(capacity=slots * CHUNK, tenant_quota=tenant_quota), CHUNK)
        self.h = Hierarchy(
            self.cpu,
            self.tiers,
            lambda infos, clock: with_quotas(policy(infos, clock=clock)),
            FIRST,
            clock=self.clock,
            make_workers=make_workers,
            window=window,
            stores=stores,
            away=away,
            prefill=prefill,
            alone=False,
        )

    def settle(self) -> None:
        """Tick, and let all ops end well, until nothing moves any more."""
        self.h.tick()
        while sum(w.run() for w in self.workers.values()) or self.h.behind():
            self.h.tick()

    def begin(self, request_id: str, *runs: Run, windowed: frozenset[int] = frozenset()) -> None:
        self.h.begin(PolicyRequest(request_id, runs), windowed=windowed)

    def look(self, request_id: str, run: Run) -> list[Lookup]:
        """Every key of the run, also after a miss."""
        return [self.h.lookup(request_id, k) for k in run.chunks if isinstance(k, bytes)]

    def load(self, request_id: str, run: Run) -> list[int]:
        slots = self.h.load(request_id, [k for k in run.chunks if isinstance(k, bytes)])
        self.h.admitted(request_id, {})
        return slots

    def store(self, run: Run, request_id: str = "engine") -> list[bytes]:
        """The engine computes a run and stores what the hierarchy takes of it."""
        taken = self.h.reserve(request_id, [run])
        for k, slot in taken:
            self.cpu.arena.slot(slot)[:] = truth(k, self.h.namespace)
        keys = [k for k, _ in taken]
        self.h.stored(keys)
        return keys

    def ready(self) -> set[bytes]:
        """Keys that the arena holds, found by the CPU tier's own map."""
        return {entry.key.hash for entry in self.cpu.scan() if entry.key is not None}

    def counts(self) -> dict[str, dict[str, int]]:
        return {stats.name: dict(stats.counts) for stats in self.h.stats()}
