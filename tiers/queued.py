"""Chunks that requests in the engine's queue are about to ask for.

Their use is certain, whatever a policy expects of them: a tier evicts them last, and a
policy's order decides again once nothing else is left. No pins: they would keep out those
whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvtiers.policies import ChunkId, PolicyRequest, Run
from kvtiers.policies.sharded import ShardedDict

# Chunks that one search for victims passes over, so that it stays short.
_MOST_SPARED = 2048


class Queued:
    """Counts the requests that wait, by chunk. The hierarchy's thread only."""

    def __init__(self) -> None:
        # Their runs as of when they came: the chunks of an answer are added later.
        self._waiting: dict[str, Sequence[Run]] = {}
        self._requests: ShardedDict[ChunkId, int] = ShardedDict()

    def enter(self, request: PolicyRequest) -> None:
        """The request waits from now on."""
        self._waiting[request.request_id] = request.runs
        for run in request.runs:
            for chunk in run.chunks:
                self._requests[chunk] = (self._requests.get(chunk) or 0) + 1

    def leave(self, request: PolicyRequest) -> None:
        """It started, or ended. Nothing happens if it did before."""
        for run in self._waiting.pop(request.request_id, ()):
            for chunk in run.chunks:
                left = (self._requests.get(chunk) or 0) - 1
                if left > 0:
                    self._requests[chunk] = left
                else:
                    self._requests.pop(chunk, 0)

    def last(self, victims: Iterable[ChunkId]) -> Iterator[ChunkId]:
        """The same chunks in the same order, but those that are waited for after all others."""
        if not self._waiting:
            return iter(victims)
        return self._others_first(iter(victims))

    def _others_first(self, victims: Iterator[ChunkId]) -> Iterator[ChunkId]:
        spared: list[ChunkId] = []
        for victim in victims:
            if victim not in self._requests:
                yield victim
                continue
            spared.append(victim)
            if len(spared) == _MOST_SPARED:
                break
        yield from chain(spared, victims)
