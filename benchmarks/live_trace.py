"""Traces scaled down until a real engine with a tiny model can replay them, and made ones.

A stretch of a trace, of which each chunk becomes one small block of the engine and lengths
shrink in proportion. Which prompts begin alike, when they came and to which session they
belong stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from kvtiers.simulator.rows import Row, Source, make_trace
from kvtiers.simulator.trace import Trace, TraceRequest

BLOCK = 32
"""Tokens of a block: the fewest that vLLM takes on a CPU."""
VOCABULARY = 1024


def scaled(trace: Trace, first: int, count: int) -> Trace:
    """``count`` requests from request ``first`` on, with blocks for chunks.

    Prompts have at least one token beyond their last full block, so that no rule of the
    engine for the last token of a prompt matters. The engine ends them by their length, and
    what is told of them are their session and turn, and of Claude Code the agent that asks.
    """
    requests = trace.requests[first : first + count]
    rows = [Row(_shrunk(i, trace, request), request.chunks()) for i, request in enumerate(requests)]
    return make_trace(trace.name, [Source(trace.name, BLOCK, rows)], BLOCK)


def _shrunk(row: int, trace: Trace, request: TraceRequest) -> TraceRequest:
    def tokens(n: int) -> int:
        return max(1, n * BLOCK // trace.chunk_tokens)

    full = request.prompt_chunks * BLOCK
    return replace(
        request,
        row=row,
        input_tokens=min(full + BLOCK - 1, max(full + 1, tokens(request.input_tokens))),
        output_tokens=tokens(request.output_tokens),
        stretches=(),
        output_stretches=(),
        finish_reason="length",
        hints={name: value for name, value in request.hints.items() if name == "agent"},
    )


def made(requests: int, seed: int = 1) -> Trace:
    """Conversations that go on for a while, and between them long prompts that nobody repeats.

    Whoever keeps what was used last fills a small tier with the latter.
    """
    asked = sorted(_asked(requests, random.Random(seed)), key=lambda one: one[0])[:requests]
    rows = []
    for i, (now, session, turn, names) in enumerate(asked):
        tokens = len(names) * BLOCK + 1 + i % (BLOCK - 1)
        request = TraceRequest(
            i, now, tokens, 1, session=session, turn=turn, finish_reason="length"
        )
        rows.append(Row(request, names))
    return make_trace("made", [Source("made", BLOCK, rows)], BLOCK)


def _asked(requests: int, draw: random.Random) -> Iterator[tuple[float, str, int, list[str]]]:
    """When each request comes, its session and turn, and what its chunks are called."""
    began = 0.0
    for session in range(requests):
        began += draw.expovariate(1 / 1.5)
        name, now, turns = f"s{session}", began, 1
        if draw.random() < 0.4:
            turns, chunks = draw.randint(6, 14), draw.randint(4, 8)
        else:
            chunks = draw.randint(20, 40)
        for turn in range(turns):
            yield now, name, turn, [f"{name}/{i}" for i in range(chunks)]
            now += draw.uniform(20, 60)
            chunks += draw.randint(1, 3)


def prompts(trace: Trace) -> Iterator[list[int]]:
    """The token ids of each request: equal chunks are equal tokens, and no others are."""
    draw = np.random.default_rng(1)
    words = draw.integers(10, VOCABULARY, (trace.footprint, BLOCK))
    for request in trace.requests:
        rest = request.input_tokens - request.prompt_chunks * BLOCK
        parts = [words[stretch.start : stretch.stop].ravel() for stretch in request.stretches]
        yield np.concatenate([*parts, draw.integers(10, VOCABULARY, rest)]).tolist()
