"""A Redis tier for the conformance suite, and doors to its values that go round it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from kvtiers.tiers.base import ChunkKey, Tier
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.redis import RedisTier
from redis_server import RedisServer

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

from kvtiers.tiers.conformance import TierConformance  # noqa: E402 - rewritten before its import

ALLOWED = ["+get", "+set", "+exists", "+touch", "+unlink", "+scan", "+object", "+strlen"]
"""What a user of the server's ACL must be allowed for a tier to work."""


def open_redis_tier(
    server: RedisServer, place: Path, chunks: int, payload_bytes: int, **options: Any
) -> RedisTier:
    """A tier with room for so many chunks, below a prefix that stands for ``place``."""
    options = {
        "url": server.url,
        "capacity": chunks * (payload_bytes + METADATA_BYTES),
        "key_prefix": prefix(place),
        **options,
    }
    return RedisTier(RedisTier.Config(**options), payload_bytes)


def prefix(place: Path) -> str:
    """Every ``place`` gets one of its own, with what ``SCAN`` could take for a pattern in it."""
    return f"{place}[*]?:"


def name_of(tier: Tier, key: ChunkKey) -> str:
    """The key under which a chunk lies."""
    return f"{tier.config.key_prefix}v1:{key.namespace.id}:{key.hash.hex()}"


class RedisConformance(TierConformance):
    """Give it a ``server``, and derive from it as from the suite itself."""

    supports_persistence = True
    bounded = True
    options: ClassVar[dict[str, Any]] = {}
    server: RedisServer

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with cls.start_server(tmp_path_factory.mktemp("redis")) as cls.server:
            yield

    @classmethod
    def start_server(cls, folder: Path) -> RedisServer:
        return RedisServer(folder)

    def url(self) -> str:
        return self.server.url

    def open_tier(self, place: Path, chunks: int) -> Tier:
        options = {"url": self.url(), **self.options}
        return open_redis_tier(self.server, place, chunks, self.payload_bytes, **options)

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        with self.client() as client:
            value = client.get(name_of(tier, key))
        return value[: self.payload_bytes] if isinstance(value, bytes) else None

    def poke_damage(self, tier: Tier, key: ChunkKey) -> None:
        offset = self.payload_bytes // 2
        with self.client() as client:
            byte = client.getrange(name_of(tier, key), offset, offset)
            assert isinstance(byte, bytes)
            client.setrange(name_of(tier, key), offset, bytes([byte[0] ^ 0x10]))

    def client(self) -> redis.Redis:
        return self.server.client()
