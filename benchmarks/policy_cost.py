"""What a policy costs: processor time a chunk, and bytes it keeps for each chunk.

    python -m benchmarks.policy_cost prefix-reuse lru --chunks 1000000

One tier is filled with prompts of ``--run`` new chunks, half of them continued from earlier
ones, one a second; then as many come again, and as much is evicted as comes in. Only the
policy's calls are timed, for a request from its arrival to its end. Their time is divided by
the chunks of the requests, hit or stored, and once, over the whole run, by those stored. That
of a full tier is given as the median and the lowest of ten windows, as other processes slow
down whoever shares a cache with them. Ids are bytes, as in an engine, which keeps them
anyway: they are not counted.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from types import TracebackType

from kvtiers.policies import POLICIES, Policy, PolicyRequest, Run, TierInfo

WINDOWS = 10

Prompt = tuple[Run, int]
"""A prompt, and how many chunks of it an earlier one had."""


class Stopwatch:
    """Adds up the processor time of ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.process_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.seconds += time.process_time() - self._begun


class Tier:
    """One tier and the policy under measurement."""

    def __init__(self, name: str, capacity: int) -> None:
        self.now, self.free = 0.0, capacity
        policy_class = POLICIES.get(name)
        self.policy: Policy = policy_class([TierInfo("cpu", capacity)], clock=lambda: self.now)
        self.watch = Stopwatch()
        self.longest, self.stored = 0.0, 0
        self._rng = random.Random(2)
        self._served = 0

    def serve(self, prompts: Sequence[Prompt]) -> float:
        """Some requests. Returns the policy's microseconds for each chunk of them."""
        before, used = self.watch.seconds, 0
        for run, hit in prompts:
            begun = self.watch.seconds
            self._request(run, hit)
            self.longest = max(self.longest, self.watch.seconds - begun)
            used += len(run)
        return 1e6 * (self.watch.seconds - before) / used

    def _request(self, run: Run, hit: int) -> None:
        self.now += 1.0
        self._served += 1
        request = PolicyRequest(f"r{self._served}", (run,), self.now, "", "", len(run) * 16)
        head, tail, policy = run.head(hit), run.tail(hit), self.policy
        with self.watch:
            policy.on_request(request)
            if hit:
                policy.on_access(head, request, "cpu")
            policy.on_start(request)
            admitted = policy.admit(tail, "cpu")
        self._store(tail.head(admitted))
        request.output_tokens = int(2 ** self._rng.uniform(3, 11))
        request.finish_reason = "stop"
        with self.watch:
            policy.on_finish(request)

    def _store(self, run: Run) -> None:
        surplus = len(run) - self.free
        if surplus > 0:
            with self.watch:
                out = list(islice(self.policy.victims("cpu", surplus), surplus))
                self.policy.on_remove(out, "cpu")
            self.free += len(out)
        if len(run):
            with self.watch:
                self.policy.on_insert(run, "cpu")
            self.free -= len(run)
            self.stored += len(run)


def prompts_of(chunks: int, new: int) -> Iterator[Prompt]:
    """Prompts with so many chunks, ``new`` new ones in each."""
    rng, last = random.Random(1), list[tuple[bytes, ...]]()
    for number in range(0, chunks, new):
        ids = tuple(hashlib.sha256(b"%d" % (number + i)).digest() for i in range(new))
        if last and rng.random() < 0.5:
            before = last.pop(rng.randrange(len(last)))[-new:]
            ids, hit = before + ids, new
        else:
            hit = 0
        last = [*last[-20:], ids]
        yield Run(ids), hit


@dataclass(frozen=True, slots=True)
class Cost:
    """What a policy costs.

    Attributes:
        filling: microseconds a chunk of a request, while the tier fills.
        full: the same in each window after that.
        stored: microseconds of the whole run for each chunk that was stored.
        longest: milliseconds for one request.
        kept: bytes for each chunk of the full tier, ids apart.

    """

    filling: float
    full: Sequence[float]
    stored: float
    longest: float
    kept: float

    def __str__(self) -> str:
        """In one line."""
        return (
            f"{self.filling:.2f} us a chunk while the tier fills; when it is full "
            f"{median(self.full):.2f} us (lowest {min(self.full):.2f}), "
            f"longest request {self.longest:.1f} ms; in all {self.stored:.2f} us a stored chunk; "
            f"{self.kept:.0f} B kept a chunk"
        )


def measure(name: str, chunks: int, new: int) -> Cost:
    """Fill a tier of so many chunks twice."""
    all_prompts = list(prompts_of(2 * chunks, new))
    half, tier = len(all_prompts) // 2, Tier(name, chunks)
    filling = tier.serve(all_prompts[:half])
    tier.longest = 0.0
    ends = [half + (len(all_prompts) - half) * i // WINDOWS for i in range(WINDOWS + 1)]
    windows = pairwise(ends)
    full = [tier.serve(all_prompts[begin:end]) for begin, end in windows]
    stored = 1e6 * tier.watch.seconds / tier.stored
    return Cost(filling, full, stored, 1e3 * tier.longest, size(name, chunks, new))


def size(name: str, chunks: int, new: int) -> float:
    """Bytes that a policy keeps for each chunk of a full tier, ids apart."""
    all_prompts = list(prompts_of(chunks, new))
    gc.collect()
    tracemalloc.start()
    tier = Tier(name, chunks)
    tier.serve(all_prompts)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / chunks


def main() -> None:
    """Measure the policies named on the command line."""
    parser = argparse.ArgumentParser(description="cost of policies")
    parser.add_argument("policies", nargs="+", help="such as lru")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="at least 1000")
    parser.add_argument("--run", type=int, default=100, help="new chunks of a prompt")
    args = parser.parse_args()
    print(f"{args.chunks} chunks, runs of {args.run}, only the policy's calls")
    for name in args.policies:
        print(f"{name}: {measure(name, args.chunks, args.run)}", flush=True)


if __name__ == "__main__":
    main()
