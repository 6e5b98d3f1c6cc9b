"""MIN: the most that any policy can hit, with knowledge of the future.

Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), with
bypass, for requests that each want a whole prefix. A chunk's next use is the next
request that contains it, and what is used farthest in the future goes first, among
chunks of one next use the deepest. A parent is used whenever its child is, so it never
goes first: what is kept is closed under prefixes, every kept chunk is a hit at its next
use, and MIN's bound for single chunks is reached by leading runs. No policy that holds at
most so many chunks between any two requests can hit more.

Only counts are needed. All chunks of one next use lie on that request's prompt, and
those that were kept are its leading run, so the hit of a request is how many chunks
with that next use were kept.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from kvtiers.simulator.numbering import Ids
from kvtiers.simulator.replay import Tally
from kvtiers.simulator.trace import Trace

NAME = "min"


@dataclass(frozen=True, slots=True)
class Future:
    """What each request's chunks will be used for next.

    Attributes:
        pieces: for each request from the head of its path on: the next request that
            contains the chunks (the number of requests if none does), and how many those are.

    """

    pieces: Sequence[Sequence[tuple[int, int]]]

    @classmethod
    def of(cls, trace: Trace) -> Future:
        """Look through a trace, from its end on."""
        never = len(trace.requests)
        following = np.full(trace.footprint, never, np.int64)
        pieces = list[Sequence[tuple[int, int]]]()
        for i in range(never - 1, -1, -1):
            request = trace.requests[i]
            path = request.stretches + request.output_stretches
            pieces.append(_pieces(path, following))
            # Chunks of an output are stored, not asked for.
            for stretch in path:
                following[stretch.start : stretch.stop] = never
            for stretch in request.stretches:
                following[stretch.start : stretch.stop] = i
        return cls(pieces[::-1])


def optimum(
    trace: Trace,
    future: Future,
    capacity: int,
    score_from: int = 0,
    on_request: Callable[[int], None] = lambda _done: None,
    hits: list[int] | None = None,
) -> Tally:
    """What MIN hits of a trace with ``capacity`` chunks. Arguments as of ``replay``."""
    begun = time.process_time()
    kept = _Kept(capacity, len(trace.requests))
    tally = Tally()
    for i, request in enumerate(trace.requests):
        hit, before = kept.counts[i], kept.total
        written = kept.serve(i, future.pieces[i])
        if hits is not None:
            hits.append(hit)
        if not i % 256:
            on_request(i)
        if i >= score_from:
            tally.requests += 1
            tally.input_tokens += request.input_tokens
            tally.hit_tokens += hit * trace.chunk_tokens
            tally.written_chunks += written
            tally.removed_chunks += before + written - kept.total
    tally.seconds = time.process_time() - begun
    return tally


class _Kept:
    """What is kept, by next use.

    Attributes:
        counts: chunks that are kept for each request.
        total: all of them.

    """

    def __init__(self, capacity: int, requests: int) -> None:
        self.counts = [0] * requests
        self.total = 0
        self._capacity = capacity
        self._never = requests
        # Requests that chunks are kept for, the farthest first.
        self._farthest: list[int] = []

    def serve(self, request: int, pieces: Sequence[tuple[int, int]]) -> int:
        """Keep the best of what was there and what comes. Returns how many chunks came in."""
        counts, hit = self.counts, self.counts[request]
        self.total -= hit
        counts[request] = 0
        for use, n in pieces:
            if use != self._never:
                if not counts[use]:
                    heapq.heappush(self._farthest, -use)
                counts[use] += n
                self.total += n
        while self.total > self._capacity:
            self._drop(self.total - self._capacity)
        return self._written(pieces, hit)

    def _drop(self, n: int) -> None:
        use = -self._farthest[0]
        dropped = min(n, self.counts[use])
        self.counts[use] -= dropped
        self.total -= dropped
        if not self.counts[use]:
            heapq.heappop(self._farthest)

    def _written(self, pieces: Sequence[tuple[int, int]], hit: int) -> int:
        """Chunks behind the hit that are kept: of one next use, the shallow ones are."""
        position = written = 0
        for use, n in pieces:
            if use != self._never:
                end = position + min(n, self.counts[use])
                written += max(0, end - max(position, hit))
            position += n
        return written


def _pieces(path: Sequence[range], following: Ids) -> Sequence[tuple[int, int]]:
    """Next uses along a path, and how many neighbours have each."""
    if not path:
        return ()
    uses = np.concatenate([following[stretch.start : stretch.stop] for stretch in path])
    cuts = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(uses)]
    return [(int(uses[a]), b - a) for a, b in pairwise(cuts)]
