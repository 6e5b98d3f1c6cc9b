"""How often chunks are asked for, and how soon again: what placement goes by.

What is known of a chunk is one number in one of two *generations*: the young one takes
what is used now, and when it is full it becomes the old one, whose rest is forgotten. So
a chunk is remembered for at least as long as it takes so many others to be used, as with
the ghosts of 2Q (Johnson, Shasha 1994), and nothing has to be kept in order.

Every chunk that is remembered is a trial: used again after so long, or forgotten without.
The trials of chunks with equally many uses give the probability that such a chunk is used
again (Laplace's rule of succession), also for one that was left alone for a while: only
trials that lasted as long count then (the estimator of Kaplan and Meier 1958, with gaps
by powers of two). Of the young generation, whose trials have hardly begun, half count, as
in a life table (Cutler, Ederer 1958).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.sharded import ShardedDict

# Uses beyond so many say no more.
_MOST_USES = 7
_TICKS = 8  # a second
_GAPS = 48
# The widths of what is packed into a number, but for the time.
_USES_BITS, _GROUP_BITS, _POSITION_BITS = 3, 5, 24
# Entries that ``give_back`` forgets in a step.
_STEP = 2048


class Past(NamedTuple):
    """What is remembered of a chunk.

    Attributes:
        uses: requests that asked for it, 7 for more.
        group: its KV-cache group.
        position: chunks before it in its prefix.
        ticks: when it was last asked for, in eighths of a second.

    """

    uses: int
    group: int
    position: int
    ticks: int

    def age(self, now: float) -> float:
        """Seconds since it was last asked for."""
        return max(0.0, now - self.ticks / _TICKS)


class UseHistory:
    """Uses of chunks, and the odds of the next one. One thread at a time: the policy's.

    Args:
        clock: seconds.
        room: chunks of a generation.

    """

    def __init__(self, clock: Callable[[], float], room: int) -> None:
        self._clock = clock
        self._room = room
        self._young: ShardedDict[ChunkId, int] = ShardedDict()
        self._old: ShardedDict[ChunkId, int] = ShardedDict()
        self._leaving: Iterator[None] = iter(())
        # By uses: chunks in each generation, trials that ended without another use, and
        # those that ended with one by the power of two of their gap.
        self._in_young = [0] * (_MOST_USES + 1)
        self._in_old = [0] * (_MOST_USES + 1)
        self._unused = [0.0] * (_MOST_USES + 1)
        self._gaps = [[0.0] * _GAPS for _ in range(_MOST_USES + 1)]

    def use(self, run: Run) -> None:
        """A request asks for these chunks. About half a microsecond a chunk."""
        now = int(self._clock() * _TICKS)
        young, old, in_young = self._young, self._old, self._in_young
        for position, chunk in enumerate(run.chunks, run.start):
            packed = young.get(chunk)
            if packed is not None:
                in_young[packed & _MOST_USES] -= 1
            elif packed := old.pop(chunk, 0):
                self._in_old[packed & _MOST_USES] -= 1
            uses = 1
            if packed:
                before = packed & _MOST_USES
                self._gaps[before][_gap(now - _ticks(packed))] += 1
                uses = min(before + 1, _MOST_USES)
            in_young[uses] += 1
            young[chunk] = _pack(uses, run.group, position, now)
        if sum(in_young) >= self._room:
            self._turn()
        for _ in range(1 + len(run) // _STEP):
            next(self._leaving, None)

    def learn(self, run: Run) -> None:
        """These chunks exist, though no request was seen to ask for them."""
        for i, chunk in enumerate(run.chunks):
            if self.past(chunk) is None:
                self.use(run.tail(i).head(1))

    def past(self, chunk: ChunkId) -> Past | None:
        """What is remembered of the chunk."""
        packed = self._young.get(chunk) or self._old.get(chunk)
        return None if packed is None else _unpack(packed)

    def chance(self, uses: int, age: float, within: float) -> float:
        """Probability that a chunk is used in the next ``within`` seconds.

        Args:
            uses: how often it was.
            age: seconds since the last time.
            within: may be infinite.

        """
        gaps, first = self._gaps[uses], _gap(int(age * _TICKS))
        end = _GAPS if within == float("inf") else _gap(int((age + within) * _TICKS)) + 1
        again = sum(gaps[first:end])
        ended = sum(gaps[first:]) + self._unused[uses]
        trials = ended + self._in_old[uses] + self._in_young[uses] / 2
        return (again + 1) / (trials + 2)

    def _turn(self) -> None:
        """The young generation becomes the old one; what was learned counts half."""
        for uses, left in enumerate(self._in_old):
            self._unused[uses] = (self._unused[uses] + left) / 2
            self._gaps[uses] = [n / 2 for n in self._gaps[uses]]
        for _ in self._leaving:
            # Only if twice as many chunks came in few long runs.
            continue
        self._leaving = self._old.give_back()
        self._old, self._young = self._young, ShardedDict()
        self._in_old, self._in_young = self._in_young, [0] * (_MOST_USES + 1)


def _gap(ticks: int) -> int:
    return min(max(ticks, 0).bit_length(), _GAPS - 1)


def _pack(uses: int, group: int, position: int, ticks: int) -> int:
    group = min(group, (1 << _GROUP_BITS) - 1)
    position = min(position, (1 << _POSITION_BITS) - 1)
    return ((ticks << _POSITION_BITS | position) << _GROUP_BITS | group) << _USES_BITS | uses


def _ticks(packed: int) -> int:
    return packed >> (_USES_BITS + _GROUP_BITS + _POSITION_BITS)


def _unpack(packed: int) -> Past:
    rest = packed >> _USES_BITS
    group = rest & ((1 << _GROUP_BITS) - 1)
    position = (rest >> _GROUP_BITS) & ((1 << _POSITION_BITS) - 1)
    return Past(packed & _MOST_USES, group, position, _ticks(packed))
