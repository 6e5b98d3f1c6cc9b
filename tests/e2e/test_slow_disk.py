"""A server over a disk that is slow or hangs: it idles, is stopped, is killed.

One root and three servers, one after the other: the first is killed in the middle of a
chunk, the second idles and is stopped over a slow disk, the third is stopped over one
that hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import processes
import pytest
from engine import cpu, file_digests, fs
from kvtiers.tools.measure import Answer, ask
from kvtiers.tools.server import VllmServer
from models import prompts
from serving import server
from slow_disk import HALF, HOW_VARIABLE, HUNG, SLOW, SlowDiskConnector

_A, _B, _C = prompts(3, 1800, seed=4)
_CHUNKS = 14
_SOON = 60.0


@dataclass
class Life:
    """One server.

    Attributes:
        answers: to what it was asked.
        files: of the tier, all of them whole, before the signal and after the end.
        status: that its first process ended with; None if it was killed.
        left: processes that had its arena mapped after the end.
        left_in_shm: kinds of files that nobody uses, new in /dev/shm.
        log: what it wrote.

    """

    answers: list[Answer] = field(default_factory=list)
    files: list[set[bytes]] = field(default_factory=list)
    status: int | None = None
    left: list[int] = field(default_factory=list)
    left_in_shm: set[str] = field(default_factory=set)
    log: str = ""


@contextlib.contextmanager
def living(model: Path, home: Path, root: Path, how: str) -> Iterator[tuple[VllmServer, Life]]:
    """A server with such a disk; the block asks it something, and ends it if it likes."""
    transfer = {
        "kv_connector": SlowDiskConnector.__name__,
        "kv_connector_module_path": SlowDiskConnector.__module__,
        "kv_role": "kv_both",
        # An arena of 32 chunks, of which stores may pin eight.
        "kv_connector_extra_config": {"tiers": [cpu("8MiB"), fs(root, threads=2)]},
    }
    made = server(
        model,
        home,
        connector=False,
        arguments=["--kv-transfer-config", json.dumps(transfer)],
        environment={HOW_VARIABLE: how, "PYTHONPATH": str(Path(__file__).parent)},
    )
    life, before = Life(), processes.shared_memory()
    with made:
        session, process = made.pid, made._process
        arenas = processes.arenas(session)
        assert len(arenas) == 1
        yield made, life
        life.files.append(set(file_digests(root)))
        made.stop()
        processes.wait_for_end(session)
    assert process is not None
    life.status = process.returncode
    life.left = processes.mapped_by(arenas)
    life.left_in_shm = processes.abandoned_since(before)
    life.files.append(set(file_digests(root)))
    life.log = (home / "vllm.log").read_text()


def wait_for(there: Callable[[], bool]) -> None:
    """Without a word to the server, which so has no reason to step."""
    deadline = time.monotonic() + _SOON
    while not there():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def unpublished(root: Path) -> list[Path]:
    """Files that are being written, or were by somebody who was killed."""
    return list(root.rglob("*.kv.*"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the filesystem tier of all servers of this module."""
    return tmp_path_factory.mktemp("slow") / "fs"


@pytest.fixture(scope="module")
def killed(llama: Path, root: Path) -> Life:
    """A server that is killed when half of some chunks is written."""
    with living(llama, root.parent / "killed", root, HALF) as (made, life):
        life.answers.append(ask(made, _A, 8))
        wait_for(lambda: any(path.stat().st_size for path in unpublished(root)))
        for pid in processes.of_session(made.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return life


@pytest.fixture(scope="module")
def slow(llama: Path, root: Path, killed: Life) -> Life:
    """A server that idles until all of one prompt is stored, and is stopped over another."""
    with living(llama, root.parent / "slow", root, SLOW) as (made, life):
        life.answers.append(ask(made, _A, 8))
        wait_for(lambda: len(file_digests(root)) == _CHUNKS)
        ask(made, _B, 1)
    return life


@pytest.fixture(scope="module")
def hung(llama: Path, root: Path, slow: Life) -> Life:
    """A server that is stopped while its stores hang."""
    with living(llama, root.parent / "hung", root, HUNG) as (made, life):
        life.answers.append(ask(made, _A, 8))
        ask(made, _C, 1)
    return life


def test_half_a_chunk_of_a_killed_server_is_never_there(root: Path, killed: Life) -> None:
    assert killed.files[-1] == set()
    assert unpublished(root), "half of something was written"


def test_a_killed_server_leaves_no_memory(killed: Life) -> None:
    assert killed.left == []


def test_what_was_half_stored_is_computed_anew(killed: Life, slow: Life) -> None:
    assert killed.answers[0].cached_tokens == slow.answers[0].cached_tokens == 0
    assert slow.answers[0].text == killed.answers[0].text


def test_stores_beyond_the_budget_go_on_while_the_engine_idles(slow: Life) -> None:
    """Nothing was asked until all of it was there; the rest came after the signal."""
    assert _CHUNKS <= len(slow.files[0]) < 2 * _CHUNKS


def test_a_server_that_is_stopped_waits_for_slow_stores(slow: Life) -> None:
    assert len(slow.files[-1]) == 2 * _CHUNKS
    ended_well(slow)
    assert "had not reached" not in slow.log


def test_a_server_that_is_stopped_does_not_wait_for_ever(hung: Life) -> None:
    assert hung.answers[0].cached_tokens == _CHUNKS * 128, "loads are not held up by stores"
    assert hung.files[-1] == hung.files[0]
    ended_well(hung)
    assert f"{_CHUNKS} chunks had not reached the fs tier" in hung.log


def ended_well(life: Life) -> None:
    assert life.status == 0
    assert "force killing" not in life.log, "vLLM had to end its engine"
    assert life.left == []
    assert life.left_in_shm == set()
