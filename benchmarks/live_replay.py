"""What a policy saves a real engine, and whether the simulator had said so.

    python -m benchmarks.live_replay --trace conversation --json FILE

Stretches of a trace are scaled down (``benchmarks.live_trace``) and replayed on a real
vLLM engine whose CPU tier holds a quarter of the distinct chunks of the stretch, with each
policy in turn (``benchmarks.live_engine``). Counted are the tokens that vLLM computed. Beside
that stands what ``kvtiers.simulator`` says of the same stretch, and the optimum.

Traces are taken from ``KVTIERS_TRACES``, which docs/simulate.md tells how to fill; ``made`` needs
none. About 5 minutes a trace on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtiers.simulator import choices
from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.formats import read_trace
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.serving import serve
from kvtiers.simulator.stack import CPU, GPU, StackModel
from kvtiers.simulator.trace import Trace
from rich.console import Console
from rich.table import Table

from benchmarks.live_engine import CHUNK_BYTES, Live, gpu_chunks, replay_live
from benchmarks.live_trace import BLOCK, made, scaled
from benchmarks.record import describe, write

WORKING_SETS = 4
"""The working set over the CPU tier."""
MADE = "made"
FILES = {
    "conversation": ("mooncake_conversation_dev.parquet", 512),
    "synthetic": ("mooncake_synthetic_dev.parquet", 512),
    "claude_code": ("claude_code_dev.parquet", 2048),
}
"""Traces, and how many of their tokens become a block."""


@dataclass(frozen=True)
class Outcome:
    """One policy on one stretch.

    Attributes:
        trace: what it is a stretch of.
        first: its first request there.
        requests, input_tokens, distinct_chunks, capacity_chunks: of the stretch.
        policy: the registered name.
        computed_tokens, gpu_tokens, lower_tokens: vLLM's counters.
        live, simulated, optimum: token hit ratios.

    """

    trace: str
    first: int
    requests: int
    input_tokens: int
    distinct_chunks: int
    capacity_chunks: int
    policy: str
    computed_tokens: int
    gpu_tokens: int
    lower_tokens: int
    live: float
    simulated: float
    optimum: float

    @property
    def difference(self) -> float:
        """Simulated over live, in points."""
        return 100 * (self.simulated - self.live)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay and print. 2 if there is no such trace."""
    options = _parser().parse_args(argv)
    progress = Console(stderr=True, highlight=False)
    found = []
    try:
        for first, trace in stretches(options):
            for policy in options.policies.split(","):
                progress.print(f"{options.trace} from request {first} on, {policy}")
                found.append(measure(trace, first, policy))
                if options.json:
                    _save(options.json, found)
    except SimulatorError as error:
        progress.print(str(error), markup=False, soft_wrap=True)
        return 2
    Console().print(table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_replay", description=__doc__)
    add = parser.add_argument
    add("--trace", choices=(*FILES, MADE), default=MADE)
    add("--policies", default="lru,prefix-reuse", help="default: lru,prefix-reuse")
    add("--requests", type=int, default=1000, help="of a stretch (default: 1000)")
    add("--stretches", type=int, default=3, help="at equal distances (default: 3)")
    add("--json", metavar="FILE", type=Path, help="write what was measured there")
    return parser


def stretches(options: argparse.Namespace) -> Iterator[tuple[int, Trace]]:
    """The first request of each stretch, and the stretch; of made traces, seeds."""
    if options.trace == MADE:
        for seed in range(options.stretches):
            yield seed, made(options.requests, seed)
        return
    name, tokens = FILES[options.trace]
    trace = read_trace(name, chunk_tokens=tokens)
    left = max(0, len(trace.requests) - options.requests)
    for number in range(options.stretches):
        # Not the very ends, where traces begin and end rather than go on.
        first = left * (number + 1) // (options.stretches + 1)
        yield first, scaled(trace, first, options.requests)


def measure(trace: Trace, first: int, policy: str) -> Outcome:
    """Replay a stretch with one policy, in both ways."""
    capacity = trace.footprint // WORKING_SETS
    live = replay_live(trace, policy, capacity)
    _check(trace, live)
    return Outcome(
        trace=trace.name,
        first=first,
        requests=len(trace.requests),
        input_tokens=trace.input_tokens,
        distinct_chunks=trace.footprint,
        capacity_chunks=capacity,
        policy=policy,
        computed_tokens=live.computed,
        gpu_tokens=live.gpu,
        lower_tokens=live.lower,
        live=live.token_hit_ratio,
        simulated=simulate(trace, policy, capacity),
        optimum=optimum(trace, Future.of(trace), capacity).token_hit_ratio,
    )


def _check(trace: Trace, live: Live) -> None:
    """What vLLM says of each request and what it says of all must be the same."""
    assert sum(live.cached) == live.gpu + live.lower
    assert live.computed + live.gpu + live.lower == trace.input_tokens


def simulate(trace: Trace, policy: str, capacity: int) -> float:
    """The token hit ratio that the simulator finds for the engine's two tiers.

    The engine is one that computes in no time, as requests are handed in when those before
    them have ended.
    """
    sizes = {GPU: gpu_chunks(trace), CPU: capacity}
    tiers = [{"name": name, "capacity": str(size)} for name, size in sizes.items()]
    stack = StackModel.model_validate({"tiers": tiers, "prefill": 1e15})
    (choice,) = choices.policies(policy)
    return serve(trace, stack, sizes, choice.make, CHUNK_BYTES).token_hit_ratio


def _save(path: Path, outcomes: Sequence[Outcome]) -> None:
    setup = describe("two layers, random weights", "float32", BLOCK, rest=0)
    write(path, setup, "outcomes", map(asdict, outcomes))


def table(outcomes: Sequence[Outcome]) -> Table:
    """The result for people."""
    grid = Table(title="Token hit ratio of a real engine, and as simulated")
    headings = ("trace", "from", "policy", "tokens computed", "live", "simulated", "optimum")
    for heading in headings:
        grid.add_column(heading, no_wrap=heading not in ("trace", "tokens computed"))
    for one in outcomes:
        ratios = (f"{100 * one.live:.1f} %", f"{100 * one.simulated:.1f} ({one.difference:+.1f})")
        best = f"{100 * one.optimum:.1f} %"
        computed = f"{one.computed_tokens:,}"
        grid.add_row(one.trace, str(one.first), one.policy, computed, *ratios, best)
    return grid


if __name__ == "__main__":
    sys.exit(main())
