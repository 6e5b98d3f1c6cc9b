"""What tiers share whose chunks lie as ``format`` lays them out: files, objects, values."""

from __future__ import annotations

import logging
import threading
import time

from kvtiers.tiers import format as chunk_format
from kvtiers.tiers.base import ALIGNMENT, ChunkKey, Tier, TierConfigError
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.encryption import AtRestConfig
from kvtiers.tiers.format import Defect
from kvtiers.tiers.sealing import sealing_of
from kvtiers.tiers.unreadable import Unreadable


class AtRestTier(Tier):
    """A tier that stores each chunk with its metadata behind it, and verifies it when read.

    Args:
        config: an instance of the class's ``Config``.
        payload_bytes: size of each chunk, a multiple of ``ALIGNMENT``.

    Raises:
        TierConfigError: the keys to encrypt with can't be used.

    """

    config: AtRestConfig

    def __init__(self, config: AtRestConfig, payload_bytes: int) -> None:
        super().__init__(config, payload_bytes)
        if payload_bytes <= 0 or payload_bytes % ALIGNMENT:
            raise ValueError(f"payload_bytes must be a multiple of {ALIGNMENT}: {payload_bytes}")
        # What must be there for a chunk to be whole.
        self._whole_bytes = payload_bytes + chunk_format.METADATA_BYTES
        self._scratch = threading.local()
        self._logged: set[object] = set()
        self._sealing = sealing_of(config)
        self._unreadable = Unreadable()

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

    def _packed(self, key: ChunkKey, payload: memoryview, tail: memoryview) -> memoryview:
        """What to store for a payload, with its metadata in ``tail``: itself, or encrypted.

        The latter lies in this thread's memory until its next call.
        """
        metadata = tail[: chunk_format.METADATA_BYTES]
        if self._sealing is None:
            chunk_format.pack(key, payload, time.time(), metadata)
            return payload
        sealed: memoryview | None = getattr(self._scratch, "sealed", None)
        if sealed is None:
            sealed = self._scratch.sealed = aligned_buffer(self.payload_bytes)
        self._sealing.seal(key, payload, time.time(), metadata, sealed)
        return sealed

    def _defect(
        self, nbytes: int, tail: memoryview, key: ChunkKey, payload: memoryview
    ) -> Defect | None:
        """Why what was read is not the chunk, ``nbytes`` of it; None if it is.

        Decrypts it in place. What is none of this engine's to read is remembered.
        """
        if nbytes < self._whole_bytes:
            return Defect.TRUNCATED
        if nbytes > self.chunk_bytes:
            return Defect.WRONG_LENGTH
        found = chunk_format.unpack(tail)
        if isinstance(found, Defect):
            return found
        if self._sealing is None:
            defect = chunk_format.verify(found, key, payload)
        else:
            defect = chunk_format.misnamed(found, key, payload.nbytes)
            defect = defect or self._sealing.open(found, tail, payload)
        if defect is not None and defect.foreign:
            self._unreadable.add(key, found.created)
        elif defect is None:
            self._unreadable.discard(key)
        return defect

    def _log_foreign(self, where: str, defect: Defect) -> None:
        self._log_once(
            defect,
            f"{where}: {defect.value}. It counts as a miss and is left alone for now. Engines "
            "share only what they can all read: give them the same keys, or a place each.",
        )

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
