"""A producer fills the tiers and reads nothing; a consumer reads them and stores nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, cpu, file_digests, fs
from engine import connector_config as config
from models import prompts

PROMPTS = prompts(2, 700)
OTHER = prompts(1, 700, seed=7)[0]
CACHEABLE = [640, 640]
CHUNKS = 10


def transfer(tiers: list[dict[str, Any]], role: str) -> dict[str, Any]:
    return {**config(tiers), "kv_role": role}


@dataclass(frozen=True)
class Record:
    """What happened.

    Attributes:
        without: tokens without the connector.
        produced: the producer's answers, twice each, the GPU's cache emptied in between.
        reads: what the producer got from its tiers.
        files: after the producer.
        consumed: the consumer's answers, from the filesystem, then from its arena.
        hits: what the consumer got from each tier.
        other: the consumer's answers to what nobody stored, twice.
        kept: chunks in the consumer's arena in the end.
        names: all files and folders after the producer, and after the consumer.

    """

    without: list[tuple[int, ...]]
    produced: list[list[Answer]]
    reads: int
    files: dict[bytes, bytes]
    consumed: list[list[Answer]]
    hits: dict[str, int]
    other: list[Answer]
    kept: set[bytes]
    names: tuple[set[str], set[str]]


@pytest.fixture(scope="module")
def record(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    root = tmp_path_factory.mktemp("roles")
    with Engine(llama) as engine:
        without = [answer.tokens for answer in engine.ask_each(PROMPTS)]
    with Engine(llama, transfer=transfer([cpu(), fs(root)], "kv_producer")) as engine:
        produced = [engine.ask_each(PROMPTS)]
        engine.reset_gpu()
        produced.append(engine.ask_each(PROMPTS))
        reads = sum(engine.counts(tier)["bytes_read"] for tier in ("cpu", "fs"))
        reads += sum(engine.counts(tier)["hits"] for tier in ("cpu", "fs"))
    files, names = file_digests(root), everything(root)
    # Room for half of what is there: keeping that bound is not the consumer's business.
    tiers = [cpu(), fs(root, "1536KiB")]
    with Engine(llama, transfer=transfer(tiers, "kv_consumer")) as engine:
        consumed = [engine.ask_each(PROMPTS)]
        engine.reset_gpu()
        consumed.append(engine.ask_each(PROMPTS))
        hits = {tier: engine.counts(tier)["hits"] for tier in ("cpu", "fs")}
        other = [engine.ask(OTHER)]
        engine.reset_gpu()
        other.append(engine.ask(OTHER))
        kept = set(engine.arena())
    assert file_digests(root) == files
    return Record(
        without, produced, reads, files, consumed, hits, other, kept, (names, everything(root))
    )


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_producer_stores_and_loads_nothing(record: Record) -> None:
    for answers in record.produced:
        assert [answer.tokens for answer in answers] == record.without
        assert [answer.cached for answer in answers] == [0, 0]
    assert record.reads == 0
    assert len(record.files) == CHUNKS


def test_a_consumer_is_served_from_what_the_producer_stored(record: Record) -> None:
    for answers in record.consumed:
        assert [answer.tokens for answer in answers] == record.without
        assert [answer.cached for answer in answers] == CACHEABLE
    assert record.hits == {"cpu": CHUNKS, "fs": CHUNKS}


def test_a_consumer_stores_nothing_anywhere(record: Record) -> None:
    assert [answer.cached for answer in record.other] == [0, 0]
    assert record.other[0].tokens == record.other[1].tokens
    assert record.kept == record.files.keys(), "what it promoted, and nothing else"


def test_a_consumer_leaves_the_shared_root_as_it_was(record: Record) -> None:
    before, after = record.names
    assert after == before
