"""A tier below the arena, as the hierarchy sees it: budget, breaker, figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvtiers.policies import ChunkId
from kvtiers.tiers.base import ReadOutcome, Tier, WriteOutcome
from kvtiers.tiers.breaker import Breaker
from kvtiers.tiers.findings import Findings
from kvtiers.tiers.foreign import Foreign
from kvtiers.tiers.speed import Speed
from kvtiers.tiers.workers import Op, OpKind, Workers

T = TypeVar("T")

# One op reads or writes about this much: enough to be efficient, little enough
# that the threads of a tier share a prefix evenly.
_OP_BYTES = 16 * 1024 * 1024
# Where no bound says how many chunks a tier can hold.
_MOST_HINTS = 1 << 20


@dataclass(eq=False)
class LowerTier:
    """State that the hierarchy keeps per lower tier. One thread: the hierarchy's.

    Attributes:
        name: as configured.
        bit: the tier's bit in ``Chunk.where``.
        tier: the tier itself. Only its workers call it.
        workers: its threads.
        breaker: whether it may be asked at all.
        store_breaker: whether it may be stored in too: a disk that is read-only, or a server
            that takes no writes for now, serves what it has all the same.
        deadline: seconds for a call.
        capacity: bytes it may hold, None if unbounded.
        headroom: share of the capacity to keep free.
        read_only: nothing is stored in it, and nothing is removed to keep its bound.
        high, low: evict above ``high`` bytes, down to ``low``.
        store_budget: bytes of stores that may be queued or running, so that a
            tier that can't keep up never holds the arena hostage.
        chunk_bytes: space one chunk takes in it.
        used: bytes it is known to hold, found at start and written since.
        storing: bytes of stores under way.
        backlog: keys that wait for room to be stored, first come first.
        removing: an eviction is under way.
        emptying: more is to be evicted than one op removes.
        refused: bytes it had no room for since the last eviction, below its bound or
            not: others may fill the same disk.
        stale: somebody else removes chunks: what is known of it is not so any more.
        unseen: what it holds was never looked through, or not since it was away.
        scanning: what it holds is being looked through.
        since: what it was found to hold since that began, None if it is of no interest.
        found: what a scan has found, until all of it is taken in.
        sweep: what is left to do of that, and of forgetting what was not found.
        strange: what it holds is not known yet, so nothing is evicted.
        scanned_at: when that last began.
        scan_seconds: how long it took.
        wrote: something was stored since then.
        reading: how many ops read each key now; such a chunk is no victim.
        foreign: chunks of other namespaces that a scan found.
        hints: chunks that a tier which keeps itself is believed to hold.
        evicted: chunks that it has evicted by itself, as far as they were counted.
        ops: every op that has not come back, in the order of submission.
        handed: how many ops there ever were.
        counts: figures since they were last taken.
        lookups, reads, writes: measured speeds, of chunks asked for and of bytes.
        logged: kinds of errors that the log has seen already.
        submitted: called after each op that was handed over.

    """

    name: str
    bit: int
    tier: Tier
    workers: Workers
    breaker: Breaker
    store_breaker: Breaker
    deadline: float
    capacity: int | None
    store_budget: int
    chunk_bytes: int
    headroom: float
    submitted: Callable[[], None]
    used: int = 0
    storing: int = 0
    backlog: dict[bytes, None] = field(default_factory=dict)
    read_only: bool = False
    removing: bool = False
    emptying: bool = False
    refused: int = 0
    stale: bool = False
    unseen: bool = False
    scanning: bool = False
    since: set[bytes] | None = None
    found: Findings | None = None
    sweep: Iterator[None] | None = None
    strange: bool = False
    scanned_at: float = float("-inf")
    scan_seconds: float = 0.0
    wrote: bool = False
    reading: Counter[bytes] = field(default_factory=Counter)
    foreign: Foreign = field(default_factory=Foreign)
    hints: int = 0
    evicted: int = 0
    ops: dict[Op, None] = field(default_factory=dict)
    handed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    logged: set[str] = field(default_factory=set)
    lookups: Speed = field(default_factory=Speed)
    reads: Speed = field(default_factory=Speed)
    writes: Speed = field(default_factory=Speed)

    @property
    def bound_is_kept(self) -> bool:
        """Whether the tier evicts by itself, so that nobody here has to."""
        return self.tier.keeps_itself and self.capacity is not None

    @property
    def most_hints(self) -> int:
        """Chunks that it can hold, and so that are worth remembering of it."""
        return _MOST_HINTS if self.capacity is None else self.capacity // self.chunk_bytes

    def breaker_of(self, kind: OpKind) -> Breaker:
        """The one that hears of such a call."""
        return self.store_breaker if kind is OpKind.WRITE else self.breaker

    @property
    def takes_stores(self) -> bool:
        """Whether stores may be submitted."""
        return self.breaker.closed() and self.store_breaker.would_allow()

    @property
    def high(self) -> float:
        """Bytes above which the hierarchy evicts. Half the headroom is for what comes meanwhile.

        Room for a chunk is kept always: a tier without is offered none, and would
        never be asked to make some.
        """
        if self.capacity is None or self.bound_is_kept:
            return math.inf
        return min(self.capacity * (1 - self.headroom / 2), self.capacity - self.chunk_bytes)

    @property
    def low(self) -> float:
        """Bytes that an eviction goes down to."""
        if self.capacity is None or self.bound_is_kept:
            return math.inf
        return min(self.capacity * (1 - self.headroom), self.high)

    @property
    def looking(self) -> bool:
        """Whether what a scan finds is still being found, or taken in."""
        return self.scanning or self.sweep is not None

    def submit(self, op: Op) -> None:
        """Hand an op to the tier's threads and remember it."""
        self.ops[op] = None
        op.number, self.handed = self.handed, self.handed + 1
        for key in op.keys if op.kind is OpKind.READ else ():
            self.reading[key.hash] += 1
        if op.kind is OpKind.WRITE:
            self.storing += len(op.keys) * self.chunk_bytes
        self.workers.submit(op)
        self.submitted()

    def returned(self, op: Op) -> None:
        """An op came back or was cancelled."""
        self.ops.pop(op, None)
        for key in op.keys if op.kind is OpKind.READ else ():
            self.reading[key.hash] -= 1
            if not self.reading[key.hash]:
                del self.reading[key.hash]
        if op.kind is OpKind.WRITE:
            self.storing -= len(op.keys) * self.chunk_bytes

    def measure(self, op: Op) -> None:
        """An op came back: what it says of the tier's speed, also if nobody waited for it.

        Nothing if it did not do all that was asked: a miss is quicker than a hit.
        """
        nbytes = len(op.keys) * self.tier.payload_bytes
        if op.error is not None or not op.keys:
            return
        if op.kind is OpKind.CONTAINS:
            self.lookups.observe(len(op.keys), op.seconds)
        elif op.kind is OpKind.READ and set(op.reads) == {ReadOutcome.HIT}:
            self.reads.observe(nbytes, op.seconds)
        elif op.kind is OpKind.WRITE and set(op.writes) == {WriteOutcome.STORED}:
            self.writes.observe(nbytes, op.seconds)

    def cancel(self, op: Op) -> bool:
        """Take back an op that has not begun. Its pins are the caller's to release."""
        if not self.workers.cancel(op):
            return False
        self.returned(op)
        return True

    def batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """Chunks in portions for one op each, so that the tier's threads share them."""
        size = self._portion(len(items))
        return (items[start : start + size] for start in range(0, len(items), size))

    def _portion(self, chunks: int) -> int:
        most = max(1, _OP_BYTES // self.chunk_bytes)
        even = -(-chunks // max(1, self.tier.config.threads))
        return max(1, min(most, even))

    def read_seconds(self, nbytes: int) -> float:
        """Estimate for reading that much, if nobody else does; 0 before it was measured."""
        return self._side_by_side(self.reads, nbytes)

    def write_seconds(self, nbytes: int) -> float:
        """The same for writing."""
        return self._side_by_side(self.writes, nbytes)

    def _side_by_side(self, speed: Speed, nbytes: int) -> float:
        """In ops on all threads, as ``batches`` cuts it."""
        payload = self.tier.payload_bytes
        chunks = max(1.0, nbytes / payload)
        portion = self._portion(math.ceil(chunks))
        seconds = speed.seconds(portion * payload)
        return max(seconds, seconds * chunks / portion / max(1, self.tier.config.threads))

    def overdue(self, now: float) -> list[Op]:
        """Lookups and loads whose deadline has passed and that were not given up yet."""
        return [op for op in self.ops if op.deadline <= now and not op.given_up]

    def due(self) -> float:
        """When the next op is overdue; infinite if none ever is."""
        return min((op.deadline for op in self.ops if not op.given_up), default=math.inf)

    def is_read(self, chunk_id: ChunkId) -> bool:
        """Whether an op reads the chunk now: then it is no victim."""
        return isinstance(chunk_id, bytes) and self.reading[chunk_id] > 0

    def store_room(self) -> int:
        """Chunks that may be queued for storing now."""
        budget = self.store_budget - self.storing
        if self.capacity is not None and not self.bound_is_kept:
            budget = min(budget, self.capacity - self.used - self.storing)
        return max(0, budget // self.chunk_bytes)

    def unbegun_for_requests(self) -> list[Op]:
        """Lookups and loads that have not begun: requests wait for them."""
        kinds = (OpKind.CONTAINS, OpKind.READ)
        return [op for op in self.ops if op.kind in kinds and not (op.started or op.given_up)]

    def queued_stores(self) -> list[Op]:
        """Stores that have not begun, the last queued first: it would wait longest."""
        return [op for op in reversed(self.ops) if op.kind is OpKind.WRITE and not op.started]


MakeWorkers = Callable[[Tier, Callable[[Op], None], int], Workers]
