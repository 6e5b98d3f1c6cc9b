"""Small made traces for tests of the simulator and of policies in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from kvtiers.simulator.numbering import Numbering
from kvtiers.simulator.trace import Trace, TraceRequest

CHUNK_TOKENS = 16


def trace_of(prompts: Sequence[Sequence[int]], chunk_tokens: int = CHUNK_TOKENS) -> Trace:
    """A trace of prompts that are lists of ids, a second apart, without tails."""
    numbering = Numbering()
    paths = [numbering.number(np.array(prompt, np.int64)) for prompt in prompts]
    requests = [
        TraceRequest(i, float(i), len(prompt) * chunk_tokens, 1, path)
        for i, (prompt, path) in enumerate(zip(prompts, numbering.rearranged(paths), strict=True))
    ]
    return Trace("made", chunk_tokens, requests, numbering.count)


def with_outputs(trace: Trace, lengths: Sequence[int]) -> Trace:
    """The same chunks, of which the last few of each request are its output's."""
    requests = []
    for request, length in zip(trace.requests, lengths, strict=True):
        chunks = [range(chunk, chunk + 1) for chunk in request.chunks()]
        prompt = max(0, len(chunks) - length)
        requests.append(
            replace(
                request,
                input_tokens=prompt * trace.chunk_tokens,
                stretches=tuple(chunks[:prompt]),
                output_stretches=tuple(chunks[prompt:]),
            )
        )
    return replace(trace, requests=requests)


def prompts_of(trace: Trace) -> list[list[int]]:
    """Each request's chunks."""
    return [request.chunks() for request in trace.requests]


@st.composite
def prompts(draw: st.DrawFn, most: int = 10, depth: int = 5, width: int = 3) -> list[list[int]]:
    """Paths of one small forest, as prompts with much in common."""
    steps = st.lists(st.integers(0, width - 1), max_size=depth)
    paths = draw(st.lists(steps, min_size=1, max_size=most))
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))] for path in paths
    ]


def forest(rng: random.Random, paths: int) -> list[tuple[int, ...]]:
    """Prompts as paths, most of which share a beginning with an earlier one."""
    found: list[tuple[int, ...]] = []
    for i in range(paths):
        head = rng.choice(found)[: rng.randint(0, 12)] if found and rng.random() < 0.7 else ()
        found.append(head + tuple(range(100 * i, 100 * i + rng.randint(1, 8))))
    return found


def chat(rng: random.Random, requests: int, sessions: int = 12) -> list[list[int]]:
    """Conversations that grow turn by turn, on a few common heads, and end now and then."""
    count, heads = 0, [list(range(1000 * k, 1000 * k + 3 + k)) for k in range(3)]
    live: list[list[int]] = []
    turns: list[list[int]] = []
    for _ in range(requests):
        if (len(live) < sessions and rng.random() < 0.4) or not live:
            live.append(list(rng.choice(heads)))
        at = min(int(rng.expovariate(0.5)), len(live) - 1)
        session = live.pop(len(live) - 1 - at)
        for _ in range(rng.randint(1, 4)):
            session.append(100_000 + count)
            count += 1
        turns.append(list(session))
        if rng.random() < 0.9:
            live.append(session)
    return turns
