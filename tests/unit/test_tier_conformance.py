"""Our tiers and wrappers keep the promises that strangers' tiers are held to."""

import os
import uuid
from pathlib import Path
from typing import ClassVar

import pytest
from kvtiers.tiers.base import ChunkKey, Tier
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.wrappers import FaultyTier, LatencyTier, WrapperTier

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

from kvtiers.tiers.conformance import TierConformance  # noqa: E402 - rewritten before its import


class FsConformance(TierConformance):
    supports_persistence = True
    bounded = True
    direct: ClassVar[bool | str] = "auto"

    def open_tier(self, place: Path, chunks: int) -> Tier:
        capacity = chunks * (self.payload_bytes + METADATA_BYTES)
        config = FsTier.Config(path=place, capacity=capacity, direct=self.direct)
        return FsTier(config, self.payload_bytes)

    def file(self, tier: Tier, key: ChunkKey) -> Path:
        name = f"{key.hash.hex()}.kv"
        return Path(tier.config.path, "v1", key.namespace.id, name[:2], name)

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        file = self.file(tier, key)
        return file.read_bytes()[: self.payload_bytes] if file.exists() else None

    def poke_damage(self, tier: Tier, key: ChunkKey) -> None:
        with self.file(tier, key).open("r+b") as file:
            file.seek(self.payload_bytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))


class TestFsTier(FsConformance):
    pass


class TestFsTierBuffered(FsConformance):
    direct = False


class TestFsTierWithFsync(FsConformance):
    payload_bytes = 4096

    def open_tier(self, place: Path, chunks: int) -> Tier:
        capacity = chunks * (self.payload_bytes + METADATA_BYTES)
        config = FsTier.Config(path=place, capacity=capacity, fsync=True)
        return FsTier(config, self.payload_bytes)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
class TestFsTierOnTmpfs(FsConformance):
    @pytest.fixture
    def tmp_path(self):
        """Named and cleaned like pytest's own, but in memory."""
        import shutil

        folder = Path("/dev/shm", f"kvtiers-test-{uuid.uuid4().hex}")
        folder.mkdir()
        yield folder
        shutil.rmtree(folder)


class WrappedConformance(FsConformance):
    def wrap(self, tier: Tier) -> WrapperTier:
        raise NotImplementedError

    def open_tier(self, place: Path, chunks: int) -> Tier:
        return self.wrap(super().open_tier(place, chunks))


class TestLatencyTier(WrappedConformance):
    def wrap(self, tier: Tier) -> WrapperTier:
        return LatencyTier(tier, call_seconds=1e-5, bytes_per_second=1e11)


class TestFaultyTierWithoutFaults(WrappedConformance):
    def wrap(self, tier: Tier) -> WrapperTier:
        return FaultyTier(tier)
