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

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from kvtiers.simulator.errors import SimulatorError, TraceError
from kvtiers.simulator.numbering import Ids
from kvtiers.simulator.parquet_columns import Columns, check_columns, read_intact
from kvtiers.simulator.rows import Row, Source
from kvtiers.tiers.recording_format import RecordingError, parts_of

VERSION = "1"
_MAGIC = b"PAR1"
# A larger id would take too large a table; no file of runs has so many blocks.
_MOST_IDS = 1 << 28
# Of one row: beyond all prompts, and few enough to be held.
_MOST_BLOCKS = 1 << 24
# Digits of a number in the metadata; more are none.
_MOST_DIGITS = 15


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
    check_columns(path, table)
    if "kvtiers_trace" in metadata:
        return _recorded(path, table, metadata)
    tokens = _number(path, metadata, "block_tokens")
    return Source(path, tokens, _run_rows(Columns(path, table), tokens))


def _table(path: str) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise SimulatorError(
            f"{path}: reading Parquet needs pyarrow. Try: pip install 'kvtiers[simulate]'."
        ) from None
    try:
        return read_intact(parts_of(path))
    except RecordingError as error:
        raise TraceError(str(error)) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: it is damaged: {' '.join(str(error).split())}") from None


def _number(path: str, metadata: Mapping[str, str], key: str) -> int:
    """A positive number of the file's metadata."""
    value = metadata.get(key, "")
    if number := _whole(value):
        return number
    raise TraceError(
        f"{path}: its metadata must say '{key}', the tokens of a block, as a whole number "
        f"above 0; it says {f'{value!r:.60}' if value else 'nothing'}."
    )


def _whole(text: str) -> int | None:
    """A whole number in plain digits, None for what is none."""
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if plain else None


# Recorded ---------------------------------------------------------------------


def _recorded(path: str, table: Any, metadata: Mapping[str, str]) -> Source:
    from pyarrow.compute import sort_indices

    if metadata["kvtiers_trace"] != VERSION:
        raise TraceError(
            f"{path}: a recorded trace of version {metadata['kvtiers_trace']}, and this kvtiers "
            f"reads version {VERSION}. Read it with the release that wrote it."
        )
    tokens = _number(path, metadata, "chunk_tokens")
    if "req" not in table.column_names:
        raise TraceError(f"{path}: it lacks the column req, which a recording has.")
    if metadata.get("stores_output") == "false":
        unused = {"output_run_start", "output_run_len"}.intersection(table.column_names)
        table = table.drop_columns(sorted(unused))
    # Rows are written as requests end.
    order = sort_indices(table, [("req", "ascending")])
    rows = _run_rows(Columns(path, table.take(order), order.to_pylist()), tokens)
    size = _whole(metadata.get("chunk_bytes", "")) or 0
    return Source(
        path,
        tokens,
        rows,
        size,
        recorded=True,
        computes_last=True,
        recording=metadata.get("recording", ""),
    )


# Runs -------------------------------------------------------------------------


def _run_rows(columns: Columns, tokens: int) -> Iterator[Row]:
    prompts = columns.runs("run_start", "run_len")
    outputs = columns.runs("output_run_start", "output_run_len")
    for i in range(len(columns)):
        request = columns.request(i)
        ids = _expanded(columns, i, *prompts(i))
        full = request.input_tokens // tokens
        if len(ids) < full:
            raise TraceError(
                f"{columns.place(i)}: {len(ids)} blocks of {tokens} tokens are fewer than its "
                f"prompt of {request.input_tokens} tokens has."
            )
        after = _expanded(columns, i, *outputs(i))
        yield Row(request, np.concatenate([ids[:full], after]))


def _expanded(columns: Columns, i: int, starts: Ids, lengths: Ids) -> Ids:
    if len(starts) != len(lengths):
        raise TraceError(
            f"{columns.place(i)}: run_start has {len(starts)} entries and run_len {len(lengths)}."
        )
    # In this order no sum is too large for its type.
    if (lengths <= 0).any() or (starts < 0).any() or (starts > _MOST_IDS - lengths).any():
        raise TraceError(
            f"{columns.place(i)}: runs must start at 0 or above, be 1 or longer and end below "
            f"{_MOST_IDS}."
        )
    runs = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    if sum(n for _, n in runs) > _MOST_BLOCKS:
        raise TraceError(f"{columns.place(i)}: its runs have more than {_MOST_BLOCKS} blocks.")
    parts = [np.arange(start, start + n, dtype=np.int64) for start, n in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
