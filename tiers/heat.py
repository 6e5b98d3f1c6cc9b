"""Measured attention on its way to the policy.

It is measured while a prompt is computed, and the prompt's chunks are stored a step or
more later; or another engine has told it, and they are loaded once they are needed. A
policy keeps facts of chunks that some tier holds, so it waits for them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtiers.policies import ChunkId, Policy, Run
from kvtiers.tiers.directory import State
from kvtiers.tiers.residency import Residency

# Prompts that wait, at most: what is not admitted is never stored.
_MOST_WAITING = 256


class HeatInbox:
    """Tells the policy once the last of a prompt's chunks is there. The hierarchy's thread.

    Attributes:
        seconds: that looking for what waits, and telling it, took so far.

    """

    def __init__(
        self,
        residency: Residency,
        policy: Policy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._residency = residency
        self._policy = policy
        self._clock = clock
        self.seconds = 0.0
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
        self._tell(runs, self._policy.on_heat)

    def used(self, runs: Iterable[Run]) -> None:
        """A request starts with these, of which some may have come from a tier."""
        self._tell(runs, self.measured)

    def _tell(self, runs: Iterable[Run], tell: Callable[[Run, Sequence[float]], None]) -> None:
        if not self._waiting:
            return
        begin = self._clock()
        for run, heat in self._waiting_for(runs):
            tell(run, heat)
        self.seconds += self._clock() - begin

    def _waiting_for(self, runs: Iterable[Run]) -> Iterator[tuple[Run, Sequence[float]]]:
        """What waits for one of these chunks, which is to wait no more."""
        for run in runs:
            for chunk in run.chunks:
                waiting = self._waiting.pop(chunk, None)
                if waiting is not None:
                    yield waiting

    def forget(self) -> None:
        """Nothing measured so far says anything any more."""
        self._waiting.clear()
