"""What kvtiers costs where it can't help: no hit in any tier, or a tier that is away.

    python -m benchmarks.overhead --json FILE

Three servers with the same settings are up at once: vLLM without a connector, kvtiers
with a cpu and an fs tier, and kvtiers with a cpu tier and a Redis that does not answer,
whose breaker is open. One is loaded at a time, in turns, all with the same prompts, which
nobody has seen before. So each load of kvtiers stores all and finds nothing.

About 12 minutes on two cores with the default of 15 pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtiers.tools.measure import complete
from kvtiers.tools.server import ServerError, VllmServer
from kvtiers.tools.service import free_port
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.paired import Interval, Load, PairedRecord
from benchmarks.record import OURS, PLAIN, describe, p99
from benchmarks.systems import BLOCK, Engine, new_folder, serve

MISSES, AWAY = "kvtiers-misses", "kvtiers-away"
BOUND = 0.02
"""How much of throughput and P99 may be lost at most."""

# Of every vocabulary, and no control tokens.
_TOKENS = range(1000, 30_000)
# Loads that vLLM's own cache and the arena hold, so that both evict for most of a run.
_LOADS_HELD = 3


@dataclass(frozen=True)
class Shape:
    """Of each load: requests in flight together, tokens of a prompt and of an answer."""

    requests: int
    prompt: int
    answer: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. 1 if a server failed."""
    return command.run(_run, _parser().parse_args(argv))


def _run(options: argparse.Namespace, progress: Console) -> None:
    record = PairedRecord(describe(options.model.name, options.dtype, BLOCK, rest=0))
    for load in _measure(options, progress):
        record.loads.append(load)
        # A run is long: what it has measured outlives an interruption.
        if options.json:
            record.save(options.json)
    Console().print(table(record))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("overhead", __doc__)
    add = parser.add_argument
    add("--pairs", type=int, default=15, help="loads of each system (default: 15)")
    add("--systems", nargs="+", choices=(MISSES, AWAY), default=[MISSES, AWAY])
    # vLLM reserves one for itself, and with a connector one more, which on two cores makes
    # it reserve none: then the two servers would not be the same.
    add("--reserve", type=int, default=1, help="cores without threads of the model (default: 1)")
    add("--requests", type=int, default=6, help="in flight together (default: 6)")
    add("--tokens", type=int, default=1024, help="of each prompt (default: 1024)")
    add("--answer", type=int, default=16, help="tokens to generate for each (default: 16)")
    return parser


def _measure(options: argparse.Namespace, progress: Console) -> Iterator[Load]:
    shape = Shape(options.requests, options.tokens, options.answer)
    seed, begin = time.time_ns(), time.monotonic()

    def say(text: str) -> None:
        line = f"{time.monotonic() - begin:6.0f} s  {text}"
        progress.print(line, markup=False, soft_wrap=True)

    with ExitStack() as stack:
        folder = stack.enter_context(new_folder())
        say("starting vLLM")
        servers = _servers(stack, options, shape, folder)
        for pair in range(-1, options.pairs):
            # Whoever comes first in one round comes last in the next.
            for system in sorted(servers, reverse=bool(pair % 2)):
                load = _load(servers[system], system, pair, shape, f"{seed}/{pair}")
                say(
                    f"{pair + 1}/{options.pairs} {system}: {load.throughput:.0f} tokens/s, "
                    f"P99 TTFT {p99(load.ttft_s):.3f} s, {load.cpu_s:.1f} s of CPU"
                )
                _settle(folder)
                # In the first round everything is used for the first time.
                if pair >= 0:
                    yield load


def _servers(
    stack: ExitStack, options: argparse.Namespace, shape: Shape, folder: Path
) -> Mapping[str, VllmServer]:
    """All of them, by system, with their tiers below ``folder``."""
    tokens = _LOADS_HELD * shape.requests * (shape.prompt + shape.answer + BLOCK)
    engine = Engine(options.model, options.dtype, tokens)
    # A port that nobody listens on: each attempt to connect fails at once.
    where: dict[str, Path | str] = {
        PLAIN: folder,
        MISSES: folder / "tier",
        AWAY: f"redis://127.0.0.1:{free_port()}",
    }
    logs = options.log or folder
    return {
        name: stack.enter_context(
            serve(
                engine,
                PLAIN if name == PLAIN else OURS,
                where[name],
                tokens // BLOCK,
                logs / f"{name}.log",
                {"VLLM_CPU_NUM_OF_RESERVED_CPU": str(options.reserve)},
            )
        )
        for name in (PLAIN, *options.systems)
    }


def _load(server: VllmServer, system: str, pair: int, shape: Shape, seed: str) -> Load:
    """All requests at once; the same prompts for the same seed."""
    draw = random.Random(seed)
    prompts = [draw.choices(_TOKENS, k=shape.prompt) for _ in range(shape.requests)]
    begin, cpu_begin = time.perf_counter(), _cpu_seconds(server.pid)
    with ThreadPoolExecutor(shape.requests) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt, shape.answer), prompts))
    seconds, cpu_s = time.perf_counter() - begin, _cpu_seconds(server.pid) - cpu_begin
    found = sum(answer.cached_tokens for answer in answers)
    if found:
        raise ServerError(f"{system} found {found} tokens of prompts that nobody has seen before.")
    tokens = shape.requests * (shape.prompt + shape.answer)
    return Load(system, pair, seconds, tokens, [answer.ttft_s for answer in answers], cpu_s)


def _cpu_seconds(group: int) -> float:
    """What the processes of a group have taken so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # From the third on; the second, a name, may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _settle(folder: Path, quiet: float = 1.0, timeout: float = 60.0) -> None:
    """Wait until nothing is written any more: the next load is another system's."""
    deadline = time.monotonic() + timeout
    count, since = -1, time.monotonic()
    while time.monotonic() - since < quiet and time.monotonic() < deadline:
        time.sleep(0.1)
        now = sum(len(names) for _, _, names in os.walk(folder / "tier"))
        if now != count:
            count, since = now, time.monotonic()


@dataclass(frozen=True)
class Figures:
    """What a system has, over what the same server has without kvtiers."""

    system: str
    throughput: Interval
    ttft: Interval
    cpu: Interval


def figures(record: PairedRecord) -> Iterator[Figures]:
    """Throughput, P99 time to first token and CPU time of each system that has a pair."""
    for system in (MISSES, AWAY):
        if record.of(system).keys() & record.of(PLAIN).keys():
            yield Figures(
                system,
                record.ratio(system, PLAIN, lambda load: load.throughput),
                record.ratio(system, PLAIN, lambda load: p99(load.ttft_s)),
                record.ratio(system, PLAIN, lambda load: load.cpu_s),
            )


def table(record: PairedRecord) -> Table:
    """The record for people."""
    pairs = len(record.of(PLAIN))
    grid = Table(
        title="With kvtiers over without",
        caption=f"geometric mean of {pairs} pairs (95 % confidence interval, bootstrap)",
    )
    for heading in ("system", "", "ratio", f"within {BOUND:.0%}"):
        grid.add_column(heading, no_wrap=True)
    for found in figures(record):
        kept = found.throughput.within(1 - BOUND, above=True)
        grid.add_row(found.system, "throughput", str(found.throughput), kept)
        kept = found.ttft.within(1 + BOUND, above=False)
        grid.add_row("", "P99 TTFT", str(found.ttft), kept)
        grid.add_row("", "CPU time", str(found.cpu), "")
    return grid


if __name__ == "__main__":
    sys.exit(main())
