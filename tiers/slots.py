"""Who owns and who uses each slot of the arena.

The rule that keeps every other part simple: **a slot is given back when nobody
owns it and nobody has it pinned.** Whoever reads or writes a slot's bytes (a
copy to or from the GPU, a read or write of a lower tier) or wants them kept (a
request that waits for the rest of its prefix) holds a pin. A chunk that is
dropped while its slot is pinned loses the slot at once; the slot itself comes
back with the last pin. So a copy that is still under way after an abort, a time
out or a reset can never write into a slot that already belongs to another chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Chunk


class SlotTable:
    """Pins and owners of the slots of a ``CpuTier``. The hierarchy's thread only."""

    def __init__(self, cpu: CpuTier) -> None:
        self._cpu = cpu
        self._pins = [0] * cpu.arena.slots
        self._owner: list[Chunk | None] = [None] * cpu.arena.slots
        self.pinned = 0

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return self._cpu.free_slots

    @property
    def unpinned(self) -> int:
        """Slots that nobody uses: free ones, and those whose chunk could be evicted."""
        return len(self._pins) - self.pinned

    def take(self, chunk: Chunk) -> int:
        """Give ``chunk`` a free slot, pinned once by whoever fills it."""
        slot = self._cpu.take()
        self._owner[slot] = chunk
        chunk.slot = slot
        self.pin(slot)
        return slot

    def owner(self, slot: int) -> Chunk | None:
        """The chunk whose bytes the slot holds or is getting; None if it was dropped."""
        return self._owner[slot]

    def is_pinned(self, slot: int) -> bool:
        """Whether anyone uses the slot."""
        return self._pins[slot] > 0

    def pin(self, slot: int) -> None:
        """Keep the slot's bytes in place."""
        if not self._pins[slot]:
            self.pinned += 1
        self._pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Take back one pin on each."""
        for slot in slots:
            assert self._pins[slot] > 0, f"slot {slot} is not pinned"
            self._pins[slot] -= 1
            if not self._pins[slot]:
                self.pinned -= 1
                if self._owner[slot] is None:
                    self._cpu.give(slot)

    def drop(self, chunk: Chunk) -> None:
        """``chunk`` loses its slot; the slot is free as soon as nobody uses it."""
        slot, chunk.slot = chunk.slot, -1
        self._owner[slot] = None
        if not self._pins[slot]:
            self._cpu.give(slot)

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes."""
        return self._cpu.arena.slot(slot)
