"""What a policy closes of the gap from LRU to the optimum, on every trace that there is.

    python -m benchmarks.reuse_table [prefix-reuse] [--cold] [--json FILE]

Each cell is one replay from a cold start, scored on the whole trace, on its middle third and
on its last third. Besides the traces of the folder that ``KVTIERS_TRACES`` names, three that
no policy should lose anything on are made here: prompts drawn uniformly, by Zipf's law, and in
a loop. Claude Code is also replayed by halves of its sessions, their starts drawn together so
that as many are active at a time as in the whole. With ``--cold``, stretches of a few hundred
requests instead, over a tier of a quarter of their chunks: what a policy does that has not learned
anything yet.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from kvtiers.simulator import choices
from kvtiers.simulator.formats import read_trace
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.replay import replay
from kvtiers.simulator.rows import Row, Source, make_trace
from kvtiers.simulator.trace import Trace, TraceRequest
from rich.console import Console
from rich.progress import track
from rich.table import Table

# Distinct chunks of the traces that shares are taken of: of two, the folder has two thirds.
_CONVERSATION, _SYNTHETIC, _CODE = 170_899, 40_148, 568_117
_PROMPTS, _KINDS, _CHUNKS, _TOKENS = 8000, 2000, 20, 512
# Stretches: of which trace, of how many requests, and how many.
_COLD = (
    ("mooncake_conversation_dev", 1000, 5),
    ("mooncake_conversation_dev", 2000, 3),
    ("mooncake_synthetic_dev", 1000, 3),
    ("claude_code_dev", 500, 5),
    ("claude_code_dev", 1000, 5),
    ("claude_code_dev", 2000, 3),
)
_QUARTER = 25
_PARTS = ("whole", "middle third", "last third")


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace at one capacity.

    Attributes:
        trace: name.
        share: of the footprint, in per cent.
        gap_closed: in per cent of the whole, the middle third and the last one.
        points: of token hit ratio above LRU, likewise.

    """

    trace: str
    share: float
    gap_closed: Sequence[float]
    points: Sequence[float]


def traces() -> Iterator[tuple[Trace, int, Sequence[float]]]:
    """Each trace, what shares are taken of, and the shares in per cent."""
    yield read_trace("mooncake_conversation_dev"), _CONVERSATION, (0.5, 1, 2, 5, 10, 20)
    yield read_trace("mooncake_synthetic_dev"), _SYNTHETIC, (1, 5, 10)
    code = read_trace("claude_code_dev")
    yield code, _CODE, (0.5, 1, 2, 5)
    for half in (0, 1):
        trace = half_of(code, half)
        yield trace, len(set().union(*(r.chunks() for r in trace.requests))), (0.5, 1, 2, 5)
    for kind in ("uniform", "zipf", "loop"):
        yield drawn(kind), _KINDS * _CHUNKS, (2, 10, 50)


def cold() -> Iterator[tuple[Trace, int, Sequence[float]]]:
    """Stretches of the traces at equal distances, likewise."""
    for name, requests, count in _COLD:
        whole = read_trace(name)
        for number in range(count):
            first = (len(whole.requests) - requests) * (number + 1) // (count + 1)
            stretch = stretch_of(whole, first, requests)
            yield stretch, stretch.footprint, (_QUARTER,)


def stretch_of(trace: Trace, first: int, count: int) -> Trace:
    """So many requests from request ``first`` on, as if there were no others."""
    rows = [
        Row(replace(request, row=i, stretches=(), output_stretches=()), request.chunks())
        for i, request in enumerate(trace.requests[first : first + count])
    ]
    name = f"{trace.name}, {count:,} from {first:,}"
    return make_trace(name, [Source(name, trace.chunk_tokens, rows)], trace.chunk_tokens)


def half_of(trace: Trace, half: int) -> Trace:
    """Every other session, beginning in half the time."""
    begun: dict[str, float] = {}
    for request in trace.requests:
        begun.setdefault(request.session, request.arrival)
    kept = set(sorted(begun, key=lambda session: (len(session), session))[half::2])
    requests = [
        replace(request, arrival=request.arrival - begun[request.session] / 2)
        for request in trace.requests
        if request.session in kept
    ]
    requests.sort(key=lambda request: request.arrival)
    return replace(trace, name=f"{trace.name}, half {half + 1}", requests=requests)


def drawn(kind: str) -> Trace:
    """Prompts that are the same again or have nothing in common, two a second."""
    rng, now, requests = random.Random(7), 0.0, list[TraceRequest]()
    for row in range(_PROMPTS):
        now += rng.expovariate(2.0)
        which = {
            "uniform": rng.randrange(_KINDS),
            "zipf": min(_KINDS, int(rng.paretovariate(0.7))) - 1,
            "loop": row % (_KINDS * 3 // 4),
        }[kind]
        prompt = range(which * _CHUNKS, (which + 1) * _CHUNKS)
        output = rng.randrange(1, 500)
        requests.append(TraceRequest(row, now, _CHUNKS * _TOKENS + 10, output, (prompt,)))
    return Trace(kind, _TOKENS, requests, _KINDS * _CHUNKS)


def measure(name: str, trace: Trace, footprint: int, share: float) -> Cell:
    """Replay one trace at one capacity."""
    capacity = max(1, int(footprint * share / 100))
    lru, ours, best = list[int](), list[int](), list[int]()
    (choice,) = choices.policies(name)
    replay(trace, choices.LRU.make, capacity, hits=lru)
    replay(trace, choice.make, capacity, hits=ours)
    optimum(trace, Future.of(trace), capacity, hits=best)
    n, closed, points = len(trace.requests), list[float](), list[float]()
    for part in slice(0, n), slice(n // 3, 2 * n // 3), slice(2 * n // 3, n):
        tokens = sum(request.input_tokens for request in trace.requests[part])
        won = sum(ours[part]) - sum(lru[part])
        gap = sum(best[part]) - sum(lru[part])
        closed.append(100 * won / gap if gap > 0 else 0.0)
        points.append(100 * won * trace.chunk_tokens / tokens)
    return Cell(trace.name, share, closed, points)


def main() -> None:
    """Measure, and show a table."""
    parser = argparse.ArgumentParser(description="gap closed on every trace")
    parser.add_argument("policy", nargs="?", default="prefix-reuse")
    parser.add_argument("--cold", action="store_true", help="stretches from a cold start")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", type=Path)
    given = parser.parse_args()
    with ProcessPoolExecutor(given.jobs) as pool:
        runs = [
            pool.submit(partial(measure, given.policy, trace, footprint, share))
            for trace, footprint, shares in (cold() if given.cold else traces())
            for share in shares
        ]
        cells = [run.result() for run in track(runs, "replaying", transient=True)]
    table = Table("trace", "capacity", *_PARTS)
    for cell in cells:
        values = zip(cell.gap_closed, cell.points, strict=True)
        shown = [f"{closed:.0f} ({points:+.2f})" for closed, points in values]
        table.add_row(cell.trace, f"{cell.share:g} %", *shown)
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    main()
