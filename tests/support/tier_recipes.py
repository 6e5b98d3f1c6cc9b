"""How to open each of our tiers for the conformance suite, with doors that go round it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from kvtiers.tiers.base import ChunkKey, Tier
from kvtiers.tiers.conformance import TierConformance
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier


class CpuRecipe(TierConformance):
    """Memory of this process, which nobody else can damage."""

    bounded = True
    supports_damage = False

    def open_tier(self, place: Path, chunks: int) -> Tier:
        return CpuTier(CpuTier.Config(capacity=chunks * self.payload_bytes), self.payload_bytes)

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        assert isinstance(tier, CpuTier)
        slot = tier._slots.get(key)
        return None if slot is None else bytes(tier.arena.slot(slot))


class FsRecipe(TierConformance):
    """A local folder; plain file calls are the back doors."""

    supports_persistence = True
    bounded = True
    direct: ClassVar[bool | str] = "auto"
    fsync: ClassVar[bool] = False

    def open_tier(self, place: Path, chunks: int) -> Tier:
        capacity = chunks * (self.payload_bytes + METADATA_BYTES)
        options = {"path": place, "capacity": capacity, "direct": self.direct, "fsync": self.fsync}
        return FsTier(FsTier.Config(**options), self.payload_bytes)

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
