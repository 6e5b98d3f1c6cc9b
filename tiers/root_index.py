"""Every chunk under a root, as the keeper of its bound knows it.

The process is an engine's scheduler, and a collection of Python's garbage walks every
object that can hold another. So a chunk is two ``bytes``, which it does not walk, in a
dict of such: an id (number of the namespace, hash) and its facts, packed. One dict for
each folder of chunks, as it is listed, and so that none grows large enough to pause
the engine while it is rehashed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kvtiers.tiers.access_log import NO_TENANT
from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.format import MAX_HASH_BYTES

_NUMBER = struct.Struct(">H")
MOST_NAMESPACES = 1 << 16
_FACTS = struct.Struct("<IIi8s")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one chunk.

    Attributes:
        nbytes: what its file takes.
        used: seconds since the epoch, of its last use or its store.
        position: in its prefix, -1 if unknown.
        tenant: tag of who it belongs to.
        parent: hash of the chunk before it, b"" if unknown.

    """

    nbytes: int
    used: float = 0.0
    position: int = -1
    tenant: bytes = NO_TENANT
    parent: bytes = b""

    def over(self, older: Facts) -> Facts:
        """These, and of what they do not say what was known before."""
        return Facts(
            self.nbytes or older.nbytes,
            self.used,
            self.position if self.position >= 0 else older.position,
            self.tenant if self.tenant != NO_TENANT else older.tenant,
            self.parent or older.parent,
        )

    def packed(self) -> bytes:
        """As few bytes as it takes."""
        used = min(max(0, int(self.used)), 0xFFFFFFFF)
        pages = min(-(-self.nbytes // ALIGNMENT), 0xFFFFFFFF)
        return _FACTS.pack(pages, used, self.position, self.tenant) + self.parent


def unpacked(packed: bytes) -> Facts:
    """What ``Facts.packed`` made."""
    pages, used, position, tenant = _FACTS.unpack_from(packed)
    return Facts(pages * ALIGNMENT, used, position, tenant, packed[_FACTS.size :])


def is_chunk(chunk: bytes, packed: bytes, namespaces: int) -> bool:
    """Whether these can be an id, of so many namespaces, and what ``Facts.packed`` made."""
    if not _NUMBER.size < len(chunk) <= _NUMBER.size + MAX_HASH_BYTES:
        return False
    parent = len(packed) - _FACTS.size
    return _NUMBER.unpack_from(chunk)[0] < namespaces and 0 <= parent <= MAX_HASH_BYTES


class RootIndex:
    """Ids to facts, with sums. One thread at a time.

    Attributes:
        nbytes: that all chunks take.
        chunks: how many there are.

    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.chunks = 0
        self._names: list[str] = []
        self._numbers: dict[str, bytes] = {}
        self._folders: dict[bytes, dict[bytes, bytes]] = {}

    def id_of(self, namespace: str, digest: bytes) -> bytes:
        """The chunk's id. Raises OverflowError for one namespace more than can be told apart."""
        number = self._numbers.get(namespace)
        if number is None:
            if len(self._names) == MOST_NAMESPACES:
                raise OverflowError(f"More than {MOST_NAMESPACES} namespaces")
            number = self._numbers[namespace] = _NUMBER.pack(len(self._names))
            self._names.append(namespace)
        return number + digest

    def name_of(self, chunk: bytes) -> tuple[str, bytes]:
        """The namespace and hash behind an id."""
        return self._names[_NUMBER.unpack_from(chunk)[0]], chunk[2:]

    def namespaces(self) -> list[str]:
        """In the order of their numbers."""
        return list(self._names)

    def __contains__(self, chunk: bytes) -> bool:
        return chunk in self._folders.get(chunk[:3], ())

    def __iter__(self) -> Iterator[bytes]:
        for folder in self._folders.values():
            yield from folder

    def get(self, chunk: bytes) -> bytes | None:
        """The packed facts."""
        folder = self._folders.get(chunk[:3])
        return None if folder is None else folder.get(chunk)

    def put(self, chunk: bytes, packed: bytes) -> None:
        """Take it in, or what is new of it."""
        folder = self._folders.setdefault(chunk[:3], {})
        before = folder.get(chunk)
        folder[chunk] = packed
        self.nbytes += _bytes_of(packed)
        if before is None:
            self.chunks += 1
        else:
            self.nbytes -= _bytes_of(before)

    def pop(self, chunk: bytes) -> int:
        """Forget it. Returns the bytes it took, 0 if it was not known."""
        packed = self._folders.get(chunk[:3], {}).pop(chunk, None)
        if packed is None:
            return 0
        self.chunks -= 1
        self.nbytes -= _bytes_of(packed)
        return _bytes_of(packed)

    def folder(self, namespace: str, first_byte: int) -> list[bytes]:
        """Ids of the chunks in one folder."""
        return list(self._folders.get(self.id_of(namespace, bytes([first_byte])), ()))


def _bytes_of(packed: bytes) -> int:
    return int(_FACTS.unpack_from(packed)[0]) * ALIGNMENT
