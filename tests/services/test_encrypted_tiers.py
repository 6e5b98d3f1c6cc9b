"""Encrypted, every tier keeps its promises, reads nothing that was planted, and fights nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

import remote_recipes  # noqa: E402 - rewritten before its import
import tier_recipes  # noqa: E402
from encrypted_tiers import decrypted, write_keys  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from kvtiers.tiers.base import ChunkKey, Namespace, ReadOutcome, Tier, WriteOutcome  # noqa: E402
from kvtiers.tiers.buffers import aligned_buffer  # noqa: E402
from kvtiers.tiers.format import METADATA_BYTES  # noqa: E402
from kvtiers.tiers.fs import FsTier  # noqa: E402
from kvtiers.tiers.keyring import new_key  # noqa: E402
from kvtiers.tiers.redis import RedisTier  # noqa: E402
from kvtiers.tiers.unreadable import GRACE_SECONDS  # noqa: E402
from redis_server import RedisServer  # noqa: E402
from redis_tiers import RedisConformance, name_of  # noqa: E402


class Encrypted:
    """Mixed into a recipe: its tier has keys, and ``peek`` decrypts by itself."""

    keys: ClassVar[Path]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _keys(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.keys = write_keys(tmp_path_factory.mktemp("keys") / "kv.keys")

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        content = self.content(tier, key)
        return None if content is None else decrypted(content, self.payload_bytes, self.keys)


class TestFsTier(Encrypted, tier_recipes.FsRecipe):
    def open_tier(self, place: Path, chunks: int) -> Tier:
        capacity = chunks * (self.payload_bytes + METADATA_BYTES)
        config = FsTier.Config(path=place, capacity=capacity, encryption=str(self.keys))
        return FsTier(config, self.payload_bytes)

    def content(self, tier: Tier, key: ChunkKey) -> bytes | None:
        file = self.file(tier, key)
        return file.read_bytes() if file.exists() else None


class TestRedisTier(Encrypted, RedisConformance):
    @property
    def options(self) -> dict[str, Any]:
        return {"encryption": {"key_file": str(self.keys)}}

    def content(self, tier: Tier, key: ChunkKey) -> bytes | None:
        with self.client() as client:
            return client.get(name_of(tier, key))


class TestMemoryUrl(Encrypted, remote_recipes.MemoryRecipe):
    @property
    def options(self) -> dict[str, Any]:
        return {"encryption": {"key_file": str(self.keys)}}

    def content(self, tier: Tier, key: ChunkKey) -> bytes | None:
        return self.get(self.path_of(tier, key))


class TestPlainUrl(Encrypted, remote_recipes.PlainRecipe):
    @property
    def options(self) -> dict[str, Any]:
        return {"encryption": {"key_file": str(self.keys)}, "publish": "rename"}

    def content(self, tier: Tier, key: ChunkKey) -> bytes | None:
        return self.get(self.path_of(tier, key))


# What others put there ------------------------------------------------------------

PAYLOAD_BYTES = 8192
HERE, ELSEWHERE = Namespace("ab" * 16, {"model": "a"}), Namespace("cd" * 16, {"model": "b"})
KEY, NEIGHBOUR = ChunkKey(HERE, b"k" * 36, 0), ChunkKey(HERE, b"n" * 36, 1)
WORDS = b"what the user wrote. " * 400
NEW, OLD, OTHER = (new_key(name) for name in ("new", "old", "other"))


class Place:
    """Where tiers with different keys lie, and a door to the bytes in it.

    Args:
        make: options -> a tier at this place.
        get, put: the bytes under a chunk's name.
        folder: for key files.

    """

    def __init__(
        self,
        make: Callable[..., Tier],
        get: Callable[[ChunkKey], bytes | None],
        put: Callable[[ChunkKey, bytes], None],
        folder: Path,
    ) -> None:
        self._make, self.get, self.put, self._folder = make, get, put, folder
        self._opened: list[Tier] = []

    def tier(self, *keys: str) -> Tier:
        """With these keys, in clear without any."""
        options = {}
        if keys:
            number = len(self._opened)
            options["encryption"] = str(write_keys(self._folder / f"{number}.keys", *keys))
        self._opened.append(self._make(**options))
        return self._opened[-1]

    def close(self) -> None:
        for tier in self._opened:
            tier.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["fs", "redis", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = {"fs": in_folder, "url": in_store}.get(request.param)
    opened = made(tmp_path) if made else in_redis(request.getfixturevalue("server"), tmp_path)
    yield opened
    opened.close()


def in_folder(folder: Path) -> Place:
    def file(key: ChunkKey) -> Path:
        name = f"{key.hash.hex()}.kv"
        return folder / "root" / "v1" / key.namespace.id / name[:2] / name

    def put(key: ChunkKey, content: bytes) -> None:
        file(key).parent.mkdir(parents=True, exist_ok=True)
        file(key).write_bytes(content)

    def make(**options: Any) -> Tier:
        return FsTier(FsTier.Config(path=folder / "root", **options), PAYLOAD_BYTES)

    def get(key: ChunkKey) -> bytes | None:
        return file(key).read_bytes() if file(key).exists() else None

    return Place(make, get, put, folder)


def in_redis(server: RedisServer, folder: Path) -> Place:
    prefix = f"{folder}:"

    def name(key: ChunkKey) -> str:
        return f"{prefix}v1:{key.namespace.id}:{key.hash.hex()}"

    def make(**options: Any) -> Tier:
        config = RedisTier.Config(url=server.url, key_prefix=prefix, **options)
        return RedisTier(config, PAYLOAD_BYTES)

    def get(key: ChunkKey) -> bytes | None:
        with server.client() as client:
            return client.get(name(key))

    def put(key: ChunkKey, content: bytes) -> None:
        with server.client() as client:
            client.set(name(key), content)

    return Place(make, get, put, folder)


def in_store(folder: Path) -> Place:
    def path(key: ChunkKey) -> str:
        return f"{folder}/{remote_recipes.name_of(key)}"

    def make(**options: Any) -> Tier:
        return remote_recipes.open_remote_tier(f"memory://{folder}", 99, PAYLOAD_BYTES, **options)

    def get(key: ChunkKey) -> bytes | None:
        file = MemoryFileSystem.store.get(path(key))
        return None if file is None else file.getvalue()

    def put(key: ChunkKey, content: bytes) -> None:
        MemoryFileSystem().pipe_file(path(key), content)

    return Place(make, get, put, folder)


def write(tier: Tier, key: ChunkKey = KEY, text: bytes = WORDS) -> WriteOutcome:
    buffer = aligned_buffer(PAYLOAD_BYTES)
    buffer[:] = text[:PAYLOAD_BYTES]
    return tier.write([key], [buffer])[0]


def read(tier: Tier, key: ChunkKey = KEY) -> ReadOutcome:
    buffer = aligned_buffer(PAYLOAD_BYTES)
    [outcome] = tier.read([key], [buffer])
    if outcome is ReadOutcome.HIT:
        assert bytes(buffer) == WORDS[:PAYLOAD_BYTES]
    return outcome


def test_who_reads_the_place_reads_nothing_of_the_payload(place: Place) -> None:
    assert write(place.tier(NEW)) is WriteOutcome.STORED
    content = place.get(KEY)
    assert not any(WORDS[n : n + 8] in content for n in range(len(b"what the user wrote. ")))
    write(place.tier(), NEIGHBOUR)
    assert WORDS[:1000] in place.get(NEIGHBOUR), "the check above can fail"


def test_keys_are_exchanged_without_losing_a_chunk(place: Place) -> None:
    assert write(place.tier(OLD)) is WriteOutcome.STORED
    both, ready = place.tier(NEW, OLD), place.tier(OLD, NEW)
    assert write(both, NEIGHBOUR) is WriteOutcome.STORED
    assert (read(both), read(both, NEIGHBOUR)) == (ReadOutcome.HIT, ReadOutcome.HIT)
    assert (read(ready), read(ready, NEIGHBOUR)) == (ReadOutcome.HIT, ReadOutcome.HIT)
    done = place.tier(NEW)
    assert (read(done), read(done, NEIGHBOUR)) == (ReadOutcome.UNREADABLE, ReadOutcome.HIT)


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ([OTHER], [NEW], "encrypted with a key that is not configured here"),
        ([], [NEW], "not encrypted, where only encrypted chunks are used"),
        ([NEW], [], "encrypted, and no keys are configured here"),
    ],
    ids=["another-key", "clear", "no-keys"],
)
class TestNotOurs:
    """A chunk that another engine stored and reads, and this one can't."""

    def test_it_is_a_miss_left_alone_and_told_once(
        self, place: Place, theirs, ours, says, caplog
    ) -> None:
        them, us = place.tier(*theirs), place.tier(*ours)
        for key in (KEY, NEIGHBOUR):
            write(them, key)
        before = place.get(KEY)
        with caplog.at_level(logging.WARNING):
            assert [read(us), read(us, NEIGHBOUR)] == [ReadOutcome.UNREADABLE] * 2
        assert caplog.text.count(says) == 1
        assert "give them the same keys" in caplog.text
        assert us.contains([KEY]) == [False]
        assert write(us) is WriteOutcome.TAKEN
        assert place.get(KEY) == before
        assert read(them) is ReadOutcome.HIT

    def test_after_a_while_it_is_replaced_and_nobody_replaces_it_back(
        self, place: Place, theirs, ours, says, monkeypatch
    ) -> None:
        them, us = place.tier(*theirs), place.tier(*ours)
        write(them)
        later = time.time() + GRACE_SECONDS + 1
        monkeypatch.setattr(time, "time", lambda: later)
        assert read(us) is ReadOutcome.UNREADABLE
        assert write(us) is WriteOutcome.STORED
        assert read(us) is ReadOutcome.HIT
        assert us.contains([KEY]) == [True]
        assert [entry.key for entry in us.scan()] == [KEY]
        assert us.usage().chunks == 1
        assert read(them) is ReadOutcome.UNREADABLE
        assert write(them) is WriteOutcome.TAKEN
        assert read(us) is ReadOutcome.HIT

    def test_once_it_is_gone_the_place_is_free(self, place: Place, theirs, ours, says) -> None:
        them, us = place.tier(*theirs), place.tier(*ours)
        write(them)
        read(us)
        them.remove([KEY])
        assert write(us) is WriteOutcome.STORED
        assert us.contains([KEY]) == [True]
        assert read(us) is ReadOutcome.HIT


def test_a_planted_chunk_is_never_a_hit(place: Place) -> None:
    attacker, us = place.tier(), place.tier(NEW)
    write(us, NEIGHBOUR)
    write(attacker, text=b"planted! " * 1000)
    assert place.get(KEY).startswith(b"planted!")
    assert read(us) is ReadOutcome.UNREADABLE


def test_a_chunk_made_with_another_key_of_the_same_name_is_corrupt(place: Place) -> None:
    us, attacker = place.tier(NEW), place.tier(new_key("new"))
    write(attacker, text=b"planted! " * 1000)
    assert read(us) is ReadOutcome.CORRUPT
    assert read(us) is ReadOutcome.MISS
    assert write(us) is WriteOutcome.STORED


@pytest.mark.parametrize("source", [NEIGHBOUR, ChunkKey(ELSEWHERE, KEY.hash)], ids=["name", "ns"])
def test_a_chunk_moved_here_is_corrupt(place: Place, source: ChunkKey) -> None:
    us = place.tier(NEW)
    write(us, source, b"of another prompt " * 1000)
    place.put(KEY, place.get(source))
    assert read(us) is ReadOutcome.CORRUPT


def test_a_replayed_chunk_is_what_was_stored_under_that_very_name(place: Place) -> None:
    """Equal names mean equal bytes, so an old copy of a chunk can't be a wrong one."""
    us = place.tier(NEW)
    write(us)
    old = place.get(KEY)
    us.remove([KEY])
    write(us)
    assert place.get(KEY) != old
    place.put(KEY, old)
    assert read(us) is ReadOutcome.HIT


@pytest.mark.parametrize("cut", [0, 1, METADATA_BYTES, PAYLOAD_BYTES])
def test_a_chunk_cut_short_is_corrupt(place: Place, cut: int) -> None:
    us = place.tier(NEW)
    write(us)
    place.put(KEY, place.get(KEY)[:cut])
    assert read(us) is ReadOutcome.CORRUPT


# Every kind of damage, in every tier ------------------------------------------------

AT = PAYLOAD_BYTES
DAMAGE = {
    "payload": lambda chunk: flip(chunk, 4711),
    "magic": lambda chunk: flip(chunk, AT),
    "version": lambda chunk: flip(chunk, AT + 8),
    "codec": lambda chunk: reseal(flip(chunk, AT + 11)),
    "length": lambda chunk: reseal(flip(chunk, AT + 25)),
    "checksum": lambda chunk: reseal(flip(chunk, AT + 40)),
    "hash": lambda chunk: reseal(flip(chunk, AT + 56)),
    "namespace": lambda chunk: reseal(flip(chunk, AT + 120)),
    "metadata": lambda chunk: flip(chunk, AT + 2000),
    "seal": lambda chunk: flip(chunk, AT + METADATA_BYTES - 1),
    "empty": lambda chunk: b"",
}


def flip(chunk: bytes, offset: int) -> bytes:
    changed = bytearray(chunk)
    changed[offset] ^= 1
    return bytes(changed)


def reseal(chunk: bytes) -> bytes:
    """Make the metadata's own checksum right again: no accident, an attack."""
    return chunk[:-16] + xxhash.xxh3_128_digest(chunk[AT:-16])


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("keys", [[], [NEW]], ids=["clear", "encrypted"])
def test_what_was_damaged_is_corrupt_once_and_out_of_the_way(
    place: Place, keys: list[str], kind: str
) -> None:
    tier = place.tier(*keys)
    write(tier)
    place.put(KEY, DAMAGE[kind](place.get(KEY)))
    assert read(tier) is ReadOutcome.CORRUPT
    assert read(tier) is ReadOutcome.MISS
    assert write(tier) is WriteOutcome.STORED
    assert read(tier) is ReadOutcome.HIT
