"""What the tiers below the first take, and when: placement by benefit, around any policy.

One index for all tiers. A copy of a chunk in a tier is expected to save

    P(it is used while it would last there) x (seconds to compute - seconds to read it)

and costs its write, and the like expected of what makes room for it. So the boundary of
a tier is a threshold, which rises with what it holds, and a chunk goes where the rest is
largest, or nowhere. Chunks of an engine are of one size: per chunk is per byte. See
docs/design/placement.md for where each term comes from.

Three rules say what is admitted (``all`` is the inner policy's own), and two say when it
is written: as it comes, once it is admitted (write through), or as the first tier evicts
it (demotion). Which chunk leaves a tier is always the inner policy's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtiers.policies.around import PolicyAround
from kvtiers.policies.base import ChunkId, Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.placement_history import Past, UseHistory

Admission = Literal["all", "reused", "worth"]
WriteWhen = Literal["through", "on_eviction"]

# Of a write's time, for a load that comes meanwhile: loads go first, so that it waits for
# what is left of the write at most.
_WRITE_SHARE = 0.5
# Uses that prove a chunk: the one it was computed for, and another.
_REUSED = 2
# Chunks that are remembered, where no capacity says how many matter.
_MOST_REMEMBERED = 1 << 20
# Of reading, for how busy a tier is.
_READING_SECONDS = 60.0
# For so long it is not asked again what a tier saves, and would give up for a chunk.
_ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """How the tiers below the first are filled.

    Attributes:
        admission: ``all`` as the policy says, which by default is everything; ``reused``
            chunks that were asked for twice; ``worth`` what is expected to pay, asked anew
            at each use of a chunk and when it is evicted.
        write: ``through`` as soon as they are admitted; ``on_eviction`` not before the
            first tier evicts them.

    """

    admission: Admission = "all"
    write: WriteWhen = "through"


def with_placement(policy: Policy, placement: Placement) -> Policy:
    """The policy under these rules; as it is where they say nothing, or there is one tier."""
    if placement == Placement() or len(policy.tiers) < 2:
        return policy
    return PlacementPolicy(policy, placement)


class PlacementPolicy(PolicyAround):
    """Admission and demotion by what copies in lower tiers are worth.

    Args:
        inner: says what is evicted, and all else.
        placement: the rules.

    """

    def __init__(self, inner: Policy, placement: Placement) -> None:
        self.placement = placement
        super().__init__(inner)

    def setup(self) -> None:
        """What is known of chunks, and of how fast tiers fill."""
        names = [tier.name for tier in self.tiers]
        self._below = {name: names[i + 1 :] for i, name in enumerate(names)}
        self._lower = {tier.name: _Boundary(tier) for tier in self.tiers[1:]}
        # What the first tier holds and a lower one was given the next chunk of: without it,
        # whoever asks would not get that far.
        self._before: dict[ChunkId, str] = {}
        rules = self.placement
        self._remembers_before = rules.write == "on_eviction" and rules.admission != "all"
        self._history: UseHistory | None = None
        self._chunk_bytes = 1

    # What happens -----------------------------------------------------------

    def on_request(self, request: PolicyRequest) -> None:
        """Every chunk of a prompt is used, wherever it is, or computed anew."""
        for run in request.runs:
            self._uses(run).use(run)
        super().on_request(request)

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
        """Take note of reads, and of uses by requests of which only the hits are known."""
        if not request.runs:
            self._uses(run).use(run)
        if tier in self._lower:
            self._lower[tier].read(len(run) * run.chunk_bytes, self.clock())
        super().on_access(run, request, tier)

    def on_insert(self, run: Run, tier: str) -> None:
        """Take note of chunks that no prompt named, and of how fast a tier fills."""
        if tier in self._lower:
            self._lower[tier].came(len(run) * run.chunk_bytes, self.clock())
        else:
            self._uses(run).learn(run)
        super().on_insert(run, tier)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """A tier that gives up chunks is full."""
        if tier in self._lower:
            self._lower[tier].gave_up()
        else:
            for chunk in chunks:
                self._before.pop(chunk, None)
        super().on_remove(chunks, tier)

    # What to do -------------------------------------------------------------

    def place(self, run: Run) -> Sequence[str]:
        """Where the inner policy says, if anything of the run may be written at once."""
        if self.placement.write == "on_eviction":
            return []
        return self.inner.place(run)

    def place_again(self, run: Run) -> Sequence[str]:
        """What has just proved its use goes where the inner policy places new chunks."""
        if self.placement.write == "on_eviction" or self.placement.admission == "all":
            return self.inner.place_again(run)
        return self.inner.place(run)

    def admit(self, run: Run, tier: str) -> int:
        """As many chunks from the head as the rule, and the inner policy, let in."""
        if tier not in self._lower:
            return self.inner.admit(run, tier)
        most = self._admitted(run, tier)
        admitted = self.inner.admit(run.head(most), tier) if most else 0
        if admitted and run.parent is not None and self._remembers_before:
            self._before[run.parent] = tier
            if len(self._before) > _MOST_REMEMBERED:
                # Of some the first tier holds nothing any more, and nobody will say so.
                del self._before[next(iter(self._before))]
        return admitted

    def demote(self, chunk: ChunkId, from_tier: str) -> str | None:
        """The tier below where the chunk is worth most, if it is admitted to any."""
        below = self._below[from_tier]
        if self.placement.admission == "all":
            return self.inner.demote(chunk, from_tier) or next(iter(below), None)
        run, past = self._one(chunk)
        if (before := self._before.get(chunk)) in below:
            return before
        if past is None:
            return None
        if self.placement.admission == "reused":
            return next(iter(below), None) if past.uses >= _REUSED else None
        worths = {name: self._worths(run, name)[0] for name in below}
        best = max(worths, key=worths.__getitem__, default=None)
        return best if best is not None and worths[best] > 0 else None

    # Rules ------------------------------------------------------------------

    def _admitted(self, run: Run, tier: str) -> int:
        if self.placement.admission == "all":
            return len(run)
        before = self._before
        needed = [i for i, chunk in enumerate(run.chunks) if before.get(chunk) == tier]
        least = needed[-1] + 1 if needed else 0
        rest = run.tail(least)
        if self.placement.admission == "worth":
            return least + _leading(worth > 0 for worth in self._worths(rest, tier))
        past = self._uses(run).past
        return least + _leading(
            known is not None and known.uses >= _REUSED for known in map(past, rest.chunks)
        )

    def _worths(self, run: Run, tier: str) -> list[float]:
        """Seconds that a copy of each chunk in the tier is expected to save, less its costs."""
        if not len(run):
            return []
        boundary, now = self._lower[tier], self.clock()
        lasts = boundary.lasts(now)
        if now >= boundary.due:
            boundary.due = now + _ASK_SECONDS
            boundary.saved.clear()
            boundary.floor = self._floor(tier, lasts) if boundary.full else 0.0
        saved = self._saved(run, tier)
        threshold = boundary.floor * saved + boundary.write_cost(run.chunk_bytes, now)
        return [chance * saved - threshold for chance in self._chances(run, lasts)]

    def _saved(self, run: Run, tier: str) -> float:
        """Seconds a chunk that reading the prefix up to the run's end saves over computing it."""
        n, boundary = run.start + len(run), self._lower[tier]
        saved = boundary.saved.get((n, run.group))
        if saved is None:
            prefix = Run(range(n), 0, run.chunk_bytes, run.group)
            read = boundary.tier.read_seconds(n * run.chunk_bytes)
            saved = max(0.0, self.recompute_seconds(prefix) - read) / n
            boundary.saved[n, run.group] = saved
        return saved

    def _chances(self, run: Run, within: float) -> Sequence[float]:
        known = self.inner.reuse(run, within)
        if known is not None:
            return known
        history, now = self._uses(run), self.clock()
        chances: list[float] = []
        # Neighbours mostly were used together, and as often.
        last: tuple[int, int] | None = None
        for chunk in run.chunks:
            past = history.past(chunk)
            if past is None:
                chances.append(0.0)
            elif last == (past.uses, past.ticks):
                chances.append(chances[-1])
            else:
                chances.append(history.chance(past.uses, past.age(now), within))
            last = (past.uses, past.ticks) if past is not None else None
        return chances

    def _floor(self, tier: str, lasts: float) -> float:
        """Probability that what a full tier would give up next is used again."""
        victim = next(self.inner.victims(tier, self._chunk_bytes), None)
        run, past = self._one(victim)
        return self._chances(run, lasts)[0] if past is not None else 0.0

    def _one(self, chunk: ChunkId) -> tuple[Run, Past | None]:
        """A chunk as a run, with what is remembered of it."""
        past = self._history.past(chunk) if self._history is not None else None
        position, group = (past.position, past.group) if past is not None else (0, 0)
        return Run((chunk,), position, self._chunk_bytes, group), past

    def _uses(self, run: Run) -> UseHistory:
        """The history, made when the size of a chunk, and so of the tiers, is known."""
        self._chunk_bytes = run.chunk_bytes
        if self._history is None:
            capacities = [tier.capacity for tier in self.tiers]
            held = sum(capacity or 0 for capacity in capacities) // run.chunk_bytes
            known = None not in capacities and held < _MOST_REMEMBERED
            self._history = UseHistory(self.clock, max(1, held) if known else _MOST_REMEMBERED)
        return self._history


class _Boundary:
    """How fast a tier fills, how busy it is, and what it would give up.

    Attributes:
        tier: what is known of it.
        full: it gave up chunks for others.
        floor: probability that the next of these is used again.
        saved: seconds a chunk that reading so many of a group saves over computing them.
        due: when these two are to be asked again.

    """

    def __init__(self, tier: TierInfo) -> None:
        self.tier = tier
        self.full = False
        self.floor = 0.0
        self.saved: dict[tuple[int, int], float] = {}
        self.due = -math.inf
        self._written = _Rate(tier.capacity)
        self._reading = _Rate(_READING_SECONDS)

    def came(self, nbytes: int, now: float) -> None:
        """So much was written."""
        self._written.add(nbytes, now)

    def read(self, nbytes: int, now: float) -> None:
        """So much was read for a request."""
        self._reading.add(self.tier.read_seconds(nbytes), now)

    def gave_up(self) -> None:
        """It evicted something, or lost it."""
        self.full = True

    def lasts(self, now: float) -> float:
        """Seconds that what comes now stays if it is not used: the tier's turnover."""
        capacity, rate = self.tier.capacity, self._written.per_second(now)
        if capacity is None or not rate or not (self.full or self._written.total >= capacity):
            return math.inf
        return capacity / rate

    def write_cost(self, nbytes: int, now: float) -> float:
        """Seconds that a write of so much is expected to delay loads."""
        reading = min(1.0, self._reading.per_second(now))
        return _WRITE_SHARE * reading * self.tier.write_seconds(nbytes)


class _Rate:
    """How much comes in a second, over the last ``window`` of it, more or less.

    Attributes:
        total: what came, of which the older part counts half again and again.

    """

    def __init__(self, window: float | None) -> None:
        self.total = 0.0
        self._window = window
        self._since: float | None = None

    def add(self, amount: float, now: float) -> None:
        if self._since is None:
            self._since = now
        self.total += amount
        if self._window is not None and self.total > 2 * self._window:
            self.total, self._since = self.total / 2, now - (now - self._since) / 2

    def per_second(self, now: float) -> float:
        if self._since is None or now <= self._since:
            return 0.0
        return self.total / (now - self._since)


def _leading(admitted: Iterable[bool]) -> int:
    n = 0
    for yes in admitted:
        if not yes:
            break
        n += 1
    return n
