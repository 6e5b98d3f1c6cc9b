"""A real server whose tier and policy are the packages of ``examples/``, found by entry point."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import example_packages
import pytest
from kvtiers.tools.measure import COMPUTED, Answer, ask
from kvtiers.tools.server import VllmServer
from models import prompts
from serving import metric, server, wait_for_metric

_PROMPTS = prompts(2, 700)
_CHUNKS = 5
_TOKENS = _CHUNKS * 128


@dataclass(frozen=True)
class Served:
    """The same prompts three times.

    Attributes:
        cold: computed.
        cpu: after the GPU's cache was emptied.
        sqlite: from a server that was started afterwards.
        hits: chunks that the second server's tiers served.
        log: of both servers.
        database: of the example tier.

    """

    cold: list[Answer]
    cpu: list[Answer]
    sqlite: list[Answer]
    hits: dict[str, float | None]
    log: str
    database: Path


@pytest.fixture(scope="module")
def served(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Two servers, one after the other."""
    folder = tmp_path_factory.mktemp("examples")
    example_packages.install(folder, folder / "installed")
    database = folder / "kv.sqlite"
    extra = {
        "tiers": [
            {"type": "cpu", "capacity": "64MiB"},
            {"type": "sqlite", "path": str(database), "capacity": "1GiB"},
        ],
        "policy": {"type": "gdsf", "frequency": 0.5},
    }
    found = {"PYTHONPATH": str(folder / "installed")}
    options: dict[str, Any] = {"extra": extra, "environment": found}
    with server(llama, folder / "home", **options) as first:
        cold = [ask(first, prompt, 16) for prompt in _PROMPTS]
        # The chunks are readable from then on.
        wait_for_metric(first, "chunks", "sqlite", lambda n: n == 2 * _CHUNKS)
        first.reset_prefix_cache()
        cpu = [ask(first, prompt, 16) for prompt in _PROMPTS]
    with server(llama, folder / "home", **options) as second:
        sqlite = [ask(second, prompt, 16) for prompt in _PROMPTS]
        hits = {tier: _hits(second, tier) for tier in ("cpu", "sqlite")}
    log = (folder / "home" / "vllm.log").read_text()
    return Served(cold, cpu, sqlite, hits, log, database)


def _hits(server: VllmServer, tier: str) -> float | None:
    wait_for_metric(server, "hits_total", "sqlite", lambda hits: hits == 2 * _CHUNKS)
    return metric(server, "hits_total", tier)


def test_answers_are_the_same_cold_from_cpu_and_from_sqlite_after_a_restart(
    served: Served,
) -> None:
    texts = [answer.text for answer in served.cold]
    assert len(set(texts)) == len(_PROMPTS)
    assert [answer.text for answer in served.cpu] == texts
    assert [answer.text for answer in served.sqlite] == texts


def test_each_step_was_served_by_the_tier_it_names(served: Served) -> None:
    assert {(answer.cached_tokens, answer.source) for answer in served.cold} == {(0, COMPUTED)}
    assert {(answer.cached_tokens, answer.source) for answer in served.cpu} == {(_TOKENS, "host")}
    assert {(answer.cached_tokens, answer.source) for answer in served.sqlite} == {
        (_TOKENS, "disk")
    }
    assert served.hits == {"cpu": 0, "sqlite": 2 * _CHUNKS}


def test_the_server_says_whose_policy_and_tier_it_runs(served: Served) -> None:
    assert served.log.count("kvtiers: policy gdsf; cpu 64 MiB; sqlite 1 GiB") == 2


def test_the_database_holds_each_chunk_once(served: Served) -> None:
    with closing(sqlite3.connect(served.database)) as db:
        (stored,) = db.execute("SELECT count(*) FROM contents").fetchone()
        (total,) = db.execute("SELECT chunks FROM total").fetchone()
    assert stored == total == 2 * _CHUNKS
