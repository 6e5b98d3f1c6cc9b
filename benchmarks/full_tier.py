"""A tier that holds as many chunks as one likes, and keeps nothing of any of them.

So what a benchmark of the directory measures is the directory, and not the tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from kvtiers.tiers import ALIGNMENT, ChunkKey, Entry, Namespace, Tier, TierConfig, Usage
from kvtiers.tiers.base import ReadOutcome, WriteOutcome

HERE = Namespace("be" * 16)


def hash_of(number: int) -> bytes:
    """The key of a chunk: as long as vLLM's, a SHA-256 and the number of a group."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


class FullTier(Tier):
    """Has every chunk that anybody asks for, and takes every one that is stored.

    Args:
        chunks: how many a scan finds, those numbered from 0.

    """

    def __init__(self, chunks: int) -> None:
        super().__init__(TierConfig(type="full", threads=2), ALIGNMENT)
        self.chunks = chunks

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Yes."""
        return [True] * len(keys)

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:  # noqa: ARG002 - a tier's
        """Leaves the buffers as they are."""
        return [ReadOutcome.HIT] * len(keys)

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:  # noqa: ARG002 - a tier's
        """Takes no time."""
        return [WriteOutcome.STORED] * len(keys)

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """They were there."""
        return len(keys)

    def scan(self) -> Iterator[Entry]:
        """Used in an order that has nothing to do with their keys'."""
        for number in range(self.chunks):
            age = number * 7919 % self.chunks
            yield Entry(ChunkKey(HERE, hash_of(number)), ALIGNMENT, float(age))

    def usage(self) -> Usage:
        """Room for all."""
        return Usage(self.chunks * ALIGNMENT, self.chunks)
