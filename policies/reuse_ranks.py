"""The order in which a tier's nodes would go: leaves ranked now and then, the rest as they come.

What keeping a leaf is worth changes with its age, slowly; who asks wants the lowest few. So all
leaves are valued now and then, of these the lowest few are sorted, and between only what
changed is valued again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from kvtiers.policies.reuse_marks import Marks
from kvtiers.policies.reuse_nodes import Nodes

# Leaves are ranked anew after a second, or when one in so many has changed.
_RANK_SECONDS = 1.0
_RANK_SHARE = 64
# Leaves that are sorted at first, and after that at once.
_FEW = 64
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
        self._at = 0.0
        self._leaves = 0
        # The lowest in order, of which the first so many are leaves no more or have changed,
        # and the rest: values and rows, in no order.
        self._lowest: list[Ranked] = []
        self._passed = 0
        self._rest = np.zeros(0), np.zeros(0, np.int64)
        self._sorted = True
        # Those that have changed in order, and as of when.
        self._changed: list[Ranked] = []
        self._changed_as_of = -1.0, -1

    def ascending(self, now: float, news: int, also: Sequence[int] = ()) -> Iterator[Ranked]:
        """Every node of the tier with its worth, see ``Nodes.ascending``. Changes nothing else.

        Args:
            now: when.
            news: a number that is another one after each call that changes a node or a mark.
            also: marks that will be asked for too.

        """
        if self.changes > self._leaves // _RANK_SHARE or now - self._at > _RANK_SECONDS:
            self._rank(now)
        if self._changed_as_of != (now, news):
            rows = list(self._nodes.changed())
            marks = [self._nodes.mark_of(row) for row in rows]
            worth = self._marks.worth_of_few([*marks, *also], now)
            self._changed = sorted(zip(worth, rows, strict=False))
            self._changed_as_of = now, news
        leaves = heapq.merge(self._kept(), self._changed)
        return self._nodes.ascending(leaves, self._valuer(now))

    def _rank(self, now: float) -> None:
        self._marks.refresh()
        rows = self._nodes.leaves()
        worth = self._marks.worth(self._nodes.marks(rows), now)
        if len(rows) > 2 * _FEW:
            low = worth < np.partition(worth, _FEW)[_FEW]
            self._rest = worth[~low], rows[~low]
            worth, rows, self._sorted = worth[low], rows[low], False
        else:
            self._rest, self._sorted = (worth[:0], rows[:0]), True
        self._lowest, self._passed = sorted(zip(worth.tolist(), rows.tolist(), strict=True)), 0
        self._nodes.take_changed()
        self._changed_as_of = -1.0, -1
        self._at, self.changes, self._leaves = now, 0, len(rows) + len(self._rest[1])

    def _kept(self) -> Iterator[Ranked]:
        """What was ranked and has not changed since."""
        lowest, is_leaf, changed = self._lowest, self._nodes.is_leaf, self._nodes.changed()
        # What is passed over stays so until all are ranked anew.
        while self._passed < len(lowest):
            node = lowest[self._passed][1]
            if is_leaf(node) and node not in changed:
                break
            self._passed += 1
        first = (lowest[i] for i in range(self._passed, len(lowest)))
        for found in chain(first, self._others()):
            if is_leaf(found[1]) and found[1] not in changed:
                yield found

    def _others(self) -> Iterator[Ranked]:
        if not self._sorted:
            worth, rows = self._rest
            order = np.lexsort((rows, worth))
            self._rest, self._sorted = (worth[order], rows[order]), True
        worth, rows = self._rest
        for begin in range(0, len(rows), _PART):
            part = slice(begin, begin + _PART)
            yield from zip(worth[part].tolist(), rows[part].tolist(), strict=True)

    def _valuer(self, now: float) -> Callable[[int], float]:
        """Worth of nodes, that of one mark computed once."""
        known: dict[int, float] = {}

        def worth(node: int) -> float:
            mark = self._nodes.mark_of(node)
            if mark not in known:
                (known[mark],) = self._marks.worth_of_few([mark], now)
            return known[mark]

        return worth
