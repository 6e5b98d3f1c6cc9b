"""A real engine with a working set of four times its CPU tier: what a policy saves, as foretold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kvtiers.simulator.formats import DEFAULT_FOLDER, FOLDER_VARIABLE, read_trace
from kvtiers.simulator.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.live_replay import FILES, WORKING_SETS, Outcome, measure
from benchmarks.live_trace import made, scaled

MOST_POINTS = 3.0
"""By which the simulator may be wrong."""
# As a user's settings are taken out of the environment.
FOLDER = Path(os.environ.get(FOLDER_VARIABLE, Path(__file__).parents[2] / DEFAULT_FOLDER))


def measured(trace: Trace, first: int) -> dict[str, Outcome]:
    found = {policy: measure(trace, first, policy) for policy in ("lru", "prefix-reuse")}
    for one in found.values():
        assert one.distinct_chunks >= WORKING_SETS * one.capacity_chunks
        # It is neither a cache that holds everything nor one that is of no use.
        assert one.computed_tokens < one.input_tokens
        assert one.live < one.optimum + MOST_POINTS / 100
    return found


def test_prefix_reuse_saves_a_real_engine_what_the_simulator_said() -> None:
    found = measured(made(400), 0)
    assert found["prefix-reuse"].computed_tokens < 0.97 * found["lru"].computed_tokens
    for one in found.values():
        assert abs(one.difference) < MOST_POINTS, one


@pytest.mark.parametrize(("name", "requests"), [("conversation", 300), ("claude_code", 1000)])
def test_the_simulator_foretells_a_real_trace(name: str, requests: int) -> None:
    file, tokens = FILES[name]
    if not (FOLDER / file).exists():
        pytest.skip(f"no trace at {FOLDER / file}; set {FOLDER_VARIABLE} to the folder with it")
    pytest.importorskip("pyarrow", reason="reading traces needs pyarrow")
    trace = read_trace(FOLDER / file, chunk_tokens=tokens)
    first = len(trace.requests) // 2
    for one in measured(scaled(trace, first, requests), first).values():
        assert abs(one.difference) < MOST_POINTS, one
