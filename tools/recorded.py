"""What a recording holds, in figures, and its parts as one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtiers.simulator.parquet_columns import read_intact
from kvtiers.tiers.fs_files import made
from kvtiers.tiers.recording_format import (
    EXTRA,
    HIT,
    VERSION,
    About,
    RecordingError,
    about,
)

Runs = npt.NDArray[np.int64]

_RUNS = ("run_start", "run_len")


@dataclass
class Summary:
    """One recording.

    Attributes:
        name: of the recording.
        started: ISO 8601, in UTC.
        about: the engine that was recorded.
        requests: how many.
        seconds: from the first admission to the last.
        input_tokens, output_tokens: of all requests.
        hit_tokens: by tier, from the GPU on.
        chunks: distinct full chunks of prompts.
        sessions, tenants: how many there are.

    """

    name: str
    started: str
    about: About
    requests: int = 0
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    chunks: int = 0
    sessions: int = 0
    tenants: int = 0

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens over all input tokens, 0 without any."""
        return sum(self.hit_tokens.values()) / max(1, self.input_tokens)

    def ratio(self, tier: str) -> float:
        """The part of it that a tier served."""
        return self.hit_tokens[tier] / max(1, self.input_tokens)


def summarise(parts: Sequence[Path]) -> Summary:
    """The figures of one recording.

    Raises:
        RecordingError: pyarrow is not there, or a file is damaged or no recording.

    """
    metadata = _metadata(parts[0])
    engine = _about(parts[0], metadata)
    found = Summary(metadata.get("recording", ""), metadata.get("started", ""), engine)
    found.hit_tokens = dict.fromkeys((tier.name for tier in engine.tiers), 0)
    times, runs = list[float](), list[Runs]()
    sessions, tenants = set[str](), set[str]()
    for path, table in _tables(parts):
        _check(path, table, [HIT + tier for tier in found.hit_tokens])
        _count(found, table)
        times += table.column("t_s").to_pylist()
        runs.append(_runs(path, table))
        sessions.update(table.column("session").to_pylist())
        tenants.update(table.column("tenant").to_pylist())
    found.seconds = max(times) - min(times) if times else 0.0
    found.chunks = covered(np.concatenate(runs)) if runs else 0
    found.sessions, found.tenants = len(sessions - {""}), len(tenants - {""})
    return found


def merge(parts: Sequence[Path], target: Path) -> None:
    """Write the parts as one file, which is not there before it is whole. Raises OSError.

    Raises:
        RecordingError: pyarrow is not there, or a part is damaged.

    """
    parquet, _ = _pyarrow(target)
    unfinished = target.with_name(f".{target.name}.tmp")
    writer = None
    try:
        with made(os.fspath(unfinished)) as file, contextlib.ExitStack() as opened:
            for path, table in _tables(parts):
                if writer is None:
                    writer = parquet.ParquetWriter(file, table.schema, compression="zstd")
                    opened.enter_context(writer)
                if not table.schema.equals(writer.schema):
                    raise RecordingError(f"{path}: its columns are not those of the parts before.")
                writer.write_table(table)
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def covered(runs: Runs) -> int:
    """How many numbers lie in at least one of the runs, given as rows of start and length."""
    if not len(runs):
        return 0
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs.sum(axis=1))
    # Of each run, what lies beyond all that began before it.
    begins = np.maximum(runs[:, 0], np.concatenate([[0], ends[:-1]]))
    return int(np.maximum(ends - begins, 0).sum())


def _count(found: Summary, table: Any) -> None:
    found.requests += table.num_rows
    found.input_tokens += _sum(table, "input_len")
    found.output_tokens += _sum(table, "output_len")
    for tier in found.hit_tokens:
        found.hit_tokens[tier] += _sum(table, HIT + tier)


def _sum(table: Any, name: str) -> int:
    return int(table.column(name).to_numpy().sum(dtype=np.int64))


def _runs(path: Path, table: Any) -> Runs:
    columns = [table.column(name).combine_chunks().flatten() for name in _RUNS]
    starts, lengths = columns
    if len(starts) != len(lengths) or starts.null_count or lengths.null_count:
        raise RecordingError(f"{path}: no recording: run_start and run_len don't fit together.")
    return np.stack([column.to_numpy().astype(np.int64) for column in columns], axis=1)


def _check(path: Path, table: Any, hits: Sequence[str]) -> None:
    """Whether the columns that figures are made of are there, and hold what they must."""
    import pyarrow.types as types

    def holds_runs(kind: Any) -> bool:
        return bool(types.is_list(kind) and types.is_integer(kind.value_type))

    wanted: Mapping[str, Callable[[Any], bool]] = {
        "t_s": types.is_floating,
        **dict.fromkeys(("input_len", "output_len", *hits), types.is_integer),
        **dict.fromkeys(_RUNS, holds_runs),
        **dict.fromkeys(("session", "tenant"), types.is_string),
    }
    for name, fits in wanted.items():
        if name not in table.column_names:
            raise RecordingError(f"{path}: no recording: it lacks the column {name}.")
        column = table.column(name)
        if not fits(column.type) or column.null_count:
            raise RecordingError(
                f"{path}: no recording: its column {name} holds {column.type}"
                f"{', and nulls' if column.null_count else ''}."
            )


def _about(path: Path, metadata: Mapping[str, str]) -> About:
    version = metadata.get("kvtiers_trace")
    if version not in (None, VERSION):
        raise RecordingError(
            f"{path}: a recording of version {version}, and this kvtiers reads version {VERSION}. "
            "Read it with the release that wrote it."
        )
    try:
        return about(metadata)
    except ValueError as error:
        raise RecordingError(f"{path}: no recording of kvtiers: {error}.") from None


def _metadata(path: Path) -> Mapping[str, str]:
    schema = _read(path, _pyarrow(path)[0].read_schema)
    found: Mapping[bytes, bytes] = schema.metadata or {}
    return {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in found.items()
    }


def _tables(parts: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Each part, read when it is asked for."""
    for path in parts:
        yield path, _read(path, read_intact)


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    """What the reader finds in the file."""
    _, errors = _pyarrow(path)
    try:
        return reader(path)
    except (errors, OSError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise RecordingError(f"{path}: it can't be read as Parquet: {told}") from None


def _pyarrow(path: Path) -> tuple[Any, type[Exception]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise RecordingError(f"{path}: this needs pyarrow. Try: {EXTRA}.") from None
    return parquet, pa.ArrowException
