"""Whether what was learned tells more than age does.

Before it has shown that, its order is a guess, and LRU's is a better one: what all policies
are held against. So each fit is first asked what it had said of the time since the fit
before: the likelihood of just what was seen since then, which it did not know, over that of
hazards which only fall with age (Dawid, *The Prequential Approach*, 1984).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# What was seen up to a fit counts so much less at the next.
_KEPT: Final = 0.9
# What one observation can say at most, for or against: one that was far off must not hide
# what hundreds of others say.
_LARGEST: Final = 4.0
# Standard errors by which it must be better.
_ERRORS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Proof:
    """What speaks for the model so far.

    Attributes:
        gain: sum of differences of log likelihoods, the later ones counting more.
        squares: sum of their squares, likewise.

    """

    gain: float = 0.0
    squares: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the model was better by more than chance."""
        return self.gain > _ERRORS * math.sqrt(self.squares)

    def older(self) -> Proof:
        """The same one fit later. What spoke against the model did so of one that is no more."""
        return Proof(_KEPT * self.gain, _KEPT * self.squares) if self.gain > 0 else Proof()

    def further(self, differences: Floats, weights: Floats) -> Proof:
        """With what some more observations say, each of which stands for so many."""
        bounded = weights * np.minimum(np.maximum(differences, -_LARGEST), _LARGEST)
        return Proof(self.gain + float(bounded.sum()), self.squares + float((bounded**2).sum()))


def falling(events: Floats, exposure: Floats) -> Floats:
    """Likeliest hazards by age, events over exposure, among those that never rise.

    By pooling neighbours that do (Ayer, Brunk, Ewing, Reid, Silverman, 1955).

    Args:
        events: shape (n,).
        exposure: in seconds, shape (n,), positive.

    """
    pools = list[tuple[float, float, int]]()
    for pool in zip(events.tolist(), exposure.tolist(), [1] * len(events), strict=True):
        while pools and pools[-1][0] * pool[1] <= pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])  # noqa: PLW2901
        pools.append(pool)
    return np.repeat([e / t for e, t, _ in pools], [size for _, _, size in pools])
