"""What tiers share whose chunks lie as ``format`` lays them out: files, objects, values."""

from __future__ import annotations

import logging
import threading

from kvtiers.tiers import format as chunk_format
from kvtiers.tiers.base import ALIGNMENT, ChunkKey, Tier, TierConfig, TierConfigError
from kvtiers.tiers.buffers import aligned_buffer


class AtRestTier(Tier):
    """A tier that stores each chunk with its metadata behind it, and verifies it when read.

    Args:
        config: an instance of the class's ``Config``.
        payload_bytes: size of each chunk, a multiple of ``ALIGNMENT``.

    """

    def __init__(self, config: TierConfig, payload_bytes: int) -> None:
        super().__init__(config, payload_bytes)
        if payload_bytes <= 0 or payload_bytes % ALIGNMENT:
            raise ValueError(f"payload_bytes must be a multiple of {ALIGNMENT}: {payload_bytes}")
        # What must be there for a chunk to be whole.
        self._whole_bytes = payload_bytes + chunk_format.METADATA_BYTES
        self._scratch = threading.local()
        self._logged: set[object] = set()

    @property
    def chunk_bytes(self) -> int:
        """See ``Tier.chunk_bytes``: with metadata."""
        return self._whole_bytes

    def _tail_buffer(self) -> memoryview:
        """For what follows a payload. One per thread: making one costs more than using it."""
        buffer: memoryview | None = getattr(self._scratch, "tail", None)
        if buffer is None:
            buffer = self._scratch.tail = aligned_buffer(self.chunk_bytes - self.payload_bytes)
        return buffer

    def _defect(
        self, nbytes: int, tail: memoryview, key: ChunkKey, payload: memoryview
    ) -> chunk_format.Defect | None:
        """Why what was read is not the chunk, ``nbytes`` of it; None if it is."""
        if nbytes < self._whole_bytes:
            return chunk_format.Defect.TRUNCATED
        if nbytes > self.chunk_bytes:
            return chunk_format.Defect.WRONG_LENGTH
        found = chunk_format.unpack(tail)
        if isinstance(found, chunk_format.Defect):
            return found
        return chunk_format.verify(found, key, payload)

    def _log_once(self, what: object, text: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger = logging.getLogger(type(self).__module__)
            logger.warning("%s Further cases are counted, not logged.", text)


def check_capacity(tier: str, capacity: int | None, chunk_bytes: int) -> None:
    """Raise TierConfigError if not one chunk fits; ``tier`` is what the text calls it."""
    if capacity is not None and capacity < chunk_bytes:
        raise TierConfigError(
            f"The {tier} tier's 'capacity' of {capacity} bytes is less than one chunk takes, "
            f"which is {chunk_bytes} bytes with its metadata. Give it room for many chunks, or "
            "leave the tier out."
        )
