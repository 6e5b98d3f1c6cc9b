"""The keeper's index on disk: what the next holder of the lease starts from.

Frames as in ``access_log``: one with the namespaces and how far each writer's log is
in it, then what each may be about to store, then chunks, the first to be evicted first,
then how many there were. Without the last one, or with anything broken, there is no
snapshot: the root is listed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar

from kvtiers.tiers.access_log import bodies, framed
from kvtiers.tiers.fs_files import made, reading
from kvtiers.tiers.fs_layout import is_namespace
from kvtiers.tiers.root_index import Facts, is_chunk

T = TypeVar("T")

_HEAD, _PENDING, _CHUNKS, _END = b"H", b"P", b"C", b"Z"
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
        pending: by writer, ids of what it has announced and not said to be there or gone.

    """

    namespaces: list[str]
    writers: Mapping[str, Position]
    pending: dict[str, list[bytes]] = field(default_factory=dict)
    chunks: list[tuple[bytes, bytes]] = field(default_factory=list)


def write(
    path: str,
    namespaces: Iterable[str],
    writers: Mapping[str, Position],
    pending: Mapping[str, Iterable[bytes]],
    chunks: Iterable[tuple[bytes, bytes]],
    rest: Callable[[], None],
) -> int:
    """Write a snapshot to a file of its own; the caller renames it. Returns its length.

    Args:
        path: of a file that nobody reads.
        namespaces: by number.
        writers: how far each writer's log is in it.
        pending: ids of what each has announced and not said to be there or gone.
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
        for name, announced in pending.items():
            for ids in _batches(announced):
                parts = [_packed(name.encode(), chunk) for chunk in ids]
                file.write(framed(_PENDING + b"".join(parts)))
        for batch in _batches(chunks):
            count += len(batch)
            parts = [_packed(chunk, facts) for chunk, facts in batch]
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
        elif found is not None and body[:1] == _PENDING:
            for name, chunk in _pairs(body):
                _check(chunk, Facts(0).packed(), len(found.namespaces))
                found.pending.setdefault(name.decode(), []).append(chunk)
        elif found is not None and body[:1] == _CHUNKS:
            for chunk, facts in _pairs(body):
                _check(chunk, facts, len(found.namespaces))
                found.chunks.append((chunk, facts))
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


def _check(chunk: bytes, facts: bytes, namespaces: int) -> None:
    if not is_chunk(chunk, facts, namespaces):
        raise ValueError("No keeper counts such a chunk")


def _packed(one: bytes, other: bytes) -> bytes:
    return _LENGTHS.pack(len(one), len(other)) + one + other


def _pairs(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 1
    while at < len(body):
        lengths = _LENGTHS.unpack_from(body, at)
        middle = at + _LENGTHS.size + lengths[0]
        end = middle + lengths[1]
        if end > len(body):
            raise ValueError("No keeper writes a part of a chunk")
        yield body[at + _LENGTHS.size : middle], body[middle:end]
        at = end


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == _CHUNKS_A_FRAME:
            yield batch
            batch = []
    if batch:
        yield batch
