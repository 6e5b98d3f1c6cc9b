"""What recording costs an engine, in processor time a request.

    python -m benchmarks.recorder [--requests 2000] [--json FILE]

A recorder is told of requests as an engine's scheduler tells it, some at a time as they
would end together, and writes what it always writes. Counted is the processor time of the
thread that tells, which is the engine's, and of the recorder's own, writing included; not what
the machine does besides. Beside it stands what vLLM takes to hash the same prompts, which is
a small part of what it does for a request before any of it is computed, and the processor
time that a request must take for the recorder to be half a percent of it.

About a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtiers.policies import PolicyRequest, Run
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.recording_format import About, RecordedTier
from rich.console import Console
from rich.table import Table

SHARE = 0.005
"""Of the engine's processor time, what the recorder may take."""

_BLOCK = 16
_OUTPUT_CHUNKS = 20
_KEY_BYTES = 36
# Turns of a conversation before another one takes its place.
_TURNS = 10
_AT_ONCE = 50
_ABOUT = About(
    chunk_tokens=_BLOCK,
    chunk_bytes=1 << 20,
    namespace="benchmark",
    policy="lru",
    tiers=(RecordedTier("gpu", 1 << 36), RecordedTier("cpu", 1 << 38)),
    stores_output=False,
    vllm="benchmark",
)


@dataclass(frozen=True)
class Shape:
    """Requests of one kind.

    Attributes:
        name: of it.
        chunks: of a prompt and its output, at most.
        new: how many of them no earlier request had.

    """

    name: str
    chunks: int
    new: int


SHAPES = (
    Shape("no reuse, up to 2,000 tokens", 125, 125),
    Shape("chat, up to 8,000 tokens", 500, 45),
    Shape("agent, up to 64,000 tokens", 4000, 40),
)


@dataclass(frozen=True)
class Cost:
    """Microseconds of processor time a request.

    Attributes:
        shape: name of the requests' kind.
        engine: of the engine's thread.
        recorder: of the recorder's.
        hashing: that vLLM takes to hash the prompt.

    """

    shape: str
    engine: float
    recorder: float
    hashing: float

    @property
    def enough(self) -> float:
        """Milliseconds that a request must take the engine for this to be ``SHARE`` of it."""
        return (self.engine + self.recorder) / SHARE / 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of each kind (default: 2000)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was measured there")
    options = parser.parse_args(argv)
    costs = [measure(shape, options.requests) for shape in SHAPES]
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
    Console().print(table(costs))
    return 0


def measure(shape: Shape, requests: int) -> Cost:
    """Record that many requests of a kind, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), _ABOUT, 1 << 30)
        # Of what is used for the first time, once.
        told = 0.0
        for batch in _batches(shape, requests):
            told += _tell(recorder, batch)
            while recorder._ended:
                time.sleep(0.05)
        clock = time.pthread_getcpuclockid(recorder._thread.ident or 0)
        taken = time.clock_gettime(clock)
        recorder.close()
    scale = 1e6 / requests
    return Cost(shape.name, told * scale, taken * scale, 1e6 * _hashing_seconds(shape))


def _tell(recorder: Recorder, batch: Sequence[PolicyRequest]) -> float:
    """Tell of requests from their admission to their end. Returns the time it took."""
    begin = time.thread_time()
    for request in batch:
        recorder.admitted(request, 64, {0: {"cpu": 2}})
    for request in batch:
        recorder.finished(request)
    return time.thread_time() - begin


def _batches(shape: Shape, requests: int) -> Iterator[list[PolicyRequest]]:
    draw = random.Random(1)
    conversations: list[list[bytes]] = [[] for _ in range(_AT_ONCE)]
    for first in range(0, requests, _AT_ONCE):
        for known in conversations:
            _go_on(known, shape, draw)
        yield [_request(first + i, known) for i, known in enumerate(conversations)]


def _go_on(known: list[bytes], shape: Shape, draw: random.Random) -> None:
    """The next turn, or the first one of another conversation."""
    if len(known) + shape.new > shape.chunks:
        known.clear()
    new = shape.new if known else shape.chunks - _TURNS * shape.new
    known += [draw.randbytes(_KEY_BYTES) for _ in range(max(new, shape.new))]


def _request(number: int, known: Sequence[bytes]) -> PolicyRequest:
    return PolicyRequest(
        str(number),
        (Run(tuple(known)),),
        time.monotonic(),
        "tenant",
        f"session {number % _AT_ONCE}",
        (len(known) - _OUTPUT_CHUNKS) * _BLOCK,
        output_tokens=_OUTPUT_CHUNKS * _BLOCK,
        finish_reason="stop",
    )


def _hashing_seconds(shape: Shape) -> float:
    """What vLLM takes to name the chunks of one prompt."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256)
    tokens, parent, begin = list(range(_BLOCK)), None, time.thread_time()
    for _ in range(shape.chunks):
        parent = hash_block_tokens(sha256, parent, tokens, None)
    return time.thread_time() - begin


def table(costs: Sequence[Cost]) -> Table:
    """The costs for people."""
    grid = Table(title="Processor time a request")
    for heading in ("requests", "engine's thread", "recorder's", "vLLM's hashing", "0.5 % of"):
        grid.add_column(heading, justify="right" if grid.columns else "left")
    for cost in costs:
        times = (f"{value:.1f} µs" for value in (cost.engine, cost.recorder, cost.hashing))
        grid.add_row(cost.shape, *times, f"{cost.enough:.1f} ms")
    return grid


if __name__ == "__main__":
    sys.exit(main())
