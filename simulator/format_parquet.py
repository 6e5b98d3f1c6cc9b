"""Parquet traces: ours, as ``kvtiers record`` writes them, and block lists in runs.

**Recorded traces**, version 1, which `kvtiers.tiers.recording_format` defines: one row for
each request, ``req`` being its number in the order in which the engine admitted them, by
which rows are sorted here. The file's metadata says ``kvtiers_trace: 1``, ``chunk_tokens``
and ``chunk_bytes``. Block lists are runs, as below: ``run_start``, ``run_len`` of the
prompt's full chunks, ``output_run_start``, ``output_run_len`` of those that the output
completed, left out here where the engine's tiers were not given those. A folder of such
files, as an engine writes it, is one trace. vLLM computes the last token of each prompt, so
that a chunk which ends with it is stored and not asked for. Columns such as what the live
cache hit are read by whoever compares with it.

**Runs.** ``run_start`` and ``run_len`` are the request's block ids, run-length coded, with
``t_s``, ``input_len``, ``output_len``; ``block_tokens`` stands in the metadata. One id for
a last block that is not full may follow the full ones and is left out. Optional columns:
``session``, ``turn``, ``stop``, and others, which become hints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtiers.simulator.errors import SimulatorError, TraceError
from kvtiers.simulator.numbering import Ids
from kvtiers.simulator.rows import Row, Source
from kvtiers.simulator.trace import TraceRequest
from kvtiers.tiers.recording_format import HIT, RecordingError, parts_of

VERSION = "1"
_MAGIC = b"PAR1"
_NEEDED = ("t_s", "input_len", "output_len")
# What is no hint: read by name, or unknown when the request arrives.
_NOT_HINTS = {
    *_NEEDED,
    *("req", "run_start", "run_len", "session", "turn", "stop", "t_in_session_s", "api_s"),
    *("queued_s", "busy_s", "tenant", "finish"),
}
# A larger id would take too large a table; no file of runs has so many blocks.
_MOST_IDS = 1 << 28


def recognises(head: bytes) -> bool:
    """Whether a file that begins so is one of these."""
    return head.startswith(_MAGIC)


def open_source(path: str) -> Source:
    """Open a file for reading.

    Raises:
        SimulatorError: pyarrow is not installed.
        TraceError: it is no Parquet, or not a trace.

    """
    table = _table(path)
    found = (table.schema.metadata or {}).items()
    metadata = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in found}
    names = set(table.column_names)
    if missing := [name for name in (*_NEEDED, "run_start", "run_len") if name not in names]:
        raise TraceError(
            f"{path}: it lacks the columns {', '.join(missing)}, and so can't be replayed. "
            f"Columns there: {', '.join(table.column_names)}."
        )
    if "kvtiers_trace" in metadata:
        return _recorded(path, table, metadata)
    tokens = _number(path, metadata, "block_tokens")
    return Source(path, tokens, _run_rows(path, table, tokens))


def _table(path: str) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise SimulatorError(
            f"{path}: reading Parquet needs pyarrow. Try: pip install 'kvtiers[simulate]'."
        ) from None
    try:
        return parquet.read_table(parts_of(path))
    except RecordingError as error:
        raise TraceError(str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: it is damaged: {' '.join(str(error).split())}") from None


def _number(path: str, metadata: Mapping[str, str], key: str) -> int:
    """A positive number of the file's metadata."""
    value = metadata.get(key)
    if value is None or not value.isdigit() or not int(value):
        raise TraceError(
            f"{path}: its metadata must say '{key}', the tokens of a block, as a whole number "
            f"above 0; it says {'nothing' if value is None else repr(value)}."
        )
    return int(value)


# Recorded ---------------------------------------------------------------------


def _recorded(path: str, table: Any, metadata: Mapping[str, str]) -> Source:
    if metadata["kvtiers_trace"] != VERSION:
        raise TraceError(
            f"{path}: a recorded trace of version {metadata['kvtiers_trace']}, and this kvtiers "
            f"reads version {VERSION}. Read it with the release that wrote it."
        )
    tokens = _number(path, metadata, "chunk_tokens")
    nbytes = metadata.get("chunk_bytes", "")
    if "req" not in table.column_names:
        raise TraceError(f"{path}: it lacks the column req, which a recording has.")
    if metadata.get("stores_output") == "false":
        table = table.drop_columns(["output_run_start", "output_run_len"])
    # Rows are written as requests end.
    rows = _run_rows(path, table.sort_by("req"), tokens)
    size = int(nbytes) if nbytes.isdigit() else 0
    return Source(path, tokens, rows, size, recorded=True, computes_last=True)


# Runs -------------------------------------------------------------------------


def _run_rows(path: str, table: Any, tokens: int) -> Iterator[Row]:
    columns = _Columns(path, table)
    prompts = columns.runs("run_start", "run_len")
    outputs = columns.runs("output_run_start", "output_run_len")
    for i in range(table.num_rows):
        request = columns.request(i)
        ids = _expanded(path, i, *prompts(i))
        full = request.input_tokens // tokens
        if len(ids) < full:
            raise TraceError(
                f"{path}, row {i}: {len(ids)} blocks of {tokens} tokens are fewer than its "
                f"prompt of {request.input_tokens} tokens has."
            )
        after = _expanded(path, i, *outputs(i))
        yield Row(request, np.concatenate([ids[:full], after]))


def _expanded(path: str, row: int, starts: Ids, lengths: Ids) -> Ids:
    if len(starts) != len(lengths):
        raise TraceError(
            f"{path}, row {row}: run_start has {len(starts)} entries and run_len {len(lengths)}."
        )
    if (lengths <= 0).any() or (starts < 0).any() or (starts + lengths > _MOST_IDS).any():
        raise TraceError(
            f"{path}, row {row}: runs must start at 0 or above, be 1 or longer and end below "
            f"{_MOST_IDS}."
        )
    runs = zip(starts.tolist(), lengths.tolist(), strict=True)
    parts = [np.arange(start, start + n, dtype=np.int64) for start, n in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class _Columns:
    """A table's columns, as Python and numpy have them, with a row's name for errors."""

    def __init__(self, path: str, table: Any) -> None:
        self._path = path
        self._table = table
        self._values = {name: self._plain(name) for name in table.column_names if self._flat(name)}
        self._hints = [
            name for name in self._values if name not in _NOT_HINTS and not name.startswith(HIT)
        ]

    def _flat(self, name: str) -> bool:
        import pyarrow.types as types

        kind = self._table.schema.field(name).type
        return not (types.is_list(kind) or types.is_large_list(kind))

    def _plain(self, name: str) -> list[Any]:
        values: list[Any] = self._table.column(name).to_pylist()
        if name in _NEEDED:
            for i, value in enumerate(values):
                if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                    raise TraceError(
                        f"{self._path}, row {i}: {name} must be a number of at least 0, "
                        f"not {value!r}."
                    )
        return values

    def lists(self, name: str) -> tuple[Sequence[tuple[int, int]], npt.NDArray[Any]]:
        """Where each row's part of the flat values begins and ends, and those values."""
        column = self._table.column(name).combine_chunks()
        if column.null_count or column.flatten().null_count:
            nulls = [i for i, value in enumerate(column.to_pylist()) if not value or None in value]
            raise TraceError(f"{self._path}, row {nulls[0]}: {name} has a null.")
        offsets = np.asarray(column.offsets).tolist()
        flat = column.values.to_numpy(zero_copy_only=False)
        if not np.issubdtype(flat.dtype, np.integer):
            raise TraceError(f"{self._path}: {name} must hold lists of whole numbers.")
        flat = flat if flat.dtype == np.uint64 else flat.astype(np.int64)
        return list(pairwise(offsets)), flat

    def runs(self, start: str, length: str) -> Callable[[int], tuple[Ids, Ids]]:
        """Where each run of a row starts and how long it is; nothing without such columns."""
        if start not in self._table.column_names or length not in self._table.column_names:
            nothing = np.empty(0, np.int64)
            return lambda _row: (nothing, nothing)
        starts, flat_starts = self.lists(start)
        lengths, flat_lengths = self.lists(length)
        return lambda i: (flat_starts[slice(*starts[i])], flat_lengths[slice(*lengths[i])])

    def request(self, i: int) -> TraceRequest:
        """Row ``i`` without its chunks."""
        values = self._values
        turn = values["turn"][i] if "turn" in values else None
        hints = {name: values[name][i] for name in self._hints}
        return TraceRequest(
            row=i,
            arrival=float(values["t_s"][i]),
            input_tokens=int(values["input_len"][i]),
            output_tokens=int(values["output_len"][i]),
            session=self._text("session", i),
            turn=None if turn is None else int(turn),
            tenant=self._text("tenant", i),
            finish_reason=self._text("finish", i) or self._text("stop", i),
            hints=hints,
        )

    def _text(self, name: str, i: int) -> str:
        values = self._values.get(name)
        return "" if values is None or values[i] is None else str(values[i])
