"""Replays a trace through the live hierarchy, on a virtual clock.

The hierarchy and its policies are the code of a live engine; only its threads are
replaced by devices on a timeline. What is modelled is the engine, by this cost model:

- Requests arrive at the trace's times and are dealt out in turn; those of one session
  go to one replica.
- A replica starts one request at a time, the first in the queue that waits for no tier,
  and is busy with it for: its chunks in the arena over the bandwidth of ``cpu``, and its
  other tokens at ``prefill`` tokens a second. Tiers below are read meanwhile, for all who
  wait. Chunks in ``gpu`` cost nothing.
- The first token comes when that ends. Decoding takes no time from others: it stands for
  batches, whose steps a prefill hardly feels. The chunks of the prompt, and those of the
  output where the trace has them, are stored at that moment.

So the time to first token is the wait in the queue, and for tiers, and the time of the
request's own prefill.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.prefix_order import PrefixOrder
from kvtiers.simulator.facts import facts_of, run_of
from kvtiers.simulator.replay import Tally, TierTally
from kvtiers.simulator.stack import CPU, GPU, StackModel
from kvtiers.simulator.timeline import Device, SharedDevice, Timeline, VirtualWorkers
from kvtiers.simulator.trace import Trace, TraceRequest
from kvtiers.tiers import ALIGNMENT, Namespace, Tier
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import Op

MakePolicy = Callable[[Sequence[TierInfo], Callable[[], float], Callable[[Run], float]], Policy]
"""Makes a policy for tiers, a clock and what recomputing takes."""

# How often an engine that has nothing to compute looks whether what it waits for has come.
_STEP_SECONDS = 0.02
_NAMESPACE = Namespace("simulated")


def serve(
    trace: Trace,
    stack: StackModel,
    capacities: Mapping[str, int],
    make_policy: MakePolicy,
    chunk_bytes: int,
    score_from: int = 0,
    on_request: Callable[[int], None] = lambda _done: None,
) -> Tally:
    """Replay a trace through replicas with this stack of tiers.

    Args:
        trace: what to replay.
        stack: tiers and speeds.
        capacities: chunks by tier.
        make_policy: makes the policy of each replica, and of each shared tier.
        chunk_bytes: size of a chunk, rounded up to a multiple of a page.
        score_from: requests before this one warm up and count for nothing.
        on_request: told the number of requests begun, now and then.

    """
    begun = time.process_time()
    fleet = _Fleet(trace, stack, capacities, make_policy, -(-chunk_bytes // ALIGNMENT) * ALIGNMENT)
    try:
        fleet.run(score_from, on_request)
    finally:
        fleet.close()
    fleet.tally.seconds = time.process_time() - begun
    return fleet.tally


class _Fleet:
    """All replicas, what they share, and the timeline they live on."""

    def __init__(
        self,
        trace: Trace,
        stack: StackModel,
        capacities: Mapping[str, int],
        make_policy: MakePolicy,
        chunk_bytes: int,
    ) -> None:
        self.trace = trace
        self.stack = stack
        self.capacities = capacities
        self.chunk_bytes = chunk_bytes
        self.timeline = Timeline()
        self.keys = tuple(i.to_bytes(16, "big") for i in range(trace.footprint))
        self.tally = Tally(tiers={tier.name: TierTally() for tier in stack.tiers})
        shared = {tier.name: self._device(tier.name) for tier in stack.lower if tier.shared}
        self._replicas = [_Replica(self, shared, make_policy) for _ in range(stack.replicas)]
        self._devices = {id(d): d for r in self._replicas for d in r.devices.values()}
        self._homes: dict[str, _Replica] = {}
        self._left = len(trace.requests)

    def _device(self, name: str) -> Device:
        model = self.stack.named(name)
        assert model is not None
        kind = SharedDevice if model.shared else Device
        return kind(model, self.capacities[name], self.chunk_bytes, self.timeline)

    def devices(self, shared: Mapping[str, Device]) -> dict[str, Device]:
        """The lower tiers of one replica."""
        return {
            tier.name: shared[tier.name] if tier.shared else self._device(tier.name)
            for tier in self.stack.lower
        }

    def run(self, score_from: int, on_request: Callable[[int], None]) -> None:
        """Serve all requests."""
        requests = self.trace.requests

        def arrive(i: int) -> None:
            if i == score_from:
                self._begin_score()
            if not i % 64:
                on_request(i)
            if i + 1 < len(requests):
                self.timeline.at(requests[i + 1].arrival, lambda: arrive(i + 1))
            self._home(i, requests[i]).arrive(i, requests[i], i >= score_from)

        self.timeline.at(requests[0].arrival, lambda: arrive(0))
        self.timeline.run(lambda: not self._left)
        self._end_score()

    def _home(self, number: int, request: TraceRequest) -> _Replica:
        session = request.session or f"r{number}"
        if session not in self._homes:
            self._homes[session] = self._replicas[len(self._homes) % len(self._replicas)]
        return self._homes[session]

    def _begin_score(self) -> None:
        for tier in self.tally.tiers.values():
            tier.read_bytes = tier.written_bytes = 0
        for device in self._devices.values():
            device.reads.carried = device.writes.carried = 0

    def _end_score(self) -> None:
        for device in self._devices.values():
            tier = self.tally.tiers[device.config.type]
            tier.read_bytes += device.reads.carried
            tier.written_bytes += device.writes.carried
        written = sum(tier.written_bytes for tier in self.tally.tiers.values())
        self.tally.written_chunks = written // self.chunk_bytes

    def ended(self) -> None:
        """A request has ended."""
        self._left -= 1

    def close(self) -> None:
        """Release every replica's arena."""
        for replica in self._replicas:
            replica.hierarchy.close(0.0)


@dataclass(slots=True)
class _Waiting:
    request: TraceRequest
    facts: PolicyRequest
    scored: bool
    on_gpu: int = 0

    @property
    def run(self) -> Run:
        return self.facts.runs[0]


class _Replica:
    """One engine over its hierarchy. As a ``Prefill`` it says how fast it computes.

    Attributes:
        devices: its lower tiers.
        hierarchy: the live one.

    """

    def __init__(
        self, fleet: _Fleet, shared: Mapping[str, Device], make_policy: MakePolicy
    ) -> None:
        self._fleet = fleet
        self._timeline = fleet.timeline
        self._tokens = fleet.trace.chunk_tokens
        self._rate = fleet.stack.prefill
        self._gpu = _GpuCache(fleet.capacities.get(GPU, 0))
        self._waiting: dict[str, _Waiting] = {}
        self._busy_until = -math.inf
        self._woken_at = math.inf
        self.devices = fleet.devices(shared)
        slots = fleet.capacities[CPU] * fleet.chunk_bytes
        self.hierarchy = Hierarchy(
            CpuTier(CpuTier.Config(capacity=slots), fleet.chunk_bytes),
            self.devices,
            lambda infos, clock: make_policy(infos, clock, self._recompute_seconds),
            _NAMESPACE,
            clock=self._timeline.clock,
            make_workers=self._make_workers,
            alone=False,
            prefill=self,
        )

    def _make_workers(
        self, tier: Tier, done: Callable[[Op], None], _threads: int
    ) -> VirtualWorkers:
        def taken(op: Op) -> None:
            done(op)
            self._timeline.at(self._timeline.now, self._step)

        return VirtualWorkers(tier, taken, self._timeline)

    def seconds(self, run: Run) -> float | None:
        """See ``Prefill``."""
        return self._recompute_seconds(run)

    def busy(self) -> float:
        """See ``Prefill``."""
        return max(0.0, self._busy_until - self._timeline.now)

    def _recompute_seconds(self, run: Run) -> float:
        return len(run) * self._tokens / self._rate

    # A request's way --------------------------------------------------------

    def arrive(self, number: int, request: TraceRequest, scored: bool) -> None:
        """A request comes into the queue."""
        facts = facts_of(number, request, self._run(request.stretches, request.tenant))
        waiting = _Waiting(request, facts, scored)
        waiting.on_gpu = self._gpu.leading(waiting.run)
        self._waiting[facts.request_id] = waiting
        self.hierarchy.begin(facts, (waiting.run.tail(waiting.on_gpu),))
        self._step()

    def _run(self, stretches: Sequence[range], tenant: str) -> Run:
        return run_of(self._fleet.keys, stretches, self._fleet.chunk_bytes, tenant)

    def _step(self) -> None:
        """What an engine does in a step: take in answers, start who can be."""
        self.hierarchy.tick()
        if self._timeline.now >= self._busy_until:
            for waiting in list(self._waiting.values()):
                hit = self._ready(waiting)
                if hit is not None:
                    self._start(waiting, hit)
                    break
        self._plan_wake()

    def _ready(self, waiting: _Waiting) -> int | None:
        """How many chunks the request would load now; None while it waits for some."""
        if self.hierarchy.waits(waiting.facts.request_id):
            return None
        waiting.on_gpu = self._gpu.leading(waiting.run)
        found = 0
        for key in islice(waiting.run.chunks, waiting.on_gpu, None):
            assert isinstance(key, bytes)
            answer = self.hierarchy.lookup(waiting.facts.request_id, key)
            if answer in (Lookup.PENDING, Lookup.UNKNOWN):
                return None
            if answer is Lookup.MISS:
                break
            found += 1
        return found

    def _start(self, waiting: _Waiting, hit: int) -> None:
        name, n = waiting.facts.request_id, waiting.on_gpu
        del self._waiting[name]
        keys = [key for key in waiting.run.chunks[n : n + hit] if isinstance(key, bytes)]
        if keys:
            self.hierarchy.load(name, keys)
        served = self.hierarchy.admitted(name, {0: n})
        self._count(waiting, Counter({GPU: n}) + Counter(served.get(0, {})))
        cpu = self._fleet.stack.named(CPU)
        assert cpu is not None
        loading = len(keys) * self._fleet.chunk_bytes / cpu.read + (cpu.latency if keys else 0.0)
        tokens = waiting.request.input_tokens - (n + hit) * self._tokens
        self._busy_until = self._timeline.now + loading + tokens / self._rate
        self._timeline.at(self._busy_until, lambda: self._end(waiting, bool(keys)))

    def _end(self, waiting: _Waiting, loaded: bool) -> None:
        """The first token is there: store what is new, as much of it as is known."""
        facts, request = waiting.facts, waiting.request
        if loaded:
            self.hierarchy.loaded(facts.request_id)
        if waiting.scored:
            self._fleet.tally.first_token.append(self._timeline.now - request.arrival)
        path = self._run(request.stretches + request.output_stretches, request.tenant)
        taken = self.hierarchy.reserve(facts.request_id, [path] if len(path) else [])
        self.hierarchy.stored([key for key, _ in taken])
        nbytes = len(taken) * self._fleet.chunk_bytes
        self._fleet.tally.tiers[CPU].written_bytes += nbytes
        self._gpu.store(path)
        facts.runs, facts.output_tokens = (path,), request.output_tokens
        facts.finish_reason = request.finish_reason
        self.hierarchy.end(facts.request_id)
        self._fleet.ended()
        self._step()

    def _count(self, waiting: _Waiting, served: Mapping[str, int]) -> None:
        tally, tokens = self._fleet.tally, self._tokens
        nbytes = sum(n for name, n in served.items() if name != GPU) * self._fleet.chunk_bytes
        tally.tiers[CPU].read_bytes += nbytes
        if not waiting.scored:
            return
        tally.requests += 1
        tally.input_tokens += waiting.request.input_tokens
        for name, chunks in served.items():
            tally.tiers[name].hit_tokens += chunks * tokens
            tally.hit_tokens += chunks * tokens

    def _plan_wake(self) -> None:
        """Come back when something is due, or soon if somebody waits and nothing runs."""
        due = self.hierarchy.due()
        if self._waiting and self._timeline.now >= self._busy_until:
            due = min(due, self._timeline.now + _STEP_SECONDS)
        due = max(due, self._timeline.now + _STEP_SECONDS / 2)
        if due < self._woken_at or self._woken_at <= self._timeline.now:
            self._woken_at = due
            if due < math.inf:
                self._timeline.at(due, self._step)


class _GpuCache:
    """The engine's own prefix cache: the least recently used leaf goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order = PrefixOrder()

    def leading(self, run: Run) -> int:
        """How many chunks from the head on it has."""
        order = self._order
        return next((i for i, chunk in enumerate(run.chunks) if chunk not in order), len(run))

    def store(self, run: Run) -> None:
        """Take a prompt in, and drop what there is no room for."""
        if not self._capacity or not len(run):
            return
        self._order.add(run.head(self._capacity))
        surplus = len(self._order) - self._capacity
        for chunk in list(islice(self._order, max(0, surplus))):
            self._order.discard(chunk)
