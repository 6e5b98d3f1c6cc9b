"""Least recently used, leaves first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtiers.policies.base import (
    ChunkId,
    Policy,
    PolicyRequest,
    Run,
)
from kvtiers.policies.prefix_order import PrefixOrder


class LruPolicy(Policy):
    """Evicts from each tier the leaf of the prefix forest that was used longest ago.

    What vLLM's own prefix cache does (it frees the blocks of a request tail
    first) and SGLang's radix tree. Admits everything, writes it through to
    every tier, demotes nothing. ``PrefixOrder`` says how it is kept.
    """

    name: ClassVar[str] = "lru"

    def setup(self) -> None:
        """An order per tier."""
        self._orders = {tier.name: PrefixOrder() for tier in self.tiers}

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:  # noqa: ARG002
        """Refresh the run in every tier that has some of it."""
        for order in self._orders.values():
            order.use(run)

    def on_insert(self, run: Run, tier: str) -> None:
        """Take the run in as the tier's most recent."""
        self._orders[tier].add(run)

    def on_found(self, run: Run, tier: str, age: float) -> None:  # noqa: ARG002
        """Take the run in as the tier's least recent: younger ones were named before."""
        self._orders[tier].add_oldest(run)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Forget the chunks."""
        self._orders[tier].discard_all(chunks)

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:  # noqa: ARG002
        """All chunks of ``tier``, the least recently used first."""
        return iter(self._orders[tier])
