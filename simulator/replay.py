"""Replays a trace through a live policy class, over one tier.

The driver says to a policy what the hierarchy says, in the order that
``kvtiers.policies.base`` fixes. A request is served in no time, at its arrival: it
hits the longest leading run of its full chunks that the tier holds, and all of its
chunks are stored before the next request comes. Nothing is prefetched, as there is
nowhere to prefetch from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvtiers.policies import Policy, Run, TierInfo
from kvtiers.simulator.facts import facts_of, run_of
from kvtiers.simulator.trace import Trace, TraceRequest

TIER = "cpu"
"""What the one tier is called."""

MakePolicy = Callable[[Sequence[TierInfo], Callable[[], float]], Policy]
"""Makes a policy for tiers and a clock."""

# What a chunk of the tier's is: not there, there, there and of the request at hand.
_ABSENT, _HELD, _PINNED = 0, 1, 2
_SECOND = 1.0


@dataclass(slots=True)
class TierTally:
    """What one tier of a stack did, from the first request that is scored on.

    Attributes:
        hit_tokens: that it served.
        read_bytes: that left it.
        written_bytes: that came into it; of an SSD, its wear.

    """

    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class Tally:
    """What a replay counted, from the first request that is scored on.

    Attributes:
        requests: how many.
        input_tokens: tokens of their prompts.
        hit_tokens: tokens of their leading runs of held chunks.
        written_chunks: chunks that came into the tier.
        removed_chunks: chunks that left it.
        seconds: processor time that the replay took, warming up included.
        tiers: by name, where there was a stack of them.
        first_token: seconds from each request's arrival to its first token, likewise.

    """

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    written_chunks: int = 0
    removed_chunks: int = 0
    seconds: float = 0.0
    tiers: dict[str, TierTally] = field(default_factory=dict)
    first_token: list[float] = field(default_factory=list)

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens over all input tokens; 0 where there are none."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def replay(
    trace: Trace,
    make_policy: MakePolicy,
    capacity: int,
    score_from: int = 0,
    on_request: Callable[[int], None] = lambda _done: None,
    hits: list[int] | None = None,
) -> Tally:
    """Replay a trace through a policy, over one tier of ``capacity`` chunks.

    Args:
        trace: what to replay.
        make_policy: such as ``lambda tiers, clock: LruPolicy(tiers, clock=clock)``.
        capacity: chunks, at least 1.
        score_from: requests before this one warm up and count for nothing.
        on_request: told the number of requests done, now and then.
        hits: if given, each request's hit in chunks is appended.

    """
    begun = time.process_time()
    tier = _Tier(trace, make_policy, capacity)
    tally = Tally()
    for i, request in enumerate(trace.requests):
        if i == score_from:
            tier.tally = tally
        hit = tier.serve(i, request)
        if hits is not None:
            hits.append(hit)
        if not i % 256:
            on_request(i)
    tally.seconds = time.process_time() - begun
    return tally


class _Tier:
    """One tier of chunks and the policy that rules it."""

    def __init__(self, trace: Trace, make_policy: MakePolicy, capacity: int) -> None:
        self._chunk_bytes = trace.chunk_bytes or 1
        self._chunk_tokens = trace.chunk_tokens
        self._free = capacity
        self._states = bytearray(trace.footprint)
        self._ids = tuple(range(trace.footprint))
        self._now = 0.0
        self._asked = 0.0
        info = TierInfo(TIER, capacity * self._chunk_bytes)
        self._policy = make_policy((info,), lambda: self._now)
        self.tally = Tally()

    def serve(self, number: int, request: TraceRequest) -> int:
        """One request from its arrival to its end. Returns its hit in chunks."""
        self._now = request.arrival
        self._expire()
        policy, prompt = self._policy, self._run(request.stretches, request.tenant)
        asked = facts_of(number, request, prompt)
        policy.on_request(asked)
        hit = self._leading(request.stretches)
        if hit:
            policy.on_access(prompt.head(hit), asked, TIER)
        policy.on_start(asked)
        if hit < len(prompt):
            self._store(prompt.tail(hit), request.stretches)
        asked.output_tokens = request.output_tokens
        asked.finish_reason = request.finish_reason
        path = request.stretches + request.output_stretches
        if request.output_stretches:
            asked.runs = (self._run(path, request.tenant),)
        policy.on_finish(asked)
        if request.output_stretches:
            self._store(asked.runs[0].tail(len(prompt)), path)
        self._count(request, hit)
        return hit

    def _count(self, request: TraceRequest, hit: int) -> None:
        tally = self.tally
        tally.requests += 1
        tally.input_tokens += request.input_tokens
        tally.hit_tokens += hit * self._chunk_tokens

    def _run(self, stretches: Sequence[range], tenant: str) -> Run:
        return run_of(self._ids, stretches, self._chunk_bytes, tenant)

    def _leading(self, stretches: Sequence[range]) -> int:
        """How many chunks from the head on the tier holds."""
        found = 0
        for stretch in stretches:
            at = self._states.find(_ABSENT, stretch.start, stretch.stop)
            if at >= 0:
                return found + at - stretch.start
            found += len(stretch)
        return found

    def _store(self, run: Run, path: Sequence[range]) -> None:
        """Admit a run, make room for what is missing of it, insert what fits.

        Args:
            run: the end of a prompt.
            path: all of the prompt, which is in use meanwhile.

        """
        run = run.head(self._policy.admit(run, TIER))
        states, chunks = self._states, cast("Sequence[int]", run.chunks)
        missing = [chunk for chunk in chunks if states[chunk] == _ABSENT]
        if len(missing) > self._free:
            self._make_room(len(missing) - self._free, path)
        if len(missing) > self._free:
            run = run.head(chunks.index(missing[self._free]))
            del missing[self._free :]
        if not len(run):
            return
        for chunk in missing:
            states[chunk] = _HELD
        self._free -= len(missing)
        self.tally.written_chunks += len(missing)
        self._policy.on_insert(run, TIER)

    def _make_room(self, n: int, path: Sequence[range]) -> None:
        self._mark(path, _HELD, _PINNED)
        named = self._policy.victims(TIER, n * self._chunk_bytes)
        if unused := self._unused(cast("Iterator[int]", named), n):
            self._remove(unused)
        self._mark(path, _PINNED, _HELD)

    def _unused(self, named: Iterator[int], n: int) -> list[int]:
        states, chosen = self._states, list[int]()
        for chunk in named:
            if states[chunk] == _HELD:
                chosen.append(chunk)
                if len(chosen) == n:
                    break
        return chosen

    def _mark(self, path: Sequence[range], before: int, after: int) -> None:
        states, (old, new) = self._states, (bytes((before,)), bytes((after,)))
        for stretch in path:
            part = slice(stretch.start, stretch.stop)
            states[part] = states[part].replace(old, new)

    def _remove(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self._states[chunk] = _ABSENT
        self._free += len(chunks)
        self.tally.removed_chunks += len(chunks)
        self._policy.on_remove(chunks, TIER)

    def _expire(self) -> None:
        """Ask what to drop, a second after it was last asked."""
        if self._now - self._asked < _SECOND:
            return
        self._asked = self._now
        named = cast("Iterable[int]", self._policy.expired(TIER))
        expired = [chunk for chunk in named if self._states[chunk] == _HELD]
        if expired:
            self._remove(expired)
