"""The parts of a recording on disk: whole at any moment, and bounded together.

A Parquet file can't be read before its end is written. So a part is written anew, beside
the old one, each time it has grown, and takes its place in one step: whatever becomes of the
engine, what lies there is readable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtiers.tiers.fs_files import made
from kvtiers.tiers.recording_format import EXTRA, part_name, recordings_in, total_bytes

# What a killed engine may have left half-written; one at work takes far less.
_ORPHAN_SECONDS = 600.0
_UNFINISHED = ".tmp"


class PartFiles:
    """The files of one recording, in a folder that may hold others.

    Args:
        folder: made if it is not there, for this user only.
        max_bytes: of all recordings in the folder; the oldest parts go first.

    Raises:
        OSError: the folder can't be made, listed or written in.
        ImportError: pyarrow is not there.

    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        _need_pyarrow()
        self._folder = folder
        self._max_bytes = max_bytes
        self._number = 0
        now = datetime.now(UTC)
        self.started = now.isoformat(timespec="milliseconds")
        self.recording = f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_orphans()
        self._try_out()

    def write(self, table: Any, *, complete: bool) -> None:
        """Write the newest part, in place of what was written of it before. Raises OSError.

        Args:
            table: all of its rows.
            complete: whether the next one begins after it.

        """
        import pyarrow as pa
        from pyarrow import parquet

        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, compression="zstd")
        data = sink.getvalue()
        self._replace(part_name(self.recording, self._number), memoryview(data))
        if complete:
            self._number += 1
        self._prune()

    def _replace(self, name: str, data: memoryview | bytes) -> None:
        unfinished = self._folder / f".{name}{_UNFINISHED}"
        try:
            with made(os.fspath(unfinished)) as file:
                file.write(data)
            os.replace(unfinished, self._folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    def _try_out(self) -> None:
        """Whether files can be written there. Raises OSError."""
        name = part_name(self.recording, self._number)
        self._replace(name, b"")
        os.unlink(self._folder / name)

    def _prune(self) -> None:
        """Delete the oldest parts beyond the bound, whoever's they are, but for the newest one."""
        parts = [part for found in recordings_in(self._folder).values() for part in found]
        excess = total_bytes(parts) - self._max_bytes
        for part in parts[:-1]:
            if excess <= 0:
                return
            # Another user's may have to stay.
            with contextlib.suppress(OSError):
                nbytes = part.stat().st_size
                part.unlink()
                excess -= nbytes

    def _remove_orphans(self) -> None:
        for path in self._folder.glob(f".*.parquet{_UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ORPHAN_SECONDS:
                    path.unlink()


def _need_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401 - whether it is there, and now rather than in a step
    except ImportError as error:
        raise ImportError(f"it needs pyarrow, which is not there. Try: {EXTRA}") from error
