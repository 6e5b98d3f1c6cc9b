"""Work in the background of an engine's process, a little at a time.

Python runs one thread at a time, and hands over only every 5 ms: a loop of seconds on
another thread would cost the scheduler that much at every turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SLICE_SECONDS = 0.002


class Pace:
    """Keeps a loop to a share of the time.

    Args:
        share: of the time that the loop may run, above 0 and at most 1.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.

    """

    def __init__(
        self,
        share: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share = share
        self._clock = clock
        self._sleep = sleep
        self._since = clock()

    def rest(self) -> bool:
        """Sleep if the loop has run for long enough. Returns whether it did."""
        ran = self._clock() - self._since
        if ran < _SLICE_SECONDS:
            return False
        # A pause between two loops was a rest already.
        self._sleep(min(ran, _SLICE_SECONDS * 2) * (1 / self._share - 1))
        self._since = self._clock()
        return True
