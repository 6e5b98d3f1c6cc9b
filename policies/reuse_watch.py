"""What is watched for its next use, whether a tier still holds it or not.

A watch stands for one use of one prefix and is kept under the last chunk of that. It ends
when a request has that chunk again, when its session goes on without it, or when there are
too many watches. Until then the time that passes without a use is told to the learner
whenever the watch's age has doubled: who waited for the end would learn from the quick
returns first, and think everything returns.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from kvtiers.policies.base import ChunkId
from kvtiers.policies.reuse_classes import FEATURES, UseClass
from kvtiers.policies.reuse_hazard import Floats, HazardLearner, Ints

# Observations that the learner gets at once, and how many at most that are not over: four
# milliseconds, while the scheduler waits.
_BATCH, _MOST_DUE = 64, 1024
_SMALL = 64


class Watches:
    """Open observations, at most ``limit``: the oldest makes room for a new one.

    Args:
        learner: gets what is observed, in batches.
        limit: how many; may be raised later.

    """

    def __init__(self, learner: HazardLearner, limit: int) -> None:
        self._learner = learner
        self.limit = limit
        # In the order in which they were opened.
        self._open: dict[ChunkId, int] = {}
        self._free: list[int] = []
        self._strata = np.zeros(_SMALL, np.int64)
        self._rows = np.zeros((_SMALL, FEATURES), np.int64)
        self._since = np.full(_SMALL, np.inf)
        # Up to which age the learner knows of it.
        self._told = np.zeros(_SMALL)
        # Of those that are over and that the learner does not know of yet.
        self._age = np.zeros(_SMALL)
        self._used = np.zeros(_SMALL)
        self._ended: list[int] = []

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
        self._strata[row], self._rows[row] = use.stratum, use.rows
        self._since[row], self._told[row] = now, 0.0

    def end(self, chunk: ChunkId, now: float, used: bool) -> None:
        """The watch is over, if there is one: with a use, or as censored."""
        row = self._open.pop(chunk, None)
        if row is None:
            return
        self._age[row], self._used[row] = now - self._since[row], used
        self._since[row] = np.inf
        self._ended.append(row)
        if len(self._ended) >= _BATCH:
            self._tell(now)

    def used(self, chunks: Iterable[ChunkId], now: float) -> list[ChunkId]:
        """End all watches of these chunks with a use. Returns them in their order."""
        # A prompt may be long, and few of its chunks are watched: no line of Python for each.
        found = list(filter(self._open.__contains__, chunks))
        for chunk in found:
            self.end(chunk, now, used=True)
        return found

    # Parts ------------------------------------------------------------------

    def _row(self) -> int:
        if not self._free:
            n = len(self._open) + len(self._ended)
            if n == len(self._since):
                self._grow()
            self._free = list(range(len(self._since) - 1, n - 1, -1))
        return self._free.pop()

    def _grow(self) -> None:
        self._strata = np.concatenate([self._strata, np.zeros_like(self._strata)])
        self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._since = np.concatenate([self._since, np.full_like(self._since, np.inf)])
        self._told = np.concatenate([self._told, np.zeros_like(self._told)])
        self._age = np.concatenate([self._age, np.zeros_like(self._age)])
        self._used = np.concatenate([self._used, np.zeros_like(self._used)])

    def _tell(self, now: float) -> None:
        ended, self._ended = self._ended, []
        self._learn(np.array(ended), self._age[ended], self._used[ended])
        self._free += ended
        ages = now - self._since
        # The rest are due still when the next batch is full.
        due = np.flatnonzero(ages > 2 * self._told + 16)[:_MOST_DUE]
        if len(due):
            self._learn(due, ages[due], np.zeros(len(due)))
            self._told[due] = ages[due]

    def _learn(self, rows: Ints, ages: Floats, used: Floats) -> None:
        self._learner.learn(self._strata[rows], self._rows[rows], self._told[rows], ages, used)
