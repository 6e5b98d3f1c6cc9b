"""How a recorder is started for an engine, and what the hierarchy tells it of hits."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from hierarchy_kit import CHUNK, DictTier, Stack, prefix
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.recording import start_recorder
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.recording_format import RecordedTier
from record_kit import end, request, rows_in

pytest.importorskip("pyarrow")


def group(index: int, tokens_per_block: int, window: int | None = None) -> SimpleNamespace:
    """As much of vLLM's ``GroupOffloadConfig`` as is looked at; two blocks make a chunk."""
    return SimpleNamespace(
        group_idx=index,
        tokens_per_block=tokens_per_block,
        tokens_per_chunk=2 * tokens_per_block,
        sliding_window_size_in_chunks=window,
    )


WINDOWED, FULL = group(0, 32, window=1), group(1, 64)


def started(stack: Stack, extra: dict, *groups: SimpleNamespace) -> Recorder | None:
    return start_recorder(load(extra, {}).config, groups or (FULL,), 10, stack.h)


@pytest.fixture
def stack():
    made = Stack(4, {"disk": DictTier(capacity=6 * CHUNK)})
    yield made
    made.h.close()


def test_nothing_is_recorded_unless_a_folder_is_named(stack):
    assert started(stack, {}) is None


def test_the_engine_is_described_by_its_first_group_with_full_attention(stack, tmp_path):
    recorder = started(stack, {"record": str(tmp_path / "rec")}, WINDOWED, FULL)
    asked = request("1", "abc", group=1)
    recorder.admitted(asked, 0, {})
    end(recorder, asked)
    recorder.close()
    engine = recorder._about
    assert (engine.chunk_tokens, engine.chunk_bytes) == (128, CHUNK)
    assert (engine.policy, engine.stores_output, engine.namespace) == ("lru", False, "first")
    assert engine.tiers == (
        # Ten blocks are five chunks.
        RecordedTier("gpu", 5 * CHUNK),
        RecordedTier("cpu", 4 * CHUNK),
        RecordedTier("disk", 6 * CHUNK),
    )
    (row,) = rows_in(tmp_path / "rec")
    assert row["run_len"] == [3]


def test_a_model_with_windows_only_is_described_by_its_first_group(stack, tmp_path):
    recorder = started(stack, {"record": str(tmp_path / "rec")}, WINDOWED)
    recorder.close()
    assert recorder._about.chunk_tokens == 64


def test_a_folder_that_cant_be_used_is_told_before_the_first_request(stack, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="nothing can be written there: File exists") as told:
        started(stack, {"record": str(tmp_path / "file")})
    assert str(tmp_path / "file") in str(told.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_that_is_closed_to_the_server_is_told(stack, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="nothing can be written there: Permission denied"):
        started(stack, {"record": str(tmp_path / "closed")})


def test_a_missing_pyarrow_is_told_with_what_brings_it(stack, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ConfigError, match=r"it needs pyarrow.*pip install 'kvtiers\[simulate\]'"):
        started(stack, {"record": str(tmp_path / "rec")})


def test_the_hierarchy_says_which_tier_served_how_many_chunks_of_an_admitted_request(stack):
    run = prefix("a", 4)
    stack.store(run.head(2))
    stack.tiers["disk"].put(run.tail(2))
    stack.settle()
    stack.begin("1", run)
    stack.settle()
    assert stack.h.load("1", list(run.chunks[1:])) != [-1, -1, -1]
    # The GPU has the first one.
    assert stack.h.admitted("1", {0: 1}) == {0: {"cpu": 1, "disk": 2}}
    assert stack.h.admitted("nobody", {}) == {}
