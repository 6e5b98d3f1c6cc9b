"""The columns of a Parquet trace, as Python and numpy have them, checked before they are used.

A file may hold anything: whatever is not what a trace needs is told by column, and by row where
one is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtiers.simulator.errors import TraceError, in_row
from kvtiers.simulator.numbering import Ids
from kvtiers.simulator.trace import TraceRequest
from kvtiers.tiers.recording_format import HIT

NEEDED = ("t_s", "input_len", "output_len", "run_start", "run_len")
_NUMBERS = ("t_s", "input_len", "output_len")
_RUNS = ("run_start", "run_len", "output_run_start", "output_run_len")
# What is no hint: read by name, or unknown when the request arrives.
_NOT_HINTS = {
    *_NUMBERS,
    *("req", "session", "turn", "stop", "t_in_session_s", "api_s"),
    *("queued_s", "busy_s", "tenant", "finish"),
}


def read_intact(files: Path | Sequence[Path]) -> Any:
    """The table in these files. Raises what pyarrow raises if one is damaged.

    That may be a UnicodeDecodeError: text that is no UTF-8 is seen only when one looks.
    """
    from pyarrow import parquet

    table = parquet.read_table(files)
    table.validate(full=True)
    table.column_names  # noqa: B018 - raises if one is no UTF-8
    return table


class Columns:
    """The columns of a table that ``check_columns`` let pass.

    Args:
        path: of the file.
        table: what it holds, in the order in which requests came.
        rows: where in the file each of them stands, if in another order.

    Raises:
        TraceError: one can't be read, or holds a number that can't be.

    """

    def __init__(self, path: str, table: Any, rows: Sequence[int] | None = None) -> None:
        self._path = path
        self._table = table
        self._rows = range(table.num_rows) if rows is None else rows
        flat = [name for name in table.column_names if not _is_list(_type(table, name))]
        self._values = {name: self._plain(name) for name in flat}
        self._hints = [n for n in flat if n not in _NOT_HINTS and not n.startswith(HIT)]
        for name in _NUMBERS:
            self._check_numbers(name)

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, i: int) -> str:
        """The file, and where in it row ``i`` stands, as an error begins."""
        return in_row(self._path, self._rows[i])

    def runs(self, start: str, length: str) -> Callable[[int], tuple[Ids, Ids]]:
        """Where each run of a row starts and how long it is; nothing without such columns."""
        if start not in self._table.column_names or length not in self._table.column_names:
            nothing = np.empty(0, np.int64)
            return lambda _row: (nothing, nothing)
        starts, flat_starts = self._lists(start)
        lengths, flat_lengths = self._lists(length)
        return lambda i: (flat_starts[slice(*starts[i])], flat_lengths[slice(*lengths[i])])

    def request(self, i: int) -> TraceRequest:
        """Row ``i`` without its chunks."""
        values = self._values
        return TraceRequest(
            row=self._rows[i],
            arrival=float(values["t_s"][i]),
            input_tokens=int(values["input_len"][i]),
            output_tokens=int(values["output_len"][i]),
            session=self._text("session", i),
            turn=self._turn(i),
            tenant=self._text("tenant", i),
            finish_reason=self._text("finish", i) or self._text("stop", i),
            hints={name: values[name][i] for name in self._hints},
        )

    # Parts ------------------------------------------------------------------

    def _plain(self, name: str) -> list[Any]:
        try:
            values: list[Any] = self._table.column(name).to_pylist()
        except (ValueError, OverflowError) as error:
            # Such as a date that Python has none for.
            told = " ".join(str(error).split())
            raise TraceError(f"{self._path}: column {name} can't be read: {told}.") from None
        return values

    def _check_numbers(self, name: str) -> None:
        for i, value in enumerate(self._values[name]):
            if value is None or not 0 <= value < float("inf"):
                raise TraceError(
                    f"{self.place(i)}: {name} must be a number of at least 0, not {value!r}."
                )

    def _lists(self, name: str) -> tuple[Sequence[tuple[int, int]], npt.NDArray[Any]]:
        """Where each row's part of the flat values begins and ends, and those values."""
        column = self._table.column(name).combine_chunks()
        if column.null_count or column.flatten().null_count:
            nulls = [i for i, v in enumerate(column.to_pylist()) if v is None or None in v]
            raise TraceError(f"{self.place(nulls[0])}: {name} has a null.")
        offsets = np.asarray(column.offsets).tolist()
        # What is too large for a signed number becomes one below 0, which no run has either.
        flat = column.values.to_numpy(zero_copy_only=False).astype(np.int64)
        return list(pairwise(offsets)), flat

    def _turn(self, i: int) -> int | None:
        turn = self._values["turn"][i] if "turn" in self._values else None
        # Floats are what pandas makes of whole numbers of which some are missing.
        if turn is None or turn != turn:
            return None
        if abs(turn) == float("inf"):
            raise TraceError(f"{self.place(i)}: turn must be a whole number, not {turn}.")
        return int(turn)

    def _text(self, name: str, i: int) -> str:
        values = self._values.get(name)
        return "" if values is None or values[i] is None else str(values[i])


def check_columns(path: str, table: Any) -> None:
    """Whether all that a trace needs is there, and of a type that can be meant.

    Raises:
        TraceError: it is not.

    """
    import pyarrow.types as types

    def is_number(kind: Any) -> bool:
        return bool(types.is_integer(kind) or types.is_floating(kind))

    def holds_runs(kind: Any) -> bool:
        return _is_list(kind) and bool(types.is_integer(kind.value_type))

    wanted: Mapping[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(_NUMBERS, (is_number, "numbers")),
        **dict.fromkeys(_RUNS, (holds_runs, "lists of whole numbers")),
        "turn": (lambda kind: is_number(kind) or types.is_null(kind), "whole numbers"),
        "req": (types.is_integer, "whole numbers"),
    }
    names: Sequence[str] = table.column_names
    if missing := [name for name in NEEDED if name not in names]:
        raise TraceError(
            f"{path}: it lacks the columns {', '.join(missing)}, and so can't be replayed. "
            f"Columns there: {', '.join(names)}."
        )
    for name in names:
        fits, words = wanted.get(name, (lambda _kind: True, ""))
        if not fits(_type(table, name)):
            raise TraceError(f"{path}: {name} must hold {words}, not {_type(table, name)}.")


def _type(table: Any, name: str) -> Any:
    return table.schema.field(name).type


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind))
