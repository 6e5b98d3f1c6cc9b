"""Our tiers behind LMCache's own server, with a real engine and LMCache's connector in front.

Needs no more of LMCache than a user has: ``lmcache server`` as a process, and the
connector that it brings for vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
from engine import Answer, Engine, chunk_files, fs, redis_tier
from lmcache_server import LmcacheServer
from redis_server import RedisServer

PROMPTS = models.prompts(3, 700)
FULL = 512
"""Tokens of each prompt that whole chunks of LMCache hold, of 256 tokens each."""
# Of the exponent of a float32: makes an ordinary number 2**128 times as large.
OFFSET, BIT = 4 * 5000 + 3, 0x40


class LmcacheEngine(Engine):
    """An engine with LMCache's connector, which has no hierarchy to look at."""

    def __init__(self, model: Path, server: LmcacheServer | None = None) -> None:
        transfer = {} if server is None else {"kv_transfer_config": server.transfer}
        super().__init__(model, blocks=64, **transfer)

    @property
    def tiered(self) -> bool:
        return False


def behind(*tiers: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter that loads ours. Objects of this model have 256 KiB: several pieces each."""
    return {
        "type": "native_plugin",
        "module_path": "kvtiers.connector.lmcache",
        "class_name": "TieredL2",
        "adapter_params": {"tiers": list(tiers), "piece_size": "64KiB", "staging": "32MiB"},
    }


@contextlib.contextmanager
def serving(model: Path, adapter: Mapping[str, Any], folder: Path) -> Iterator[LmcacheEngine]:
    """A new server and a new engine: what they know lies behind the adapter."""
    with (
        LmcacheServer(adapter, folder / "lmcache.log") as server,
        contextlib.closing(LmcacheEngine(model, server)) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def cold(llama: Path) -> list[Answer]:
    with LmcacheEngine(llama) as engine:
        return engine.ask_each(PROMPTS)


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def flip(path: Path) -> None:
    """One bit of a stored number."""
    data = bytearray(path.read_bytes())
    data[OFFSET] ^= BIT
    path.write_bytes(data)


def test_fs_behind_lmcache_survives_a_restart_and_a_flipped_bit(
    llama: Path, cold: list[Answer], tmp_path: Path
) -> None:
    adapter = behind(fs(tmp_path / "fs"))
    with serving(llama, adapter, tmp_path) as engine:
        first = engine.ask_each(PROMPTS)
        engine.reset_gpu()
        from_l1 = engine.ask_each(PROMPTS)
    assert tokens(first) == tokens(from_l1) == tokens(cold)
    assert cached(first) == [0, 0, 0]
    assert cached(from_l1) == [FULL] * 3

    with serving(llama, adapter, tmp_path) as engine:
        from_l2 = engine.ask_each(PROMPTS)
    assert tokens(from_l2) == tokens(cold)
    assert cached(from_l2) == [FULL] * 3

    flip(min(chunk_files(tmp_path / "fs").values()))
    with serving(llama, adapter, tmp_path) as engine:
        damaged = engine.ask_each(PROMPTS)
    assert tokens(damaged) == tokens(cold)
    assert sorted(cached(damaged))[1:] == [FULL] * 2
    assert min(cached(damaged)) < FULL


def test_lmcaches_own_adapter_serves_the_flipped_bit(
    llama: Path, cold: list[Answer], tmp_path: Path
) -> None:
    """Why ours verifies. When this fails, LMCache does it too, and the docs should say so."""
    adapter = {"type": "fs", "base_path": str(tmp_path / "fs")}
    with serving(llama, adapter, tmp_path) as engine:
        assert tokens(engine.ask_each(PROMPTS)) == tokens(cold)
    stored = [path for path in (tmp_path / "fs").rglob("*") if path.is_file()]
    assert len(stored) == 2 * len(PROMPTS)
    flip(min(stored))
    with serving(llama, adapter, tmp_path) as engine:
        damaged = engine.ask_each(PROMPTS)
    assert cached(damaged) == [FULL] * 3
    assert tokens(damaged) != tokens(cold)


def test_redis_behind_lmcache_survives_a_restart_and_may_hang(
    llama: Path, cold: list[Answer], redis_server: RedisServer, tmp_path: Path
) -> None:
    adapter = behind(redis_tier(redis_server.url, deadline=1))
    with serving(llama, adapter, tmp_path) as engine:
        assert tokens(engine.ask_each(PROMPTS[:2])) == tokens(cold[:2])
    with serving(llama, adapter, tmp_path) as engine:
        from_l2 = engine.ask_each(PROMPTS[:2])
        redis_server.pause()
        try:
            hung = engine.ask(PROMPTS[2])
        finally:
            redis_server.resume()
    assert tokens(from_l2) == tokens(cold[:2])
    assert cached(from_l2) == [FULL] * 2
    assert (hung.tokens, hung.cached) == (cold[2].tokens, 0)
