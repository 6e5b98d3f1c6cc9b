"""``kill -9`` of a server leaves nothing behind but whole files, which the next start uses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from engine import file_digests
from kvtiers.tools.measure import Answer, ask
from kvtiers.tools.server import ServerError, VllmServer
from models import prompts
from serving import complete, default_root, server, wait_for_metric

_PROMPTS = prompts(3, 700)
_ON_THE_WAY = prompts(1, 1800, seed=2)[0]
_CHUNKS = 3 * 5


@dataclass(frozen=True)
class Life:
    """One server from its start to its end.

    Attributes:
        answers: to the prompts.
        arenas: how many arenas its processes had mapped.
        left_running: processes that had one of them mapped after the end.
        left_in_shm: kinds of files that nobody uses, new in /dev/shm.
        files: what lay in the filesystem tier after its end, all of it whole.

    """

    answers: list[Answer]
    arenas: int
    left_running: list[int]
    left_in_shm: set[str]
    files: dict[bytes, bytes]


def _live(made: VllmServer, home: Path, kill: str, connector: bool = True) -> Life:
    before = processes.shared_memory()
    with made:
        answers = [ask(made, prompt, 16) for prompt in _PROMPTS]
        if connector:
            stored = wait_for_metric(made, "chunks", "fs", lambda chunks: chunks >= _CHUNKS)
            assert stored >= _CHUNKS
        session = made.pid
        arenas = processes.arenas(session)
        busy = threading.Thread(target=_ask_without_an_answer, args=(made,))
        busy.start()
        _kill(session, kill)
        processes.wait_for_end(session)
        busy.join()
    return Life(
        answers,
        len(arenas),
        processes.mapped_by(arenas),
        processes.abandoned_since(before),
        file_digests(default_root(home)),
    )


def _ask_without_an_answer(made: VllmServer) -> None:
    """Keeps the server at work when it is killed, at whatever it is doing then."""
    with contextlib.suppress(ServerError, OSError):
        complete(made, _ON_THE_WAY, 64)


def _kill(session: int, which: str) -> None:
    running = processes.of_session(session)
    chosen = [pid for pid, command in running.items() if which in ("all", *command.split("::"))]
    assert chosen, running
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the lives of this module, one after the other."""
    return tmp_path_factory.mktemp("kill") / "home"


@pytest.fixture(scope="module")
def without(llama: Path, home: Path) -> Life:
    """A server without the connector, of which every process is killed."""
    return _live(server(llama, home, connector=False), home, "all", connector=False)


@pytest.fixture(scope="module")
def first(llama: Path, home: Path, without: Life) -> Life:
    """A server with the connector, of which every process is killed."""
    return _live(server(llama, home), home, "all")


@pytest.fixture(scope="module")
def second(llama: Path, home: Path, first: Life) -> Life:
    """The next start, of which only the engine's process is killed."""
    return _live(server(llama, home), home, "EngineCore")


def _assert_nothing_left(life: Life, without: Life) -> None:
    assert life.arenas == 1
    assert life.left_running == []
    # vLLM's own files for its processes' queues may stay; a server without the
    # connector, killed in the same way, says which ones.
    assert life.left_in_shm <= without.left_in_shm


def _assert_served_from_disk(answers: list[Answer], without: Life) -> None:
    assert [answer.text for answer in answers] == [answer.text for answer in without.answers]
    assert [answer.cached_tokens for answer in answers] == [640, 640, 640]
    assert {answer.source for answer in answers} == {"disk"}


def test_nothing_is_left_when_all_processes_are_killed(without: Life, first: Life) -> None:
    assert without.arenas == 0
    assert without.files == {}
    assert {answer.cached_tokens for answer in first.answers} == {0}
    _assert_nothing_left(first, without)
    assert len(first.files) >= _CHUNKS


def test_the_next_start_serves_what_the_killed_server_stored(without: Life, second: Life) -> None:
    _assert_served_from_disk(second.answers, without)


def test_nothing_is_left_when_only_the_engine_is_killed(
    without: Life, first: Life, second: Life
) -> None:
    _assert_nothing_left(second, without)
    assert first.files.items() <= second.files.items()


def test_a_start_after_the_engine_was_killed_serves_too(
    llama: Path, home: Path, without: Life, second: Life
) -> None:
    with server(llama, home) as third:
        _assert_served_from_disk([ask(third, prompt, 16) for prompt in _PROMPTS], without)
        assert wait_for_metric(third, "hits_total", "fs", lambda hits: hits >= _CHUNKS) == _CHUNKS
        session = third.pid
        arenas = processes.arenas(session)
    assert len(arenas) == 1
    assert processes.of_session(session) == {}
    assert processes.mapped_by(arenas) == []
