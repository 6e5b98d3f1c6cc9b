"""Results as a table, JSON and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.grid import Result
from rich import box
from rich.table import Table
from rich.text import Text

_COMMON = ("chunks", "policy", "hits", "gap closed", "saved")
_SINGLE = ("written", "seconds")
_STACK = ("first token", "P99")
_TIERS = ("chunks", "policy", "tier", "hits", "read", "written")
# Columns of words, which stand at the left.
_WORDS = ("chunks", "policy", "tier")
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


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
    table = pa.Table.from_pylist([each.as_dict() for each in results])
    # Given the path, pyarrow would delete what lies there if it fails: a pipe or a device, too.
    with open(path, "wb") as file:
        parquet.write_table(table, file)


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
    """A table for each trace, with a section for each capacity; and one of its tiers, if any.

    They fit a terminal of 80 columns.
    """
    found = []
    for name, group in groupby(results, lambda result: result.trace):
        those = list(group)
        found.append(_table(name, those))
        if any(result.tiers for result in those):
            found.append(_tiers_table(those))
    return found


def _table(name: str, results: Sequence[Result]) -> Table:
    first = results[0]
    title = f"{name}: {first.requests:,} requests, chunks of {first.chunk_tokens} tokens"
    stack = any(result.tiers for result in results)
    table = _empty(title, (*_COMMON, *(_STACK if stack else _SINGLE)))
    for label, group in _sections(results):
        for i, result in enumerate(group):
            figures = _waits(result) if stack else _work(result)
            table.add_row("" if i else label, *_cells(result), *figures)
        table.add_section()
    return table


def _tiers_table(results: Sequence[Result]) -> Table:
    table = _empty("what each tier served and moved", _TIERS)
    for label, group in _sections(results):
        # The optimum has none.
        lines = [(each, name) for each in group for name in each.tiers or {}]
        for i, (result, name) in enumerate(lines):
            tier = (result.tiers or {})[name]
            first = not i or result is not lines[i - 1][0]
            table.add_row(
                "" if i else label,
                Text(result.policy if first else ""),
                Text(name),
                _percent(tier["token_hit_ratio"]),
                _size(tier["read_bytes"]),
                _size(tier["written_bytes"]),
            )
        table.add_section()
    return table


def _empty(title: str, columns: Sequence[str]) -> Table:
    # A space from the box and one of padding between two columns, and none at the edges.
    table = Table(
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in _WORDS else "right"
        table.add_column(Text(column), justify=justify, no_wrap=True)
    return table


def _sections(results: Sequence[Result]) -> Iterator[tuple[str, Iterator[Result]]]:
    """The results of each capacity, and what to call it."""
    for (chunks, share), group in groupby(results, lambda r: (r.capacity_chunks, r.capacity_share)):
        percent = 100 * share
        yield f"{chunks:,} ({f'{percent:.3g}' if percent < 1000 else f'{percent:,.0f}'} %)", group


def _cells(result: Result) -> tuple[str | Text, ...]:
    gap = result.gap_closed
    return (
        Text(result.policy),
        _percent(result.token_hit_ratio),
        "" if gap is None else f"{100 * gap:.1f} %",
        _tokens(result.hit_tokens),
    )


def _work(result: Result) -> tuple[str, str]:
    written = result.written_bytes
    return (
        f"{result.written_chunks:,}" if written is None else _size(written),
        f"{result.seconds:.1f}",
    )


def _waits(result: Result) -> tuple[str, str]:
    if result.first_token_mean is None or result.first_token_p99 is None:
        return "", ""
    return f"{result.first_token_mean:.3f} s", f"{result.first_token_p99:.3f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _tokens(count: int) -> str:
    return f"{count / 1e6:,.2f} M" if count >= 1e6 else f"{count:,}"


def _size(nbytes: float) -> str:
    """In a smaller unit where there would be nothing before the point."""
    unit, name = next((pair for pair in _UNITS if nbytes >= pair[0]), _UNITS[-1])
    return f"{nbytes / unit:,.1f} {name}" if nbytes else "0"
