"""The keeper's index on disk: what the next holder of the lease starts from.

Frames as in ``access_log``: one with the namespaces and how far each writer's log is
in it, then chunks, the first to be evicted first, then how many there were. Without
the last one, or with anything broken, there is no snapshot: the root is listed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from kvtiers.tiers.access_log import bodies, framed
from kvtiers.tiers.fs_files import made, reading
from kvtiers.tiers.fs_layout import is_namespace
from kvtiers.tiers.root_index import is_chunk

_HEAD, _CHUNKS, _END = b"H", b"C", b"Z"
_LENGTHS = struct.Struct("<BB")
_COUNT = struct.Struct("<Q")
_CHUNKS_A_FRAME = 512
_PIECE = 4 << 20


@dataclass(frozen=True)
class Position:
    """How much of a writer's log is in the snapshot.

    Attributes:
        number, offset: the segment, and the bytes of it.
        announced: bytes the writer had announced by then.
        unit: bytes of one of its chunks.

    """

    number: int
    offset: int
    announced: int
    unit: int


@dataclass
class Snapshot:
    """A snapshot.

    Attributes:
        namespaces: by number.
        writers: by id.
        chunks: id and packed facts of each, the first to be evicted first.

    """

    namespaces: list[str]
    writers: Mapping[str, Position]
    chunks: list[tuple[bytes, bytes]] = field(default_factory=list)


def write(
    path: str,
    namespaces: Iterable[str],
    writers: Mapping[str, Position],
    chunks: Iterable[tuple[bytes, bytes]],
    rest: Callable[[], None],
) -> int:
    """Write a snapshot to a file of its own; the caller renames it. Returns its length.

    Args:
        path: of a file that nobody reads.
        namespaces: by number.
        writers: how far each writer's log is in it.
        chunks: id and packed facts of each, the first to be evicted first.
        rest: called every so often.

    Raises:
        OSError: it could not be written.

    """
    count = 0
    with made(path) as file:
        positions = {name: list(vars(position).values()) for name, position in writers.items()}
        head = {"namespaces": list(namespaces), "writers": positions}
        file.write(framed(_HEAD + json.dumps(head).encode()))
        for batch in _batches(chunks):
            count += len(batch)
            parts = [
                _LENGTHS.pack(len(chunk), len(facts)) + chunk + facts for chunk, facts in batch
            ]
            file.write(framed(_CHUNKS + b"".join(parts)))
            rest()
        file.write(framed(_END + _COUNT.pack(count)))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def read(path: str, rest: Callable[[], None]) -> Snapshot | None:
    """The snapshot, None if there is none that is whole. Raises OSError."""
    try:
        with reading(path) as file:
            return _understood(file, rest)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def _understood(file: BinaryIO, rest: Callable[[], None]) -> Snapshot | None:
    """What is in the file; raises anything of what parsing can where that is no snapshot."""
    found: Snapshot | None = None
    for body in _bodies(file):
        rest()
        if body[:1] == _HEAD:
            found = _head(body[1:])
        elif found is not None and body[:1] == _CHUNKS:
            found.chunks.extend(_chunks(body, len(found.namespaces)))
        elif found is not None and body[:1] == _END:
            return found if _COUNT.unpack(body[1:])[0] == len(found.chunks) else None
    return None


def _bodies(file: BinaryIO) -> Iterator[bytes]:
    """The bodies of all whole frames up to the first that is not; a piece is in memory."""
    data = b""
    while more := file.read(_PIECE):
        data, understood = data + more, 0
        for body, end in bodies(data):
            yield body
            understood = end
        data = data[understood:]
        if len(data) > _PIECE:
            return  # no frame is as long


def _head(text: bytes) -> Snapshot:
    head = json.loads(text)
    namespaces = head["namespaces"]
    if not isinstance(namespaces, list) or not isinstance(head["writers"], dict):
        raise ValueError("No keeper writes a head like that")  # noqa: TRY004 - it is caught
    if len(set(namespaces)) < len(namespaces) or not all(map(is_namespace, namespaces)):
        raise ValueError("No keeper names namespaces like that")
    writers = {name: Position(*position) for name, position in head["writers"].items()}
    numbers = [number for position in writers.values() for number in vars(position).values()]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError("No keeper was at such a position")
    return Snapshot(namespaces, writers)


def _chunks(body: bytes, namespaces: int) -> Iterator[tuple[bytes, bytes]]:
    at = 1
    while at < len(body):
        lengths = _LENGTHS.unpack_from(body, at)
        middle = at + _LENGTHS.size + lengths[0]
        end = middle + lengths[1]
        chunk, facts = body[at + _LENGTHS.size : middle], body[middle:end]
        if end > len(body) or not is_chunk(chunk, facts, namespaces):
            raise ValueError("No keeper counts such a chunk")
        yield chunk, facts
        at = end


def _batches(chunks: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    batch: list[tuple[bytes, bytes]] = []
    for chunk in chunks:
        batch.append(chunk)
        if len(batch) == _CHUNKS_A_FRAME:
            yield batch
            batch = []
    if batch:
        yield batch
