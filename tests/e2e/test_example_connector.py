"""Beside vLLM's own ``ExampleConnector``, which loads within a step and saves layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, connector_config, cpu
from kvtiers.connector.connector import TieredKVConnector
from models import prompts

PROMPTS = prompts(2, 700)
CACHEABLE = [640, 640]
CHUNKS = 10


class MultiEngine(Engine):
    """Looks into our connector among the two."""

    @property
    def connector(self) -> TieredKVConnector:
        connectors = self.scheduler.connector.sub_connectors
        return next(c for c in connectors if isinstance(c, TieredKVConnector))


@dataclass(frozen=True)
class Pair:
    """An engine with both connectors.

    Attributes:
        engine: the engine.
        theirs: where the partner keeps its files.
        ours_first: the order.

    """

    engine: MultiEngine
    theirs: Path
    ours_first: bool

    def ask(self) -> tuple[list[Answer], int]:
        """Answers with the GPU's cache emptied before, and how many chunks came from ours."""
        self.engine.reset_gpu()
        before = self.engine.counts("cpu")["hits"]
        answers = self.engine.ask_each(PROMPTS)
        return answers, self.engine.counts("cpu")["hits"] - before

    def forget_theirs(self) -> None:
        """The partner has nothing any more."""
        for folder in self.theirs.iterdir():
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def without(llama: Path) -> list[tuple[int, ...]]:
    with Engine(llama) as engine:
        return [answer.tokens for answer in engine.ask_each(PROMPTS)]


@pytest.fixture(scope="module", params=["kvtiers", "partner"])
def pair(
    request: pytest.FixtureRequest,
    llama: Path,
    without: list[tuple[int, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    theirs = tmp_path_factory.mktemp("example")
    partner: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(theirs)},
    }
    ours = connector_config([cpu()])
    ours_first = request.param == "kvtiers"
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [ours, partner] if ours_first else [partner, ours]
        },
    }
    with MultiEngine(llama, transfer=transfer) as engine:
        yield Pair(engine, theirs, ours_first)


# One after the other on the same engine: each leaves both connectors with all chunks.


def test_both_store_what_is_computed(pair: Pair, without: list[tuple[int, ...]]) -> None:
    answers, hits = pair.ask()
    assert [answer.tokens for answer in answers] == without
    assert ([answer.cached for answer in answers], hits) == ([0, 0], 0)
    assert len(pair.engine.arena()) == CHUNKS
    assert len(list(pair.theirs.iterdir())) == len(PROMPTS)


def test_the_first_one_serves(pair: Pair, without: list[tuple[int, ...]]) -> None:
    answers, hits = pair.ask()
    assert [answer.tokens for answer in answers] == without
    assert [answer.cached for answer in answers] == CACHEABLE
    assert hits == (CHUNKS if pair.ours_first else 0)


def test_ours_serves_what_the_partner_lacks(pair: Pair, without: list[tuple[int, ...]]) -> None:
    pair.forget_theirs()
    answers, hits = pair.ask()
    assert [answer.tokens for answer in answers] == without
    assert ([answer.cached for answer in answers], hits) == (CACHEABLE, CHUNKS)
    assert len(list(pair.theirs.iterdir())) == len(PROMPTS), "the partner saves what we loaded"


def test_the_partner_serves_what_ours_lacks(pair: Pair, without: list[tuple[int, ...]]) -> None:
    pair.engine.drop_arena()
    answers, hits = pair.ask()
    assert [answer.tokens for answer in answers] == without
    assert ([answer.cached for answer in answers], hits) == (CACHEABLE, 0)


def test_ours_stores_what_the_partner_loaded(pair: Pair, without: list[tuple[int, ...]]) -> None:
    assert len(pair.engine.arena()) == CHUNKS
    pair.forget_theirs()
    answers, hits = pair.ask()
    assert [answer.tokens for answer in answers] == without
    assert ([answer.cached for answer in answers], hits) == (CACHEABLE, CHUNKS)


def test_the_policy_hears_how_a_request_ended(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partner knows of one KV-cache group only, and vLLM then calls another method."""
    reasons: list[str] = []
    heard = pair.engine.hierarchy.policy
    monkeypatch.setattr(heard, "on_finish", lambda facts: reasons.append(facts.finish_reason))
    pair.engine.ask(PROMPTS[0])
    assert reasons == ["length"]
