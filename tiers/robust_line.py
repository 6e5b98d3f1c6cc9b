"""A straight line through measured points that a minority of bad ones can't bend.

Method: the median of the slopes between pairs of points (Theil 1950, Sen 1968), which
stands up to 29 % of outliers: a collected garbage, a page fault, a first call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

Point = tuple[float, float]

# Pairs whose x differ by less, relative to the larger, say nothing of the slope.
_APART = 0.1


def robust_line(points: Sequence[Point]) -> tuple[float, float] | None:
    """``(base, slope)`` of the line, neither below 0; None if all x are much alike.

    Args:
        points: (x, y), none below 0.

    """
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
        if abs(x2 - x1) > _APART * max(x1, x2)
    ]
    # Fewer pairs than points that stand apart: one odd point, and not a slope.
    if len(slopes) < max(1, len(points)):
        return None
    slope = max(0.0, median(slopes))
    base = median(y - slope * x for x, y in points)
    if base >= 0:
        return base, slope
    # Through the origin, then.
    return 0.0, median(y / x for x, y in points if x > 0)
