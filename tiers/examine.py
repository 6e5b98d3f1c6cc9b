"""Whether what lies somewhere is the chunk that its name says: of any size, with or without keys.

A tier verifies chunks of one size as it reads them into slots. Here sizes are found out,
nothing is kept, and a piece at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash
from kvtiers.tiers import format as chunk_format
from kvtiers.tiers.base import ALIGNMENT, ChunkKey
from kvtiers.tiers.format import CODEC_NONE, METADATA_BYTES, Defect, Metadata
from kvtiers.tiers.sealing import Sealing

_PIECE = 1 << 20
# Files may be padded to the largest block size.
_MOST_PADDING = 16 << 20


class Content(Protocol):
    """The bytes of a file, object or value."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Some of them; fewer only where it ends before. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        defect: what is wrong, None if nothing is. A ``foreign`` one says that the payload
            could not be judged: the metadata is sound.
        metadata: what it says of itself, None if that can't be read.

    """

    defect: Defect | None
    metadata: Metadata | None = None


def examine(content: Content, key: ChunkKey, sealing: Sealing | None) -> Verdict:
    """Judge what lies under a chunk's name. Raises OSError where it can't be read.

    Args:
        content: what lies there.
        key: what its name says.
        sealing: the keys at hand. A chunk in clear is sound with or without.

    """
    block, found = find_metadata(content)
    if isinstance(found, Defect):
        return Verdict(found)
    defect = chunk_format.misnamed(found, key, found.payload_bytes)
    if defect is None and found.codec == CODEC_NONE:
        defect = _checked(content, found)
    elif defect is None:
        defect = _decrypted(content, found, block, sealing)
    return Verdict(defect, found)


def find_metadata(content: Content) -> tuple[memoryview, Metadata | Defect]:
    """The last block that is not padding, and what it says. Raises OSError."""
    block = memoryview(b"")
    for start, block in _blocks_from_the_end(content):
        found = chunk_format.unpack(block)
        if isinstance(found, Metadata) and found.payload_bytes != start:
            return block, Defect.WRONG_LENGTH
        if found is not Defect.BAD_MAGIC or any(block):
            # A file that was cut short ends anywhere, mostly within its payload.
            cut = found is Defect.BAD_MAGIC and content.nbytes % ALIGNMENT
            return block, Defect.TRUNCATED if cut else found
    return block, Defect.TRUNCATED


def _blocks_from_the_end(content: Content) -> Iterator[tuple[int, memoryview]]:
    last = content.nbytes // ALIGNMENT * ALIGNMENT - METADATA_BYTES
    for start in range(last, max(-1, last - _MOST_PADDING), -ALIGNMENT):
        block = memoryview(content.read(start, start + METADATA_BYTES))
        if block.nbytes < METADATA_BYTES:
            return
        yield start, block


def _pieces(content: Content, nbytes: int) -> Iterator[bytes | memoryview]:
    for start in range(0, nbytes, _PIECE):
        yield content.read(start, min(start + _PIECE, nbytes))


def _checked(content: Content, metadata: Metadata) -> Defect | None:
    digest = xxhash.xxh3_128()
    for piece in _pieces(content, metadata.payload_bytes):
        digest.update(piece)
    return None if digest.digest() == metadata.checksum else Defect.PAYLOAD_CHECKSUM


def _decrypted(
    content: Content, metadata: Metadata, block: memoryview, sealing: Sealing | None
) -> Defect | None:
    if sealing is None:
        return Defect.ENCRYPTED
    return sealing.check(metadata, block, _pieces(content, metadata.payload_bytes))
