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

from array import array
from collections.abc import Iterable

import numpy as np
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Chunk, Directory

_NOBODY = -1


class SlotTable:
    """Pins and owners of the slots of a ``CpuTier``. The hierarchy's thread only.

    Args:
        cpu: whose slots.
        directory: of the chunks that own slots.

    """

    def __init__(self, cpu: CpuTier, directory: Directory) -> None:
        self._cpu = cpu
        self._directory = directory
        self._pins = array("i", [0]) * cpu.arena.slots
        # Rows of the directory.
        self._owner = array("i", [_NOBODY]) * cpu.arena.slots
        self.pinned = 0

    def start_over(self, directory: Directory) -> None:
        """All chunks lose their slots at once; from now on those of ``directory`` own some."""
        owned = np.frombuffer(self._owner, np.intc) != _NOBODY
        unused = np.frombuffer(self._pins, np.intc) == 0
        self._owner = array("i", [_NOBODY]) * len(self._pins)
        self._directory = directory
        # Low ones last, as they are taken from the end.
        for slot in np.flatnonzero(owned & unused)[::-1].tolist():
            self._cpu.give(slot)

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
        self._owner[slot] = chunk.row
        chunk.slot = slot
        self.pin(slot)
        return slot

    def owner(self, slot: int) -> Chunk | None:
        """The chunk whose bytes the slot holds or is getting; None if it was dropped."""
        row = self._owner[slot]
        return None if row == _NOBODY else self._directory.at(row)

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
                if self._owner[slot] == _NOBODY:
                    self._cpu.give(slot)

    def drop(self, chunk: Chunk) -> None:
        """``chunk`` loses its slot; the slot is free as soon as nobody uses it."""
        slot, chunk.slot = chunk.slot, -1
        self._owner[slot] = _NOBODY
        if not self._pins[slot]:
            self._cpu.give(slot)

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes."""
        return self._cpu.arena.slot(slot)
