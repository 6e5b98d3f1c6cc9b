"""What tests of recordings share: an engine, requests, and what lies in a folder then."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

from kvtiers.policies import PolicyRequest, Run
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.recording_format import About, RecordedTier, parts_of

CHUNK = 128
ENGINE = About(
    chunk_tokens=CHUNK,
    chunk_bytes=1000,
    namespace="0123",
    policy="lru",
    tiers=(RecordedTier("gpu", 4000), RecordedTier("cpu", None)),
    stores_output=True,
    vllm="0.32.0",
)


def keys_of(text: str) -> tuple[bytes, ...]:
    """A chunk for each letter."""
    states = itertools.accumulate(text, lambda state, letter: state + letter)
    return tuple(hashlib.sha256(state.encode()).digest() + b"\0\0\0\0" for state in states)


def request(name: str, text: str, group: int = 0, **facts: object) -> PolicyRequest:
    """One whose prompt has a chunk for each letter, and seven tokens more."""
    run = Run(keys_of(text), group=group)
    tokens = len(text) * CHUNK + 7
    return PolicyRequest(name, (run,), time.monotonic(), prompt_tokens=tokens, **facts)


def end(recorder: Recorder, asked: PolicyRequest, text: str = "", reason: str = "stop") -> None:
    """The request ends, its prompt and output being ``text``."""
    if text:
        asked.runs = (Run(keys_of(text), group=asked.runs[0].group),)
    asked.output_tokens, asked.finish_reason = 100, reason
    recorder.finished(asked)


def serve(recorder: Recorder, *texts: str) -> None:
    """Requests one after the other, of which nothing was cached."""
    for number, text in enumerate(texts):
        asked = request(f"{text}/{number}", text)
        recorder.admitted(asked, 0, {})
        end(recorder, asked)


def rows_in(folder: Path) -> list[dict]:
    """In the order of admission."""
    from pyarrow import parquet

    rows = parquet.read_table(parts_of(folder)).to_pylist()
    return sorted(rows, key=lambda row: row["req"])


def wait_until(done: Callable[[], object]) -> None:
    """Fails the test if it takes half a minute."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
