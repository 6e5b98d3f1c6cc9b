"""Engines at one root as processes of their own, one killed, and the command ``kvtiers gc``."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import root_writer
from root_kit import FILE, bytes_of, files_of

CAPACITY = 48
MAIN = "import sys; from kvtiers.tools.cli import main; sys.exit(main())"
GC = [sys.executable, "-c", MAIN, "gc"]


class Writer:
    """One process of ``root_writer``."""

    def __init__(self, root: Path, number: int) -> None:
        support = Path(root_writer.__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, root_writer.__file__, str(root), str(CAPACITY), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(support)},
        )
        self.stored = 0
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)

    def look(self) -> int:
        """Chunks that it has stored; fails if it ended by itself."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.stored = int(self._lines.get_nowait().split()[1])
        if self.process.poll() not in (None, -signal.SIGKILL):
            pytest.fail(self.process.stderr.read())
        return self.stored

    def send(self, what: int) -> None:
        self.process.send_signal(what)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def writers(root) -> Iterator[list[Writer]]:
    made = [Writer(root, number) for number in range(3)]
    yield made
    for writer in made:
        writer.kill()


def check_bound(root: Path, writers: list[Writer]) -> None:
    """While all of them stand still, as a walk takes a while."""
    running = [writer for writer in writers if writer.process.poll() is None]
    for writer in running:
        writer.send(signal.SIGSTOP)
    for writer in running:
        while ") T " not in Path(f"/proc/{writer.process.pid}/stat").read_text():
            time.sleep(0.001)
    try:
        assert bytes_of(root) <= CAPACITY * FILE
    finally:
        for writer in running:
            writer.send(signal.SIGCONT)


def until(done: Callable[[], bool], then: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + 90
    while not done():
        assert time.monotonic() < end, "it does not go on"
        then()
        time.sleep(0.02)


def all_stored(writers: list[Writer], more: int) -> Callable[[], bool]:
    goals = [(writer, writer.look() + more) for writer in writers]
    return lambda: all(writer.look() >= goal for writer, goal in goals)


def holder_of(root: Path) -> int:
    """The process that keeps the bound, by what it publishes."""
    beats = sorted(root.glob("v1/.keeping/lease/*[0-9]/beat"))
    with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
        return json.loads(beats[-1].read_text())["owner"]["pid"]
    return holder_of(root)


def gc(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*GC, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def test_three_engines_keep_one_bound_and_go_on_when_the_keeper_is_killed(root, writers):
    def check() -> None:
        check_bound(root, writers)

    until(all_stored(writers, 100), check)
    keeper = holder_of(root)
    said = gc(root, "--capacity", CAPACITY * FILE // 2).stdout
    assert f"process {keeper} on " in said
    assert "keeps its bound" in said
    check()
    [dead] = [writer for writer in writers if writer.process.pid == keeper]
    dead.kill()
    rest = [writer for writer in writers if writer is not dead]
    until(lambda: holder_of(root) != keeper, check)
    assert holder_of(root) in [writer.process.pid for writer in rest]
    until(all_stored(rest, 100), check)
    for writer in rest:
        writer.kill()
    check()
    gc(root)
    assert list(root.rglob("*.over")) == []
    left = list(root.glob("v1/.keeping/w-*"))
    assert left == [], "folders of dead writers, with what they were writing"


@pytest.fixture
def left_behind(root) -> Path:
    """A root that a killed engine filled."""
    writer = Writer(root, 0)
    until(all_stored([writer], 60))
    writer.kill()
    return root


def test_two_gcs_at_once_bring_a_root_under_its_bound(left_behind):
    command = [*GC, str(left_behind), "--capacity", str(CAPACITY * FILE // 4)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert bytes_of(left_behind) <= CAPACITY * FILE // 4


def test_a_gc_that_is_killed_leaves_the_rest_to_the_next(left_behind):
    before = len(files_of(left_behind))
    command = [*GC, str(left_behind), "--capacity", str(3 * FILE)]
    # Killed after its fifth deletion.
    code = (
        "import os, signal, sys; real, left = os.unlink, [5]\n"
        "def unlink(path, **options):\n"
        "    real(path, **options)\n"
        "    left[0] -= str(path).endswith('.kv')\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.unlink = unlink\n"
        f"{MAIN}"
    )
    killed = subprocess.run([sys.executable, "-c", code, *command[3:]], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(files_of(left_behind)) == before - 5
    said = gc(*command[4:]).stdout
    assert re.search(r"\d+ chunks evicted; it holds 2 chunks, 16 KiB", said), said
    assert bytes_of(left_behind) <= 3 * FILE


def test_a_dry_run_says_what_a_run_then_does(left_behind):
    bound = ("--capacity", 10 * FILE)
    would = gc(left_behind, *bound, "--dry-run").stdout
    relisted = gc(left_behind, *bound, "--dry-run", "--rebuild").stdout
    names = [file.name for file in files_of(left_behind)]
    [evicted] = re.findall(r"(\d+) chunks, \S+ \S+ would be evicted", would)
    assert re.findall(r"(\d+) chunks, \S+ \S+ would be evicted", relisted) == [evicted]
    assert f": {evicted} chunks evicted" in gc(left_behind, *bound).stdout
    assert len(names) - len(files_of(left_behind)) == int(evicted) > 0
