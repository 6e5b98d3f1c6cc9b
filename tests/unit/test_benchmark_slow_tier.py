"""What is said of a run of ``benchmarks.slow_tier``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.record import Setup
from benchmarks.slow_tier import LEARNING, Pair, Result, told

SETUP = Setup("2026-01-02", "a CPU", 2, "0.32.0", "0.1.0", "a-model", "bfloat16", 128, 64)


def _pairs(delay_ms: float, turns: int, ratio: float, cached: int) -> list[Pair]:
    learning = [Pair(delay_ms, turn, 1.0, 2.0, 0) for turn in range(LEARNING)]
    later = range(LEARNING, LEARNING + turns)
    return [*learning, *(Pair(delay_ms, turn, 2.0, 2.0 * ratio, cached) for turn in later)]


def test_learning_is_told_apart_from_what_was_learnt() -> None:
    pairs = [*_pairs(5, 4, 0.25, 1024), *_pairs(100, 2, 1.0, 0)]
    _, quick, slow = told(Result(SETUP, 1024, pairs))
    assert quick.strip() == (
        "5 ms: first 3 turns 2.000, then 0.250 (0.250 to 0.250), 4 of 4 loaded"
    )
    assert slow.strip() == (
        "100 ms: first 3 turns 2.000, then 1.000 (1.000 to 1.000), 0 of 2 loaded"
    )


def test_a_run_that_was_cut_short_is_told_as_far_as_it_came() -> None:
    lines = list(told(Result(SETUP, 1024, _pairs(5, 0, 1.0, 0))))
    assert lines[1].endswith("first 3 turns 2.000")


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = Result(SETUP, 1024, [Pair(5, 0, 0.1234, 0.5, 1024)])
    result.save(tmp_path / "made" / "result.json")
    assert Result.load(tmp_path / "made" / "result.json") == result
