"""Replicas die by SIGKILL at the worst of moments, delete what others read, or all at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import fault_replica
import pytest
from engine import file_digests
from fault_cases import case
from fault_replica import BOUND, LENGTH, Replica, killed_at, prompt
from fault_trial import PATIENCE, Row
from processes import abandoned_since, shared_memory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fs"


@pytest.fixture(autouse=True)
def _nothing_in_shared_memory() -> Iterator[None]:
    before = shared_memory()
    yield
    assert {kind for kind in abandoned_since(before) if "kvtiers" in kind} == set()


class Watched:
    """A replica whose requests and figures fill in a row."""

    def __init__(self, replica: Replica, row: Row) -> None:
        self.replica = replica
        self._row = row
        self._before = Counter(replica.figures())

    def ask(self, name: str) -> int:
        begun = time.monotonic()
        loaded = self.replica.ask(prompt(name))
        self._row.waited(time.monotonic() - begun)
        self._row.answer = f"the same bytes; {loaded} of {LENGTH} chunks loaded"
        return loaded

    def counted(self) -> None:
        self._row.counted(self._before, Counter(self.replica.figures()))

    def serves(self, name: str) -> None:
        """From below the arena, all of it, once what is refused at the bound was stored anew."""
        end = time.monotonic() + PATIENCE
        asked = 0
        while asked == 0 or self.replica.ask(prompt(name)) < LENGTH:
            assert time.monotonic() < end, "the tier was not used again"
            self.replica.forget()
            asked += 1
        self._row.after = "hits at once" if asked <= 2 else "hits again, by itself"


@case("kill-store")
def test_what_a_killed_replica_was_storing_is_no_chunk(root: Path, row: Row) -> None:
    with Replica(root, BOUND) as replica:
        watched = Watched(replica, row)
        with killed_at("store", root):
            assert file_digests(root) == {}, "half a chunk has a chunk's name"
            assert watched.ask("store0") == 0
        replica.settle()
        watched.counted()
        watched.serves("store0")
        assert len(file_digests(root)) == LENGTH


@case("kill-load")
def test_what_a_killed_replica_was_loading_is_there_for_others(root: Path, row: Row) -> None:
    with Replica(root, BOUND) as replica:
        replica.ask(prompt("load0"))
        replica.forget()
        watched = Watched(replica, row)
        with killed_at("load", root):
            assert watched.ask("load0") == LENGTH
        watched.counted()
        watched.serves("load0")


@case("kill-gc")
def test_when_the_one_that_kept_the_bound_is_killed_another_one_does(root: Path, row: Row) -> None:
    with killed_at("gc", root), Replica(root, BOUND) as replica:
        watched = Watched(replica, row)
        end = time.monotonic() + PATIENCE
        while "fs evictions" not in replica.figures():
            assert time.monotonic() < end, "nobody keeps the bound"
            watched.ask(f"survivor{replica.asked}")
            replica.settle()
            assert len(file_digests_beside(root)) <= BOUND
        watched.counted()
        replica.ask(prompt("last"))
        watched.serves("last")


@case("gc-reads")
def test_readers_of_what_is_evicted_get_all_of_it_or_a_miss(root: Path, row: Row) -> None:
    with Replica(root, BOUND) as replica, Replica(root, BOUND) as reader:
        watched = Watched(reader, row)
        with storing(replica, "gc") as stores:
            while stores():
                reader.forget()
                # ``ask`` compares the bytes of what it gets.
                watched.ask(f"gc{reader.asked % 4}")
                assert len(file_digests_beside(root)) <= BOUND
        row.answer = "all of a chunk, or a miss"
        watched.counted()
        reader.ask(prompt("last"))
        watched.serves("last")


@case("two-gcs")
def test_two_that_would_evict_at_once_keep_one_bound(root: Path, row: Row) -> None:
    with Replica(root, BOUND) as one, Replica(root, BOUND) as other:
        watched = Watched(one, row)
        with storing(one, "one") as first, storing(other, "other") as second:
            while first() or second():
                assert len(file_digests_beside(root)) <= BOUND
        assert len(file_digests_beside(root)) >= BOUND // 2, "both evicted what one had to"
        watched.ask("mine")
        watched.counted()
        watched.serves("mine")


@case("kill-gc-command", "two-gc-commands")
def test_commands_that_collect_at_once_or_are_killed_leave_whole_chunks(
    root: Path, row: Row
) -> None:
    with Replica(root, 4 * BOUND) as replica:
        for number in range(2 * BOUND // LENGTH):
            replica.ask(prompt(f"{number}"))
            replica.settle()
    with killed_at("command", root) if row.case.id == "kill-gc-command" else nothing():
        assert gc_twice_at_once(root) == [0, 0]
    kept = len(file_digests(root))
    assert BOUND // 2 <= kept <= BOUND
    with Replica(root, BOUND) as replica:
        watched = Watched(replica, row)
        # Last stored, and so the last to go.
        assert watched.ask(f"{2 * BOUND // LENGTH - 1}") == LENGTH
        watched.counted()
        watched.serves("fresh")


# Means ------------------------------------------------------------------------------------


nothing = contextlib.nullcontext


def gc_twice_at_once(root: Path) -> list[int]:
    """The exit statuses of two commands."""
    program = "import sys, fault_replica as f; from pathlib import Path\n"
    program += "sys.exit(f.gc(Path(sys.argv[1]), f.BOUND))"
    folder = Path(fault_replica.__file__).parent
    command = [sys.executable, "-c", program, str(root)]
    processes = [subprocess.Popen(command, cwd=folder) for _ in range(2)]
    try:
        return [process.wait(PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def storing(replica: Replica, name: str) -> Iterator[Callable[[], bool]]:
    """Store three times the bound meanwhile; tells whether it still does."""

    def store() -> None:
        for number in range(3 * BOUND // LENGTH):
            replica.ask(prompt(f"{name}{number}"))
            replica.settle()

    thread = threading.Thread(target=store)
    thread.start()
    try:
        yield thread.is_alive
    finally:
        thread.join()


def file_digests_beside(root: Path) -> dict[bytes, bytes]:
    """Every chunk's file, beside others that delete some."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return file_digests(root)


def test_a_replica_that_is_not_stopped_comes_to_its_end(root: Path) -> None:
    """The points are where they seem to be: without them, the process does its work."""
    program = "import sys, fault_replica as f; from pathlib import Path\n"
    program += "with f.Replica(Path(sys.argv[1]), 99) as r: r.ask(f.prompt('x')); r.settle()"
    folder = str(Path(fault_replica.__file__).parent)
    subprocess.run([sys.executable, "-c", program, str(root)], check=True, cwd=folder)
    assert len(file_digests(root)) == LENGTH
