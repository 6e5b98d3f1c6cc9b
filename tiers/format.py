"""A chunk at rest: its payload and one block of metadata that vouches for it.

    offset 0                                   payload_bytes
    ├── payload, a multiple of 4096 bytes ─────┼── metadata, 4096 bytes ──┤

Both parts start on a page boundary and have a page multiple as length, so that
O_DIRECT works, and one ``preadv``/``pwritev`` of ``[payload, metadata]`` moves a
chunk between a tier and the caller's memory without an extra copy.

The metadata comes last. A write that was cut short then lacks it, and cannot be
taken for a chunk even before a checksum is looked at; the payload keeps the
alignment of the file or value it lies in, whatever that is (a stripe, a huge
page); and a reader that streams (Redis) gets the payload straight into its slot.
What lies behind it (a tier may pad its files) belongs to no chunk.

Layout of the block, little-endian, the rest zero:

    ====== ===== =====================================================
    offset bytes
    ====== ===== =====================================================
    0      8     magic ``KVTCHUNK``
    8      2     format version
    10     2     codec of the payload: 0 as it is, 1 AES-256-GCM
    12     2     length of the hash
    14     2     length of the namespace id
    16     8     position of the chunk in its prefix, -1 unknown
    24     8     payload bytes
    32     8     creation time, seconds since the epoch, float
    40     16    xxh3_128 of the payload, with codec 1 GCM's tag
    56     64    hash
    120    128   namespace id, ASCII
    248    12    with codec 1: nonce, random for each chunk
    260    32    with codec 1: id of the key, ASCII
    4080   16    xxh3_128 of the 4080 bytes before
    ====== ===== =====================================================

The tenant is not stored: the hash covers it, and a cache has no business keeping
a list of its users. The checksum finds accidents, not attackers: it is not
keyed, and who can write to a tier can plant a chunk. With codec 1 the tag is in its
place, and vouches for both payload and metadata: the additional data that GCM
authenticates is the first 4080 bytes with zeros in place of the tag. So no chunk
passes for another one, under another name, or as made by another key. See ``sealing``.

xxh3_128 runs at memory speed (19 GB/s a core where crc32 and sha256 made 3.6 and
1.8), and releases the GIL.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash
from kvtiers.tiers.base import ALIGNMENT, ChunkKey

METADATA_BYTES = ALIGNMENT
VERSION = 1
CODEC_NONE = 0
CODEC_AES_GCM = 1
NONCE_BYTES = 12
MAX_KEY_ID_BYTES = 32
MAX_HASH_BYTES = 64
MAX_NAMESPACE_BYTES = 128

_MAGIC = b"KVTCHUNK"
_HEAD = struct.Struct("<8sHHHHqQd16s64s128s")
_PREFIX = struct.Struct("<8sH")
_KEYED = struct.Struct(f"<{NONCE_BYTES}s{MAX_KEY_ID_BYTES}s")
_CHECKSUM = slice(40, 56)
_SEALED = METADATA_BYTES - 16


class Defect(enum.Enum):
    """Why bytes are not the chunk that was asked for; the value is for humans."""

    TRUNCATED = "shorter than a chunk"
    BAD_MAGIC = "no chunk: magic missing"
    UNKNOWN_VERSION = "written by another version of the format"
    METADATA_CHECKSUM = "metadata damaged"
    UNKNOWN_CODEC = "payload encoded in a way this version cannot decode"
    WRONG_NAMESPACE = "a chunk of another namespace"
    WRONG_KEY = "another chunk"
    WRONG_LENGTH = "payload of another size"
    PAYLOAD_CHECKSUM = "payload damaged"
    NOT_AUTHENTIC = "damaged, or not made with the key that it names"
    NOT_ENCRYPTED = "not encrypted, where only encrypted chunks are used"
    ENCRYPTED = "encrypted, and no keys are configured here"
    UNKNOWN_KEY = "encrypted with a key that is not configured here"

    @property
    def foreign(self) -> bool:
        """Whether it may be a sound chunk, for engines with other keys or with none."""
        return self in (Defect.NOT_ENCRYPTED, Defect.ENCRYPTED, Defect.UNKNOWN_KEY)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the metadata block says of its payload.

    Attributes:
        hash: the key's hash.
        namespace: id of the key's namespace.
        position: index of the chunk in its prefix, -1 if unknown.
        payload_bytes: length of the payload as stored.
        codec: how the payload is encoded.
        checksum: xxh3_128 of the payload as stored, or GCM's tag.
        created: seconds since the epoch.
        nonce: GCM's, b"" if the payload is not encrypted.
        key_id: of the key that it is encrypted with, "" if it is not.

    """

    hash: bytes
    namespace: str
    position: int
    payload_bytes: int
    codec: int
    checksum: bytes
    created: float
    nonce: bytes = b""
    key_id: str = ""


def pack(key: ChunkKey, payload: memoryview, created: float, block: memoryview) -> None:
    """Write the metadata of ``payload`` into ``block``.

    Args:
        key: names the chunk.
        payload: the bytes to vouch for.
        created: seconds since the epoch.
        block: writable, ``METADATA_BYTES`` long; aligned if O_DIRECT will see it.

    Raises:
        ValueError: the hash or the namespace id is too long for the block.

    """
    _write(block, key, CODEC_NONE, payload.nbytes, created)
    _close(block, xxhash.xxh3_128_digest(payload))


def pack_encrypted(
    key: ChunkKey,
    payload_bytes: int,
    created: float,
    named: tuple[bytes, str],
    encrypt: Callable[[bytes], bytes],
    block: memoryview,
) -> None:
    """Write the metadata of a payload that is encrypted meanwhile.

    Args:
        key: names the chunk.
        payload_bytes: length of the payload.
        created: seconds since the epoch.
        named: the nonce, and the id of the encryption key.
        encrypt: encrypts the payload; additional data to authenticate -> tag.
        block: as for ``pack``.

    Raises:
        ValueError: as ``pack`` does.

    """
    _write(block, key, CODEC_AES_GCM, payload_bytes, created)
    _KEYED.pack_into(block, _HEAD.size, named[0], named[1].encode("ascii"))
    _close(block, encrypt(associated(block)))


def associated(block: memoryview) -> bytes:
    """What a block says beside the tag: the additional data that GCM authenticates."""
    data = bytearray(block[:_SEALED])
    data[_CHECKSUM] = bytes(16)
    return bytes(data)


def _write(
    block: memoryview, key: ChunkKey, codec: int, payload_bytes: int, created: float
) -> None:
    """All but what vouches for it."""
    namespace = key.namespace.id.encode("ascii")
    if len(key.hash) > MAX_HASH_BYTES or len(namespace) > MAX_NAMESPACE_BYTES:
        raise ValueError(
            f"A chunk's hash has at most {MAX_HASH_BYTES} bytes and its namespace id "
            f"{MAX_NAMESPACE_BYTES}, got {len(key.hash)} and {len(namespace)}."
        )
    block[:] = bytes(METADATA_BYTES)
    _HEAD.pack_into(
        block,
        0,
        _MAGIC,
        VERSION,
        codec,
        len(key.hash),
        len(namespace),
        key.position,
        payload_bytes,
        created,
        b"",
        key.hash,
        namespace,
    )


def _close(block: memoryview, checksum: bytes) -> None:
    block[_CHECKSUM] = checksum
    block[_SEALED:] = xxhash.xxh3_128_digest(block[:_SEALED])


def unpack(block: memoryview) -> Metadata | Defect:
    """What ``block`` says, or why it says nothing. Never raises for its content."""
    if block.nbytes < METADATA_BYTES:
        return Defect.TRUNCATED
    magic, version = _PREFIX.unpack_from(block)
    if magic != _MAGIC:
        return Defect.BAD_MAGIC
    # Before the checksum: another version may seal its block in another way.
    if version != VERSION:
        return Defect.UNKNOWN_VERSION
    if block[_SEALED:METADATA_BYTES] != xxhash.xxh3_128_digest(block[:_SEALED]):
        return Defect.METADATA_CHECKSUM
    fields = _HEAD.unpack_from(block)
    _, _, codec, hash_bytes, id_bytes, position, payload_bytes, created, checksum = fields[:9]
    if codec not in (CODEC_NONE, CODEC_AES_GCM):
        return Defect.UNKNOWN_CODEC
    nonce, key_id = _KEYED.unpack_from(block, _HEAD.size) if codec else (b"", b"")
    return Metadata(
        hash=fields[9][:hash_bytes],
        namespace=fields[10][:id_bytes].decode("ascii", errors="replace"),
        position=position,
        payload_bytes=payload_bytes,
        codec=codec,
        checksum=checksum,
        created=created,
        nonce=nonce,
        key_id=key_id.rstrip(b"\0").decode("ascii", errors="replace"),
    )


def verify(metadata: Metadata, key: ChunkKey, payload: memoryview) -> Defect | None:
    """Why ``payload``, in clear, is not the chunk named ``key``, None if it is."""
    defect = misnamed(metadata, key, payload.nbytes)
    if defect is not None:
        return defect
    if metadata.codec != CODEC_NONE:
        return Defect.ENCRYPTED
    if metadata.checksum != xxhash.xxh3_128_digest(payload):
        return Defect.PAYLOAD_CHECKSUM
    return None


def misnamed(metadata: Metadata, key: ChunkKey, payload_bytes: int) -> Defect | None:
    """Why it is not of a chunk of that name and size, None if it is.

    The position is not compared: it is a fact about the chunk, not its name.
    """
    if metadata.namespace != key.namespace.id:
        return Defect.WRONG_NAMESPACE
    if metadata.hash != key.hash:
        return Defect.WRONG_KEY
    if metadata.payload_bytes != payload_bytes:
        return Defect.WRONG_LENGTH
    return None
