"""A circuit breaker per tier: a tier that fails is left alone, then probed.

Method: Nygard, "Release It!" (circuit breaker), with exponential back-off.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Hashable


class BreakerState(enum.IntEnum):
    """The numbers are what the metrics show."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Counts failures in a row; opens, waits, lets one call through, decides.

    Failures are counted per kind of call: a tier whose lookups are quick and whose
    reads hang must not be trusted again for its lookups. A probe of another kind than
    the one that failed closes the breaker on probation: the next failure of that kind
    opens it at once, for longer.

    Not thread-safe: it belongs to the hierarchy's thread.

    Args:
        clock: seconds, monotonic.
        threshold: failures in a row that open it.
        cooldown: seconds before the first probe; doubles each time it opens again
            before a call of the kind that failed has succeeded.
        max_cooldown: where doubling ends.

    """

    def __init__(
        self,
        clock: Callable[[], float],
        threshold: int = 5,
        cooldown: float = 1.0,
        max_cooldown: float = 60.0,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_cooldown = cooldown
        self._max_cooldown = max_cooldown
        self._cooldown = cooldown
        self._failures: Counter[Hashable] = Counter()
        # Kinds that opened it and have not succeeded since.
        self._culprits: set[Hashable] = set()
        self._open_until = 0.0
        self.state = BreakerState.CLOSED

    @property
    def cooldown(self) -> float:
        """Seconds from when it opens, or was probed last, to the next probe."""
        return self._cooldown

    @property
    def probe_at(self) -> float:
        """When ``allows`` lets the next probe through; infinite while nothing is restricted."""
        return math.inf if self.state is BreakerState.CLOSED else self._open_until

    def trip(self) -> None:
        """Open it without a call: it is known already that one would fail."""
        self.state = BreakerState.OPEN
        self._open_until = self._clock() + self._cooldown

    def allows(self) -> bool:
        """Whether a call may be made now; in half-open state only one may."""
        if self.state is BreakerState.CLOSED:
            return True
        if not self.would_allow():
            return False
        # The probe that this lets through has until the next cooldown to answer;
        # if it never does, another one may try.
        self.state = BreakerState.HALF_OPEN
        self._open_until = self._clock() + self._cooldown
        return True

    def would_allow(self) -> bool:
        """What ``allows`` would say. Asking does not use up a probe."""
        return self.state is BreakerState.CLOSED or self._clock() >= self._open_until

    def closed(self) -> bool:
        """Whether calls are not restricted. Asking does not use up a probe."""
        return self.state is BreakerState.CLOSED

    def success(self, kind: Hashable) -> None:
        """A call of that kind was answered (a miss is an answer)."""
        del self._failures[kind]
        self._culprits.discard(kind)
        for culprit in self._culprits:
            self._failures[culprit] = self._threshold - 1
        if not self._culprits:
            self._cooldown = self._first_cooldown
        self.state = BreakerState.CLOSED

    def failure(self, kind: Hashable) -> bool:
        """A call failed or took too long. Returns True if this opened the breaker."""
        if self.state is BreakerState.OPEN:
            # Calls from before it opened come back: nothing new.
            return False
        self._failures[kind] += 1
        probed = self.state is BreakerState.HALF_OPEN
        if self._failures[kind] < self._threshold and not probed:
            return False
        if probed or kind in self._culprits:
            self._cooldown = min(self._cooldown * 2, self._max_cooldown)
        self._culprits.add(kind)
        self.state = BreakerState.OPEN
        self._open_until = self._clock() + self._cooldown
        return True
