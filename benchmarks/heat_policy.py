"""Whether attention is worth knowing for what stays: ``attention-heat`` against ``lru``.

    python -m benchmarks.heat_policy --json FILE

The transcripts of ``benchmarks.heat`` are taken as agents' sessions that grow by a turn of
some hundred tokens each. What the end of each turn attends to is measured once with the
probe's functions. Many sessions, each a copy of one transcript with chunks of its own after
a head that all copies share, then take their turns at random times and end at random, over
one tier of several sizes. As a placebo, the same with the heat of each prompt shuffled.

When sessions return is drawn here, since nobody published prompts together with their
times; so this can show what heat costs and what it gains by the structure of prompts, and
can't show whether sessions return more often where attention is high.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from kvtiers.connector.heat import HeatSettings
from kvtiers.connector.heat_mass import attention_mass
from kvtiers.policies import Policy, PolicyRequest, TierInfo
from kvtiers.policies.attention_heat import AttentionHeatPolicy
from kvtiers.policies.lru import LruPolicy
from kvtiers.simulator.replay import MakePolicy, replay
from kvtiers.simulator.rows import Row, Source, make_trace
from kvtiers.simulator.trace import Trace, TraceRequest
from kvtiers.tools.heat_model import HeatModel
from kvtiers.tools.model import ModelError, smollm2_path
from rich.console import Console
from rich.table import Table

from benchmarks import heat

CHUNK_TOKENS, TURN_TOKENS = 64, 384
SESSIONS, SHARED_CHUNKS, GOES_ON = 60, 8, 0.85
CAPACITIES = (0.1, 0.2, 0.4)
SEEDS = 20
LRU, HEAT, PLACEBO = "lru", "attention-heat", "attention-heat, shuffled heat"

Turns = list[list[float]]
"""Of one transcript: after each turn, the heat of each chunk but the sink."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = _parser().parse_args(argv)
    progress = Console(stderr=True, highlight=False)
    try:
        model = HeatModel(options.model or smollm2_path())
        transcripts = []
        for pair in heat.read_pairs(options.prompts):
            progress.print(pair.source, markup=False)
            transcripts.append(measure(model, model.tokens(pair.text)))
    except (ModelError, OSError, ValueError) as error:
        progress.print(str(error), markup=False, soft_wrap=True)
        return 2
    rows = compare(transcripts)
    Console().print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(list(map(asdict, rows)), indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.heat_policy", description=__doc__)
    made.add_argument("--prompts", metavar="PATH", type=Path, default=heat.default_prompts())
    made.add_argument("--model", metavar="PATH", type=Path, help="default: SmolLM2-135M")
    made.add_argument("--json", metavar="FILE", type=Path, help="write what was measured there")
    return made


def measure(model: HeatModel, tokens: list[int]) -> Turns:
    """What the end of each turn attends to: all turns are in one run, as attention is causal."""
    ends = range(TURN_TOKENS, len(tokens) + 1, TURN_TOKENS)
    window = HeatSettings().window
    layers: list[list[np.ndarray]] = []

    def observe(_: int, query: object, keys: object, scale: float) -> None:
        layers.append(
            [
                attention_mass(
                    query[end - window : end],  # type: ignore[index]
                    keys,  # type: ignore[arg-type]
                    end - window,
                    scale,
                    CHUNK_TOKENS,
                )
                .mean(0)
                .numpy()
                for end in ends
            ]
        )

    model.run(tokens, observe)
    return [np.mean([layer[i] for layer in layers], axis=0)[1:].tolist() for i in range(len(ends))]


@dataclass(frozen=True)
class Outcome:
    """One policy at one capacity: means over the draws, and the gain's standard error."""

    policy: str
    capacity_share: float
    hit_ratio: float
    over_lru: float
    standard_error: float


def compare(transcripts: Sequence[Turns]) -> list[Outcome]:
    """Token hit ratio of each policy at each capacity, over the seeds."""
    rows = []
    for share in CAPACITIES:
        ratios: dict[str, list[float]] = {LRU: [], HEAT: [], PLACEBO: []}
        for seed in range(SEEDS):
            trace, heats = workload(transcripts, seed)
            capacity = max(1, int(share * trace.footprint))
            for name, ratio in ratios.items():
                make = policy_of(name, heats, seed)
                ratio.append(replay(trace, make, capacity).token_hit_ratio)
        for name, ratio in ratios.items():
            gains = [ours - base for ours, base in zip(ratio, ratios[LRU], strict=True)]
            error = stdev(gains) / len(gains) ** 0.5
            rows.append(Outcome(name, share, fmean(ratio), fmean(gains), error))
    return rows


def workload(transcripts: Sequence[Turns], seed: int) -> tuple[Trace, Turns]:
    """Requests in order of time, and of each the heat of its chunks but the first."""
    asked = sorted(_turns(transcripts, random.Random(seed)), key=lambda one: one[0])
    rows = []
    for number, (now, names, _) in enumerate(asked):
        request = TraceRequest(number, now, input_tokens=len(names) * CHUNK_TOKENS)
        rows.append(Row(request, names))
    trace = make_trace("sessions", [Source("sessions", CHUNK_TOKENS, rows)], CHUNK_TOKENS)
    return trace, [heats for _, _, heats in asked]


def _turns(
    transcripts: Sequence[Turns], draw: random.Random
) -> Iterator[tuple[float, list[Hashable], list[float]]]:
    """Of each turn when it comes, what its chunks are called, and their heat."""
    for session in range(SESSIONS):
        which = draw.randrange(len(transcripts))
        now = draw.uniform(0, SESSIONS)
        for heats in transcripts[which]:
            names: list[Hashable] = [
                (which, i) if i < SHARED_CHUNKS else (which, session, i)
                for i in range(len(heats) + 1)
            ]
            yield now, names, heats
            now += draw.expovariate(1 / 5)
            if draw.random() > GOES_ON:
                break


class _Told(AttentionHeatPolicy):
    """Hears at each request's end what was measured of it."""

    heats: Iterator[list[float]]

    def on_finish(self, request: PolicyRequest) -> None:
        super().on_finish(request)
        self.on_heat(request.runs[0].tail(1), next(self.heats))


def policy_of(name: str, heats: Turns, seed: int) -> MakePolicy:
    """How to make one of the three, with what it is told of each request in turn."""
    draw = random.Random(seed)

    def make(tiers: Sequence[TierInfo], clock: Callable[[], float]) -> Policy:
        if name == LRU:
            return LruPolicy(tiers, clock=clock)
        told = _Told(tiers, clock=clock)
        shuffled = (draw.sample(one, len(one)) for one in heats)
        told.heats = shuffled if name == PLACEBO else iter(heats)
        return told

    return make


def table(rows: Sequence[Outcome]) -> Table:
    """The result for people."""
    grid = Table(title=f"Hit ratio over {SEEDS} draws of {SESSIONS} sessions")
    for heading in ("capacity", "policy", "hit ratio", "over lru (standard error)"):
        grid.add_column(heading, no_wrap=True)
    for row in rows:
        gain = f"{100 * row.over_lru:+.2f} ({100 * row.standard_error:.2f}) points"
        grid.add_row(f"{row.capacity_share:.0%}", row.policy, f"{row.hit_ratio:.4f}", gain)
    return grid


if __name__ == "__main__":
    sys.exit(main())
