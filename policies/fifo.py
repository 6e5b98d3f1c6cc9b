"""First in, first out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.chunkwise import ChunkwisePolicy, ChunkwiseTier
from kvtiers.policies.rings import Rings


class _FifoTier(ChunkwiseTier):
    """One list, in the order of arrival."""

    def setup(self) -> None:
        self._rings = Rings(1)

    # What happens -----------------------------------------------------------

    def use(self, chunks: Sequence[ChunkId]) -> None:
        """A use changes nothing."""

    def insert(self, run: Run) -> None:
        self._rings.append_all(self._rings.absent(run.chunks[::-1]), 0)

    def insert_oldest(self, run: Run) -> None:
        self._rings.prepend_all(self._rings.absent(run.chunks[::-1]), 0)

    def remove(self, chunks: Sequence[ChunkId]) -> None:
        self._rings.discard_all(chunks)

    # What to do -------------------------------------------------------------

    def victims(self) -> Iterator[ChunkId]:
        return self._rings.oldest(0)


class FifoPolicy(ChunkwisePolicy):
    """Evicts what came first, however often it was used since.

    The yardstick of the literature: what a policy gains over it, it gains by looking at uses.
    """

    name: ClassVar[str] = "fifo"
    tier_class = _FifoTier
