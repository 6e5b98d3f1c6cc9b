"""Virtual time: what happens next, and devices that take their time for it."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import ClassVar, cast

from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.simulator.stack import TierModel
from kvtiers.tiers import ChunkKey, Entry, Tier, TierConfig, Usage
from kvtiers.tiers.base import ReadOutcome, WriteOutcome
from kvtiers.tiers.workers import Op, OpKind, call, fail, scan

_NOBODY = PolicyRequest("")
# Nobody waits for these.
_PATIENT = (OpKind.WRITE, OpKind.REMOVE)


class Timeline:
    """Things that happen at a time; those of one time in the order in which they were planned.

    Attributes:
        now: seconds.

    """

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def clock(self) -> float:
        """Seconds, for whoever wants a clock."""
        return self.now

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan something, now or later."""
        heapq.heappush(self._planned, (max(seconds, self.now), next(self._numbers), action))

    def run(self, until: Callable[[], bool]) -> None:
        """Let things happen until there is no need for more, or nothing is planned."""
        while self._planned and not until():
            self.now, _, action = heapq.heappop(self._planned)
            action()


class Pipe:
    """What carries bytes one after the other: one direction of a device.

    Attributes:
        carried: bytes so far.

    """

    def __init__(self, timeline: Timeline, bandwidth: float) -> None:
        self.carried = 0
        self._timeline = timeline
        self._bandwidth = bandwidth
        self._free = 0.0

    def carry(self, nbytes: int, latency: float) -> float:
        """When bytes that are asked for now have all come."""
        self.carried += nbytes
        begin = max(self._timeline.now + latency, self._free)
        self._free = begin + nbytes / self._bandwidth
        return self._free


class Device(Tier):
    """A tier of chunks without bytes, of a size and a speed."""

    def __init__(
        self, model: TierModel, capacity: int, chunk_bytes: int, timeline: Timeline
    ) -> None:
        config = TierConfig(type=model.name, deadline=model.deadline, threads=model.threads)
        super().__init__(config, chunk_bytes)
        self.latency = model.latency
        self.reads = Pipe(timeline, model.read)
        self.writes = Pipe(timeline, model.write)
        self._clock = timeline.clock
        self._limit = capacity * chunk_bytes
        self._held: OrderedDict[ChunkKey, None] = OrderedDict()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier``."""
        return [key in self._held for key in keys]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:  # noqa: ARG002 - a tier's signature
        """See ``Tier``; fills nothing."""
        return [ReadOutcome.HIT if key in self._held else ReadOutcome.MISS for key in keys]

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:  # noqa: ARG002 - a tier's signature
        """See ``Tier``; keeps no bytes."""
        return [self._write(key) for key in keys]

    def _write(self, key: ChunkKey) -> WriteOutcome:
        if key in self._held:
            return WriteOutcome.EXISTS
        if (len(self._held) + 1) * self.payload_bytes > self._limit:
            return WriteOutcome.REFUSED
        self._held[key] = None
        return WriteOutcome.STORED

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier``."""
        held = [key for key in keys if key in self._held]
        for key in held:
            del self._held[key]
        return len(held)

    def scan(self) -> Iterator[Entry]:
        """See ``Tier``: a replay begins with empty tiers."""
        return iter(())

    def usage(self) -> Usage:
        """See ``Tier``."""
        return Usage(len(self._held) * self.payload_bytes, len(self._held), self._limit)


class SharedDevice(Device):
    """One that several replicas use, and that keeps its bound by a policy of its own."""

    shared: ClassVar[bool] = True
    keeps_itself: ClassVar[bool] = True

    def __init__(
        self, model: TierModel, capacity: int, chunk_bytes: int, timeline: Timeline
    ) -> None:
        super().__init__(model, capacity, chunk_bytes, timeline)
        self._policy: Policy | None = None
        self._name = model.name

    def keep(
        self,
        info: TierInfo,
        make_policy: Callable[[Sequence[TierInfo], Callable[[], float]], Policy],
        *,
        stores: bool,  # noqa: ARG002 - a tier's signature
    ) -> None:
        """See ``Tier``: the first replica brings the policy."""
        if self._policy is None:
            self._policy = make_policy((info,), self._clock)

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier``; fills nothing."""
        self.served_elsewhere(keys)
        return super().read(keys, buffers)

    def served_elsewhere(self, keys: Sequence[ChunkKey]) -> None:
        """See ``Tier``."""
        held = tuple(key.hash for key in keys if key in self._held)
        if held and self._policy is not None:
            run = Run(held, chunk_bytes=self.payload_bytes)
            self._policy.on_access(run, _NOBODY, self._name)

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier``; makes room for what is new, and keeps no bytes."""
        new = [key for key in keys if key not in self._held]
        run = Run(tuple(key.hash for key in new), chunk_bytes=self.payload_bytes)
        if new and self._policy is not None:
            self._policy.admit(run, self._name)
            self._make_room(self._policy, len(new), new[0])
            self._policy.on_insert(run, self._name)
        return super().write(keys, buffers)

    def _make_room(self, policy: Policy, n: int, like: ChunkKey) -> None:
        surplus = len(self._held) + n - self._limit // self.payload_bytes
        if surplus <= 0:
            return
        victims = list(islice(policy.victims(self._name, surplus * self.payload_bytes), surplus))
        policy.on_remove(victims, self._name)
        for victim in victims:
            del self._held[replace(like, hash=cast("bytes", victim))]


class VirtualWorkers:
    """``Workers`` whose calls take the time that their device takes, on a timeline."""

    def __init__(self, tier: Tier, done: Callable[[Op], None], timeline: Timeline) -> None:
        assert isinstance(tier, Device)
        self._device = tier
        self._done = done
        self._timeline = timeline
        self._free = tier.config.threads
        # Half of the threads take no stores, as live.
        self._stores = max(1, tier.config.threads // 2)
        self._urgent: deque[Op] = deque()
        self._patient: deque[Op] = deque()

    def submit(self, op: Op) -> None:
        """See ``Workers.submit``."""
        if op.kind is OpKind.SCAN:
            scan(self._device, op, self._done, lambda: False)
            return
        (self._patient if op.kind in _PATIENT else self._urgent).append(op)
        self._start()

    def cancel(self, op: Op) -> bool:
        """See ``Workers.cancel``."""
        for queue in (self._urgent, self._patient):
            if op in queue:
                queue.remove(op)
                return True
        return False

    def close(self, timeout: float) -> None:  # noqa: ARG002 - nothing runs
        """See ``Workers.close``."""
        self._urgent.clear()
        self._patient.clear()

    def _start(self) -> None:
        while self._free and (self._urgent or (self._patient and self._stores)):
            op = (self._urgent or self._patient).popleft()
            self._take(op, -1)
            op.began, op.started = self._timeline.now, True
            self._timeline.at(self._ends(op), partial(self._end, op))

    def _take(self, op: Op, n: int) -> None:
        """Count threads that are free, and those of them that take stores."""
        self._free += n
        if op.kind in _PATIENT:
            self._stores += n

    def _ends(self, op: Op) -> float:
        device = self._device
        if self._timeline.now >= op.deadline:
            return self._timeline.now
        nbytes = len(op.keys) * device.payload_bytes
        if op.kind is OpKind.READ:
            return device.reads.carry(nbytes, device.latency)
        if op.kind is OpKind.WRITE:
            return device.writes.carry(nbytes, device.latency)
        return self._timeline.now + device.latency

    def _end(self, op: Op) -> None:
        op.seconds = self._timeline.now - op.began
        if op.began < op.deadline:
            call(self._device, op)
        else:
            fail(op, TimeoutError("its deadline passed in the queue"))
        self._take(op, 1)
        self._done(op)
        self._start()
