"""Least recently used, with a second chance for what prompts attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.prefix_order import PrefixOrder
from kvtiers.policies.sharded import ShardedDict
from pydantic import BaseModel, ConfigDict, Field

# Of a new measurement, in what chunks at a distance usually get.
_LEARNING = 0.05


class AttentionHeatPolicy(LruPolicy):
    """Evicts like LRU, but passes once over chunks that got much attention.

    The idea is that of CLOCK's second chance (Corbato, 1968), given for measured attention
    instead of a use. A chunk is hot if the end of a prompt attended to it ``hot`` times as
    much as to chunks at that distance usually: attention falls with distance in every
    prompt, so that by its mass alone the newest chunks would always be hot. What is passed
    over keeps its prefix and its place, and is hot again only after the next measurement:
    moved to the recent end, as by CLOCK, the hot chunks of dead sessions would stay. Where
    nothing is measured this is ``lru``. What it is good for: docs/policies/attention-heat.md.
    """

    class Config(BaseModel):
        """Options of the policy."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        hot: float = Field(
            default=4.0,
            gt=0,
            description="how many times the attention that is usual at its distance from the end "
            "of the prompt a chunk must get to be passed over",
        )

    name: ClassVar[str] = "attention-heat"
    wants_heat: ClassVar[bool] = True

    def setup(self) -> None:
        """An order and the hot chunks per tier, and what is usual."""
        super().setup()
        assert isinstance(self.config, self.Config)
        self._threshold = self.config.hot
        self._hot: dict[str, ShardedDict[ChunkId, None]] = {
            tier.name: ShardedDict() for tier in self.tiers
        }
        # By the logarithm of the distance from the end, in chunks.
        self._usual: dict[int, float] = {}

    def on_heat(self, run: Run, heat: Sequence[float]) -> None:
        """Note which of the chunks that some tier holds are hot now, and which are not any more."""
        for i, mass in enumerate(heat):
            hot = self._is_hot(mass, len(heat) - i)
            for tier, order in self._orders.items():
                if hot and run.chunks[i] in order:
                    self._hot[tier][run.chunks[i]] = None
                else:
                    self._hot[tier].pop(run.chunks[i], None)

    def _is_hot(self, mass: float, distance: int) -> bool:
        """Compare with what was usual so far, and learn from it."""
        usual = self._usual.get(distance.bit_length())
        if usual is None:
            self._usual[distance.bit_length()] = mass
            return False
        self._usual[distance.bit_length()] = usual + _LEARNING * (mass - usual)
        return mass >= self._threshold * usual and mass > 0

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Forget the chunks, and spend the second chance of what they were evicted before."""
        hot, gone = self._hot[tier], set(chunks)
        passed = []
        for chunk in self._orders[tier]:
            if chunk not in hot or chunk in gone:
                break
            passed.append(chunk)
        super().on_remove(chunks, tier)
        for chunk in (*passed, *chunks):
            hot.pop(chunk, None)

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        """The least recently used first, and at last what is hot, each with its prefix."""
        if not self._usual:  # nothing was ever measured
            return super().victims(tier, n_bytes)
        return _hot_last(self._orders[tier], self._hot[tier])


def _hot_last(order: PrefixOrder, hot: ShardedDict[ChunkId, None]) -> Iterator[ChunkId]:
    passed: list[ChunkId] = []
    needed: set[ChunkId] = set()
    for chunk in order:
        if chunk in hot or chunk in needed:
            passed.append(chunk)
            parent = order.parent_of(chunk)
            if parent is not None:
                needed.add(parent)
        else:
            yield chunk
    yield from passed
