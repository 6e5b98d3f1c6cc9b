"""The order in which a tier's nodes would go: leaves ranked now and then, the rest as they come.

What keeping a leaf is worth changes with its age, the slower the older it is, and who asks
wants the lowest few of many. Where there are few leaves, all are valued anew each second.
Where there are many, all are valued from time to time, and in between the few that were
lowest and those that have changed, when some have gathered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from kvtiers.policies.reuse_fit import Floats, Ints
from kvtiers.policies.reuse_marks import Marks
from kvtiers.policies.reuse_nodes import Nodes

# A few leaves are ranked anew after a second, or when one in so many has changed; more of
# them after a second for each so many.
_FEW, _SECONDS, _SHARE = 256, 1.0, 64
_A_SECOND = 64
# Of many, so many are sorted at first, and then what came to them, up to how many at most;
# up to so many that have changed go last until they are ranked, all together.
_LOWEST, _MOST, _CHANGED = 64, 256, 16
_PART = 256

Ranked = tuple[float, int]
"""What a node is worth, and its number."""


class Ranks:
    """The leaves of one tier in their order.

    Attributes:
        changes: calls that changed the tier since all leaves were ranked.

    """

    def __init__(self, nodes: Nodes, marks: Marks) -> None:
        self.changes = 1
        self._nodes = nodes
        self._marks = marks
        # When all leaves were ranked, and how many they were.
        self._at, self._leaves = 0.0, 0
        # The lowest in order, of which the first so many are leaves no more or have changed.
        self._lowest: list[Ranked] = []
        self._passed = 0
        # The rest, not sorted before somebody asks for them; what got among the lowest since
        # is not of them any more.
        self._rest = np.zeros(0), np.zeros(0, np.int64)
        self._least = np.inf
        self._sorted = True
        self._moved: set[int] = set()
        # Those that have changed in order, and as of when.
        self._changed: list[Ranked] = []
        self._changed_as_of = -1.0, -1

    def ascending(self, now: float, news: int) -> Iterator[Ranked]:
        """Every node of the tier with its worth, see ``Nodes.ascending``. Changes nothing else.

        Args:
            now: when.
            news: a number that is another one after each call that changes a node or a mark.

        """
        if self._outdated(now):
            self._rank_all(now)
        elif self._leaves > _FEW and len(self._nodes.changed()) > _CHANGED:
            self._rank_lowest(now)
        self._pass()
        return self._nodes.ascending(self._in_order(now, news), self._valuer(now))

    def keep_up(self, now: float) -> None:
        """Nobody asks, as there is room. Who asks first must not wait until all are valued."""
        changed = self._nodes.changed()
        if len(changed) > _MOST:
            self._worth(np.array(list(changed), np.int64), now)
            self._nodes.take_changed()
            self._at = -np.inf

    # Parts ------------------------------------------------------------------

    def _in_order(self, now: float, news: int) -> Iterator[Ranked]:
        if self._leaves > _FEW:
            return chain(self._ranked(()), self._unranked(now))
        if self._changed_as_of != (now, news):
            self._changed = self._value_changed(now)
            self._changed_as_of = now, news
        return self._ranked(self._changed)

    def _value_changed(self, now: float) -> list[Ranked]:
        """What has changed, in order."""
        rows = list(self._nodes.changed())
        marks = [self._nodes.mark_of(row) for row in rows]
        return sorted(zip(self._marks.worth_of_few(marks, now), rows, strict=True))

    def _unranked(self, now: float) -> Iterator[Ranked]:
        """The same, not valued before somebody gets there."""
        yield from self._value_changed(now)

    def _outdated(self, now: float) -> bool:
        if self._leaves <= _FEW:
            return self.changes > self._leaves // _SHARE or now - self._at > _SECONDS
        seconds = _SECONDS * self._leaves / _A_SECOND
        return len(self._lowest) > _MOST or now - self._at > seconds

    def _rank_all(self, now: float) -> None:
        self._marks.refresh()
        rows = self._nodes.leaves()
        worth = self._worth(rows, now)
        self._leaves = len(rows)
        if len(rows) > _FEW:
            self._least = np.partition(worth, _LOWEST)[_LOWEST]
            low = worth < self._least
            self._rest, self._sorted = (worth[~low], rows[~low]), False
            worth, rows = worth[low], rows[low]
        else:
            self._rest, self._sorted, self._least = (worth[:0], rows[:0]), True, np.inf
        self._moved.clear()
        self._set_lowest(worth, rows)
        self._at, self.changes = now, 0

    def _rank_lowest(self, now: float) -> None:
        """The lowest again, and what has changed among them; all if none of them is left."""
        changed = self._nodes.changed()
        self._moved |= changed
        kept = {row for _, row in self._lowest[self._passed :] if self._nodes.is_leaf(row)}
        rows = np.array(sorted(kept | changed), np.int64)
        self._set_lowest(self._worth(rows, now), rows)
        if not self._lowest or self._lowest[0][0] >= self._least:
            self._rank_all(now)

    def _worth(self, rows: Ints, now: float) -> Floats:
        """That of the nodes of these rows."""
        return self._marks.worth(self._nodes.marks(rows), now)

    def _set_lowest(self, worth: Floats, rows: Ints) -> None:
        self._lowest = sorted(zip(worth.tolist(), rows.tolist(), strict=True))
        self._passed = 0
        self._nodes.take_changed()
        self._changed_as_of = -1.0, -1

    def _pass(self) -> None:
        """What is a leaf no more, or has changed, stays so until it is ranked anew."""
        lowest, is_leaf, changed = self._lowest, self._nodes.is_leaf, self._nodes.changed()
        while self._passed < len(lowest):
            node = lowest[self._passed][1]
            if is_leaf(node) and node not in changed:
                break
            self._passed += 1

    def _ranked(self, also: Sequence[Ranked]) -> Iterator[Ranked]:
        """All leaves that were ranked and some others, the lowest first."""
        kept = (self._lowest[i] for i in range(self._passed, len(self._lowest)))
        ours = self._unchanged(kept)
        if also:
            ours = heapq.merge(ours, also)
        for found in ours:
            if found[0] >= self._least:
                ours = chain((found,), ours)
                break
            yield found
        others = (found for found in self._others() if found[1] not in self._moved)
        yield from heapq.merge(ours, self._unchanged(others))

    def _unchanged(self, found: Iterable[Ranked]) -> Iterator[Ranked]:
        is_leaf, changed = self._nodes.is_leaf, self._nodes.changed()
        return (pair for pair in found if is_leaf(pair[1]) and pair[1] not in changed)

    def _others(self) -> Iterator[Ranked]:
        worth, rows = self._rest
        if not self._sorted:
            order = np.lexsort((rows, worth))
            worth, rows = worth[order], rows[order]
            self._rest, self._sorted = (worth, rows), True
        for begin in range(0, len(rows), _PART):
            part = slice(begin, begin + _PART)
            yield from zip(worth[part].tolist(), rows[part].tolist(), strict=True)

    def _valuer(self, now: float) -> Callable[[int], float]:
        """Worth of nodes, that of one mark computed once."""
        known: dict[int, float] = {}

        def worth(node: int) -> float:
            mark = self._nodes.mark_of(node)
            if mark not in known:
                known[mark] = self._marks.worth_of_one(mark, now)
            return known[mark]

        return worth
