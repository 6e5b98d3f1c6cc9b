"""Pairs: two systems given the same load, one right after the other, again and again.

For differences of a few per cent, which the drift of a machine over minutes would hide:
of each pair only the ratio counts.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.record import Setup, write

_RESAMPLES = 10_000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Load:
    """What one system made of one load.

    Attributes:
        system: its name in the benchmark.
        pair: counted from 0; the loads of one number were the same, and neighbours in time.
        seconds: until the last answer was complete.
        tokens: of prompts and answers together.
        ttft_s: seconds to the first token, one per request.
        cpu_s: CPU seconds that the server's processes took for it, 0 if nobody looked.

    """

    system: str
    pair: int
    seconds: float
    tokens: int
    ttft_s: Sequence[float]
    cpu_s: float = 0.0

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        """Such as ``0.997 (0.991 to 1.004)``."""
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"

    def within(self, bound: float, above: bool) -> str:
        """Whether the whole interval, none or a part of it keeps to one side of ``bound``."""
        inside = [(value >= bound) == above for value in (self.low, self.middle, self.high)]
        return "kept" if all(inside) else "undecided" if any(inside) else "missed"


@dataclass
class PairedRecord:
    """A run: its setup and its loads, in the order in which they were measured."""

    setup: Setup
    loads: list[Load] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it as JSON, times rounded to a tenth of a millisecond."""
        rounded = [
            {
                **asdict(load),
                "seconds": round(load.seconds, 4),
                "ttft_s": [round(seconds, 4) for seconds in load.ttft_s],
                "cpu_s": round(load.cpu_s, 2),
            }
            for load in self.loads
        ]
        write(path, self.setup, "loads", rounded)

    @classmethod
    def load(cls, path: Path) -> PairedRecord:
        """Read what ``save`` wrote."""
        data = json.loads(path.read_text())
        return cls(Setup(**data["setup"]), [Load(**load) for load in data["loads"]])

    def of(self, system: str) -> dict[int, Load]:
        """The loads of a system, by pair."""
        return {load.pair: load for load in self.loads if load.system == system}

    def ratio(self, system: str, base: str, statistic: Callable[[Load], float]) -> Interval:
        """How much larger the statistic is with ``system`` than with ``base``, pair by pair.

        Raises:
            ValueError: there is no pair.

        """
        ours, theirs = self.of(system), self.of(base)
        pairs = sorted(ours.keys() & theirs.keys())
        return geometric_mean([statistic(ours[i]) / statistic(theirs[i]) for i in pairs])


def geometric_mean(ratios: Sequence[float]) -> Interval:
    """Of the ratios of pairs, with a percentile bootstrap over the pairs.

    Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 13: 10,000
    resamples, and no assumption of how the ratios are distributed. The same ratios give
    the same interval.

    Raises:
        ValueError: there are none.

    """
    if not ratios:
        raise ValueError("There is no pair to compare.")
    logs = [math.log(ratio) for ratio in ratios]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    tail = round(_RESAMPLES * (1 - _CONFIDENCE) / 2)
    low, high = means[tail], means[-1 - tail]
    return Interval(math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high))
