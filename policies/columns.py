"""Columns: what is kept of a million chunks, where the garbage collector does not look.

A full collection of CPython walks every object that can refer to another, and whatever
lists and sets refer to: a hundred milliseconds for an object a chunk, forty for a list of
ids, and it stops the engine's scheduler. It does not walk numbers in an ``array``, nor a
dict of which all keys and values are plain (bytes, str, int; CPython 3.11 to 3.13 leave
such a dict untracked), nor the objects in a numpy array.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_BITS = 12
_PIECE = 1 << _BITS
_MASK = _PIECE - 1
# Rows of a table after which another column is extended, and before which none is.
_AHEAD = 256
_SMALL = 4096


class Objects(Generic[T]):
    """A list that the collector does not walk, and that grows piece by piece.

    Pieces of nothing but None take no memory. For what refers to nothing that could refer
    back, such as ids of chunks: cycles through it would never be freed.
    """

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[np.object_] | None] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> T:
        piece = self._pieces[i >> _BITS]
        value: Any = None if piece is None else piece[i & _MASK]
        return cast("T", value)

    def __setitem__(self, i: int, value: T) -> None:
        piece = self._pieces[i >> _BITS]
        if piece is None:
            if value is None:
                return
            piece = self._pieces[i >> _BITS] = np.empty(_PIECE, np.object_)
        piece[i & _MASK] = value

    def append(self, value: T) -> None:
        """Add ``value`` at the end."""
        if not self._size & _MASK:
            self._pieces.append(None)
        self[self._size] = value
        self._size += 1

    def put(self, i: int, value: T) -> None:
        """Set ``self[i]``, which may be the next one that is not there yet."""
        if i == self._size:
            self.append(value)
        else:
            self[i] = value

    def get_all(self, rows: Iterable[int]) -> list[T]:
        """The values of ``rows``, none of which may lie in a piece of nothing but None."""
        pieces = cast("list[npt.NDArray[np.object_]]", self._pieces)
        return [pieces[i >> _BITS][i & _MASK] for i in rows]

    def put_all(self, rows: Iterable[int], values: Iterable[T]) -> None:
        """Set ``self[i]`` for each of ``rows``; the next ones that are not there yet in turn."""
        pieces, size = self._pieces, self._size
        for i, value in zip(rows, values, strict=True):
            if i < size and (piece := pieces[i >> _BITS]) is not None:
                piece[i & _MASK] = value
            else:
                self.put(i, value)
                size = self._size

    def clear(self, rows: Iterable[int]) -> None:
        """Set ``self[i]`` to None for each of ``rows``."""
        pieces = self._pieces
        for i in rows:
            piece = pieces[i >> _BITS]
            if piece is not None:
                piece[i & _MASK] = None

    def give_back(self) -> Iterator[None]:
        """Let go of everything, step by step: a million objects at once would be a pause."""
        self._size = 0
        while self._pieces:
            self._pieces.pop()
            yield


class Table:
    """Rows of integers, one ``array`` a column. A freed row is used again.

    An array that grows may have to be moved, which takes a millisecond or two at a million
    rows. So that no two are moved at once, columns are extended in turn, ahead of need.

    Args:
        types: of each column, a letter as ``array`` knows them.

    """

    __slots__ = ("_blank", "_free", "_used", "columns")

    def __init__(self, types: str) -> None:
        self.columns = tuple(array(letter) for letter in types)
        self._free = array("i")
        self._used = 0
        self._blank = (0,) * len(self.columns)

    def __len__(self) -> int:
        return self._used - len(self._free)

    def new(self, *values: int) -> int:
        """A row with these values, one a column."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._used
            self._used += 1
            if row >= _SMALL and not row % _AHEAD:
                self._extend(row // _AHEAD % len(self.columns))
        for column, value in zip(self.columns, values, strict=True):
            if row < len(column):
                column[row] = value
            else:
                column.append(value)
        return row

    def take(self, count: int) -> list[int]:
        """So many rows, with whatever values they have."""
        free = self._free
        rows = free[len(free) - count :].tolist() if count < len(free) else free.tolist()
        del free[len(free) - len(rows) :]
        while len(rows) < count:
            rows.append(self.new(*self._blank))
        return rows

    def _extend(self, number: int) -> None:
        column = self.columns[number]
        column.frombytes(bytes(column.itemsize * _AHEAD * len(self.columns)))

    def free(self, row: int) -> None:
        """Nobody needs the row any more."""
        self._free.append(row)

    def free_all(self, rows: Sequence[int]) -> None:
        """Nobody needs these any more."""
        self._free.extend(rows)
