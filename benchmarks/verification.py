"""What it costs to verify every chunk that is read from the filesystem tier.

    python -m benchmarks.verification --json FILE

Two servers share one filesystem tier: kvtiers, and kvtiers with its verification taken
out (``benchmarks.unverified``). Both are asked the same prompts in turns. Their arenas
hold less than half of them, so each prompt is read from the filesystem again.

About 4 minutes on two cores with the default of 100 pairs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvtiers.tools.measure import ask, complete, prompts
from kvtiers.tools.server import ServerError, VllmServer
from rich.console import Console

from benchmarks import command
from benchmarks.paired import Interval, Load, PairedRecord
from benchmarks.record import OURS, UNVERIFIED, describe
from benchmarks.systems import BLOCK, Engine, drain, new_folder, serve

BOUND = 0.05
"""How much of the time to the first token it may add at most."""

# What no tier can hold, and is computed each time.
_REST = BLOCK // 2
_PROMPTS, _PROMPTS_HELD = 5, 2
_WARM_UPS = 2 * _PROMPTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. 1 if a server failed."""
    return command.run(_run, _parser().parse_args(argv))


def _run(options: argparse.Namespace, progress: Console) -> None:
    record = PairedRecord(describe(options.model.name, options.dtype, BLOCK, rest=_REST))
    record.loads += _measure(options, progress)
    if options.json:
        record.save(options.json)
    Console().print(told(record), soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("verification", __doc__)
    add = parser.add_argument
    add("--pairs", type=int, default=100, help="requests to each server (default: 100)")
    add("--tokens", type=int, default=4096, help="read for each request (default: 4096)")
    return parser


def _measure(options: argparse.Namespace, progress: Console) -> Iterator[Load]:
    with ExitStack() as stack:
        folder = stack.enter_context(new_folder())
        progress.print("starting vLLM")
        servers = _servers(stack, options, folder)
        first = servers[OURS]
        asked = prompts(first, _PROMPTS, options.tokens + _REST, seed=time.time_ns())
        progress.print("storing the prompts")
        for prompt in asked:
            complete(first, prompt, 1)
            drain(first, folder / "tier", quiet=0.5)
        for pair in range(-_WARM_UPS, options.pairs):
            prompt = asked[pair % _PROMPTS]
            # Whoever comes first in one pair comes last in the next.
            for system in sorted(servers, reverse=bool(pair % 2)):
                load = _load(servers[system], system, pair, prompt, options.tokens)
                if pair >= 0:
                    yield load
        progress.print(f"{options.pairs} pairs measured")


def _servers(
    stack: ExitStack, options: argparse.Namespace, folder: Path
) -> Mapping[str, VllmServer]:
    """Both of them, by system, with one tier below ``folder``."""
    engine = Engine(options.model, options.dtype, 2 * (options.tokens + BLOCK))
    arena_chunks = _PROMPTS_HELD * options.tokens // BLOCK
    logs = options.log or folder
    return {
        name: stack.enter_context(
            serve(engine, name, folder / "tier", arena_chunks, logs / f"{name}.log")
        )
        for name in (OURS, UNVERIFIED)
    }


def _load(server: VllmServer, system: str, pair: int, prompt: list[int], tokens: int) -> Load:
    """One request, whose prompt is in the filesystem tier alone."""
    server.reset_prefix_cache()
    answer = ask(server, prompt, 1)
    if answer.cached_tokens < tokens or answer.source != "disk":
        raise ServerError(
            f"{system} loaded {answer.cached_tokens} of {tokens} tokens, most of them from "
            f"'{answer.source}' and not from the filesystem tier."
        )
    return Load(system, pair, answer.ttft_s, answer.prompt_tokens, [answer.ttft_s])


def figure(record: PairedRecord) -> Interval:
    """Time to the first token with verification over that without."""
    return record.ratio(OURS, UNVERIFIED, lambda load: load.ttft_s[0])


def told(record: PairedRecord) -> str:
    """The record for people."""
    cost = figure(record)
    return (
        f"A filesystem hit verified over one believed, time to first token: {cost} "
        f"(geometric mean of {len(record.of(OURS))} pairs, 95 % confidence interval, bootstrap). "
        f"At most {BOUND:.0%} more: {cost.within(1 + BOUND, above=False)}."
    )


if __name__ == "__main__":
    sys.exit(main())
