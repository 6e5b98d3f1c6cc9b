"""Chunks of 1, 2 and 8 blocks, prompts around their ends, computed in pieces, several at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, cpu, fs, redis_tier
from models import WINDOW, prompts
from redis_server import RedisServer

_BLOCK = 32
_LENGTHS = (31, 63, 64, 65, 255, 256, 257, 600)
_PROMPTS = [prompts(1, length, seed=length)[0] for length in _LENGTHS]
_ENGINE: dict[str, Any] = {"block_size": _BLOCK, "blocks": 512, "max_model_len": 1024}
_PIECES: dict[str, Any] = {**_ENGINE, "max_num_batched_tokens": 96}
"""No step computes more tokens than these, so the prompts take steps, and share some."""


@dataclass(frozen=True)
class Round:
    """One time through all prompts: the answers, and the chunks that a lower tier served."""

    answers: list[Answer]
    served: int

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """What the engine generated."""
        return [answer.tokens for answer in self.answers]

    @property
    def cached(self) -> list[int]:
        """Prompt tokens that were not computed."""
        return [answer.cached for answer in self.answers]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    """Full attention, and sliding windows beside it."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def without(model: Path) -> list[tuple[int, ...]]:
    """Each prompt alone and in one piece, without the connector."""
    with Engine(model, **_ENGINE) as engine:
        tokens = [answer.tokens for answer in engine.ask_each(_PROMPTS, 4)]
    assert len(set(tokens)) == len(tokens)
    return tokens


@pytest.fixture(scope="module", params=[1, 2, 8])
def blocks_per_chunk(request: pytest.FixtureRequest) -> int:
    """Blocks that move as one."""
    return int(request.param)


@pytest.fixture(scope="module")
def rounds(
    model: Path, blocks_per_chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Round]:
    """All prompts at once: cold, from the CPU tier, and after a restart from each lower one."""
    folder = tmp_path_factory.mktemp("chunks")
    extra = {"blocks_per_chunk": blocks_per_chunk}

    def start(*tiers: dict[str, Any]) -> Engine:
        return Engine(model, [cpu(), *tiers], extra=extra, **_PIECES)

    with RedisServer(folder / "redis") as server:
        redis, disk = redis_tier(server.url), fs(folder / "fs")
        with start(redis, disk) as first:
            done = {"cold": _round(first, "fs"), "cpu": _round(first, "fs")}
        for name, tier in (("redis", redis), ("fs", disk)):
            with start(tier) as restarted:
                done[name] = _round(restarted, name)
    return done


def _round(engine: Engine, below: str) -> Round:
    engine.reset_gpu()
    before = engine.counts(below)["hits"]
    answers = engine.ask_all(_PROMPTS, 4)
    return Round(answers, engine.counts(below)["hits"] - before)


def test_answers_are_the_same(rounds: dict[str, Round], without: list[tuple[int, ...]]) -> None:
    assert {name: done.tokens for name, done in rounds.items()} == dict.fromkeys(rounds, without)


def test_whole_chunks_are_found_again(
    rounds: dict[str, Round], blocks_per_chunk: int, model: Path
) -> None:
    chunk = blocks_per_chunk * _BLOCK
    # With windows vLLM seeks a prompt's chunks without its last token, which it computes anyway.
    left = 1 if model.name == "gemma3" else 0
    assert WINDOW == 8 * _BLOCK, "the largest chunk is one window"
    whole = [(length - left) // chunk * chunk for length in _LENGTHS]
    assert rounds["cold"].cached == [0] * len(whole)
    for tier in ("cpu", "redis", "fs"):
        assert rounds[tier].cached == whole, tier


def test_the_tier_below_serves_after_a_restart_and_not_before(rounds: dict[str, Round]) -> None:
    assert rounds["cold"].served == rounds["cpu"].served == 0
    assert rounds["redis"].served == rounds["fs"].served > 0
