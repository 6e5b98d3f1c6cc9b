"""Memory for arena slots, found before they are used.

A first touch costs 20 to 50 times the copy itself where a hypervisor must find the
page, and a request would pay for it. Populating the whole arena at start would take
seconds of a core for each 10 GB, just when the first requests come, and memory that
may never be used. So a window ahead of the slots in use is populated, on a thread
that gives way to all others.
"""

from __future__ import annotations

import contextlib
import os
import threading

from kvtiers.tiers.arena import Arena

_AHEAD_BYTES = 1 << 30
# Per system call: while one runs, nobody else can map memory in this process.
_STEP_BYTES = 4 << 20
_NICE = 19


class Populator:
    """Keeps slots populated ahead of those in use, low ones first.

    Each process that touches the arena's bytes wants one of its own: the first finds
    the pages, the others still have to map them.

    Args:
        arena: must outlive this object: close this first.
        ahead_bytes: size of the window.

    """

    def __init__(self, arena: Arena, ahead_bytes: int = _AHEAD_BYTES) -> None:
        self._arena = arena
        self._ahead = max(1, ahead_bytes // arena.slot_bytes)
        self._step = max(1, _STEP_BYTES // arena.slot_bytes)
        self._target = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtiers-populate", daemon=True)
        self._thread.start()
        self.expect(0)

    def expect(self, slot: int) -> None:
        """``slot`` is used now, and those above it may be next. Any thread; does not block."""
        # Half a window of lead before the thread is woken again.
        if slot + self._ahead // 2 < self._target or self._target >= self._arena.slots:
            return
        with self._changed:
            self._target = min(slot + self._ahead + 1, self._arena.slots)
            self._changed.notify()

    def close(self) -> None:
        """Stop. Waits for the system call under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            # Of this thread only, on Linux.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        done = 0
        while self._wait_for_work(done):
            if not self._arena.populate(done, min(self._step, self._target - done)):
                return
            done = min(done + self._step, self._target)

    def _wait_for_work(self, done: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or done < self._target)
            return not self._closed
