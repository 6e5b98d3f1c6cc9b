"""Records of the log that the users of one root keep together, and their bytes.

What is about to be stored, what was used, what went: enough to count a root and to evict
from it in a policy's order without listing it. A file of records (a segment) is understood
by itself: it begins with who writes it, and names each namespace before it uses its number.

    frame   checksum of what follows (8, xxh3_64), length of the body (4), body
    body    kind (1), and for a stretch of neighbouring chunks: length of a hash (1), whether
            a parent is named (1), number of the namespace (2), position of the first (4),
            pages of each file (4), tenant's tag (8), the parent's hash, the hashes

Raw hashes, run by run: 36 bytes a chunk and 34 for the run. What is appended at once begins
with the time, by the writer's clock: a hint, for the order of what several writers did
before anybody read it. Reading stops at the first frame that is not whole: a writer that
was killed, or one that is just writing.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from kvtiers.tiers.base import ALIGNMENT, ChunkKey
from kvtiers.tiers.format import MAX_HASH_BYTES
from kvtiers.tiers.fs_layout import is_namespace

NO_TENANT = bytes(8)
VERSION = 1

_FRAME = struct.Struct("<QI")
_LENGTH = struct.Struct("<I")
_RUN = struct.Struct("<BB?HiI8s")
_HEADER = struct.Struct("<BBQI")
_NAMESPACE = struct.Struct("<BH")
_FIGURE = struct.Struct("<BQ")
# A run's length is bounded so that a reader never holds more than this of a broken file.
_MOST_BYTES = 1 << 20
_MOST_CHUNKS = 4096
_MOST_POSITION = (1 << 31) - 1


class Kind(enum.IntEnum):
    """What a record says of its chunks."""

    HEADER = 1
    """Who writes this segment, and how much it had announced before."""
    NAMESPACE = 2
    """The id behind a namespace's number."""
    COMING = 3
    """Files of these may appear from now on; written before they do."""
    THERE = 4
    """What was announced is there now."""
    USED = 5
    """Read by a request, stored once more, or served elsewhere."""
    GONE = 6
    """Not there as far as the writer knows: removed, lost, or its store failed."""
    SHORT = 7
    """The file system had no room for so many bytes."""
    TIME = 8
    """When what follows was written down."""
    WANTED = 9
    """The writer waits to announce so many bytes more than it was granted."""


# They say a number of bytes, and name no chunks.
_OF_BYTES = frozenset({Kind.SHORT, Kind.WANTED})


@dataclass(frozen=True, slots=True)
class Record:
    """Neighbouring chunks of one prefix, head first, and what became of them.

    Attributes:
        kind: see ``Kind``.
        namespace: id of the chunks' namespace.
        hashes: of the chunks, all of one length.
        start: position of the first in its prefix, -1 if unknown.
        parent: the hash before the first, None if there is none or it is unknown.
        nbytes: size of each file, a multiple of ``ALIGNMENT``; 0 if not said. Of ``SHORT``
            the room that lacked, of ``WANTED`` what is waited for.
        tenant: tag of who they belong to, ``NO_TENANT`` if unknown.
        at: seconds since the epoch when it was written down, 0 if not said.

    """

    kind: Kind
    namespace: str = ""
    hashes: tuple[bytes, ...] = ()
    start: int = -1
    parent: bytes | None = None
    nbytes: int = 0
    tenant: bytes = NO_TENANT
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Header:
    """The first record of a segment.

    Attributes:
        announced: bytes that this writer had announced in the segments before.
        unit: bytes of one of its chunks.
        owner: who it is, as ``owner.Owner`` says it.

    """

    announced: int
    unit: int
    owner: Mapping[str, Any]


def records_of(
    kind: Kind, keys: Sequence[ChunkKey], nbytes: int, tags: Mapping[str, bytes]
) -> list[Record]:
    """The keys in runs: neighbours of one prefix are told together.

    Args:
        kind: what is said of them.
        keys: in the order of the call that was about them.
        nbytes: size of each file.
        tags: of every tenant named in ``keys``.

    """
    records: list[Record] = []
    begin = 0
    for end in range(1, len(keys) + 1):
        if end < len(keys) and end - begin < _MOST_CHUNKS and _follows(keys[end - 1], keys[end]):
            continue
        first = keys[begin]
        hashes = tuple(key.hash for key in keys[begin:end])
        tag = tags.get(first.tenant, NO_TENANT)
        records.append(
            Record(kind, first.namespace.id, hashes, first.position, _parent(first), nbytes, tag)
        )
        begin = end
    return records


def _parent(key: ChunkKey) -> bytes | None:
    """Hashes of one record have one length, the parent's too."""
    return key.parent if key.parent and len(key.parent) == len(key.hash) else None


def _follows(one: ChunkKey, other: ChunkKey) -> bool:
    return (
        0 <= one.position == other.position - 1
        and other.parent in (None, one.hash)
        and one.namespace.id == other.namespace.id
        and one.tenant == other.tenant
        and len(one.hash) == len(other.hash)
    )


def framed(body: bytes) -> bytes:
    """A body with what vouches for it."""
    length = _LENGTH.pack(len(body))
    return xxhash.xxh3_64_intdigest(length + body).to_bytes(8, "little") + length + body


def bodies(data: bytes | memoryview, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Each whole body from ``start`` on, and where it ends; stops at what is not whole."""
    while start + _FRAME.size <= len(data):
        checksum, length = _FRAME.unpack_from(data, start)
        end = start + _FRAME.size + length
        if length > _MOST_BYTES or end > len(data):
            return
        if xxhash.xxh3_64_intdigest(data[start + 8 : end]) != checksum:
            return
        yield bytes(data[start + _FRAME.size : end]), end
        start = end


class Encoder:
    """Makes the bytes of one segment, in their order."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @staticmethod
    def header(header: Header) -> bytes:
        """The segment's beginning."""
        fixed = _HEADER.pack(Kind.HEADER, VERSION, header.announced, header.unit // ALIGNMENT)
        return framed(fixed + json.dumps(dict(header.owner)).encode())

    @staticmethod
    def time(at: float) -> bytes:
        """When the records that follow are written down, in seconds since the epoch."""
        return framed(_FIGURE.pack(Kind.TIME, int(at * 1e6)))

    def records(self, records: Iterable[Record]) -> bytes:
        """The records, and the namespaces that they name for the first time."""
        return b"".join(part for record in records for part in self._parts(record))

    def _parts(self, record: Record) -> Iterator[bytes]:
        if record.kind in _OF_BYTES:
            yield framed(_FIGURE.pack(record.kind, record.nbytes))
            return
        number = self._numbers.get(record.namespace)
        if number is None:
            number = self._numbers[record.namespace] = len(self._numbers)
            yield framed(_NAMESPACE.pack(Kind.NAMESPACE, number) + record.namespace.encode("ascii"))
        fixed = _RUN.pack(
            record.kind,
            len(record.hashes[0]),
            record.parent is not None,
            number,
            record.start,
            record.nbytes // ALIGNMENT,
            record.tenant,
        )
        yield framed(b"".join([fixed, record.parent or b"", *record.hashes]))


class Decoder:
    """Understands the bytes of one segment, from its beginning."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._at = 0.0

    def feed(self, data: bytes) -> tuple[list[Record | Header], int]:
        """The records in ``data``, and how much of it they took.

        What passes its checksum and can't be understood was written by a later release, or
        by somebody who means harm, and is passed over.
        """
        found: list[Record | Header] = []
        used = 0
        for body, end in bodies(data):
            used = end
            record = self._understood(body)
            if record is not None:
                found.append(record)
        return found, used

    def _understood(self, body: bytes) -> Record | Header | None:
        try:
            kind = Kind(body[0])
            if kind is Kind.HEADER:
                _, _, announced, pages = _HEADER.unpack_from(body)
                owner = json.loads(body[_HEADER.size :])
                known = isinstance(owner, dict)
                return Header(announced, pages * ALIGNMENT, owner) if known else None
            if kind is Kind.NAMESPACE:
                name = body[_NAMESPACE.size :].decode("ascii")
                if is_namespace(name):
                    self._names[_NAMESPACE.unpack_from(body)[1]] = name
                return None
            if kind is Kind.TIME:
                self._at = _FIGURE.unpack_from(body)[1] / 1e6
                return None
            if kind in _OF_BYTES:
                return Record(kind, nbytes=_FIGURE.unpack_from(body)[1], at=self._at)
            return self._run(kind, body)
        except (ValueError, IndexError, KeyError, RecursionError, struct.error):
            return None

    def _run(self, kind: Kind, body: bytes) -> Record:
        _, width, has_parent, number, start, pages, tenant = _RUN.unpack_from(body)
        at = _RUN.size
        parent = body[at : at + width] if has_parent else None
        at += width if has_parent else 0
        count, rest = divmod(len(body) - at, width) if width else (0, 0)
        bounded = 1 <= count <= _MOST_CHUNKS and -1 <= start <= _MOST_POSITION - count
        if width > MAX_HASH_BYTES or rest or not bounded:
            raise ValueError("No run of chunks looks like that")
        hashes = tuple(body[i : i + width] for i in range(at, len(body), width))
        if len(set(hashes)) < count:
            raise ValueError("No chunk comes twice in one prefix")
        nbytes = pages * ALIGNMENT
        name = self._names[number]
        return Record(kind, name, hashes, start, parent, nbytes, tenant, self._at)
