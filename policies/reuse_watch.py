"""What is watched for its next use, whether a tier still holds it or not.

A watch stands for one use of one prefix and is kept under the last chunk of that. It ends
when a request has that chunk again, when its session goes on without it, or when there are
too many watches. What ended is remembered for a while, so that hazards can be fitted to
what was seen since then: of a watch that was open already, from the age that it had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from kvtiers.policies.base import ChunkId
from kvtiers.policies.reuse_classes import FEATURES, UseClass
from kvtiers.policies.reuse_fit import Observations
from kvtiers.policies.reuse_hazard import HazardLearner

_SMALL = 64
# Watches that are over which a fit takes in, and how many at most that are not.
_ENDED, _OPEN = 16_384, 8192
# After the first few, the next fit begins when there are so many times more, or so many.
_FIRST_FIT, _MORE, _MOST_MORE = 16, 1.15, 1024
# Observations that a fit under way goes through for each watch: one or two milliseconds.
_WORK = 2048


class Watches:
    """Open observations, at most ``limit``: the oldest makes room for a new one.

    Args:
        learner: gets what was observed, from time to time.
        limit: how many; may be raised later.

    """

    def __init__(self, learner: HazardLearner, limit: int) -> None:
        self._learner = learner
        self.limit = limit
        # In the order in which they were opened, and in which they ended.
        self._open: dict[ChunkId, int] = {}
        self._ended: deque[int] = deque()
        self._free: list[int] = []
        self._rows = 0
        self._strata = np.zeros(_SMALL, np.int64)
        self._features = np.zeros((_SMALL, FEATURES), np.float32)
        self._since = np.zeros(_SMALL)
        self._until = np.zeros(_SMALL)
        self._used = np.zeros(_SMALL)
        # Since when all that ended is remembered.
        self._from = -np.inf
        self._begun, self._next_fit = 0, _FIRST_FIT
        # When the last fit began.
        self._fitted = -np.inf

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._open

    def begin(self, chunk: ChunkId, use: UseClass, now: float) -> None:
        """Watch a prefix that ends with ``chunk``; one that is watched so far is dropped."""
        self.end(chunk, now, used=False)
        if len(self._open) >= self.limit:
            self.end(next(iter(self._open)), now, used=False)
        row = self._row()
        self._open[chunk] = row
        self._strata[row] = use.stratum
        self._features[row, : len(use.features)] = use.features
        self._features[row, len(use.features) :] = 0
        self._since[row], self._until[row], self._used[row] = now, np.inf, 0
        self._begun += 1
        self._learn(now)

    def end(self, chunk: ChunkId, now: float, used: bool) -> None:
        """The watch is over, if there is one: with a use, or as censored."""
        row = self._open.pop(chunk, None)
        if row is None:
            return
        self._until[row], self._used[row] = now, used
        self._ended.append(row)
        if len(self._ended) > _ENDED:
            first = self._ended.popleft()
            self._from = self._until[first]
            self._free.append(first)

    def used(self, chunks: Iterable[ChunkId], now: float) -> list[ChunkId]:
        """End all watches of these chunks with a use. Returns them in their order."""
        # A prompt may be long, and few of its chunks are watched: no line of Python for each.
        found = list(filter(self._open.__contains__, chunks))
        for chunk in found:
            self.end(chunk, now, used=True)
        return found

    # Parts ------------------------------------------------------------------

    def _learn(self, now: float) -> None:
        if self._learner.busy:
            self._learner.work(_WORK)
        elif self._begun >= self._next_fit:
            self._next_fit = min(int(self._begun * _MORE) + _FIRST_FIT, self._begun + _MOST_MORE)
            self._learner.learn(self._seen(now))
            self._fitted = now

    def _seen(self, now: float) -> Observations:
        """What a fit takes in; if too many are open, some of them stand for the rest."""
        still = np.fromiter(self._open.values(), np.int64, len(self._open))
        each = max(1, -(-len(still) // _OPEN))
        rows = np.concatenate([np.array(self._ended, np.int64), still[::each]])
        weight = np.ones(len(rows))
        weight[len(self._ended) :] = each
        since = self._since[rows]
        begin = np.maximum(0.0, self._from - since)
        end = np.maximum(np.minimum(self._until[rows], now) - since, begin)
        known = np.maximum(self._fitted - since, -1.0)
        return Observations(
            self._strata[rows], self._features[rows], begin, end, known, self._used[rows], weight
        )

    def _row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._rows == len(self._since):
            self._grow()
        self._rows += 1
        return self._rows - 1

    def _grow(self) -> None:
        self._strata = np.concatenate([self._strata, np.zeros_like(self._strata)])
        self._features = np.concatenate([self._features, np.zeros_like(self._features)])
        self._since = np.concatenate([self._since, np.zeros_like(self._since)])
        self._until = np.concatenate([self._until, np.zeros_like(self._until)])
        self._used = np.concatenate([self._used, np.zeros_like(self._used)])
