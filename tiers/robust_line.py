"""A straight line through measured points that a minority of bad ones can't bend.

Method: the median of the slopes between pairs of points (Theil 1950, Sen 1968), which
stands up to 29 % of outliers: a collected garbage, a page fault, a first call.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from statistics import median

Point = tuple[float, float]

# Pairs whose x differ by less, relative to the larger, say nothing of the slope.
_APART = 0.1


def robust_line(points: Sequence[Point]) -> tuple[float, float] | None:
    """``(base, slope)`` of the line, neither below 0; None if all x, or nearly all, are much alike.

    Args:
        points: (x, y), none below 0.

    """
    apart = [
        (i, j)
        for i, j in itertools.combinations(range(len(points)), 2)
        if abs(points[j][0] - points[i][0]) > _APART * max(points[i][0], points[j][0])
    ]
    # One point in most of the pairs could make the slope by itself.
    if not apart or 2 * max(Counter(itertools.chain(*apart)).values()) > len(apart):
        return None
    slopes = [(points[j][1] - points[i][1]) / (points[j][0] - points[i][0]) for i, j in apart]
    slope = max(0.0, median(slopes))
    base = median(y - slope * x for x, y in points)
    if base >= 0:
        return base, slope
    # Through the origin, then.
    return 0.0, median(y / x for x, y in points if x > 0)
