"""Measured attention on its way to the policy.

It is measured while a prompt is computed, and the prompt's chunks are stored a step or
more later; or another engine has told it, and they are loaded once they are needed. A
policy keeps facts of chunks that some tier holds, so it waits for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvtiers.policies import ChunkId, Policy, Run
from kvtiers.tiers.directory import State
from kvtiers.tiers.residency import Residency

# Prompts that wait, at most: what is not admitted is never stored.
_MOST_WAITING = 256


class HeatInbox:
    """Tells the policy once the last of a prompt's chunks is there. The hierarchy's thread."""

    def __init__(self, residency: Residency, policy: Policy) -> None:
        self._residency = residency
        self._policy = policy
        self._waiting: OrderedDict[ChunkId, tuple[Run, Sequence[float]]] = OrderedDict()

    def measured(self, run: Run, heat: Sequence[float]) -> None:
        """Attention per chunk of ``run``, which is not empty."""
        last = self._residency.get(run.chunks[-1])
        if last is not None and (last.state is State.READY or last.where):
            self._policy.on_heat(run, heat)
            return
        self._waiting[run.chunks[-1]] = (run, heat)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)

    def stored(self, runs: Iterable[Run]) -> None:
        """These chunks are in the arena now."""
        for run, heat in self._waiting_for(runs):
            self._policy.on_heat(run, heat)

    def used(self, runs: Iterable[Run]) -> None:
        """A request starts with these, of which some may have come from a tier."""
        for run, heat in self._waiting_for(runs):
            self.measured(run, heat)

    def _waiting_for(self, runs: Iterable[Run]) -> Iterator[tuple[Run, Sequence[float]]]:
        """What waits for one of these chunks, which is to wait no more."""
        if not self._waiting:
            return
        for run in runs:
            for chunk in run.chunks:
                waiting = self._waiting.pop(chunk, None)
                if waiting is not None:
                    yield waiting

    def forget(self) -> None:
        """Nothing measured so far says anything any more."""
        self._waiting.clear()
