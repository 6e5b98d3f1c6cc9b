"""How much of the attention to come the measured heat of chunks foretells.

    python -m benchmarks.heat --json FILE

Reads pairs of consecutive prompts of agents (``KVTIERS_HEAT_PROMPTS`` or ``--prompts``, a
JSON line for each with ``prefix``, ``continuation`` and ``prefix_tokens``), runs prefix and
continuation through a model in float32, and measures with the probe's own functions what
the last queries of the prefix attend to. The fifth of the chunks with most of that heat is
set against what the continuation's queries then attend to; the sink chunk, which is always
kept, is left out. Each figure is the share of all their attention that the chosen chunks
hold, for each prompt and the mean over them.

About 2 minutes on two cores for five prompts of 3,000 tokens; with ``--all-queries``, half an
hour.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from kvtiers.connector.heat import HeatSettings, layers_at
from kvtiers.connector.heat_mass import attention_mass
from kvtiers.tools.heat_model import HeatModel
from kvtiers.tools.model import ModelError, smollm2_path
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

VARIABLE = "KVTIERS_HEAT_PROMPTS"
PERFECT = "perfect knowledge"
BOUND = 0.95
"""Of what perfect knowledge reaches, with a ranking of its own for each layer or head."""

_DEFAULT = "../shared/heat_prompts"
_SHARE = 0.2
# Columns of the terminal that the table of five prompts takes.
_WIDTH = 100

Mass = NDArray[np.float64]
"""``[layers, kv_heads, chunks]``, without the sink chunk."""


@dataclass(frozen=True)
class Pair:
    """A prompt and the one that follows it."""

    source: str
    text: str
    prefix_tokens: int


@dataclass
class Measured:
    """Of one pair.

    Attributes:
        window: attention of the prefix's last queries.
        average: mean attention of all queries of the prefix, if asked for.
        total: the same without regard to how many queries see a chunk (H2O's sum).
        future: attention of the continuation's queries.

    """

    window: list[Mass] = field(default_factory=list)
    average: list[Mass] = field(default_factory=list)
    total: list[Mass] = field(default_factory=list)
    future: list[Mass] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What ``--json`` writes: what each way to choose chunks holds of each prompt."""

    prompts: Sequence[str]
    chunk_tokens: int
    window: int
    shares: Mapping[str, Sequence[float]]
    means: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 1 if the heat per layer or per head falls below ``BOUND``."""
    options = _parser().parse_args(argv)
    progress = Console(stderr=True, highlight=False)
    try:
        pairs = list(read_pairs(options.prompts))
        model = HeatModel(options.model or smollm2_path())
    except (ModelError, OSError, ValueError) as error:
        progress.print(str(error), markup=False, soft_wrap=True)
        return 2
    measured = []
    for number, pair in enumerate(pairs, start=1):
        told = f"#{number}: {pair.source}, {pair.prefix_tokens} tokens"
        progress.print(told, markup=False)
        measured.append(measure(model, pair, options))
    held_by = shares(measured)
    means = {name: fmean(values) for name, values in held_by.items()}
    names = [pair.source for pair in pairs]
    result = Result(names, options.chunk_tokens, options.window, held_by, means)
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table(result))
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    best = max(means["window, per KV head"], means["window, per layer"])
    return 0 if best >= BOUND * means[PERFECT] else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.heat", description=__doc__)
    add = made.add_argument
    add(
        "--prompts",
        metavar="PATH",
        type=Path,
        default=default_prompts(),
        help=f"default: {_DEFAULT}",
    )
    add("--model", metavar="PATH", type=Path, help="a model folder (default: SmolLM2-135M)")
    add("--window", type=int, default=HeatSettings().window, help="queries that are measured")
    add("--chunk-tokens", type=int, default=64, help="tokens of a chunk (default: 64)")
    add("--all-queries", action="store_true", help="what all queries attend to, too (slow)")
    add("--json", metavar="FILE", type=Path, help="write what was measured there")
    return made


def default_prompts() -> Path:
    """Where the prompts are, as the environment or the layout of the checkout says."""
    return Path(os.environ.get(VARIABLE) or Path(__file__).parent.parent / _DEFAULT)


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a file, or of ``pairs.jsonl`` in a folder.

    Raises:
        OSError: it can't be read.
        ValueError: a line is no pair; the text names file and line.

    """
    file = path / "pairs.jsonl" if path.is_dir() else path
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            text = row["prefix"] + row["continuation"]
            yield Pair(str(row["source"]), text, int(row["prefix_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}, line {number} is no pair of prompts ({error!r}): it must be a JSON "
                "object with source, prefix, continuation and prefix_tokens."
            ) from error


def measure(model: HeatModel, pair: Pair, options: argparse.Namespace) -> Measured:
    """Run one pair. Of the prefix only whole chunks count."""
    tokens, end = model.tokens(pair.text), pair.prefix_tokens
    chunk_tokens: int = options.chunk_tokens
    found, chunks = Measured(), end // chunk_tokens

    def observe(_layer: int, query: object, keys: object, scale: float) -> None:
        def mass(begin: int, stop: int) -> Mass:
            part = query[begin:stop]  # type: ignore[index]
            heat = attention_mass(part, keys, begin, scale, chunk_tokens)  # type: ignore[arg-type]
            return heat.double().numpy()[:, 1:chunks]

        found.window.append(mass(max(0, end - options.window), end))
        found.future.append(mass(end, len(tokens)))
        if options.all_queries:
            seen_by = end - chunk_tokens * np.arange(1, chunks)
            found.average.append(mass(0, end))
            found.total.append(found.average[-1] * seen_by)

    model.run(tokens, observe)
    return found


def shares(measured: Sequence[Measured]) -> dict[str, list[float]]:
    """Each way to rank chunks: the share of the attention to come that its fifth holds."""
    ways = _ways()
    if measured[0].average:
        ways |= _ways_of_all_queries()
    found = {
        name: [held(np.stack(one.future), rank(one)) for one in measured]
        for name, rank in ways.items()
    }
    # Of any chunk the chance to be among them is the same, so the mean over all draws is known.
    chunks = [one.future[0].shape[1] for one in measured]
    return found | {"random": [_count(number) / number for number in chunks]}


def _ways() -> dict[str, Callable[[Measured], Mass]]:
    """By name, the score of each chunk: ``[layers or 1, heads or 1, chunks]``."""
    return {
        PERFECT: lambda one: np.stack(one.future),
        "window, per KV head": lambda one: np.stack(one.window),
        "window, per layer": lambda one: np.stack(one.window).sum(1, keepdims=True),
        "window, whole model": lambda one: np.stack(one.window).sum((0, 1), keepdims=True),
        "window, the layers of one request": lambda one: _sampled(np.stack(one.window)),
        "recency": lambda one: np.arange(one.future[0].shape[1], dtype=float)[None, None],
    }


def _ways_of_all_queries() -> dict[str, Callable[[Measured], Mass]]:
    return {
        "all queries, averaged, per KV head": lambda one: np.stack(one.average),
        "all queries, summed (H2O), per KV head": lambda one: np.stack(one.total),
    }


def _sampled(window: Mass) -> Mass:
    chosen = layers_at(0, HeatSettings().layers, len(window))
    return window[list(chosen)].sum((0, 1), keepdims=True)


def held(future: Mass, score: Mass) -> float:
    """The share of ``future`` in the fifth of the chunks with the highest ``score``."""
    score = np.broadcast_to(score, future.shape)
    chosen = np.argsort(-score, axis=2, kind="stable")[:, :, : _count(future.shape[2])]
    return float(np.take_along_axis(future, chosen, axis=2).sum() / future.sum())


def _count(chunks: int) -> int:
    return max(1, round(_SHARE * chunks))


def table(result: Result) -> Table:
    """The result for people."""
    grid = Table(
        title=f"Attention held by a fifth of the chunks of {result.chunk_tokens} tokens",
        caption=f"window of {result.window} queries, without the sink",
    )
    grid.add_column("chosen by")
    for number in range(1, len(result.prompts) + 1):
        grid.add_column(f"#{number}", justify="right")
    grid.add_column("mean", justify="right")
    grid.add_column("of perfect", justify="right")
    for name, values in result.shares.items():
        each, mean = map("{:.3f}".format, values), result.means[name]
        grid.add_row(name, *each, f"{mean:.3f}", f"{mean / result.means[PERFECT]:.1%}")
    return grid


if __name__ == "__main__":
    sys.exit(main())
