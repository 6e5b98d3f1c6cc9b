"""One writer's log on disk: segments in a folder of its own.

    <writer>/log.000001 …   segments; a new one after ``SEGMENT_BYTES``, or after an error
             <chunk>.…      files being written

Each append opens, writes and closes, so that on NFS too the next reader sees it. The
folder is the writer's right to write: who renames it (``fence``) ends that right at
once, for the log and for the files being written, as both are named by path. An append
that was under way then may be read or not: the file that it announced can't appear.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from kvtiers.tiers.access_log import Decoder, Encoder, Header, Kind, Record
from kvtiers.tiers.fs_files import reading

SEGMENT_BYTES = 1 << 20
WRITER = "w-"
OVER = ".over"
_PREFIX = "log."
_MOST_DIGITS = 18
# Of a segment at once. The longest append is a few times what a segment has before it.
_MOST_BYTES = 64 << 20


def segment_path(folder: str, number: int) -> str:
    """Where a segment lies."""
    return f"{folder}/{_PREFIX}{number:06d}"


def segment_numbers(folder: str) -> list[int]:
    """Segments there are, in order; none if the folder is gone."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    numbers = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    return sorted(int(number) for number in numbers if _is_number(number))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def fence(folder: str) -> None:
    """End a writer's right to write. Idempotent."""
    try:
        os.rename(folder, folder + OVER)
    except FileNotFoundError:
        return


class LogWriter:
    """Appends to one writer's log. One thread at a time.

    Attributes:
        announced: bytes announced so far, in appends that failed too: a reader may have
            seen them.

    Args:
        folder: of this writer, there and empty.
        owner: who it is.
        unit: bytes of one of its chunks, 0 if it stores none.

    """

    def __init__(self, folder: str, owner: Mapping[str, Any], unit: int) -> None:
        self.folder = folder
        self.announced = 0
        self._owner = owner
        self._unit = unit
        self._number = 0
        self._size = SEGMENT_BYTES
        self._encoder = Encoder()

    def append(self, records: Iterable[Record]) -> None:
        """Write the records down.

        Raises FileNotFoundError if the writer was fenced, another OSError if they could
        not be written: a reader may find all or some of them all the same.
        """
        records = list(records)
        create = self._size >= SEGMENT_BYTES
        data = self._beginning() if create else b""
        data += self._encoder.time(time.time()) if records else b""
        data += self._encoder.records(records)
        self.announced += sum(
            record.nbytes * len(record.hashes) for record in records if record.kind is Kind.COMING
        )
        size, self._size = self._size, SEGMENT_BYTES  # a new segment follows if this one breaks
        self._write(data, os.O_CREAT | os.O_EXCL if create else 0)
        self._size = (0 if create else size) + len(data)

    def _beginning(self) -> bytes:
        self._number += 1
        self._encoder = Encoder()
        return self._encoder.header(Header(self.announced, self._unit, self._owner))

    def _write(self, data: bytes, flags: int) -> None:
        path = segment_path(self.folder, self._number)
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError("A part of a record was written")
        finally:
            os.close(descriptor)


class LogReader:
    """Follows one writer's log. One thread at a time.

    Attributes:
        number: the segment being read, 0 before the first.
        offset: bytes of it that were understood.

    Args:
        number: a segment that was read before, 0 to begin.
        offset: how much of it had been understood.

    """

    def __init__(self, number: int = 0, offset: int = 0) -> None:
        self.number = number
        self.offset = offset
        # Also for a segment that was read in part: its namespaces are named at its beginning.
        self._decoder: Decoder | None = None

    def read(self, folder: str) -> list[Record | Header]:
        """What was appended since; stops where a record is not whole.

        A segment that ends with a broken record ends there, once there is another. The
        header of a segment that was read before comes again, as who writes it is not
        known from a snapshot.
        """
        found: list[Record | Header] = []
        for number in segment_numbers(folder):
            if number < self.number:
                continue
            # Nothing more came to those before the last one since they were listed.
            if number != self.number:
                self.number, self.offset, self._decoder = number, 0, Decoder()
            found += self._rest(segment_path(folder, number))
        return found

    def _rest(self, path: str) -> list[Record | Header]:
        try:
            with reading(path) as file:
                before: list[Record | Header] = []
                if self._decoder is None:
                    self._decoder = Decoder()
                    before, _ = self._decoder.feed(file.read(min(self.offset, _MOST_BYTES)))
                file.seek(self.offset)
                found, used = self._decoder.feed(file.read(_MOST_BYTES))
        except (FileNotFoundError, ValueError):
            return []  # or no file: no writer made it
        self.offset += used
        return [record for record in before if isinstance(record, Header)] + found
