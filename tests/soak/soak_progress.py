"""Tells who watches where a soak is, and ends one that does not end by itself."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_EVERY_SECONDS = 60.0
# What was started is ended within that, also by who was interrupted.
_END_SECONDS = 420.0


def say(text: str) -> None:
    """Progress, to who watches."""
    # In one piece: several threads have something to say.
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Progress(threading.Thread):
    """Says once a minute how far it has come.

    Attributes:
        phase: what goes on.
        figures: what has happened so far.
        last_words: what else to show when it is stopped.

    """

    def __init__(self) -> None:
        super().__init__(name="progress", daemon=True)
        self._begun = time.monotonic()
        self.phase = "preparing"
        self.figures: Callable[[], str] = lambda: "no requests yet"
        self.last_words: Callable[[], str] = lambda: ""

    def enters(self, phase: str) -> None:
        """Say that something else goes on from now on."""
        self.phase = phase
        self._tell()

    def run(self) -> None:
        """As long as the process."""
        while True:
            time.sleep(_EVERY_SECONDS)
            self._tell()

    def _tell(self) -> None:
        say(f"after {time.monotonic() - self._begun:.0f} s: {self.phase}; {self.figures()}")


def end_by_itself(progress: Progress, seconds: float) -> None:
    """Show where each thread is, and end, when told to or when it takes longer than that.

    What stops a job stops the servers, and takes the mount away: so it is an exception, in
    the main thread. Should that not come to an end either, the process is ended.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        say(f"stopped by {signal.Signals(number).name} while {progress.phase}")
        faulthandler.dump_traceback()
        signal.alarm(0)
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
        sys.stderr.write(progress.last_words())
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    signal.alarm(int(seconds))
