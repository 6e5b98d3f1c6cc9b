"""Two ranks share one arena; the canonical layout lets one rank read what two have written.

Two engines with two ranks, which take half a minute each to start, serve all of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
from engine import Engine, cpu, file_digests, fs, redis_tier
from kvtiers.connector import neighbours
from models import prompts
from redis_server import RedisServer

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="vLLM for CPU wants a core for each rank"
)

_FIRST, _SECOND = prompts(3, 700, seed=1), prompts(3, 700, seed=2)
_CHUNKS = 3 * 5


Tokens = list[tuple[int, ...]]


@dataclass(frozen=True)
class Record:
    """What one engine said.

    Attributes:
        tokens: by step, per prompt.
        cached: by step, per prompt.
        hits: by step: chunks from below the arena.
        namespace: of the engine.
        arena: hash of every chunk at the end.
        log: what it said of KV that it does not share.

    """

    tokens: dict[str, Tokens]
    cached: dict[str, list[int]]
    hits: dict[str, int]
    namespace: str
    arena: dict[bytes, bytes]
    log: str = ""


def _record(engine: Engine, steps: dict[str, list[list[int]]]) -> Record:
    """Ask the prompts of each step; "gpu emptied" and "arena emptied" do what they say first."""
    tokens, cached, hits = {}, {}, {}
    for name, asked in steps.items():
        if name == "gpu emptied":
            engine.reset_gpu()
        elif name == "arena emptied":
            engine.drop_arena()
        before = _hits(engine)
        answers = engine.ask_each(asked)
        tokens[name] = [answer.tokens for answer in answers]
        cached[name] = [answer.cached for answer in answers]
        hits[name] = _hits(engine) - before
    return Record(tokens, cached, hits, engine.namespace, engine.arena_digests())


def _hits(engine: Engine) -> int:
    return engine.counts("redis")["hits"] + engine.counts("fs")["hits"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The filesystem tier that all engines of this module share."""
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Another tier that they share."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def without(llama: Path) -> dict[str, Tokens]:
    """One rank, no connector."""
    with Engine(llama) as engine:
        return {
            "first": [answer.tokens for answer in engine.ask_each(_FIRST)],
            "second": [answer.tokens for answer in engine.ask_each(_SECOND)],
        }


@pytest.fixture(scope="module")
def one_writes(llama: Path, root: Path) -> Record:
    """One rank, canonical where possible, which is the default."""
    with Engine(llama, [cpu(), fs(root)]) as engine:
        return _record(engine, {"cold": _FIRST})


@pytest.fixture(scope="module")
def two_read_and_write(llama: Path, root: Path, redis: RedisServer, one_writes: Record) -> Record:
    """Two ranks: the first prompts from the other's files, the second ones anew."""
    tiers = [cpu(), redis_tier(redis.url), fs(root)]
    with Engine(llama, tiers, tensor_parallel=2) as engine:
        return _record(engine, {"read": _FIRST, "cold": _SECOND, "gpu emptied": _SECOND})


@pytest.fixture(scope="module")
def one_reads(llama: Path, redis: RedisServer, two_read_and_write: Record) -> Record:
    """One rank again: what two have written to Redis."""
    with Engine(llama, [cpu(), redis_tier(redis.url)]) as engine:
        return _record(engine, {"read": _SECOND})


@pytest.fixture(scope="module")
def two_direct(llama: Path, root: Path, one_writes: Record) -> Record:
    """Two ranks without the canonical layout, over the same folder."""
    tiers, extra = [cpu(), fs(root)], {"canonical_layout": False}
    with _said() as said, Engine(llama, tiers, tensor_parallel=2, extra=extra) as engine:
        steps = {"cold": _FIRST, "gpu emptied": _FIRST, "arena emptied": _FIRST}
        return replace(_record(engine, steps), log=said.getvalue())


@pytest.fixture(scope="module")
def one_direct(llama: Path, root: Path, two_direct: Record) -> Record:
    """One rank without the canonical layout, over the same folder."""
    tiers, extra = [cpu(), fs(root)], {"canonical_layout": False}
    with _said() as said, Engine(llama, tiers, extra=extra) as engine:
        return replace(_record(engine, {"cold": _FIRST}), log=said.getvalue())


@contextmanager
def _said() -> Iterator[StringIO]:
    """What an engine that starts inside says of KV that it does not share."""
    logger, said = logging.getLogger(neighbours.__name__), StringIO()
    handler, level = logging.StreamHandler(said), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
def answers(without: dict[str, Tokens]) -> dict[str, Tokens]:
    """The answers to compare with, which differ from prompt to prompt."""
    assert len({*without["first"], *without["second"]}) == 6
    return without


def test_two_ranks_read_what_one_has_written(
    answers: dict[str, Tokens], one_writes: Record, two_read_and_write: Record
) -> None:
    assert one_writes.tokens["cold"] == answers["first"]
    assert one_writes.cached["cold"] == [0, 0, 0]
    assert two_read_and_write.namespace == one_writes.namespace
    assert two_read_and_write.cached["read"] == [640, 640, 640]
    assert two_read_and_write.hits["read"] == _CHUNKS
    assert two_read_and_write.tokens["read"] == answers["first"]


def test_two_ranks_give_the_same_answers_cold_and_from_the_cpu_tier(
    answers: dict[str, Tokens], two_read_and_write: Record
) -> None:
    assert two_read_and_write.cached["cold"] == [0, 0, 0]
    assert two_read_and_write.tokens["cold"] == answers["second"]
    assert two_read_and_write.cached["gpu emptied"] == [640, 640, 640]
    assert two_read_and_write.hits["gpu emptied"] == 0
    assert two_read_and_write.tokens["gpu emptied"] == answers["second"]


def test_one_rank_reads_what_two_have_written(
    answers: dict[str, Tokens], two_read_and_write: Record, one_reads: Record
) -> None:
    assert one_reads.namespace == two_read_and_write.namespace
    assert one_reads.cached["read"] == [640, 640, 640]
    assert one_reads.hits["read"] == _CHUNKS
    assert one_reads.tokens["read"] == answers["second"]


def test_bytes_are_the_same_in_both_arenas_and_on_disk(
    root: Path, one_writes: Record, two_read_and_write: Record, one_reads: Record
) -> None:
    files = file_digests(root, one_writes.namespace)
    assert len(files) == 2 * _CHUNKS
    assert two_read_and_write.arena == files
    assert one_writes.arena.items() <= files.items()
    assert one_reads.arena.items() <= files.items()


def test_two_ranks_without_the_canonical_layout_give_the_same_answers(
    answers: dict[str, Tokens], two_direct: Record
) -> None:
    assert two_direct.cached["cold"] == [0, 0, 0], "the canonical files are not theirs"
    for step, hits in (("cold", 0), ("gpu emptied", 0), ("arena emptied", _CHUNKS)):
        assert two_direct.tokens[step] == answers["first"], step
        assert two_direct.hits[step] == hits, step
    assert two_direct.cached["gpu emptied"] == [640, 640, 640]
    assert two_direct.cached["arena emptied"] == [640, 640, 640]


def test_without_the_canonical_layout_each_shape_keeps_to_itself(
    root: Path,
    answers: dict[str, Tokens],
    one_writes: Record,
    two_direct: Record,
    one_direct: Record,
) -> None:
    assert len({one_writes.namespace, two_direct.namespace, one_direct.namespace}) == 3
    assert one_direct.cached["cold"] == [0, 0, 0]
    assert one_direct.tokens["cold"] == answers["first"]
    assert file_digests(root, two_direct.namespace) == two_direct.arena
    assert file_digests(root, one_direct.namespace) == one_direct.arena


def test_who_keeps_to_itself_says_why(
    one_writes: Record, two_direct: Record, one_direct: Record
) -> None:
    assert f"(namespace {one_writes.namespace}, ours is {two_direct.namespace})" in two_direct.log
    assert "layout.portable: false here, true there" in two_direct.log
    told = next(line for line in one_direct.log.splitlines() if two_direct.namespace in line)
    assert "The fs tier holds KV of this model that is not shared" in told
    assert "layout.tp: 1 here, 2 there" in told
