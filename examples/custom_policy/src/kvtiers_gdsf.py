"""Greedy-Dual-Size-Frequency: the example of a policy in a package of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from kvtiers.policies import ChunkFacts, ChunkId, PolicyRequest, Run, ScoredPolicy
from pydantic import BaseModel, ConfigDict, Field


class GdsfPolicy(ScoredPolicy):
    """Evicts the leaf of least value, which is ``age + uses ** frequency * cost / size``.

    Cost is the time to compute the chunk again. The age is the greatest value evicted so
    far, as it stood when the chunk was last used. So a chunk used a hundred times stays
    longer than one used twice, but not for ever: the age grows, and with it the value of
    what is used now.

    From Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
    Caching Policy" (HP Labs, 1998); the exponent is from Cherkasova and Ciardo, "Role of
    Aging, Frequency, and Size in Web Cache Replacement Policies" (HPCN 2001). All tiers
    share one age here. A chunk that was lost ages the others as an evicted one does.
    """

    class Config(BaseModel):
        """Options of the policy.

        Attributes:
            frequency: how much uses count, 0 to 4: with 0 not at all (Greedy-Dual-Size),
                with 1 as in the paper of 1998.

        """

        model_config = ConfigDict(frozen=True, extra="forbid")

        frequency: Annotated[float, Field(ge=0, le=4)] = 1.0

    name: ClassVar[str] = "gdsf"
    config: Config

    def setup(self) -> None:
        """An age, and what it was for each chunk that some tier holds."""
        super().setup()
        self._age = 0.0
        self._age_at_use: dict[ChunkId, float] = {}
        self._cost_by_size: dict[ChunkId, float] = {}

    def score(self, chunk: ChunkFacts, now: float) -> float:  # noqa: ARG002 - it ages by evictions
        """The value of ``chunk``."""
        uses = math.pow(chunk.uses, self.config.frequency)
        return self._age_at_use[chunk.chunk] + uses * self._cost_by_size[chunk.chunk]

    def on_insert(self, run: Run, tier: str) -> None:
        """Note what each new chunk would cost to compute again."""
        for i, chunk in enumerate(run.chunks):
            if self.facts(chunk) is None:
                seconds = self.recompute_seconds(run.tail(i).head(1))
                self._cost_by_size[chunk] = seconds / run.chunk_bytes
                self._age_at_use[chunk] = self._age
        super().on_insert(run, tier)

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
        """Bring each chunk up to the age of now."""
        for chunk in run.chunks:
            if self.facts(chunk) is not None:
                self._age_at_use[chunk] = self._age
        super().on_access(run, request, tier)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Grow older, and forget what no tier holds any more."""
        now = self.clock()
        known = [facts for facts in map(self.facts, chunks) if facts is not None]
        self._age = max([self._age, *(self.score(facts, now) for facts in known)])
        super().on_remove(chunks, tier)
        for facts in known:
            if not facts.copies:
                del self._cost_by_size[facts.chunk], self._age_at_use[facts.chunk]
