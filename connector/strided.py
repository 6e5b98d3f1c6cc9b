"""Copies between KV blocks and arena rows as few strided copies.

A rank's page maps to its page in the row by runs of fragments, and a block has a
page in every layer. Most of that is regular: layers lie at equal distances, so do
heads, so do tokens. ``fold`` finds the arithmetic progressions, and one strided
copy then moves a block of all layers; a loop over blocks and layers takes up to
twice as long, gathering by index eight times.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]

# Widest first: torch copies eight-byte elements faster than bytes.
_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.int8}


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a block that go to regularly spaced places of a row.

    Attributes:
        block_at: address of the first byte, in block 0.
        block_stride: bytes from a block to the next one.
        row_at: offset of the first byte in the row, in the chunk's first page.
        page_stride: bytes from a page to the next one in the row.
        nbytes: bytes that are contiguous on both sides.
        repeats: nested repetitions, outermost first: how often, bytes between two
            on the side of the blocks, bytes between two in the row.
        writers: how many ranks hold these bytes and take turns in writing them.
        writer: this rank's turn among them.

    """

    block_at: int
    block_stride: int
    row_at: int
    page_stride: int
    nbytes: int
    repeats: tuple[tuple[int, int, int], ...] = ()
    writers: int = 1
    writer: int = 0


def fold(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge neighbours in ``pieces`` that are equal but for regularly growing places."""
    while True:
        folded = _fold_once(pieces)
        if len(folded) == len(pieces):
            return folded
        pieces = folded


def _fold_once(pieces: Sequence[Piece]) -> list[Piece]:
    folded: list[Piece] = []
    start = 0
    while start < len(pieces):
        first = pieces[start]
        count = _progression(pieces, start)
        if count > 1:
            repeat = (count, *_gap(first, pieces[start + 1]))
            first = replace(first, repeats=(repeat, *first.repeats))
        folded.append(first)
        start += count
    return folded


def _progression(pieces: Sequence[Piece], start: int) -> int:
    """How many pieces from ``start`` on are the same at growing, equal distances."""
    first = pieces[start]
    gap: tuple[int, int] | None = None
    for index in range(start + 1, len(pieces)):
        piece = pieces[index]
        step = _gap(pieces[index - 1], piece)
        same = replace(piece, block_at=first.block_at, row_at=first.row_at) == first
        # torch has no negative strides, and zero would write a place twice.
        if not same or min(step) <= 0 or step != (gap or step):
            return index - start
        gap = step
    return len(pieces) - start


def _gap(one: Piece, other: Piece) -> tuple[int, int]:
    return other.block_at - one.block_at, other.row_at - one.row_at


class PageRun(NamedTuple):
    """Neighbouring blocks that go to neighbouring pages.

    Page ``p`` of the arena is the ``p % blocks_per_chunk``-th of row
    ``p // blocks_per_chunk``; with several pages to a row, a run stays in its row.
    """

    block: int
    page: int
    length: int


def page_runs(blocks: Ids, pages: Ids, blocks_per_chunk: int) -> list[PageRun]:
    """Split equally long lists of blocks and their pages into runs, in order."""
    if not len(blocks):
        return []
    breaks = (np.diff(blocks) != 1) | (np.diff(pages) != 1)
    if blocks_per_chunk > 1:
        breaks |= pages[1:] % blocks_per_chunk == 0
    ends = [*(np.flatnonzero(breaks) + 1).tolist(), len(blocks)]
    return [
        PageRun(int(blocks[start]), int(pages[start]), end - start)
        for start, end in pairwise([0, *ends])
    ]


class BoundPiece:
    """A piece with the memory that it copies between.

    Addresses the memory without owning it: whoever holds this also holds the KV
    cache's tensors and the arena.

    Args:
        piece: what to copy.
        num_blocks: blocks in the KV cache.
        arena_at: address of the arena.
        slots: rows in the arena.
        slot_bytes: bytes from a row to the next one.
        blocks_per_chunk: pages in a row.

    Attributes:
        piece: what it was made of.
        nbytes: bytes copied per block.

    """

    def __init__(
        self,
        piece: Piece,
        num_blocks: int,
        arena_at: int,
        slots: int,
        slot_bytes: int,
        blocks_per_chunk: int,
    ) -> None:
        counts = [count for count, _, _ in piece.repeats]
        self.piece = piece
        self.nbytes = math.prod(counts) * piece.nbytes
        row_at = arena_at + piece.row_at
        block_strides = [piece.block_stride, *(stride for _, stride, _ in piece.repeats)]
        row_strides = [slot_bytes, piece.page_stride, *(stride for _, _, stride in piece.repeats)]
        word = math.gcd(8, piece.block_at, row_at, piece.nbytes, *block_strides, *row_strides)
        shape = [*counts, piece.nbytes // word]
        self._blocks_per_chunk = blocks_per_chunk
        self._blocks = _view(piece.block_at, [num_blocks, *shape], block_strides, word)
        self._rows = _view(row_at, [slots, blocks_per_chunk, *shape], row_strides, word)

    def store(self, run: PageRun) -> None:
        """Copy from the run's blocks to its pages."""
        self._pages(run).copy_(self._blocks[run.block : run.block + run.length])

    def load(self, run: PageRun) -> None:
        """Copy to the run's blocks from its pages."""
        self._blocks[run.block : run.block + run.length].copy_(self._pages(run))

    def _pages(self, run: PageRun) -> torch.Tensor:
        if self._blocks_per_chunk == 1:
            return self._rows[run.page : run.page + run.length, 0]
        row, page = divmod(run.page, self._blocks_per_chunk)
        return self._rows[row, page : page + run.length]


def _view(address: int, shape: Sequence[int], strides: Sequence[int], word: int) -> torch.Tensor:
    """A tensor over foreign memory; it may span storages, which torch's own views cannot."""
    first = np.ctypeslib.as_array((ctypes.c_byte * word).from_address(address))
    strided = np.lib.stride_tricks.as_strided(first.view(_WORDS[word]), shape, [*strides, word])
    return torch.from_numpy(strided)
