"""Time to first token from each tier, kvtiers and vLLM's own tiering in turns.

    python -m benchmarks.ttft --json FILE

Each turn has fresh servers and an empty filesystem tier. The systems alternate, so
that whatever else the machine does meanwhile meets both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.record import (
    OURS,
    RIVAL,
    Record,
    Row,
    Sample,
    Spread,
    describe,
    median,
    p99,
    pressures,
    rows,
)
from benchmarks.scenarios import Plan, Turn, load, load_redis, single
from benchmarks.systems import BLOCK, Engine

_SCENARIOS = {"single": single, "load": load, "load-redis": load_redis}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. 1 if a server failed."""
    return command.run(_run, _parser().parse_args(argv))


def _run(options: argparse.Namespace, progress: Console) -> None:
    record = Record(describe(options.model.name, options.dtype, BLOCK, rest=BLOCK // 2))
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "vllm.log"
        for sample in _measure(options, log, progress):
            record.samples.append(sample)
            # A run is long: what it has measured outlives an interruption.
            if options.json:
                record.save(options.json)
    for grid in tables(record):
        Console().print(grid)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("ttft", __doc__, log="FILE")
    add = parser.add_argument
    add("--turns", type=int, default=3, help="of each system (default: 3)")
    add("--systems", nargs="+", choices=(OURS, RIVAL), default=[OURS, RIVAL])
    add("--scenarios", nargs="+", choices=list(_SCENARIOS), default=list(_SCENARIOS))
    add("--prompts", type=int, default=5, help="single: prompts of each length (default: 5)")
    add("--tokens", type=_blocks, nargs="+", default=[1024, 4096], help="single: their lengths")
    add("--concurrency", type=int, default=16, help="load: requests in flight (default: 16)")
    add("--load-tokens", type=_blocks, default=2048, help="load: their length (default: 2048)")
    return parser


def _blocks(text: str) -> int:
    tokens = int(text)
    if tokens < 2 * BLOCK or tokens % (2 * BLOCK):
        raise argparse.ArgumentTypeError(f"{text} is no multiple of {2 * BLOCK} tokens")
    return tokens


def _measure(options: argparse.Namespace, log: Path, progress: Console) -> Iterator[Sample]:
    plan = Plan(
        options.tokens,
        options.prompts,
        options.concurrency,
        options.load_tokens,
        rest=BLOCK // 2,
        seed=time.time_ns(),
    )
    engine = Engine(options.model, options.dtype, plan.gpu_tokens)
    rounds = [
        (number, scenario, system)
        for number in range(options.turns)
        for scenario in options.scenarios
        for system in options.systems
    ]
    begin = time.monotonic()
    for done, (number, scenario, system) in enumerate(rounds, 1):

        def say(text: str, head: str = f"{done}/{len(rounds)} {system}") -> None:
            line = f"{time.monotonic() - begin:6.0f} s  {head}: {text}"
            progress.print(line, markup=False, soft_wrap=True)

        turn = Turn(engine, plan, system, number, log, say)
        yield from _SCENARIOS[scenario](turn)


def tables(record: Record) -> Iterator[Table]:
    """The record for people, one table per statistic."""
    for scenario, title, statistic in (
        ("single", "One request at a time, median TTFT", median),
        ("load", "All requests at once, median TTFT", median),
        ("load", "All requests at once, P99 TTFT", p99),
    ):
        grid = Table(title=title, caption="median over turns (least to most)")
        for heading in ("tokens", "step", OURS, RIVAL, "ratio", "loaded"):
            grid.add_column(heading)
        for row in rows(record.samples, scenario, statistic):
            grid.add_row(*_cells(row))
        if grid.row_count:
            yield grid
    grid = Table(title="P99 TTFT with an arena of a quarter, over one that holds all")
    for heading in ("tier", "system", "ratio", "loaded with a quarter"):
        grid.add_column(heading)
    for found in pressures(record.samples):
        loaded = f"{_spread(found.loaded, '{:.0f}')} of {found.prompts}"
        grid.add_row(found.tier, found.system, _spread(found.ratio, "{:.2f}"), loaded)
    if grid.row_count:
        yield grid


def _cells(row: Row) -> list[str]:
    times = [_spread(row.seconds.get(system), "{:.3f}") for system in (OURS, RIVAL)]
    loaded = " ".join(f"{row.loaded[system].middle:.0f}" for system in row.loaded)
    ratio = _spread(row.ratio, "{:.2f}")
    return [str(row.tokens), row.step, *times, ratio, f"{loaded} of {row.prompts}"]


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    middle, low, high = (form.format(value) for value in (spread.middle, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
