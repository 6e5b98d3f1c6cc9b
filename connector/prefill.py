"""How fast the engine computes prompts, measured on the scheduler.

A step's time is that from when it could begin, its scheduling or the end of the step
before it, whichever was later, to its output. So time without work counts for nothing,
and with asynchronous scheduling, where a step is scheduled while another one runs, each
has its own share. It is what a request waits for, with sampling and all else, on every
device; a clock on the workers would stop at the launch of a GPU's kernels.

Computing a token costs more the more tokens stand before it (attention), so seconds per
token are a line over the context. On SmolLM2-135M and two cores, 1,024 tokens took 1.1 ms
each and 7,900 took 2.4 ms each: a number without the context is wrong by a factor of two.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median

from kvtiers.policies import Run
from kvtiers.policies.base import one_second_a_chunk
from kvtiers.tiers.robust_line import robust_line

# Steps that count.
_WINDOW = 32
# Steps before anything is taken for known.
_LEAST = 3
# Steps with fewer tokens than this share of the largest one's say nothing: most of their
# time is spent on what every step costs, the weights above all.
_LARGE = 0.25
# Steps under way at once: pipelines have some. More means that an end was not told.
_MOST_UNDER_WAY = 64
_SHOWN_TOKENS = 1024

Span = tuple[int, int]
"""Tokens that stand before, and tokens to compute."""


class PrefillClock:
    """Times steps, on the scheduler's thread, and estimates prefills, on that of who asks.

    While the engine takes no steps that is the hierarchy's own thread, so what both use is
    copied before it is looked through.

    Args:
        chunk_tokens: tokens of a chunk, per KV-cache group.
        under_way: what is left to compute of the prompts of running requests.
        clock: seconds, monotonic.

    """

    def __init__(
        self,
        chunk_tokens: Mapping[int, int],
        under_way: Callable[[], Iterable[Span]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chunk_tokens = dict(chunk_tokens)
        self._under_way = under_way
        self._clock = clock
        # Steps that have no output yet: when scheduled, tokens, mean context.
        self._steps: deque[tuple[float, int, float]] = deque()
        self._ended = float("-inf")
        self._measured: deque[tuple[int, float, float]] = deque(maxlen=_WINDOW)
        self._largest = 0
        self._line: tuple[float, float] | None = None

    def scheduled(self, tokens: int, spans: Iterable[Span]) -> None:
        """A step begins that computes so many tokens.

        Where they stand is not looked at for the many small steps that say nothing.
        """
        large = tokens > 0 and tokens >= _LARGE * self._largest
        products = sum(new * (before + new / 2) for before, new in spans) if large else 0.0
        if len(self._steps) == _MOST_UNDER_WAY:
            self._steps.clear()
        self._steps.append((self._clock(), tokens, products / tokens if large else 0.0))

    def executed(self) -> None:
        """The oldest step's output is here."""
        if not self._steps:
            return
        now = self._clock()
        begun, tokens, context = self._steps.popleft()
        seconds = now - max(begun, self._ended)
        self._ended = now
        if tokens and tokens >= _LARGE * self._largest:
            self._largest = max(self._largest, tokens)
            self._measured.append((tokens, context, seconds / tokens))
            self._line = None

    def span_seconds(self, before: int, new: int) -> float | None:
        """Time to compute so many tokens behind so many; None before it was measured."""
        line = self._line or self._fit()
        if line is None:
            return None
        base, slope = line
        return new * (base + slope * (before + new / 2))

    def seconds(self, run: Run) -> float | None:
        """Time to compute a run whose prefix is there; None before it was measured.

        Nor is it known of a group that this engine does not have: a folder's policy sees
        chunks of other models too.
        """
        tokens = self._chunk_tokens.get(run.group)
        if tokens is None:
            return None
        return self.span_seconds(run.start * tokens, len(run) * tokens)

    def worth(self, run: Run) -> float:
        """The same for policies, who want a number from the start."""
        seconds = self.seconds(run)
        return one_second_a_chunk(run) if seconds is None else seconds

    def busy(self) -> float:
        """Seconds until the prompts of running requests are computed; 0 if unknown."""
        return sum(self.span_seconds(before, new) or 0.0 for before, new in self._under_way())

    def tokens_per_second(self) -> float | None:
        """Speed for the first 1,024 tokens of a prompt; None before it was measured."""
        seconds = self.span_seconds(0, _SHOWN_TOKENS)
        return _SHOWN_TOKENS / seconds if seconds else None

    def _fit(self) -> tuple[float, float] | None:
        measured = tuple(self._measured)
        large = [(x, y) for n, x, y in measured if n >= _LARGE * self._largest]
        if len(large) < _LEAST:
            return None
        line = robust_line(large) or (median(y for _, y in large), 0.0)
        self._line = line
        return line
