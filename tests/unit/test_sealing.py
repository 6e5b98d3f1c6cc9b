"""What is encrypted comes back, and nothing that was touched ever does."""

import struct
import sys

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from kvtiers.tiers.base import ChunkKey, Namespace, TierConfigError
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES, Defect, Metadata, misnamed, pack, unpack, verify
from kvtiers.tiers.keyring import new_key, parse
from kvtiers.tiers.sealing import Sealing

KEY = ChunkKey(Namespace("0f" * 16), b"h" * 36, position=7)
TEXT = b"the user's own words, as KV. " * 142
PAYLOAD = memoryview(TEXT[:4096])
NEW, OLD, OTHER = (new_key(name) for name in ("new", "old", "other"))
SEALING = Sealing(parse(f"{NEW}\n{OLD}", "k"))


def sealed(sealing=SEALING, key=KEY, payload=PAYLOAD):
    """A chunk at rest: what its file or value holds."""
    block, target = aligned_buffer(METADATA_BYTES), bytearray(payload.nbytes)
    sealing.seal(key, payload, 12.5, block, memoryview(target))
    return bytearray(target + bytes(block))


def opened(chunk, sealing=SEALING, key=KEY):
    """As a tier opens one: the payload, or why there is none."""
    payload, block = memoryview(chunk[: PAYLOAD.nbytes]), memoryview(chunk[PAYLOAD.nbytes :])
    found = unpack(block)
    if isinstance(found, Defect):
        return found
    defect = misnamed(found, key, payload.nbytes) or sealing.open(found, block, payload)
    return defect or bytes(payload)


@given(
    digest=st.binary(max_size=64),
    namespace=st.text("0123456789abcdef", max_size=128),
    position=st.integers(-1, 2**62),
    payload=st.binary(max_size=300),
    created=st.floats(0, 1e12),
)
def test_what_is_sealed_opens_in_place_and_says_what_it_is(
    digest, namespace, position, payload, created
):
    key = ChunkKey(Namespace(namespace), digest, position)
    block, target = aligned_buffer(METADATA_BYTES), memoryview(bytearray(len(payload)))
    SEALING.seal(key, memoryview(payload), created, block, target)
    found = unpack(block)
    assert isinstance(found, Metadata)
    assert (found.hash, found.namespace, found.position) == (digest, namespace, position)
    assert (found.created, found.codec, found.key_id) == (created, 1, "new")
    assert misnamed(found, key, len(payload)) is None
    assert SEALING.open(found, block, target) is None
    assert bytes(target) == payload


BITS = (PAYLOAD.nbytes + METADATA_BYTES) * 8
AT = PAYLOAD.nbytes


@given(bit=st.integers(0, BITS - 1))
@example(bit=0)
@example(bit=(AT + 40) * 8)  # the tag
@example(bit=(AT + 248) * 8)  # the nonce
@example(bit=(AT + 260) * 8)  # the key's id
def test_no_flipped_bit_goes_unseen(bit):
    chunk = sealed()
    chunk[bit // 8] ^= 1 << bit % 8
    assert isinstance(opened(chunk), Defect)


def reseal(chunk):
    """What an attacker does, who lacks the key and has read ``format``."""
    chunk[-16:] = xxhash.xxh3_128_digest(bytes(chunk[AT:-16]))
    return chunk


@given(bit=st.integers(0, BITS - 16 * 8 - 1))
@example(bit=(AT + 10) * 8)  # the codec
@example(bit=(AT + 16) * 8)  # the position
@example(bit=(AT + 32) * 8)  # when it was made
@example(bit=(AT + 260) * 8)  # the key's id
@example(bit=(AT + 2000) * 8)  # what is zero and means nothing
def test_a_flipped_bit_with_a_right_checksum_is_no_hit_either(bit):
    chunk = sealed()
    chunk[bit // 8] ^= 1 << bit % 8
    assert isinstance(opened(reseal(chunk)), Defect)


def test_ciphertext_has_nothing_of_the_payload():
    chunk = sealed()
    assert not any(TEXT[n : n + 8] in chunk for n in range(256))


def test_no_two_chunks_share_a_nonce_and_equal_ones_look_different():
    chunks = [sealed() for _ in range(200)]
    assert len({bytes(chunk[AT + 248 : AT + 260]) for chunk in chunks}) == 200
    assert len({bytes(chunk[:16]) for chunk in chunks}) == 200


def test_the_payload_is_left_as_it_is():
    source = memoryview(bytearray(PAYLOAD))
    sealed(payload=source)
    assert source == PAYLOAD


# Keys -----------------------------------------------------------------------------


def test_a_chunk_of_an_older_key_opens_and_new_ones_use_the_first():
    before = sealed(Sealing(parse(OLD, "k")))
    assert opened(before) == PAYLOAD
    assert unpack(memoryview(sealed()[AT:])).key_id == "new"


def test_a_chunk_of_an_unknown_key_is_foreign():
    defect = opened(sealed(Sealing(parse(OTHER, "k"))))
    assert defect is Defect.UNKNOWN_KEY
    assert defect.foreign


def test_another_key_under_a_known_id_is_damage():
    impostor = Sealing(parse(new_key("new"), "k"))
    assert opened(sealed(impostor)) is Defect.NOT_AUTHENTIC
    assert not Defect.NOT_AUTHENTIC.foreign


# Planting -------------------------------------------------------------------------


def test_a_clear_chunk_is_never_taken_where_keys_are():
    block = aligned_buffer(METADATA_BYTES)
    pack(KEY, PAYLOAD, 12.5, block)
    assert verify(unpack(block), KEY, PAYLOAD) is None
    assert opened(bytearray(bytes(PAYLOAD) + bytes(block))) is Defect.NOT_ENCRYPTED


def test_an_encrypted_chunk_is_foreign_where_no_keys_are():
    chunk = sealed()
    found = unpack(memoryview(chunk[AT:]))
    assert verify(found, KEY, memoryview(chunk[:AT])) is Defect.ENCRYPTED


@pytest.mark.parametrize(
    ("key", "defect"),
    [
        (ChunkKey(Namespace("ee" * 16), KEY.hash), Defect.WRONG_NAMESPACE),
        (ChunkKey(KEY.namespace, b"i" * 36), Defect.WRONG_KEY),
    ],
)
def test_a_chunk_moved_under_another_name_is_refused(key, defect):
    assert opened(sealed(), key=key) is defect


@pytest.mark.parametrize(("offset", "content"), [(56, b"i" * 36), (120, b"ee" * 16)])
def test_and_so_is_one_whose_metadata_was_rewritten_to_match(offset, content):
    chunk = sealed()
    chunk[AT + offset : AT + offset + len(content)] = content
    key = ChunkKey(Namespace("ee" * 16), KEY.hash) if offset == 120 else None
    key = key or ChunkKey(KEY.namespace, b"i" * 36)
    assert opened(reseal(chunk), key=key) is Defect.NOT_AUTHENTIC


def test_metadata_of_one_chunk_does_not_vouch_for_the_payload_of_another():
    one, two = sealed(), sealed(payload=memoryview(bytes(4096)))
    assert opened(two[:AT] + one[AT:]) is Defect.NOT_AUTHENTIC


def test_a_codec_set_back_to_clear_opens_nothing():
    chunk = sealed()
    struct.pack_into("<H", chunk, AT + 10, 0)
    struct.pack_into("<16s", chunk, AT + 40, xxhash.xxh3_128_digest(bytes(chunk[:AT])))
    assert opened(reseal(chunk)) is Defect.NOT_ENCRYPTED


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(TierConfigError, match=r"pip install 'kvtiers\[encryption\]'"):
        Sealing(parse(NEW, "k"))
