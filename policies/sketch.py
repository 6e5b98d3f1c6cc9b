"""About how often each of many chunks was seen, in a few bytes for each that fits a tier."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash
from kvtiers.policies.base import ChunkId

# Of libCacheSim's sketch, so that equal counts give equal decisions.
_SEEDS = (0x12345678, 0x12344321)
_ERROR = 0.001
_COUNTERS_PER_ENTRY = -math.log(_ERROR) / math.log(2) ** 2
_PROBES = math.ceil(_COUNTERS_PER_ENTRY * math.log(2))
_HIGHEST = 65535


class FrequencySketch:
    """Counters that chunks share: an estimate may be too high, but not too low.

    Method: a counting Bloom filter (Fan et al., "Summary Cache", SIGCOMM 1998). Each chunk
    has ten counters, all of which are raised when it is seen; the lowest of them is the
    estimate. Counters stop at 65,535.

    Args:
        entries: so many chunks can be told apart well, at least 1.

    """

    def __init__(self, entries: int) -> None:
        count = math.ceil(_COUNTERS_PER_ENTRY * entries)
        self._counters = np.zeros(count if count >= _PROBES else 2 * _PROBES, np.uint16)
        self._steps = np.arange(_PROBES, dtype=np.uint32)

    def add_all(self, chunks: Sequence[ChunkId]) -> None:
        """Each of ``chunks`` was seen once."""
        if not chunks:
            return
        counters, where = self._counters, self._where(chunks)
        before = counters[where]
        np.add.at(counters, where, np.uint16(1))
        over = counters[where] < before
        if over.any():
            counters[where[over]] = _HIGHEST

    def estimates(self, chunks: Sequence[ChunkId]) -> list[int]:
        """How often each of ``chunks`` was seen."""
        if not chunks:
            return []
        found: list[int] = self._counters[self._where(chunks)].min(axis=1).tolist()
        return found

    def halve(self) -> None:
        """What was seen long ago counts for less."""
        self._counters >>= 1

    def _where(self, chunks: Sequence[ChunkId]) -> npt.NDArray[np.uint32]:
        """A row of counters for each chunk."""
        keys = [c if isinstance(c, bytes) else _bytes_of(c) for c in chunks]
        first, step = (
            np.array([xxhash.xxh64_intdigest(key, seed) for key in keys], np.uint64).astype(
                np.uint32
            )
            for seed in _SEEDS
        )
        return (first[:, None] + step[:, None] * self._steps) % np.uint32(len(self._counters))


def _bytes_of(chunk: ChunkId) -> bytes:
    return (hash(chunk) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
