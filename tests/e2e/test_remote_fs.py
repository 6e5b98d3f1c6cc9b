"""Real engines with a filesystem tier in an S3 bucket: hits, a restart, damage, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, cpu
from kvtiers.tiers.workers import OpKind
from models import prompts
from s3_server import S3Server

_PROMPTS = prompts(3, 700)
# Whole blocks of each prompt.
_CHUNKS = 5
_CACHED = _CHUNKS * 128


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def without(llama: Path) -> list[tuple[int, ...]]:
    """What the engine answers without the connector."""
    with Engine(llama) as plain:
        return [answer.tokens for answer in plain.ask_each(_PROMPTS)]


@pytest.fixture(scope="module")
def stored(llama: Path, server: S3Server, without: list[tuple[int, ...]]) -> list[str]:
    """Names of the chunks that a first engine left in the bucket, judged as it went."""
    with Engine(llama, [cpu(), bucket(server)]) as first:
        cold = first.ask_each(_PROMPTS)
        assert [answer.tokens for answer in cold] == without
        assert {answer.cached for answer in cold} == {0}
        first.reset_gpu()
        again = first.ask_each(_PROMPTS)
        assert [answer.tokens for answer in again] == without
        assert {answer.cached for answer in again} == {_CACHED}
        assert first.counts("cpu")["hits"] == 3 * _CHUNKS
        assert first.counts("fs")["hits"] == 0
    return [name for name in server.names() if name.endswith(".kv")]


def bucket(server: S3Server) -> dict[str, Any]:
    """Configuration of the tier."""
    options = {"path": server.url("kv"), "storage_options": server.storage_options}
    return {"type": "fs", "capacity": "1GiB", "deadline": 20.0, **options}


def test_answers_are_the_same_from_a_bucket_after_a_restart_and_when_it_is_damaged(
    llama: Path, server: S3Server, without: list[tuple[int, ...]], stored: list[str]
) -> None:
    assert len(stored) == 3 * _CHUNKS
    with Engine(llama, [cpu(), bucket(server)]) as second:
        restarted = second.ask_each(_PROMPTS)
        assert [answer.tokens for answer in restarted] == without
        assert {answer.cached for answer in restarted} == {_CACHED}
        assert second.counts("fs")["hits"] == 3 * _CHUNKS

        for name in stored:
            server.flip_bit(name, 1000)
        second.drop_arena()
        damaged = second.ask(_PROMPTS[0])
        assert (damaged.tokens, damaged.cached) == (without[0], 0)
        assert second.counts("fs")["corrupt"] == _CHUNKS
        # Stored anew in place of what was damaged.
        second.drop_arena()
        healed = second.ask(_PROMPTS[0])
        assert (healed.tokens, healed.cached) == (without[0], _CACHED)


def test_a_bucket_that_dies_costs_hits_and_no_answer_and_is_used_when_it_is_back(
    llama: Path, server: S3Server, without: list[tuple[int, ...]], stored: list[str]
) -> None:
    assert stored
    with Engine(llama, [cpu(), bucket(server)]) as engine:
        first = engine.ask(_PROMPTS[0])
        assert (first.tokens, first.cached) == (without[0], _CACHED)
        engine.drop_arena()
        name = engine.submit(_PROMPTS[0])
        engine.run_until(lambda: reads_under_way(engine))
        server.kill()
        answers = engine.run_until(lambda: not engine.scheduler.has_requests())
        assert answers[name].tokens == without[0]
        engine.drop_arena()
        dead = engine.ask_each(_PROMPTS)
        assert [answer.tokens for answer in dead] == without
        assert {answer.cached for answer in dead} == {0}
        assert engine.counts("fs")["failures"] > 0
        server.start()
        served, deadline = engine.counts("fs")["hits"], time.monotonic() + 100
        while engine.counts("fs")["hits"] == served:
            assert time.monotonic() < deadline, "the tier is not used again"
            engine.drop_arena()
            assert engine.ask(_PROMPTS[0]).tokens == without[0]


def reads_under_way(engine: Engine) -> bool:
    """Whether the tier has been asked for chunks, and its answer not been taken in."""
    [tier] = engine.hierarchy._lower
    return any(op.kind is OpKind.READ for op in tier.ops)
