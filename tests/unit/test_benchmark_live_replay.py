"""Traces that ``benchmarks.live_replay`` scales down: what of them must stay as it was."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from small_traces import chat, trace_of

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.live_trace import BLOCK, made, prompts, scaled

TRACE = trace_of(chat(random.Random(3), 60), chunk_tokens=4 * BLOCK)
TRACE = replace(
    TRACE,
    requests=[replace(r, input_tokens=r.input_tokens + 100, session="s") for r in TRACE.requests],
)


def common(one: list[int], other: list[int]) -> int:
    """Full blocks that two prompts begin with alike."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 10**9)
    return min(n, len(one), len(other)) // BLOCK


def test_prompts_begin_alike_in_tokens_as_far_as_they_did_in_chunks() -> None:
    small = scaled(TRACE, 10, 40)
    asked = [request.chunks() for request in TRACE.requests[10:50]]
    tokens = list(prompts(small))
    for i, mine in enumerate(asked):
        for j in range(i):
            same = [a == b for a, b in zip(mine, asked[j], strict=False)]
            alike = same.index(False) if False in same else len(same)
            assert common(tokens[i], tokens[j]) == alike


def test_lengths_shrink_and_leave_a_token_to_compute() -> None:
    small = scaled(TRACE, 10, 40)
    rows = zip(TRACE.requests[10:50], small.requests, prompts(small), strict=True)
    for before, after, tokens in rows:
        assert after.input_tokens == len(tokens) == before.input_tokens // 4
        assert after.input_tokens % BLOCK
        assert (after.arrival, after.session) == (before.arrival, "s")
        assert after.prompt_chunks == before.prompt_chunks


@pytest.mark.parametrize(("beyond", "left"), [(0, 1), (3, 1), (4, 1), (8, 2), (128, 31)])
def test_what_lies_beyond_the_chunks_is_a_token_at_least_and_less_than_a_block(
    beyond: int, left: int
) -> None:
    prompt = TRACE.requests[0]
    full = prompt.prompt_chunks * TRACE.chunk_tokens
    trace = replace(TRACE, requests=[replace(prompt, input_tokens=full + beyond)])
    (small,) = scaled(trace, 0, 1).requests
    assert small.input_tokens == prompt.prompt_chunks * BLOCK + left
    assert small.prompt_chunks == prompt.prompt_chunks


def test_a_made_trace_has_what_returns_and_what_does_not() -> None:
    requests = made(200).requests
    assert {request.turn for request in requests} >= {0, 4}
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    once = Counter(request.session for request in requests)
    assert sum(n == 1 for n in once.values()) > 50
    assert made(200) == made(200)
