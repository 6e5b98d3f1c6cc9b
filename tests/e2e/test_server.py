"""An OpenAI server with the connector and no other setting, and what its ``/metrics`` say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from engine import file_digests
from kvtiers.tools.measure import COMPUTED, Answer, ask
from kvtiers.tools.server import VllmServer
from models import prompts
from serving import default_root, metric, server, wait_for_metric

_PROMPT, _LAST = prompts(2, 700)
_CHUNKS = 5
_CHUNK_BYTES = 2 * 2 * 4 * 32 * 4 * 128
"""K and V of two layers, four heads of 32 floats, 128 tokens."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's home."""
    return tmp_path_factory.mktemp("server") / "home"


@pytest.fixture(scope="module")
def running(llama: Path, home: Path) -> Iterator[VllmServer]:
    """The server."""
    with server(llama, home) as started:
        yield started


@pytest.fixture(scope="module")
def cold(running: VllmServer) -> Answer:
    """The prompt's first answer, with its chunks stored in both tiers."""
    answer = ask(running, _PROMPT, 16)
    wait_for_metric(running, "bytes_written_total", "fs", lambda n: n >= _CHUNKS * _CHUNK_BYTES)
    return answer


def test_both_default_tiers_report_how_full_they_are(running: VllmServer, cold: Answer) -> None:
    assert (cold.cached_tokens, cold.source) == (0, COMPUTED)
    assert metric(running, "used_bytes", "cpu") == _CHUNKS * _CHUNK_BYTES
    assert metric(running, "chunks", "cpu") == _CHUNKS
    assert metric(running, "chunks", "fs") == _CHUNKS
    # A chunk at rest has a page of metadata.
    assert metric(running, "used_bytes", "fs") == _CHUNKS * (_CHUNK_BYTES + 4096)
    for tier in ("cpu", "fs"):
        capacity = metric(running, "capacity_bytes", tier)
        assert capacity is not None
        assert capacity > 100 * _CHUNK_BYTES
        assert metric(running, "bytes_written_total", tier) == _CHUNKS * _CHUNK_BYTES
        assert metric(running, "misses_total", tier) == _CHUNKS
    gpu = metric(running, "capacity_bytes", "gpu")
    assert gpu == 64 * _CHUNK_BYTES


def test_figures_without_an_event_are_there_and_zero(running: VllmServer, cold: Answer) -> None:
    for tier in ("cpu", "fs"):
        for name in ("failures", "timeouts", "corrupt", "evictions", "hits", "bytes_read"):
            assert metric(running, f"{name}_total", tier) == 0, (tier, name)
    assert metric(running, "breaker_state", "fs") == 0


def test_the_namespace_is_spelt_out_beside_the_chunks(home: Path, cold: Answer) -> None:
    root = default_root(home)
    (facts,) = (root / "v1").glob("*/namespace.json")
    folder = facts.parent
    assert json.loads(facts.read_text())
    assert len(file_digests(root, folder.name)) == _CHUNKS
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_prompt_is_served_from_the_cpu_tier_after_a_reset(
    running: VllmServer, cold: Answer
) -> None:
    before = metric(running, "hits_total", "cpu")
    assert before is not None
    running.reset_prefix_cache()
    again = ask(running, _PROMPT, 16)
    assert again.text == cold.text
    assert (again.cached_tokens, again.source) == (_CHUNKS * 128, "host")
    hits = wait_for_metric(running, "hits_total", "cpu", lambda hits: hits > before)
    assert hits == before + _CHUNKS
    assert metric(running, "hits_total", "fs") == 0
    assert metric(running, "bytes_read_total", "fs") == 0


def test_a_server_that_is_stopped_stores_what_it_has_first(
    running: VllmServer, home: Path, cold: Answer
) -> None:
    before = file_digests(default_root(home))
    session = running.pid
    arenas = processes.arenas(session)
    shared = processes.shared_memory()
    process = running._process
    assert process is not None
    # No wait between the answer and the signal: its chunks are on their way.
    ask(running, _LAST, 1)
    running.stop()
    assert process.returncode == 0
    assert processes.of_session(session) == {}
    assert len(arenas) == 1
    assert processes.mapped_by(arenas) == []
    assert not processes.abandoned_since(shared)
    files = file_digests(default_root(home))
    assert len(files) == len(before) + _CHUNKS
    assert before.items() <= files.items()
    assert not list(default_root(home).rglob("*.kv.*")), "files that were being written"
