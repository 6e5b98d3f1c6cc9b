"""Replicas die by SIGKILL at the worst of moments, delete what others read, or all at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fault_replica
import processes
import pytest
from engine import file_digests
from fault_cases import case
from fault_replica import LENGTH, Replica, killed_at, prompt
from fault_trial import PATIENCE, Row


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fs"


@pytest.fixture(autouse=True)
def _nothing_in_shared_memory() -> Iterator[None]:
    before = processes.shared_memory()
    yield
    assert {kind for kind in processes.abandoned_since(before) if "kvtiers" in kind} == set()


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
    with Replica(root) as replica:
        watched = Watched(replica, row)
        with killed_at("store", root):
            assert file_digests(root) == {}, "half a chunk has a chunk's name"
            assert watched.ask("store") == 0
        replica.settle()
        watched.counted()
        watched.serves("store")
        assert len(file_digests(root)) == LENGTH


@case("kill-load")
def test_what_a_killed_replica_was_loading_is_there_for_others(root: Path, row: Row) -> None:
    with Replica(root) as replica:
        replica.ask(prompt("load"))
        replica.forget()
        watched = Watched(replica, row)
        with killed_at("load", root):
            assert watched.ask("load") == LENGTH
        watched.counted()
        watched.serves("load")


@case("kill-gc")
def test_when_the_one_that_kept_the_bound_is_killed_another_one_does(root: Path, row: Row) -> None:
    bound = 4 * LENGTH
    with killed_at("gc", root), Replica(root, capacity=bound) as replica:
        watched = Watched(replica, row)
        watched.ask("survivor")
        ask_beyond(replica, bound, "survivor")
        # Its own fit; what the dead one left does not fit beside them.
        wait_until_bounded(root, bound)
        watched.counted()
        replica.ask(prompt("last"))
        replica.settle()
        watched.serves("last")


@case("gc-reads")
def test_readers_of_what_is_evicted_get_all_of_it_or_a_miss(root: Path, row: Row) -> None:
    bound = 6 * LENGTH
    with Replica(root, capacity=bound) as replica, Replica(root, capacity=bound) as reader:
        watched = Watched(reader, row)
        storing = threading.Thread(target=ask_beyond, args=(replica, 3 * bound, "gc"))
        storing.start()
        answered = 0
        while storing.is_alive():
            reader.forget()
            # ``ask`` compares the bytes of what it gets.
            watched.ask(f"gc{answered % 6}")
            answered += 1
        storing.join()
        assert answered > 1
        row.answer = "all of a chunk, or a miss"
        wait_until_bounded(root, bound)
        watched.counted()
        reader.ask(prompt("last"))
        reader.settle()
        watched.serves("last")


@case("two-gcs")
def test_two_that_would_evict_at_once_keep_one_bound(root: Path, row: Row) -> None:
    bound = 6 * LENGTH
    with Replica(root, capacity=bound) as one, Replica(root, capacity=bound) as other:
        watched = Watched(one, row)
        threads = [
            threading.Thread(target=ask_beyond, args=(replica, 2 * bound, name))
            for replica, name in ((one, "one"), (other, "other"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until_bounded(root, bound)
        assert files(root) >= bound // 3, "both evicted what one of them had to"
        watched.ask("mine")
        one.settle()
        watched.counted()
        watched.serves("mine")


def ask_beyond(replica: Replica, chunks: int, name: str) -> None:
    """Store more than that."""
    for number in range(chunks // LENGTH + 2):
        replica.ask(prompt(f"{name}{number}"))
        replica.settle()


def files(root: Path) -> int:
    return len(list(root.glob("v1/*/??/*.kv")))


def wait_until_bounded(root: Path, chunks: int) -> None:
    """Until no more than that is there, each of it whole."""
    end = time.monotonic() + PATIENCE
    while True:
        # A file may go between its listing and its reading.
        with contextlib.suppress(FileNotFoundError):
            if len(file_digests(root)) <= chunks:
                return
        assert time.monotonic() < end, f"{files(root)} chunks, and room for {chunks}"
        time.sleep(0.05)


def test_a_replica_that_is_not_stopped_comes_to_its_end(root: Path) -> None:
    """The points are where they seem to be: without them, the process does its work."""
    program = "import fault_replica as f, sys; from pathlib import Path\n"
    program += "with f.Replica(Path(sys.argv[1])) as r: r.ask(f.prompt('x')); r.settle()"
    folder = str(Path(fault_replica.__file__).parent)
    subprocess.run([sys.executable, "-c", program, str(root)], check=True, cwd=folder)
    assert len(file_digests(root)) == LENGTH
