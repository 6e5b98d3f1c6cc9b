"""Time to the first token over a tier that is slow, against a server without a connector.

    python -m benchmarks.slow_tier --json FILE

Two servers, asked for the same prompts in turns. The one with kvtiers has them in a tier
alone that takes so many milliseconds more for each chunk, on each of its four threads; it
found that tier quick before. So the first turns show what it costs to learn better, and
the rest whether a slow tier is ever slower than no cache.

About 8 minutes on two cores with the defaults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvtiers.tools.measure import complete, prompts
from kvtiers.tools.server import VllmServer
from rich.console import Console

from benchmarks import command
from benchmarks.paired import geometric_mean
from benchmarks.record import DELAY_VARIABLE, PLAIN, SLOWED, Setup, describe, write
from benchmarks.systems import BLOCK, Engine, drain, new_folder, serve

# What no tier can hold, and is computed each time.
_REST = BLOCK // 2
_PROMPTS, _PROMPTS_HELD = 6, 2
LEARNING = 3
"""Turns after a change of speed that are told apart from the rest."""


@dataclass(frozen=True)
class Pair:
    """One prompt, asked of both servers one right after the other.

    Attributes:
        delay_ms: that the tier takes longer for a chunk.
        turn: counted from 0 since the tier has that speed.
        plain_s, ours_s: seconds to the first token.
        cached_tokens: of the server with kvtiers.

    """

    delay_ms: float
    turn: int
    plain_s: float
    ours_s: float
    cached_tokens: int

    @property
    def ratio(self) -> float:
        """Above 1 where the tier was slower than no cache."""
        return self.ours_s / self.plain_s


@dataclass
class Result:
    """A run: its setup and its pairs, in the order in which they were measured."""

    setup: Setup
    tokens: int
    pairs: list[Pair] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it as JSON, times rounded to a tenth of a millisecond."""
        rounded = [
            asdict(pair) | {"plain_s": round(pair.plain_s, 4), "ours_s": round(pair.ours_s, 4)}
            for pair in self.pairs
        ]
        write(path, self.setup, "pairs", rounded, tokens=self.tokens)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what ``save`` wrote."""
        data = json.loads(path.read_text())
        pairs = [Pair(**pair) for pair in data["pairs"]]
        return cls(Setup(**data["setup"]), data["tokens"], pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. 1 if a server failed."""
    return command.run(_run, _parser().parse_args(argv))


def _run(options: argparse.Namespace, progress: Console) -> None:
    setup = describe(options.model.name, options.dtype, BLOCK, rest=_REST)
    result = Result(setup, options.tokens)
    for pair in _measure(options, progress):
        result.pairs.append(pair)
        # A run is long: what it has measured outlives an interruption.
        if options.json:
            result.save(options.json)
    Console().print("\n".join(told(result)), soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("slow_tier", __doc__)
    add = parser.add_argument
    add("--turns", type=int, default=18, help="of each delay (default: 18)")
    add("--tokens", type=int, default=1024, help="of a prompt in the tier (default: 1024)")
    add("--delays", type=float, nargs="+", default=[0, 5, 20, 100, 500, 2000], help="ms a chunk")
    return parser


def _measure(options: argparse.Namespace, progress: Console) -> Iterator[Pair]:
    with ExitStack() as stack:
        folder = stack.enter_context(new_folder())
        delay = folder / "delay"
        delay.write_text("0")
        progress.print("starting vLLM")
        plain, ours = _servers(stack, options, folder)
        asked = prompts(ours, _PROMPTS, options.tokens + _REST, seed=time.time_ns())
        for prompt in asked:
            complete(ours, prompt, 1)
            complete(plain, prompt, 1)
            drain(ours, folder / "tier", quiet=0.5)
        again = itertools.cycle(asked)
        for delay_ms in options.delays:
            delay.write_text("0")
            # Quick, as far as anybody knows.
            for prompt in itertools.islice(again, _PROMPTS):
                _ask(ours, prompt)
            delay.write_text(str(delay_ms / 1000))
            for turn, prompt in enumerate(itertools.islice(again, options.turns)):
                yield _pair(plain, ours, prompt, delay_ms, turn)
            progress.print(f"{delay_ms:g} ms a chunk: measured")


def _servers(
    stack: ExitStack, options: argparse.Namespace, folder: Path
) -> tuple[VllmServer, VllmServer]:
    engine = Engine(options.model, options.dtype, 2 * (options.tokens + BLOCK))
    arena_chunks = _PROMPTS_HELD * options.tokens // BLOCK
    logs = options.log or folder
    variables = {DELAY_VARIABLE: str(folder / "delay")}
    made = [
        serve(engine, name, folder / "tier", arena_chunks, logs / f"{name}.log", variables)
        for name in (PLAIN, SLOWED)
    ]
    plain, ours = (stack.enter_context(server) for server in made)
    return plain, ours


def _pair(
    plain: VllmServer, ours: VllmServer, prompt: list[int], delay_ms: float, turn: int
) -> Pair:
    # Whoever comes first in one turn comes last in the next.
    if turn % 2:
        plain_s, _ = _ask(plain, prompt)
        ours_s, cached = _ask(ours, prompt)
    else:
        ours_s, cached = _ask(ours, prompt)
        plain_s, _ = _ask(plain, prompt)
    return Pair(delay_ms, turn, plain_s, ours_s, cached)


def _ask(server: VllmServer, prompt: list[int]) -> tuple[float, int]:
    server.reset_prefix_cache()
    answer = complete(server, prompt, 1)
    return answer.ttft_s, answer.cached_tokens


def told(result: Result) -> Iterator[str]:
    """The result for people, a line for each delay."""
    yield (
        f"Time to the first token of {result.tokens:,} tokens in a tier that takes so many "
        "milliseconds more a chunk, over that without a connector: geometric mean of the turns "
        "of one run, 95 % confidence interval (bootstrap)."
    )
    for delay_ms in dict.fromkeys(pair.delay_ms for pair in result.pairs):
        pairs = [pair for pair in result.pairs if pair.delay_ms == delay_ms]
        first = [pair.ratio for pair in pairs if pair.turn < LEARNING]
        rest = [pair for pair in pairs if pair.turn >= LEARNING]
        line = f"{delay_ms:5g} ms: first {LEARNING} turns {geometric_mean(first).middle:.3f}"
        if rest:
            loaded = sum(pair.cached_tokens >= result.tokens for pair in rest)
            line += (
                f", then {geometric_mean([pair.ratio for pair in rest])}, "
                f"{loaded} of {len(rest)} loaded"
            )
        yield line


if __name__ == "__main__":
    sys.exit(main())
