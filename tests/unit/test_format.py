import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers.base import ChunkKey, Namespace
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES, Defect, Metadata, pack, unpack, verify

KEY = ChunkKey(Namespace("0f" * 16), b"h" * 36, position=7, tenant="alice")
PAYLOAD = memoryview(bytes(range(256)) * 32)


def packed(key: ChunkKey = KEY, payload: memoryview = PAYLOAD) -> memoryview:
    block = aligned_buffer(METADATA_BYTES)
    pack(key, payload, 12.5, block)
    return block


def reseal(block: memoryview) -> memoryview:
    """Make the block's own checksum right again after an edit."""
    block[-16:] = xxhash.xxh3_128_digest(block[:-16])
    return block


@given(
    digest=st.binary(max_size=64),
    namespace=st.text("0123456789abcdef", max_size=128),
    position=st.integers(-1, 2**62),
    payload=st.binary(max_size=300),
    created=st.floats(0, 1e12),
)
def test_what_is_packed_is_unpacked_and_verifies(digest, namespace, position, payload, created):
    key, view = ChunkKey(Namespace(namespace), digest, position), memoryview(payload)
    block = aligned_buffer(METADATA_BYTES)
    pack(key, view, created, block)
    metadata = unpack(block)
    assert metadata == Metadata(
        hash=digest,
        namespace=namespace,
        position=position,
        payload_bytes=len(payload),
        codec=0,
        checksum=xxhash.xxh3_128_digest(payload),
        created=created,
    )
    assert verify(metadata, key, view) is None


@given(bit=st.integers(0, METADATA_BYTES * 8 - 1))
def test_no_flipped_bit_of_the_block_goes_unseen(bit):
    block = packed()
    block[bit // 8] ^= 1 << bit % 8
    assert isinstance(unpack(block), Defect)


@given(bit=st.integers(0, PAYLOAD.nbytes * 8 - 1))
def test_no_flipped_bit_of_the_payload_goes_unseen(bit):
    damaged = bytearray(PAYLOAD)
    damaged[bit // 8] ^= 1 << bit % 8
    assert verify(unpack(packed()), KEY, memoryview(damaged)) is Defect.PAYLOAD_CHECKSUM


@given(garbage=st.binary(max_size=2 * METADATA_BYTES))
def test_garbage_is_a_defect_and_never_an_exception(garbage):
    assert isinstance(unpack(memoryview(garbage)), Defect)


def test_packing_leaves_nothing_of_what_the_buffer_held():
    dirty = aligned_buffer(METADATA_BYTES)
    dirty[:] = b"\xff" * METADATA_BYTES
    pack(KEY, PAYLOAD, 12.5, dirty)
    assert dirty == packed()


def test_the_tenant_is_not_stored():
    assert b"alice" not in bytes(packed())


@pytest.mark.parametrize(
    ("edit", "defect"),
    [
        (lambda block: block[: METADATA_BYTES - 1], Defect.TRUNCATED),
        (lambda block: memoryview(bytes(METADATA_BYTES)), Defect.BAD_MAGIC),
    ],
)
def test_what_is_no_block_at_all(edit, defect):
    assert unpack(edit(packed())) is defect


def test_another_version_is_named_even_if_it_seals_its_block_differently():
    block = packed()
    struct.pack_into("<H", block, 8, 2)
    assert unpack(block) is Defect.UNKNOWN_VERSION


def test_an_unknown_codec_is_named():
    block = packed()
    struct.pack_into("<H", block, 10, 2)
    assert unpack(reseal(block)) is Defect.UNKNOWN_CODEC


@pytest.mark.parametrize(
    ("key", "payload", "defect"),
    [
        (ChunkKey(Namespace("ee" * 16), KEY.hash), PAYLOAD, Defect.WRONG_NAMESPACE),
        (ChunkKey(KEY.namespace, b"i" * 36), PAYLOAD, Defect.WRONG_KEY),
        (ChunkKey(KEY.namespace, KEY.hash[:-1]), PAYLOAD, Defect.WRONG_KEY),
        (KEY, PAYLOAD[:-1], Defect.WRONG_LENGTH),
    ],
)
def test_a_sound_block_that_vouches_for_something_else(key, payload, defect):
    assert verify(unpack(packed()), key, payload) is defect


def test_the_position_is_no_part_of_the_name():
    moved = ChunkKey(KEY.namespace, KEY.hash, position=8)
    assert verify(unpack(packed()), moved, PAYLOAD) is None


@pytest.mark.parametrize(
    "key",
    [ChunkKey(KEY.namespace, b"h" * 65), ChunkKey(Namespace("a" * 129), KEY.hash)],
)
def test_a_key_too_long_for_the_block_is_refused_not_cut(key):
    with pytest.raises(ValueError, match="at most 64 bytes and its namespace id 128"):
        pack(key, PAYLOAD, 0.0, aligned_buffer(METADATA_BYTES))
