"""Who goes on when the engine has stopped stepping, and how ownership passes hands.

The hierarchy is owned by one thread at a time: whoever holds its lock. That is the
engine's thread nearly always, which meets nobody there. An engine without requests takes
no steps, though, and then stores would stop half-way and nothing would expire. So one
more thread does what a step would have done, where something is due and the engine has
not been seen for a while. With nothing due it sleeps without a time-out.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

logger = logging.getLogger(__name__)

# A turn comes no sooner after the one before, should something be due for ever.
_SHORTEST_WAIT = 0.001

P = ParamSpec("P")
R = TypeVar("R")


class Owned(Protocol):
    """What one thread at a time may change."""

    _lock: threading.RLock


T = TypeVar("T", bound=Owned)


def owning(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """The calling thread owns the object while ``method`` runs."""

    @functools.wraps(method)
    def alone(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


class IdleThread:
    """Takes turns while the engine takes no steps.

    Args:
        rest: seconds for which the engine is to be left alone, 0 or less if it idles. Called
            without the lock, so that an engine at work is not even asked for it.
        turn: does what is due. Returns the seconds until something is due again, None if
            nothing is.

    Attributes:
        turns: how many it took.
        asleep: it waits to be woken, without a time-out.

    """

    def __init__(self, rest: Callable[[], float], turn: Callable[[], float | None]) -> None:
        self._rest = rest
        self._turn = turn
        self._due = threading.Event()
        self._stopping = threading.Event()
        self.turns = 0
        self.asleep = False
        self._thread = threading.Thread(target=self._run, name="kvtiers-idle", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something may be due sooner than before. Any thread; costs nothing if it is awake."""
        if not self._due.is_set():
            self._due.set()

    def close(self) -> None:
        """End it. The caller must not own the hierarchy, for which a turn may wait."""
        self._stopping.set()
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            wait: float | None = 0.0
            while self._woken(wait):
                self.turns += 1
                wait = self._turn()
        except Exception:
            # A policy's fault or our own: the engine meets it in its next step.
            logger.exception("kvtiers does nothing any more while the engine idles.")

    def _woken(self, wait: float | None) -> bool:
        """Sleep until something is due and the engine idles; False to end."""
        self.asleep = wait is None
        self._due.wait(wait if wait is None else max(wait, _SHORTEST_WAIT))
        self.asleep = False
        while not self._stopping.is_set() and (rest := self._rest()) > 0:
            # Deaf: an engine at work sees to what comes in meanwhile.
            self._stopping.wait(rest)
        self._due.clear()
        return not self._stopping.is_set()
