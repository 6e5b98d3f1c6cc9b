"""``kvtiers heat``: which chunks of a prompt its end attends to, head by head."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.heat import HeatSettings
from kvtiers.connector.heat_book import HeatBook
from kvtiers.connector.heat_log import read
from kvtiers.simulator.plot import need_matplotlib
from kvtiers.tools import outputs
from kvtiers.tools.heat_model import HeatModel
from kvtiers.tools.model import ModelError, smollm2_path
from kvtiers.tools.places import printable
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

_BAR = 8
_SNIPPET = 44
# With the width that each must have.
_LAST = "begins with"
_COLUMNS = {"chunk": 5, "tokens": 9, "attention": 9, "": _BAR, "most in": 22, _LAST: 8}


@dataclass(frozen=True)
class HeatMap:
    """What the end of one prompt attends to.

    Attributes:
        title: of what, for people.
        mass: ``[layers, kv_heads, chunks]``, attention of a query, 0 to 1, the sink included;
            0 where nothing was measured.
        spans: which tokens each chunk has, "" if unknown.
        texts: of each chunk, "" if unknown.

    """

    title: str
    mass: NDArray[np.float32]
    spans: list[str]
    texts: list[str]

    def means(self) -> NDArray[np.float32]:
        """Per chunk, over the heads that were measured."""
        counts = np.count_nonzero(self.mass, axis=(0, 1))
        means: NDArray[np.float32] = self.mass.sum(axis=(0, 1)) / np.maximum(counts, 1)
        return means


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers heat``."""
    defaults = HeatSettings()
    add = parser.add_argument
    given = parser.add_mutually_exclusive_group(required=True)
    what = "a text file with a prompt, - for standard input"
    given.add_argument("prompt", metavar="FILE", nargs="?", help=what)
    what = "what a live engine measured: the file that 'log' of its attention_heat names"
    given.add_argument("--log", metavar="FILE", type=Path, help=what)
    add(
        "--last",
        metavar="N",
        type=int,
        default=1,
        help="with --log: the N-th prompt from the end (default: 1)",
    )
    add("--model", metavar="PATH", type=Path, help="a model folder (default: SmolLM2-135M)")
    add("--chunk-tokens", metavar="N", type=int, default=64, help="default: 64")
    add(
        "--window",
        metavar="N",
        type=int,
        default=defaults.window,
        help=f"queries at the end that are measured (default: {defaults.window})",
    )
    add("--png", metavar="FILE", type=Path, help="plot chunks by heads there, a .png")
    add("--json", action="store_true", help="print the map as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and plot. Returns 0.

    Raises:
        ConfigError: an option can't work, or the prompt, log or model can't be had.
        SimulatorError: the plot can't be drawn there, or matplotlib is not installed.
        OSError: the plot can't be written.

    """
    for key in ("chunk_tokens", "window", "last"):
        if (value := getattr(arguments, key)) < 1:
            option = "--" + key.replace("_", "-")
            raise ConfigError([f"{option} is {value}: it must be 1 or more."])
    if arguments.png:  # now, and not after the work is done
        outputs.check_ending("--png", arguments.png, ".png")
        outputs.check_output("--png", arguments.png, [arguments.log or arguments.prompt])
        need_matplotlib()
    found = logged(arguments.log, arguments.last) if arguments.log else _measured(arguments)
    if arguments.png:
        draw(found, arguments.png)
        print(f"kvtiers: plotted to {arguments.png}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        Console().print(table(found))
    return 0


def _measured(arguments: argparse.Namespace) -> HeatMap:
    try:
        given = arguments.prompt
        text = sys.stdin.read() if given == "-" else Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{given} is no text in UTF-8: {error}."]) from error
    except OSError as error:
        raise ConfigError(
            [
                f"{given} can't be read: {error.strerror or error}. Give a text file with a "
                "prompt, or - for standard input."
            ]
        ) from error
    try:
        model = HeatModel(arguments.model or smollm2_path())
    except ModelError as error:
        raise ConfigError([str(error)]) from error
    return measure(model, text, arguments.chunk_tokens, arguments.window)


def logged(path: Path, last: int) -> HeatMap:
    """A prompt of a live engine, with the averages over all that share its chunks.

    Raises:
        ConfigError: the file can't be read, is no log, or has too few prompts.

    """
    try:
        rows = list(read(path))
    except OSError as error:
        raise ConfigError(
            [
                f"{path} can't be read: {error.strerror or error}. Name the file that 'log' of "
                "attention_heat names."
            ]
        ) from error
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if not rows:
        raise ConfigError(
            [
                f"{path} has no prompts. If it is the file that 'log' of attention_heat names, "
                "none was measured yet."
            ]
        )
    if len(rows) < last:
        raise ConfigError(
            [f"{path} has {len(rows)} prompts, and --last is {last}. Set it to at most that."]
        )
    rows = rows[: len(rows) - last + 1]
    book = HeatBook(1 + max(layer for _, layers in rows for layer in layers))
    for run, layers in rows:
        book.note(run, layers)
    last_run = rows[-1][0]
    unknown = [""] * len(last_run)
    title = f"What the end of prompt {len(rows)} attends to"
    return HeatMap(title, book.heat_of(last_run), unknown, unknown)


def measure(model: HeatModel, text: str, chunk_tokens: int, window: int) -> HeatMap:
    """Run the prompt through the model.

    Raises:
        ConfigError: the prompt has no second chunk.

    """
    from kvtiers.connector.heat_mass import attention_mass

    tokens = model.tokens(text)
    if len(tokens) <= chunk_tokens:
        raise ConfigError(
            [
                f"The prompt has {len(tokens)} tokens, which is one chunk of {chunk_tokens}: there "
                "is nothing to compare. Give a longer one, or set --chunk-tokens to less."
            ]
        )
    first = max(0, len(tokens) - window)
    layers: list[NDArray[np.float32]] = []

    def observe(_: int, query: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        layers.append(attention_mass(query[first:], keys, first, scale, chunk_tokens).numpy())

    model.run(tokens, observe)
    starts = range(0, len(tokens), chunk_tokens)
    texts = [model.text(tokens[start : start + chunk_tokens]) for start in starts]
    spans = [f"{start}-{min(start + chunk_tokens, len(tokens)) - 1}" for start in starts]
    title = f"What the last {len(tokens) - first} of {len(tokens)} tokens attend to"
    return HeatMap(title, np.stack(layers), spans, texts)


def as_json(found: HeatMap) -> dict[str, Any]:
    """The map for programs."""
    return {
        "title": found.title,
        "tokens": found.spans,
        "attention": np.round(found.mass.astype(float), 6).tolist(),
    }


def table(found: HeatMap) -> Table:
    """The map for people: the mean over all heads, and the head with most."""
    means = found.means()
    # Narrow, so that the words of a chunk are seen in 80 columns too.
    grid = Table(
        title=found.title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption="Attention of a query, mean over layers and heads. The first chunk is the sink, "
        "which is always kept; the bar is in proportion to the hottest of the others.",
    )
    for title, width in _COLUMNS.items():
        # The last one gives way: rich narrows what may wrap, which its cells don't.
        grid.add_column(title, no_wrap=title != _LAST, min_width=width)
    scale = max(float(means[1:].max(initial=0)), 1e-9)
    for chunk, mean in enumerate(means):
        layer, head = np.unravel_index(found.mass[:, :, chunk].argmax(), found.mass.shape[:2])
        most = f"{found.mass[layer, head, chunk]:6.1%} layer {layer} head {head}"
        bar = "" if chunk == 0 else "█" * round(_BAR * float(mean) / scale)
        snippet = printable(" ".join(found.texts[chunk].split())[:_SNIPPET])
        cells = (str(chunk), found.spans[chunk], f"{mean:9.2%}", bar, most)
        grid.add_row(*map(Text, cells), Text(snippet, no_wrap=True))
    return grid


def draw(found: HeatMap, path: Path) -> None:
    """Plot chunks by heads, without the sink, on a scale of logarithms.

    Raises:
        SimulatorError: matplotlib is not installed.
        OSError: the file can't be written.

    """
    figure = need_matplotlib().Figure(figsize=(10, 6), layout="constrained")
    from matplotlib.colors import LogNorm

    layers, heads, chunks = found.mass.shape
    rows = found.mass[:, :, 1:].reshape(layers * heads, chunks - 1)
    top = max(float(rows.max()), 1e-6)
    axes = figure.add_subplot()
    shown = axes.imshow(
        np.where(rows > 0, rows, np.nan),
        aspect="auto",
        interpolation="nearest",
        norm=LogNorm(max(top * 1e-4, 1e-6), top),
        extent=(0.5, chunks - 0.5, layers, 0),
    )
    axes.set_xlabel("chunk (0, the sink, is left out)")
    axes.set_ylabel(f"layer, with its {heads} KV heads")
    axes.set_title(found.title)
    figure.colorbar(shown, label="attention of a query")
    figure.savefig(path, dpi=120, format="png")
