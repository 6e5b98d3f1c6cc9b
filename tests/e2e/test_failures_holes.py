"""Chunks of several blocks, some of which are null: vLLM 0.32 stores them half-written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import BLOCK, Answer, Engine
from faulty_bench import Bench
from models import WINDOW, prompts

TOKENS = 8
HIT = 5 * BLOCK
"""Leaves a window of two blocks with blocks 3 and 4: of blocks 2 and 3 only half is there."""
ENDS = prompts(3, HIT + 100, seed=31)
FIRST = ENDS[0][: HIT + 10]
LONGER = [*FIRST[:HIT], *ENDS[1][HIT:]]
"""Whose last chunk, of two blocks or of four, ends with block 3: vLLM wants it stored."""
NEEDED = 4 * BLOCK
BRANCH = [*FIRST[:NEEDED], *ENDS[2][NEEDED : NEEDED + 10]]
"""Has blocks 2 and 3 in its window."""


@pytest.fixture(scope="module")
def expected(gemma3: Path) -> list[Answer]:
    assert WINDOW == 2 * BLOCK
    with Engine(gemma3) as engine:
        return engine.ask_each([FIRST, LONGER, BRANCH], TOKENS)


@pytest.fixture(params=[2, 4])
def bench(
    request: pytest.FixtureRequest, gemma3: Path, expected: list[Answer], tmp_path: Path
) -> Iterator[Bench]:
    with Bench(gemma3, tmp_path, extra={"blocks_per_chunk": request.param}) as bench:
        yield bench


def test_a_group_with_null_blocks_inside_a_chunk_is_not_stored(
    bench: Bench, expected: list[Answer]
) -> None:
    engine = bench.engine
    bench.faults.order("store", "fail")
    assert engine.ask(FIRST, TOKENS).tokens == expected[0].tokens
    before = bench.counted()["failures"]
    bench.faults.forget()
    answer = engine.ask(LONGER, TOKENS)
    assert answer.tokens == expected[1].tokens
    assert answer.cached == HIT, "the case did not arise: the GPU did not serve the head"
    assert bench.counted()["failures"] > before, "the case did not arise: no group was refused"
    (store,) = bench.faults.jobs("store")
    assert store["slots"], "groups that are whole were not stored"
    bench.forget()
    answer = engine.ask(BRANCH, TOKENS)
    assert answer.tokens == expected[2].tokens
    bench.quiet()
    bench.forget()
    # What the last request computed is whole, and serves.
    answer = engine.ask(BRANCH, TOKENS)
    assert answer.tokens == expected[2].tokens
    assert answer.cached == NEEDED
