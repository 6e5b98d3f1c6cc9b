"""The CPU tier: chunks in the host arena."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from kvtiers.tiers.arena import Arena
from kvtiers.tiers.base import (
    ALIGNMENT,
    ChunkKey,
    Entry,
    ReadOutcome,
    Tier,
    TierConfig,
    TierConfigError,
    Usage,
    WriteOutcome,
)
from kvtiers.tiers.populate import Populator
from pydantic import Field, field_validator

_FREED_AT_ONCE = 1024


class CpuTier(Tier):
    """Chunks in equal slots of an arena.

    As a ``Tier`` it copies in and out. The hierarchy uses the slots themselves:
    it takes free ones, has them filled by the GPU or by a lower tier, publishes
    them under a key, and gives them back. Which slot may be given back when is
    the hierarchy's business (pins); this class only knows free from taken.

    Args:
        config: ``capacity`` in bytes must hold at least one chunk.
        payload_bytes: size of a slot.
        arena: an arena to use instead of making one.
        populator: told of the slots that are used, if the arena has one.

    """

    class Config(TierConfig):
        """Options of the CPU tier.

        Attributes:
            capacity: bytes of host memory for KV.

        """

        type: str = "cpu"
        capacity: int
        # Excluded: no options of this tier.
        deadline: float = Field(default=5.0, exclude=True)
        threads: int = Field(default=4, exclude=True)
        headroom: float = Field(default=0.0, exclude=True)

        @field_validator("deadline", "threads", mode="before")
        @classmethod
        def _not_here(cls, _value: object) -> NoReturn:
            raise ValueError(
                "the cpu tier has neither a deadline nor threads, as the engine makes its "
                "copies. Leave it out"
            )

        @field_validator("headroom", mode="before")
        @classmethod
        def _never_free(cls, _value: object) -> NoReturn:
            raise ValueError(
                "the cpu tier keeps no room free: it gives up a chunk when its slot is needed, "
                "which takes no time. Leave it out, or give it to a tier below cpu"
            )

    config: Config

    def __init__(
        self,
        config: Config,
        payload_bytes: int,
        arena: Arena | None = None,
        populator: Populator | None = None,
    ) -> None:
        super().__init__(config, payload_bytes)
        self.arena = arena if arena is not None else make_arena(config.capacity, payload_bytes)
        self._populator = populator
        # Popped from the end: low slots first, which are populated first.
        self._free = list(range(self.arena.slots - 1, -1, -1))
        self._slots: dict[ChunkKey, int] = {}
        self._used_at: dict[ChunkKey, float] = {}
        # Tier calls come from many threads; the slot calls from one.
        self._lock = threading.Lock()

    # Slots: the hierarchy's thread only -------------------------------------

    @property
    def free_slots(self) -> int:
        """How many slots ``take`` could return."""
        return len(self._free)

    def take(self) -> int:
        """A free slot. Raises IndexError if there is none."""
        slot = self._free.pop()
        if self._populator is not None:
            self._populator.expect(slot)
        return slot

    def give(self, slot: int) -> None:
        """Return a slot that nobody reads or writes any more."""
        self._free.append(slot)

    def publish(self, key: ChunkKey, slot: int) -> None:
        """``slot``, taken before, now holds all of ``key``."""
        with self._lock:
            self._slots[key] = slot
            self._used_at[key] = time.time()

    def withdraw(self, key: ChunkKey) -> None:
        """``key`` is no longer here. Its slot stays taken until it is given back."""
        with self._lock:
            self._slots.pop(key, None)
            self._used_at.pop(key, None)

    def withdraw_all(self) -> Iterator[None]:
        """Nothing is here any more. Their slots stay taken until they are given back.

        Returns steps that free what was kept of them: all at once would be a pause.
        """
        with self._lock:
            slots, self._slots = self._slots, {}
            used_at, self._used_at = self._used_at, {}
        return _freeing(slots, used_at)

    # Tier -------------------------------------------------------------------

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``."""
        with self._lock:
            return [key in self._slots for key in keys]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``. The copy is made under the lock: a slot can't change meanwhile."""
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            with self._lock:
                slot = self._slots.get(key)
                if slot is not None:
                    buffer[:] = self.arena.slot(slot)
                    self._used_at[key] = time.time()
            outcomes.append(ReadOutcome.MISS if slot is None else ReadOutcome.HIT)
        return outcomes

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``."""
        return [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def _write(self, key: ChunkKey, buffer: memoryview) -> WriteOutcome:
        with self._lock:
            if key in self._slots:
                return WriteOutcome.EXISTS
            if not self._free:
                return WriteOutcome.REFUSED
            slot = self._free.pop()
            self.arena.slot(slot)[:] = buffer
            self._slots[key] = slot
            self._used_at[key] = time.time()
        return WriteOutcome.STORED

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``."""
        removed = 0
        for key in keys:
            with self._lock:
                slot = self._slots.pop(key, None)
                self._used_at.pop(key, None)
                if slot is not None:
                    self._free.append(slot)
                    removed += 1
        return removed

    def scan(self) -> Iterator[Entry]:
        """See ``Tier.scan``."""
        with self._lock:
            found = [(key, slot, self._used_at[key]) for key, slot in self._slots.items()]
        for key, slot, used_at in found:
            yield Entry(key, self.payload_bytes, used_at, f"slot {slot}")

    def usage(self) -> Usage:
        """See ``Tier.usage``. Counts published chunks; taken slots may be more."""
        chunks = len(self._slots)
        return Usage(chunks * self.payload_bytes, chunks, self.arena.nbytes)

    def close(self) -> None:
        """See ``Tier.close``."""
        if self._populator is not None:
            self._populator.close()
        self.arena.close()


def _freeing(*maps: dict[ChunkKey, Any]) -> Iterator[None]:
    for entries in maps:
        while entries:
            for _ in range(min(_FREED_AT_ONCE, len(entries))):
                entries.popitem()
            yield


def make_arena(capacity: int, payload_bytes: int) -> Arena:
    """An arena of as many slots as fit.

    Raises:
        TierConfigError: not one chunk fits, or the kernel refuses.

    """
    if payload_bytes % ALIGNMENT:
        raise ValueError(f"chunk size {payload_bytes} is not a multiple of {ALIGNMENT}")
    slots = capacity // payload_bytes
    if slots < 1:
        raise TierConfigError(
            f"The CPU tier's `capacity` of {capacity} bytes is below one chunk, which takes "
            f"{payload_bytes} bytes here. Give it at least that; room for the prompts of all "
            "requests in flight is a good start."
        )
    try:
        return Arena.create(slots, payload_bytes)
    except OSError as error:
        raise TierConfigError(
            f"The CPU tier could not reserve its `capacity` of {capacity} bytes "
            f"({slots} chunks of {payload_bytes}): {error}. Set a smaller one."
        ) from error
