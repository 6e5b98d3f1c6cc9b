"""How fast a tier is: latency and bandwidth, from the calls that it answered.

The median line and not the mean: one call in a hundred that takes a hundred times as long
doubles the mean, and says nothing of the next call. Nor a high percentile: the calls of a
load run side by side and one after the other, so that their times add up, and who waits
for one that is late is kept from waiting too long by its patience (see ``worth``).
"""

from __future__ import annotations

from collections import deque
from statistics import median

from kvtiers.tiers.robust_line import Point, robust_line

# Calls that count. Few, so that a tier that has become slow, or quick again, is known as
# such after as many as make a majority.
_WINDOW = 9
# Calls before anything is taken for known.
_LEAST = 3


class Speed:
    """Seconds that a kind of call takes for so much. The hierarchy's thread only."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=_WINDOW)
        self._line: tuple[float, float] | None = None
        # The usual call, should there be no line: how much, and how long.
        self._usual = (1.0, 0.0)
        self._fresh = False

    def observe(self, amount: int, seconds: float) -> None:
        """A call that moved so many bytes, or asked for so many chunks, took so long."""
        self._points.append((float(amount), seconds))
        self._fresh = True

    @property
    def known(self) -> bool:
        """Whether ``seconds`` rests on enough to decide by."""
        return len(self._points) >= _LEAST

    @property
    def last(self) -> float:
        """Seconds that the last call took for one of what is counted; 0 if there was none."""
        amount, seconds = self._points[-1] if self._points else (1.0, 0.0)
        return seconds / amount

    def seconds(self, amount: int) -> float:
        """Estimate for one call of that much; 0 before anything was measured."""
        if self._fresh:
            self._fit()
        if self._line is not None:
            base, slope = self._line
            return base + slope * amount
        # Calls of one size do not tell latency from bandwidth. So smaller ones may take as
        # long, and larger ones longer in proportion: the worse of the two is assumed.
        usual, seconds = self._usual
        return seconds * max(1.0, amount / usual)

    def _fit(self) -> None:
        """Once a call, and not once a question: those who wait ask about each op before them."""
        self._fresh = False
        self._line = robust_line(self._points)
        amounts, times = zip(*self._points, strict=True)
        self._usual = max(median(amounts), 1.0), median(times)
