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
from kvtiers.tools.heat_model import HeatModel
from kvtiers.tools.model import ModelError, smollm2_path
from kvtiers.tools.places import printable
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

_BAR = 16
_SNIPPET = 44
# With the width that each must have.
_COLUMNS = {"chunk": 5, "tokens": 9, "attention": 9, "": 8, "most in": 26, "begins with": 8}


@dataclass(frozen=True)
class HeatMap:
    """What the end of one prompt attends to.

    Attributes:
        chunk_tokens: tokens of a chunk.
        tokens: of the prompt.
        window: queries that were measured.
        mass: ``[layers, kv_heads, chunks]``, attention of a query, 0 to 1, the sink included.
        texts: of each chunk.

    """

    chunk_tokens: int
    tokens: int
    window: int
    mass: NDArray[np.float32]
    texts: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers heat``."""
    defaults = HeatSettings()
    add = parser.add_argument
    add("prompt", metavar="FILE", help="a text file with the prompt, - for standard input")
    add("--model", metavar="PATH", type=Path, help="a model folder (default: SmolLM2-135M)")
    add("--chunk-tokens", metavar="N", type=int, default=64, help="default: 64")
    add(
        "--window",
        metavar="N",
        type=int,
        default=defaults.window,
        help=f"queries at the end that are measured (default: {defaults.window})",
    )
    add("--png", metavar="FILE", type=Path, help="plot chunks by heads there")
    add("--json", action="store_true", help="print the map as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and plot. Returns 0.

    Raises:
        ConfigError: an option can't work, or the model or the plot can't be had.
        OSError: the prompt can't be read.

    """
    for key in ("chunk_tokens", "window"):
        if (value := getattr(arguments, key)) < 1:
            option = "--" + key.replace("_", "-")
            raise ConfigError([f"{option} is {value}: it must be 1 or more."])
    text = sys.stdin.read() if arguments.prompt == "-" else Path(arguments.prompt).read_text()
    plot = plotter() if arguments.png else None
    try:
        model = HeatModel(arguments.model or smollm2_path())
    except ModelError as error:
        raise ConfigError([str(error)]) from error
    found = measure(model, text, arguments.chunk_tokens, arguments.window)
    if plot is not None:
        draw(found, plot, arguments.png)
        print(f"kvtiers: plotted to {arguments.png}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        Console().print(table(found))
    return 0


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
    return HeatMap(chunk_tokens, len(tokens), len(tokens) - first, np.stack(layers), texts)


def as_json(found: HeatMap) -> dict[str, Any]:
    """The map for programs."""
    return {
        "tokens": found.tokens,
        "chunk_tokens": found.chunk_tokens,
        "window": found.window,
        "attention": np.round(found.mass.astype(float), 6).tolist(),
    }


def table(found: HeatMap) -> Table:
    """The map for people: the mean over all heads, and the head with most."""
    means = found.mass.mean(axis=(0, 1))
    grid = Table(
        title=f"What the last {found.window} of {found.tokens} tokens attend to",
        caption="Attention of a query, mean over layers and heads. The first chunk is the sink, "
        "which is always kept; the bar is in proportion to the hottest of the others.",
    )
    for title, width in _COLUMNS.items():
        grid.add_column(title, no_wrap=True, min_width=width)
    scale = max(float(means[1:].max()), 1e-9)
    for chunk, mean in enumerate(means):
        start = chunk * found.chunk_tokens
        end = min(start + found.chunk_tokens, found.tokens)
        layer, head = np.unravel_index(found.mass[:, :, chunk].argmax(), found.mass.shape[:2])
        most = f"{found.mass[layer, head, chunk]:6.1%} layer {layer} head {head}"
        bar = "" if chunk == 0 else "█" * round(_BAR * float(mean) / scale)
        snippet = printable(" ".join(found.texts[chunk].split())[:_SNIPPET])
        cells = (str(chunk), f"{start}-{end - 1}", f"{mean:9.2%}", bar, most, snippet)
        grid.add_row(*map(Text, cells))
    return grid


def plotter() -> Any:
    """Matplotlib's ``Figure``.

    Raises:
        ConfigError: it is not installed.

    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            [f"--png needs matplotlib ({error}). Install it with: pip install 'kvtiers[simulate]'."]
        ) from error
    return Figure


def draw(found: HeatMap, figure_class: Any, path: Path) -> None:
    """Plot chunks by heads, without the sink, on a scale of logarithms.

    Raises:
        OSError: the file can't be written.

    """
    from matplotlib.colors import LogNorm

    layers, heads, chunks = found.mass.shape
    rows = found.mass[:, :, 1:].reshape(layers * heads, chunks - 1)
    top = max(float(rows.max()), 1e-6)
    figure = figure_class(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(
        np.maximum(rows, 1e-6),
        aspect="auto",
        interpolation="nearest",
        norm=LogNorm(max(top * 1e-4, 1e-6), top),
        extent=(0.5, chunks - 0.5, layers, 0),
    )
    axes.set_xlabel(f"chunk of {found.chunk_tokens} tokens (0, the sink, is left out)")
    axes.set_ylabel(f"layer, with its {heads} KV heads")
    axes.set_title(f"What the last {found.window} of {found.tokens} tokens attend to")
    figure.colorbar(shown, label="attention of a query")
    figure.savefig(path, dpi=120, format="png")
