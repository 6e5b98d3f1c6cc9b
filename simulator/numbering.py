"""Numbers for chunks: small, dense, and consecutive along a prompt.

Equal ids mean an equal prefix, so a trace's chunks form a forest. They are first numbered
as they appear, which finds files that break this; then once more in preorder, so that a
conversation whose turns came between those of others is one stretch again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

_NONE = -1


class Numbering:
    """Numbers chunks in the order of their first appearance.

    Keeps one numbering over all files that are parts of one trace, and holds them to
    what ids promise: one of them always follows the same one.
    """

    def __init__(self) -> None:
        # By a file's id: its number here. By number here: the number of the one before.
        self._numbers = np.full(1024, _NONE, np.int64)
        self._parents = np.full(1024, _NONE, np.int64)
        self.count = 0

    def number(self, ids: Ids) -> tuple[range, ...]:
        """The numbers of one prompt's chunks, given a file's ids, head first.

        Raises:
            ValueError: an id follows another one than it did before, or twice in one prompt.

        """
        if not len(ids):
            return ()
        self._numbers = _reaching(self._numbers, int(ids.max()))
        numbers = self._numbers[ids]
        known = _leading_known(numbers)
        if known < len(ids):
            self._add(ids, numbers, known)
        self._check(ids[:known], numbers[:known])
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(ids)]
        return tuple(
            range(int(numbers[a]), int(numbers[b - 1]) + 1)
            for a, b in zip(starts, ends, strict=True)
        )

    def _add(self, ids: Ids, numbers: Ids, known: int) -> None:
        """Number what is new, which is all from ``known`` on."""
        new, n = ids[known:], len(ids) - known
        if (numbers[known:] != _NONE).any() or len(np.unique(new)) < n:
            at = known + int(np.argmax(_seen_before(numbers[known:], new)))
            raise ValueError(_broken(ids, at))
        numbers[known:] = self._numbers[new] = np.arange(self.count, self.count + n)
        self._parents = _reaching(self._parents, self.count + n)
        self._parents[numbers[known:]] = numbers[known:] - 1
        self._parents[numbers[known]] = numbers[known - 1] if known else _NONE
        self.count += n

    def _check(self, ids: Ids, numbers: Ids) -> None:
        if not len(ids):
            return
        wrong = self._parents[numbers[1:]] != numbers[:-1]
        if self._parents[numbers[0]] != _NONE:
            raise ValueError(_broken(ids, 0))
        if wrong.any():
            raise ValueError(_broken(ids, int(np.argmax(wrong)) + 1))

    def rearranged(self, paths: Iterable[Sequence[range]]) -> list[tuple[range, ...]]:
        """The same prompts in preorder numbers, in as few stretches as that gives.

        Args:
            paths: what ``number`` returned.

        """
        parents = self._parents[: self.count]
        # Where a number does not follow the one before it, a piece begins.
        follows = parents == np.arange(self.count) - 1
        follows[:1] = False
        begins = np.flatnonzero(~follows)
        ends = np.append(begins[1:], self.count)
        offsets = np.zeros(self.count, np.int64)
        at = 0
        for piece in _preorder(begins, ends, parents):
            begin, end = int(begins[piece]), int(ends[piece])
            offsets[begin:end] = at - begin
            at += end - begin
        moves: list[int] = offsets.tolist()
        return [_moved(path, moves) for path in paths]


class Interner:
    """Small numbers for ids that are none: hashes, texts, large integers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def intern(self, ids: Iterable[Hashable]) -> Ids:
        """One number for each id, the same for equal ones."""
        known = self._known
        return np.array([known.setdefault(each, len(known)) for each in ids], np.int64)


def _preorder(begins: Ids, ends: Ids, parents: Ids) -> Iterable[int]:
    """Pieces of the forest, each as soon as can be after the chunk that it follows."""
    children = defaultdict[int, list[int]](list)
    for piece, begin in enumerate(begins.tolist()):
        children[int(parents[begin])].append(piece)
    # Forks within a piece, from its head on; sorted, for a piece takes a stretch of them.
    forks = np.array(sorted(children), np.int64)
    todo = children[_NONE][::-1]
    while todo:
        piece = todo.pop()
        yield piece
        a, b = np.searchsorted(forks, (begins[piece], ends[piece]))
        for fork in forks[a:b].tolist():
            todo += children[fork][::-1]


def _moved(path: Sequence[range], moves: Sequence[int]) -> tuple[range, ...]:
    moved = list[range]()
    for stretch in path:
        by = moves[stretch.start]
        start, stop = stretch.start + by, stretch.stop + by
        if moved and moved[-1].stop == start:
            start = moved.pop().start
        moved.append(range(start, stop))
    return tuple(moved)


def _reaching(array: Ids, index: int) -> Ids:
    """The same array, or a longer copy that has ``index``."""
    if index < len(array):
        return array
    longer = np.full(max(index + 1, 2 * len(array)), _NONE, np.int64)
    longer[: len(array)] = array
    return longer


def _leading_known(numbers: Ids) -> int:
    unknown = numbers == _NONE
    return int(np.argmax(unknown)) if unknown.any() else len(numbers)


def _seen_before(numbers: Ids, ids: Ids) -> npt.NDArray[np.bool_]:
    again = np.ones(len(ids), np.bool_)
    again[np.unique(ids, return_index=True)[1]] = False
    again[numbers != _NONE] = True
    return again


def _broken(ids: Ids, at: int) -> str:
    before = f"follows chunk {ids[at - 1]}" if at else "begins a prompt"
    return (
        f"chunk {ids[at]} {before}, and did not before: equal ids must mean an equal prefix. "
        "Are these files parts of one trace?"
    )
