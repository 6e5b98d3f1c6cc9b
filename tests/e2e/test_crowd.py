"""Many requests for one cold prefix in a lower tier read it once, on a real engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine import BLOCK, Engine, cpu, fs, redis_tier
from kvtiers.connector import stack
from kvtiers.tiers import ChunkKey, ReadOutcome, Tier
from kvtiers.tiers.wrappers import WrapperTier
from models import prompts
from redis_server import RedisServer

CROWD = 16
"""Twice as many as vLLM runs at once here."""
CHUNKS = 5


class Counting(WrapperTier):
    """Counts how often each chunk is read."""

    reads: Counter[bytes]

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.reads = Counter()

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        self.reads.update(key.hash for key in keys)
        return self.inner.read(keys, buffers)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_crowd_reads_each_chunk_once(
    model: str,
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting: list[Counting] = []
    build = stack._build_tier

    def counted(*args: object) -> Tier:
        counting.append(Counting(build(*args)))  # type: ignore[arg-type]
        return counting[-1]

    monkeypatch.setattr(stack, "_build_tier", counted)
    head = prompts(1, CHUNKS * BLOCK, seed=21)[0]
    crowd = [head + tail for tail in prompts(CROWD, 20, seed=22)]
    path = request.getfixturevalue(model)
    with Engine(path) as engine:
        right = engine.ask_all(crowd, max_tokens=4)
    tiers = [cpu(), redis_tier(redis_server.url), fs(tmp_path)]
    with Engine(path, tiers, extra={"load_or_recompute": "always_load"}) as engine:
        engine.ask([*head, 1, 2, 3], max_tokens=1)
        engine.drop_arena()
        answers = engine.ask_all(crowd, max_tokens=4)
        read = sum(engine.counts(tier)["bytes_read"] for tier in ("redis", "fs"))
        chunk_bytes = engine.hierarchy.chunk_bytes
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
    assert {answer.cached for answer in answers} == {CHUNKS * BLOCK}
    reads = counting[0].reads + counting[1].reads
    assert reads
    assert set(reads.values()) == {1}
    assert read == len(reads) * chunk_bytes
