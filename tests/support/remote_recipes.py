"""Filesystem tiers on URLs for the conformance suite, with doors that go round them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from kvtiers.tiers.base import ChunkKey, Tier
from kvtiers.tiers.conformance import TierConformance
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from s3_server import S3Server


class PlainFileSystem(LocalFileSystem):
    """Local files under a protocol of their own: seen from the first byte, moved in one step."""

    protocol = "plain"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return LocalFileSystem._strip_protocol(path.removeprefix("plain://"))


fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


def open_remote_tier(url: str, chunks: int, payload_bytes: int, **options: Any) -> Tier:
    """A tier on a URL with room for so many chunks."""
    written = {"path": url, "capacity": chunks * (payload_bytes + METADATA_BYTES), **options}
    kind = FsTier.variant(written)
    return kind(kind.Config(**written), payload_bytes)


def name_of(key: ChunkKey) -> str:
    """Where a chunk lies below the tier's URL."""
    name = f"{key.hash.hex()}.kv"
    return f"v1/{key.namespace.id}/{name[:2]}/{name}"


class RemoteRecipe(TierConformance):
    """Give it ``url``, ``get`` and ``put``."""

    supports_persistence = True
    bounded = True
    # An object's time can't be set.
    records_use = False
    options: ClassVar[dict[str, Any]] = {}

    def url(self, place: Path) -> str:
        raise NotImplementedError

    def get(self, path: str) -> bytes | None:
        """Of a file below the URL's protocol."""
        raise NotImplementedError

    def put(self, path: str, content: bytes) -> None:
        raise NotImplementedError

    def open_tier(self, place: Path, chunks: int) -> Tier:
        return open_remote_tier(self.url(place), chunks, self.payload_bytes, **self.options)

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        content = self.get(self.path_of(tier, key))
        return None if content is None else content[: self.payload_bytes]

    def poke_damage(self, tier: Tier, key: ChunkKey) -> None:
        path = self.path_of(tier, key)
        content = bytearray(self.get(path) or b"")
        content[self.payload_bytes // 2] ^= 0x10
        self.put(path, bytes(content))

    def path_of(self, tier: Tier, key: ChunkKey) -> str:
        return f"{tier.config.path.partition('://')[2]}/{name_of(key)}"


class MemoryRecipe(RemoteRecipe):
    """A dict of this process; the back doors are the dict itself."""

    def url(self, place: Path) -> str:
        return f"memory://{place}"

    def get(self, path: str) -> bytes | None:
        file = MemoryFileSystem.store.get(path)
        return None if file is None else file.getvalue()

    def put(self, path: str, content: bytes) -> None:
        MemoryFileSystem.store[path].seek(0)
        MemoryFileSystem.store[path].write(content)


class PlainRecipe(RemoteRecipe):
    """Files that are seen while they are written; plain file calls are the back doors."""

    options: ClassVar[dict[str, Any]] = {"publish": "rename"}

    def url(self, place: Path) -> str:
        return f"plain://{place}"

    def get(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).exists() else None

    def put(self, path: str, content: bytes) -> None:
        Path(path).write_bytes(content)


class S3Recipe(RemoteRecipe):
    """A server of its own for each class; the back doors are boto3's."""

    sequences = 3
    # The promises are tested, not the patience: a request that fails on a busy machine
    # is no broken one.
    options: ClassVar[dict[str, Any]] = {"timeout": 60.0}
    server: S3Server

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with S3Server(tmp_path_factory.mktemp("s3")) as cls.server:
            yield

    def url(self, place: Path) -> str:
        return self.server.url(f"tests{place}")

    def open_tier(self, place: Path, chunks: int) -> Tier:
        options = {"storage_options": self.server.storage_options, **self.options}
        return open_remote_tier(self.url(place), chunks, self.payload_bytes, **options)

    def get(self, path: str) -> bytes | None:
        return self.server.get(path.removeprefix(f"{self.server.bucket}/"))

    def put(self, path: str, content: bytes) -> None:
        self.server.put(path.removeprefix(f"{self.server.bucket}/"), content)
