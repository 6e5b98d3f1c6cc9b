"""Whether chunks are sooner loaded than computed, for the run at stake.

The time to the first token of a request whose first ``n`` missing chunks are loaded is

    max(time until these are in the arena, time until the engine comes to it)
        + time to compute the rest

and the ``n`` with the least is taken. Seconds per chunk are the same all along one tier's
stretch of a prefix, and computing a chunk takes the longer the more stand before it. So
within a stretch the sum is least at one of its ends, and only those are tried: a head is
loaded and its tail computed only where they lie in tiers of different speed.

That is a guess, and the tier may be slower than it ever was. So nobody waits longer than
computing would have taken: the deterministic strategy of the ski-rental problem (Karlin,
Manasse, Rudolph, Sleator 1988), which at worst doubles the time without a cache.

What computing takes counts those before in the queue: while the engine would have been
busy with them, waiting costs nothing. Without that, all who wait for one slow tier would
give up at the same moment, and stand in line for the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtiers.policies import Run
from kvtiers.tiers.directory import Chunk, State
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.requests import RequestState
from kvtiers.tiers.residency import Residency
from kvtiers.tiers.speed import Speed
from kvtiers.tiers.workers import Op, OpKind

# A call that took, or takes, so many times as long as expected makes us think again.
LATE = 2.0
# So many seconds of the engine's time are as good as any more.
_FAR = 60.0
# For so long what a tier has to do is not added up again.
_WORK_SECONDS = 0.02
# How often a tier that is too slow is measured again, and how much of the time that takes.
_MEASURE_SECONDS = 1.0
_MEASURE_SHARE = 0.1


class Prefill(Protocol):
    """What is known of the engine's computing."""

    def seconds(self, run: Run) -> float | None:
        """Time to compute a run whose prefix is there; None if that was never measured."""

    def busy(self) -> float:
        """Seconds for which the engine computes prompts of requests that have started."""


# What is not in the arena and would come from a tier.
_COMING = (State.ABSENT, State.PROMOTING)


@dataclass(eq=False)
class _Stretch:
    """Missing chunks that follow one another in a prompt and come from one tier.

    Attributes:
        tier: reads them, or would.
        start, end: where they stand in their run.
        keys: of them all.
        awaited: those that are being read.

    """

    tier: LowerTier
    start: int
    end: int = 0
    keys: list[bytes] = field(default_factory=list)
    awaited: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class _Work:
    """What a tier has to do, as of a moment ago: seconds before each op, by its number.

    Added up anew for each of thousands that wait, it would stop the engine for seconds.
    """

    at: float
    before: dict[int, float] = field(default_factory=dict)
    total: float = 0.0


class Worth:
    """Weighs loading against computing. The hierarchy's thread only.

    Args:
        residency: what is where.
        requests: the hierarchy's, by id, in the order of arrival.
        prefill: None if everything that can be loaded shall be.

    """

    def __init__(
        self,
        residency: Residency,
        requests: Mapping[str, RequestState],
        prefill: Prefill | None,
    ) -> None:
        self._residency = residency
        self._requests = requests
        self._prefill = prefill
        # Requests that are to compute what tiers hold, until they start.
        self._computing: dict[str, RequestState] = {}
        # Chunks that a tier was too slow for: tier -> what to measure it with, one a thread.
        self._samples: dict[str, dict[bytes, None]] = {}
        self._measured_at: dict[str, float] = {}
        self._work: dict[str, _Work] = {}

    def patience(self, request: RequestState, most: float) -> float:
        """Seconds after which computing would have brought the request as far, or ``most``."""
        own = self._alone(request)
        if own is None:
            return most
        return min(most, own + self._engine(self._before(request), most))

    def too_slow(self, request: RequestState) -> list[bytes]:
        """Chunks that the request wants or awaits, and that are sooner computed."""
        if self._prefill is None or not (request.wanted or request.awaited):
            return []
        stretches = self._stretches(request)
        one_group = len(request.beyond_gpu) == 1 and not request.windowed
        queue = self._engine(self._ahead_of(request))
        best, least = len(stretches), math.inf
        # From the longest load on: at a tie the engine's time is saved.
        for loaded in range(len(stretches), -1, -1) if one_group else (len(stretches), 0):
            compute = self._compute(request, stretches[loaded:], one_group)
            if compute is None:
                return []
            seconds = max(self._landing(stretches[:loaded]), queue) + compute
            if seconds < least:
                best, least = loaded, seconds
        return [key for stretch in stretches[best:] for key in stretch.keys]

    def slow_to_say(self, request: RequestState) -> list[tuple[LowerTier, Op]]:
        """Lookups under way after which, and after a load, computing would have been quicker."""
        own = self._alone(request)
        if own is None or not request.unanswered:
            return []
        compute = own + self._engine(self._ahead_of(request))
        return [
            (tier, op)
            for tier in self._residency.lower
            for op in tier.ops
            if op.kind is OpKind.CONTAINS
            and op.request_id == request.facts.request_id
            and not op.given_up
            and tier.lookups.known
            and tier.reads.known
            and self._after(tier, op) + self._to_read(tier, len(op.keys)) > compute
        ]

    def computes(self, request: RequestState, keys: Iterable[bytes]) -> None:
        """The request computes these chunks although a tier holds them: count, and measure."""
        self._computing[request.facts.request_id] = request
        counts: Counter[str] = Counter()
        for key in keys:
            chunk = self._residency.get(key)
            tier = self._tier_of(chunk) if chunk is not None else None
            if chunk is None or tier is None or chunk.state is State.READY:
                continue
            counts[tier.name] += 1
            samples = self._samples.setdefault(tier.name, {})
            if chunk.state is State.ABSENT and len(samples) < tier.tier.config.threads:
                samples[key] = None
        for tier in self._residency.lower:
            tier.counts["recomputed"] += counts[tier.name]

    def to_measure(self) -> Iterator[list[bytes]]:
        """What to read for nobody, so that a slow tier is noticed to be quick again.

        Seldom: once a second, and for a tenth of the time.
        """
        now = self._residency.clock()
        for name, keys in self._samples.items():
            tier = self._residency.named(name)
            if tier is None or tier.reading:
                # What is read for others measures it as well.
                continue
            # By its last read, so that one that was quick is soon followed by others.
            seconds = tier.reads.last * self._residency.chunk_bytes
            pause = max(_MEASURE_SECONDS, seconds / _MEASURE_SHARE)
            if now >= self._measured_at.get(name, -math.inf) + pause:
                self._measured_at[name] = now
                yield list(keys)
        self._samples.clear()

    # Computing --------------------------------------------------------------

    def _alone(self, request: RequestState) -> float | None:
        """Seconds to compute all of its prompt, had it the engine to itself."""
        if request.alone is None:
            request.alone = self._longest(request.beyond_gpu)
        return request.alone

    def _longest(self, runs: Iterable[Run]) -> float | None:
        """Seconds to compute the tokens that these runs of several groups share."""
        if self._prefill is None:
            return None
        times = [self._prefill.seconds(run) for run in runs]
        known = [seconds for seconds in times if seconds is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def _engine(self, before: Iterable[RequestState], most: float = _FAR) -> float:
        """Seconds until the engine has computed what it is at, and these; or ``most``."""
        assert self._prefill is not None
        seconds = self._prefill.busy()
        for request in before:
            if seconds >= most:
                return most
            seconds += self._alone(request) or 0.0
        return seconds

    def _before(self, request: RequestState) -> Iterator[RequestState]:
        """Who came earlier and waits as well."""
        for other in self._requests.values():
            if other is request:
                return
            if not other.started:
                yield other

    def _ahead_of(self, request: RequestState) -> Iterator[RequestState]:
        """Who will keep the engine busy when the request has its chunks.

        For one that the engine has not come to, all that came earlier: as without a cache.
        """
        if not request.considered:
            yield from self._before(request)
            return
        for name, other in list(self._computing.items()):
            if other.started or self._requests.get(name) is not other:
                del self._computing[name]
            elif other is not request:
                yield other

    def _compute(
        self, request: RequestState, left: Sequence[_Stretch], one_group: bool
    ) -> float | None:
        """Seconds to compute what is not loaded, and all that builds on it."""
        if not left:
            return self._longest(())
        if not one_group:
            # One group without its chunks is enough for all to be computed.
            return self._alone(request)
        (run,) = request.beyond_gpu
        return self._longest([run.head(left[-1].end).tail(left[0].start)])

    # Loading ----------------------------------------------------------------

    def _stretches(self, request: RequestState) -> list[_Stretch]:
        """What the request waits for, in the order of its prompt."""
        stretches: list[_Stretch] = []
        for run in request.beyond_gpu:
            current: _Stretch | None = None
            for index, key in enumerate(run.chunks):
                if key not in request.awaited and key not in request.wanted:
                    continue
                chunk = self._residency.get(key)
                tier = self._tier_of(chunk) if chunk is not None else None
                if chunk is None or tier is None or chunk.state not in _COMING:
                    continue
                if current is None or current.tier is not tier:
                    current = _Stretch(tier, index)
                    stretches.append(current)
                current.end = index + 1
                current.keys.append(chunk.key)
                if chunk.state is State.PROMOTING:
                    current.awaited.add(chunk.key)
        return stretches

    def _tier_of(self, chunk: Chunk) -> LowerTier | None:
        """The tier that reads the chunk now, or would."""
        if chunk.state is State.PROMOTING:
            for tier in self._residency.lower:
                if tier.is_read(chunk.key):
                    return tier
        return self._residency.source(chunk)

    def _landing(self, stretches: Sequence[_Stretch]) -> float:
        """Seconds until these are in the arena."""
        by_tier: dict[str, list[_Stretch]] = {}
        for stretch in stretches:
            by_tier.setdefault(stretch.tier.name, []).append(stretch)
        return max(map(self._seconds, by_tier.values()), default=0.0)

    def _seconds(self, of_tier: Sequence[_Stretch]) -> float:
        tier = of_tier[0].tier
        to_read = sum(len(stretch.keys) - len(stretch.awaited) for stretch in of_tier)
        if to_read:
            return self._to_read(tier, to_read)
        awaited = set().union(*(stretch.awaited for stretch in of_tier))
        last = None
        for op in tier.ops:
            if op.kind is OpKind.READ and any(key.hash in awaited for key in op.keys):
                last = op
        return self._after(tier, last) if last is not None else 0.0

    def _to_read(self, tier: LowerTier, chunks: int) -> float:
        """Seconds until so many more chunks were read, behind what the tier has to do."""
        size = self._residency.chunk_bytes
        parts = tier.batches(range(chunks))
        fresh = [_expected(tier.reads, len(part) * size) for part in parts]
        last = next(reversed(tier.ops), None)
        busy = self._before_op(tier, last) + self._left(tier, last) if last is not None else 0.0
        return self._side_by_side(tier, max(fresh, default=0.0), sum(fresh) + busy)

    def _after(self, tier: LowerTier, op: Op) -> float:
        """Seconds until an op under way has ended, and so all before it."""
        left = self._left(tier, op)
        return self._side_by_side(tier, left, left + self._before_op(tier, op))

    def _before_op(self, tier: LowerTier, op: Op) -> float:
        """What the ops before one under way still take, all of them together."""
        now = self._residency.clock()
        work = self._work.get(tier.name)
        if work is None or now >= work.at + _WORK_SECONDS:
            work = self._work[tier.name] = _Work(now)
        if op.number not in work.before:
            for other in tier.ops:
                if other.number not in work.before:
                    work.before[other.number] = work.total
                    work.total += self._left(tier, other)
        # Those before the first that is left have ended meanwhile.
        return work.before[op.number] - work.before[next(iter(tier.ops)).number]

    @staticmethod
    def _side_by_side(tier: LowerTier, longest: float, work: float) -> float:
        """On the tier's threads: no sooner than the longest, nor than all work shared out."""
        return max(longest, work / tier.tier.config.threads)

    def _left(self, tier: LowerTier, op: Op) -> float:
        """What an op still takes, going by what such ops took.

        One that has run twice as long as that, or of which nobody knows, takes as long
        again: it hangs for all we know, and its thread with it.
        """
        nbytes = len(op.keys) * self._residency.chunk_bytes
        if op.kind is OpKind.READ:
            seconds = _expected(tier.reads, nbytes)
        elif op.kind is OpKind.CONTAINS:
            seconds = _expected(tier.lookups, len(op.keys))
        elif op.kind is OpKind.WRITE and op.started:
            # One that has not begun lets loads go first.
            seconds = _expected(tier.writes, nbytes)
        else:
            return 0.0
        elapsed = self._residency.clock() - op.began if op.started else 0.0
        return max(0.0, seconds - elapsed) if elapsed <= LATE * seconds else elapsed


def _expected(speed: Speed, amount: int) -> float:
    """What a call should take; no time if that was never measured, so that it is tried."""
    return speed.seconds(amount) if speed.known else 0.0
