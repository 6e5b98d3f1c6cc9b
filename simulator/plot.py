"""Results as curves: hit ratio over capacity, one line for each policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvtiers.simulator import optimum
from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.grid import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 6.4, 4.8  # inches
_STYLES = {"lru": ("grey", "-"), optimum.NAME: ("black", "--")}


def check(path: str) -> None:
    """Refuse what could not be drawn.

    Raises:
        SimulatorError: matplotlib is not installed, or does not know the file's ending.

    """
    known = need_matplotlib().Figure().canvas.get_supported_filetypes()
    if os.path.splitext(path)[1].lower().removeprefix(".") not in known:
        raise SimulatorError(f"a plot is a file that ends in .png, .svg or .pdf, not '{path}'.")


def need_matplotlib() -> Any:
    """``matplotlib.figure``, which draws without a screen.

    Raises:
        SimulatorError: it is not installed.

    """
    try:
        from matplotlib import figure
    except ImportError:
        raise SimulatorError(
            "A plot needs matplotlib. Try: pip install 'kvtiers[simulate]'."
        ) from None
    return figure


def write_plot(results: Sequence[Result], path: str) -> None:
    """One panel for each trace; the file's ending says its format (png, svg, pdf).

    Raises:
        SimulatorError: matplotlib is not installed, or does not know the ending.
        OSError: the file can't be written.

    """
    panels = [(name, list(group)) for name, group in groupby(results, lambda r: r.trace)]
    check(path)
    figure = need_matplotlib().Figure(figsize=(_WIDTH * len(panels), _HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, group) in zip(axes, panels, strict=True):
        _panel(axis, name, group)
    figure.savefig(path)


def _panel(axis: Axes, name: str, results: Sequence[Result]) -> None:
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted(
            (100 * r.capacity_share, 100 * r.token_hit_ratio) for r in results if r.policy == policy
        )
        xs, ys = zip(*points, strict=True)
        color, line = _STYLES.get(policy, (None, "-"))
        axis.plot(xs, ys, color=color, linestyle=line, marker="o", markersize=3, label=policy)
    shares = sorted({100 * result.capacity_share for result in results})
    axis.set_xscale("log")
    axis.set_xticks(shares, [f"{share:.3g}" for share in shares])
    axis.minorticks_off()
    axis.set_xlabel(f"capacity, % of {results[0].footprint_chunks:,} chunks")
    axis.set_ylabel("token hit ratio, %")
    axis.set_title(name)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
