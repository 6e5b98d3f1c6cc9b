"""What a grid of replays does with one trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtiers.simulator.choices import PolicyChoice
from kvtiers.simulator.stack import CPU, StackModel
from kvtiers.simulator.trace import Trace

Cell = tuple[int, int, PolicyChoice]
"""One replay: number of the task, capacity, policy."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is done with one trace.

    Attributes:
        trace: to replay.
        capacities: of the tier, in chunks, each with its share of the footprint.
        footprint: chunks that shares of capacity are taken of.
        score_from: first request that counts.
        chunk_bytes: size of a chunk, 0 if unknown.
        stack: tiers to replay through the live hierarchy; None for one tier and its policy.
            ``capacities`` are those of the arena then, its ``cpu``.
        others: capacities of the stack's other tiers, in chunks.

    """

    trace: Trace
    capacities: Sequence[tuple[int, float]]
    footprint: int
    score_from: int = 0
    chunk_bytes: int = 0
    stack: StackModel | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    def total(self, capacity: int) -> int:
        """Chunks that all tiers of all replicas hold together."""
        if self.stack is None:
            return capacity
        sizes = {**self.others, CPU: capacity}
        copies = {tier.name: 1 if tier.shared else self.stack.replicas for tier in self.stack.tiers}
        return sum(n * copies[name] for name, n in sizes.items())
