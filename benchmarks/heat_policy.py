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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from kvtiers.connector.heat import HeatSettings
from kvtiers.connector.heat_mass import attention_mass
from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.attention_heat import AttentionHeatPolicy
from kvtiers.policies.lru import LruPolicy
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
class Row:
    """One policy at one capacity: means over the draws, and the gain's standard error."""

    policy: str
    capacity_share: float
    hit_ratio: float
    over_lru: float
    standard_error: float


def compare(transcripts: Sequence[Turns]) -> list[Row]:
    """Token hit ratio of each policy at each capacity, over the seeds."""
    rows = []
    for share in CAPACITIES:
        ratios: dict[str, list[float]] = {LRU: [], HEAT: [], PLACEBO: []}
        for seed in range(SEEDS):
            requests = list(workload(transcripts, seed))
            footprint = len({chunk for run, _ in requests for chunk in run.chunks})
            for name, ratio in ratios.items():
                ratio.append(replay(name, requests, max(1, int(share * footprint)), seed))
        for name, ratio in ratios.items():
            gains = [ours - base for ours, base in zip(ratio, ratios[LRU], strict=True)]
            error = stdev(gains) / len(gains) ** 0.5
            rows.append(Row(name, share, fmean(ratio), fmean(gains), error))
    return rows


def workload(transcripts: Sequence[Turns], seed: int) -> Iterator[tuple[Run, list[float]]]:
    """Requests in order of time, each with the heat of its chunks but the first."""
    draw = random.Random(seed)
    asked: list[tuple[float, Run, list[float]]] = []
    for session in range(SESSIONS):
        which = draw.randrange(len(transcripts))
        now = draw.uniform(0, SESSIONS)
        for heats in transcripts[which]:
            names = [
                (which, i) if i < SHARED_CHUNKS else (which, session, i)
                for i in range(len(heats) + 1)
            ]
            asked.append((now, Run(tuple(names)), heats))
            now += draw.expovariate(1 / 5)
            if draw.random() > GOES_ON:
                break
    yield from ((run, heats) for _, run, heats in sorted(asked, key=lambda one: one[0]))


def replay(
    name: str, requests: Sequence[tuple[Run, list[float]]], capacity: int, seed: int
) -> float:
    """The share of all chunks that were hits."""
    draw = random.Random(seed)
    policy = _POLICIES[name]([TierInfo("cpu", capacity)])
    held: set[object] = set()
    hits = asked = 0
    for number, (run, heats) in enumerate(requests):
        found = next((i for i, chunk in enumerate(run.chunks) if chunk not in held), len(run))
        hits, asked = hits + found, asked + len(run)
        if found:
            policy.on_access(run.head(found), PolicyRequest(str(number)), "cpu")
        _store(policy, held, run, found, capacity)
        if name != LRU:
            told = draw.sample(heats, len(heats)) if name == PLACEBO else heats
            policy.on_heat(run.tail(1), told)
    return hits / asked


_POLICIES: dict[str, Callable[[Sequence[TierInfo]], Policy]] = {
    LRU: LruPolicy,
    HEAT: AttentionHeatPolicy,
    PLACEBO: AttentionHeatPolicy,
}


def _store(policy: Policy, held: set[object], run: Run, found: int, capacity: int) -> None:
    """Store what was missed, and evict nothing of the prompt for it."""
    new, kept = run.tail(found), set(run.chunks)
    policy.admit(new, "cpu")
    short = len(held) + len(new) - capacity
    gone = []
    for chunk in policy.victims("cpu", max(0, short)):
        if len(gone) >= short:
            break
        if chunk not in kept:
            gone.append(chunk)
    held.difference_update(gone)
    if gone:
        policy.on_remove(gone, "cpu")
    room = new.head(max(0, min(len(new), capacity - len(held))))
    if len(room):
        held.update(room.chunks)
        policy.on_insert(room, "cpu")


def table(rows: Sequence[Row]) -> Table:
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
