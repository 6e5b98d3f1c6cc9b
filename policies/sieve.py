"""A hand that goes over a queue and lets pass what was used since it came by last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.rings import Rings

# What a chunk that the hand comes to goes on with, for each mark: used ones, as unused.
_PASSES = (-1, 0)


class _SieveTier(ChunkwiseTier):
    """The queue, cut in two where the hand is: what it has passed, and what lies ahead.

    A chunk that the hand passes goes from the oldest end of one list to the newest end of
    the other. With nothing ahead the hand is back at the oldest of all, and the two lists
    change roles.
    """

    def setup(self) -> None:
        self._rings = Rings(2)
        self._ahead, self._passed = 0, 1
        self._coming = 0

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        self._rings.mark_all(chunks, 1)

    def announce(self, run: Run) -> int:
        self._coming = len(self._rings.absent(run.chunks))
        return super().announce(run)

    def insert(self, run: Run) -> None:
        self._coming = 0
        self._rings.append_all(self._rings.absent(run.chunks[::-1]), self._ahead)

    def insert_oldest(self, run: Run) -> None:
        oldest = self._ahead if self._rings.is_empty(self._passed) else self._passed
        self._rings.prepend_all(self._rings.absent(run.chunks[::-1]), oldest)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        """Forget the chunks, and let the hand pass what it passed on its way to them.

        It waits at a chunk that was spared though its turn had come (a pinned one), and so
        it does if the chunks were not evicted, but lost somewhere else.
        """
        for chunk in chunks:
            self._advance()
            self._rings.discard(chunk)
        # Chunk by chunk, all but the last of those that come were ahead of the hand by now.
        if self._coming < 2:
            self._turn_back()

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        used = list[ChunkId]()
        for chunk, mark in chain(
            self._rings.oldest_marked(self._ahead), self._rings.oldest_marked(self._passed)
        ):
            if mark:
                used.append(chunk)
            else:
                yield chunk
        # In its second round the hand finds them unused.
        yield from used

    # Parts ------------------------------------------------------------------

    def _advance(self) -> None:
        """Move the hand to the next chunk that it does not pass."""
        for _ in range(2):
            self._rings.pass_marked(self._ahead, self._passed, _PASSES)
            self._turn_back()

    def _turn_back(self) -> None:
        if self._rings.is_empty(self._ahead):
            self._ahead, self._passed = self._passed, self._ahead


class SievePolicy(ChunkwisePolicy):
    """SIEVE, for each tier on its own, chunk by chunk.

    Method: Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches" (NSDI 2024), figure 1. New chunks come in at the newest end of a
    queue, a hand goes from its oldest end to its newest one, again and again. It evicts what
    was not used since it came by, and stays where it is: so what is new is looked at
    soon, while what was used is not touched for a round.
    """

    name: ClassVar[str] = "sieve"
    tier_class = _SieveTier
