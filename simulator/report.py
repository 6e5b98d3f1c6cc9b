"""Results as a table, JSON and Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.grid import Result
from rich.table import Table
from rich.text import Text

_COMMON = ("chunks", "policy", "hits", "gap closed", "saved")
_SINGLE = ("written", "seconds")
_STACK = ("first token", "P99")


def as_json(results: Sequence[Result]) -> str:
    """A list of one object for each result."""
    return json.dumps([result.as_dict() for result in results], indent=1) + "\n"


def write_parquet(results: Sequence[Result], path: str) -> None:
    """One row for each result.

    Raises:
        SimulatorError: pyarrow is not installed.
        OSError: the file can't be written.

    """
    pa, parquet = need_pyarrow()
    parquet.write_table(pa.Table.from_pylist([each.as_dict() for each in results]), path)


def need_pyarrow() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        SimulatorError: it is not installed.

    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise SimulatorError(
            "Parquet needs pyarrow. Try: pip install 'kvtiers[simulate]'."
        ) from None
    return pa, parquet


def tables(results: Sequence[Result]) -> list[Table]:
    """A table for each trace, with a section for each capacity."""
    return [_table(name, list(group)) for name, group in groupby(results, lambda r: r.trace)]


def _table(name: str, results: Sequence[Result]) -> Table:
    first = results[0]
    table = Table(
        title=Text(f"{name}: {first.requests:,} requests, chunks of {first.chunk_tokens} tokens"),
        title_justify="left",
    )
    # The optimum has none.
    tiers = next((list(result.tiers) for result in results if result.tiers), [])
    titles = [*_COMMON, *tiers, *(_STACK if tiers else _SINGLE)]
    for i, title in enumerate(titles):
        table.add_column(Text(title), justify="left" if i < 2 else "right", no_wrap=True)
    for (chunks, share), group in groupby(results, lambda r: (r.capacity_chunks, r.capacity_share)):
        percent = 100 * share
        label = f"{chunks:,} ({f'{percent:.3g}' if percent < 1000 else f'{percent:,.0f}'} %)"
        for result in group:
            table.add_row(label, *_cells(result, tiers))
            label = ""
        table.add_section()
    return table


def _cells(result: Result, tiers: Sequence[str]) -> tuple[str | Text, ...]:
    gap = result.gap_closed
    common = (
        Text(result.policy),
        f"{100 * result.token_hit_ratio:.2f} %",
        "" if gap is None else f"{100 * gap:.1f} %",
        f"{result.hit_tokens / 1e6:,.2f} M",
    )
    if tiers:
        return (*common, *(_tier(result, name) for name in tiers), *_waits(result))
    written = result.written_bytes
    return (
        *common,
        f"{result.written_chunks:,}" if written is None else _gibibytes(written),
        f"{result.seconds:.1f}",
    )


def _tier(result: Result, name: str) -> str:
    """What a tier served, and what was written to it."""
    if result.tiers is None:
        return ""
    tier = result.tiers[name]
    written = tier["written_bytes"]
    said = f"{100 * tier['token_hit_ratio']:.2f} %"
    return f"{said}, {_gibibytes(written)}" if written else said


def _waits(result: Result) -> tuple[str, str]:
    if result.first_token_mean is None or result.first_token_p99 is None:
        return "", ""
    return f"{result.first_token_mean:.3f} s", f"{result.first_token_p99:.3f} s"


def _gibibytes(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
