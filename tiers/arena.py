"""The host arena: equal slots of memory that all processes of one engine share.

It is a ``memfd``: no name in /dev/shm, so no size limit of a container's
/dev/shm applies and nothing is left behind when every process of the engine is
killed. Another process of the same user maps it through ``/proc/<pid>/fd``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from kvtiers.tiers.base import ALIGNMENT

# Linux 5.14; Python's mmap module has no name for it before 3.14.
_MADV_POPULATE_WRITE = 23
# mmap.madvise() holds the interpreter lock for the seconds that this can take.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """All that another process needs to map the arena. Pickles.

    Attributes:
        pid: process that created the arena and keeps ``fd`` open.
        fd: descriptor in that process.
        slots: number of slots.
        slot_bytes: size of each, a multiple of ``ALIGNMENT``.

    """

    pid: int
    fd: int
    slots: int
    slot_bytes: int


class Arena:
    """A shared mapping of ``slots * slot_bytes`` bytes. Made by ``create`` or ``attach``."""

    def __init__(self, fd: int, handle: ArenaHandle) -> None:
        self.handle = handle
        self.slots = handle.slots
        self.slot_bytes = handle.slot_bytes
        self._fd = fd
        self._mmap = mmap.mmap(fd, self.slots * self.slot_bytes)
        self.memory = memoryview(self._mmap)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Arena:
        """Reserve an arena. Memory is taken as slots are first written.

        Raises:
            ValueError: no slot, or a slot size that is not page-aligned.
            OSError: the kernel refuses that much.

        """
        if slots < 1 or slot_bytes < 1 or slot_bytes % ALIGNMENT:
            raise ValueError(f"cannot make an arena of {slots} slots of {slot_bytes} bytes")
        fd = os.memfd_create("kvtiers-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slots * slot_bytes)
            # Nobody who maps it can shrink it under the others (SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, ArenaHandle(os.getpid(), fd, slots, slot_bytes))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Map an arena that another process of this user, or this one, created.

        Raises:
            OSError: the creator is gone, or may not be looked into.
            ValueError: what lies there has another size.

        """
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != handle.slots * handle.slot_bytes:
                raise ValueError(f"the arena has {size} bytes, not what {handle} says")
            return cls(fd, handle)
        except BaseException:
            os.close(fd)
            raise

    @property
    def nbytes(self) -> int:
        """Size of the mapping in bytes."""
        return self.slots * self.slot_bytes

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = index * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def populate(self, first: int, count: int) -> bool:
        """Back slots with memory now, so that their first use takes no page faults.

        Any thread may call it; it releases the interpreter lock. Returns whether
        the kernel did it: False before Linux 5.14, and when memory is short.
        """
        count = min(count, self.slots - first)
        if count <= 0:
            return True
        view = (ctypes.c_char * (count * self.slot_bytes)).from_buffer(
            self._mmap, first * self.slot_bytes
        )
        return bool(_madvise(ctypes.addressof(view), len(view), _MADV_POPULATE_WRITE) == 0)

    def close(self) -> None:
        """Unmap. Views that others still hold keep the memory until they are gone."""
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mmap.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
