"""The simulator on the public traces, where they lie: what is known of them must come out."""

import os
from functools import cache
from pathlib import Path

import pytest
from kvtiers.policies.lru import LruPolicy
from kvtiers.simulator.formats import DEFAULT_FOLDER, FOLDER_VARIABLE, read_trace
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.replay import replay
from kvtiers.simulator.trace import Trace

ROOT = Path(__file__).parents[2]


@cache
def trace(name: str) -> Trace:
    folder = Path(os.environ.get(FOLDER_VARIABLE, ROOT / DEFAULT_FOLDER))
    file = folder / f"{name}.parquet"
    if not file.exists():
        pytest.skip(f"no trace at {file}; set {FOLDER_VARIABLE} to the folder that has it")
    pytest.importorskip("pyarrow", reason="reading traces needs pyarrow")
    return read_trace(file)


@pytest.mark.parametrize(
    ("name", "chunk_tokens", "requests", "footprint"),
    [
        ("mooncake_conversation_dev", 512, 8020, 120_520),
        ("mooncake_synthetic_dev", 512, 2662, 37_076),
        ("claude_code_dev", 256, 34_150, 568_117),
    ],
)
def test_a_trace_has_the_chunks_that_its_publisher_counted(
    name: str, chunk_tokens: int, requests: int, footprint: int
) -> None:
    read = trace(name)
    assert read.chunk_tokens == chunk_tokens
    assert len(read.requests) == requests
    assert read.footprint == footprint


# Chunks that all of Mooncake's conversation trace has, its last third included.
CONVERSATION = 170_899


@pytest.mark.parametrize(
    ("share", "lru", "best"),
    [(0.005, 4.9, 18.8), (0.01, 6.0, 25.1), (0.02, 8.6, 32.0), (0.05, 19.5, 38.4)],
)
def test_lru_and_the_optimum_hit_of_conversations_what_was_published(
    share: float, lru: float, best: float
) -> None:
    """Within two and a half points of the whole hour's last third; this is the middle.

    There LRU hits 4.6, 5.4, 7.8 and 21.2 % and the optimum 18.6, 25.6, 33.1 and 40.9 %.
    """
    talk = trace("mooncake_conversation_dev")
    capacity, score_from = int(share * CONVERSATION), len(talk.requests) * 2 // 3
    ours = replay(talk, lambda tiers, clock: LruPolicy(tiers, clock=clock), capacity, score_from)
    bound = optimum(talk, Future.of(talk), capacity, score_from)
    assert 100 * ours.token_hit_ratio == pytest.approx(lru, abs=0.06)
    assert 100 * bound.token_hit_ratio == pytest.approx(best, abs=0.06)


def test_the_optimum_of_sixteen_million_references() -> None:
    code = trace("claude_code_dev")
    assert code.references == 16_280_412
    tally = optimum(code, Future.of(code), 2840)
    assert 100 * tally.token_hit_ratio == pytest.approx(67.1, abs=0.06)
