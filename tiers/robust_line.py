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


def robust_line(points: Sequence[Point], *, rising: bool) -> tuple[float, float]:
    """``(base, slope)`` of the line, neither below 0.

    Args:
        points: at least one (x, y), none below 0.
        rising: what to take y for if all x are alike, so that no slope can be seen:
            for proportional to x, else for the same at every x.

    """
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
        if abs(x2 - x1) > _APART * max(x1, x2)
    ]
    # Fewer pairs than points that stand apart: one odd point, and not a slope.
    slope = max(0.0, median(slopes)) if len(slopes) >= len(points) else None
    if slope is None:
        return (0.0, _steepness(points)) if rising else (median(y for _, y in points), 0.0)
    base = median(y - slope * x for x, y in points)
    return (base, slope) if base >= 0 else (0.0, _steepness(points))


def _steepness(points: Sequence[Point]) -> float:
    """Slope of the line through the origin."""
    ratios = [y / x for x, y in points if x > 0]
    return median(ratios) if ratios else 0.0
