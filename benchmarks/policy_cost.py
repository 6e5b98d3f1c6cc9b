"""What a policy costs: processor time a chunk, and bytes it keeps for each chunk.

    python -m benchmarks.policy_cost prefix-reuse lru --chunks 1000000

One tier is filled with prompts of a hundred chunks, half of them continued from earlier
ones, twice over, so that as much is evicted as comes in. Ids are bytes, as in an engine,
and are counted as the engine's, which keeps them anyway. The second number of microseconds
counts a chunk whenever a request has it, hit or stored.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice

from kvtiers.policies import POLICIES, Policy, PolicyRequest, Run, TierInfo

PROMPT = 100


class Tier:
    """One tier and the policy under measurement."""

    def __init__(self, name: str, capacity: int) -> None:
        self.now, self.free = 0.0, capacity
        policy_class = POLICIES.get(name)
        self.policy: Policy = policy_class([TierInfo("cpu", capacity)], clock=lambda: self.now)
        self.stored, self.used = 0, 0

    def serve(self, number: int, run: Run, hit: int) -> None:
        """A request of which the tier holds the first ``hit`` chunks."""
        request = PolicyRequest(f"r{number}", (run,), self.now, "", "", PROMPT * 16)
        self.policy.on_request(request)
        if hit:
            self.policy.on_access(run.head(hit), request, "cpu")
        self.policy.on_start(request)
        self._store(run.tail(hit))
        request.output_tokens, request.finish_reason = 100, "stop"
        self.policy.on_finish(request)
        self.used += len(run)

    def _store(self, run: Run) -> None:
        run = run.head(self.policy.admit(run, "cpu"))
        surplus = len(run) - self.free
        if surplus > 0:
            out = list(islice(self.policy.victims("cpu", surplus), surplus))
            self.policy.on_remove(out, "cpu")
            self.free += len(out)
        if len(run):
            self.policy.on_insert(run, "cpu")
            self.free -= len(run)
            self.stored += len(run)


def prompts(chunks: int) -> Iterator[tuple[Run, int]]:
    """Prompts with as many new chunks, and how much of each an earlier one had."""
    rng, last = random.Random(1), list[tuple[bytes, ...]]()
    for number in range(0, chunks, PROMPT):
        ids = tuple(hashlib.sha256(b"%d" % (number + i)).digest() for i in range(PROMPT))
        if last and rng.random() < 0.5:
            before = last.pop(rng.randrange(len(last)))[-PROMPT:]
            ids, hit = before + ids, PROMPT
        else:
            hit = 0
        last = [*last[-20:], ids]
        yield Run(ids), hit


def measure(name: str, chunks: int) -> tuple[float, float, float]:
    """Microseconds a stored chunk and a chunk of a request, and bytes a chunk."""
    all_prompts = list(prompts(2 * chunks))
    tier = Tier(name, chunks)
    begun = time.process_time()
    for number, (run, hit) in enumerate(all_prompts):
        tier.now += 1.0
        tier.serve(number, run, hit)
    micros = 1e6 * (time.process_time() - begun)
    return micros / tier.stored, micros / tier.used, size(name, chunks)


def size(name: str, chunks: int) -> float:
    """Bytes that a policy keeps for each chunk of a full tier, ids apart."""
    all_prompts = list(prompts(chunks))
    gc.collect()
    tracemalloc.start()
    tier = Tier(name, chunks)
    for number, (run, hit) in enumerate(all_prompts):
        tier.now += 1.0
        tier.serve(number, run, hit)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / chunks


def main() -> None:
    """Measure the policies named on the command line."""
    parser = argparse.ArgumentParser(description="cost of policies")
    parser.add_argument("policies", nargs="+", help="such as lru")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    args = parser.parse_args()
    for name in args.policies:
        stored, used, kept = measure(name, args.chunks)
        print(f"{name}: {stored:.2f} us a stored chunk, {used:.2f} us a used one, {kept:.0f} B")


if __name__ == "__main__":
    main()
