"""One mapping for all processes of an engine, gone with the last of them."""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvtiers.tiers import ALIGNMENT
from kvtiers.tiers.arena import Arena

ATTACH = """
import pickle, sys
from kvtiers.tiers.arena import Arena
arena = Arena.attach(pickle.loads(bytes.fromhex(sys.argv[1])))
arena.slot(1)[:5] = arena.slot(0)[:5]
arena.slot(0)[:5] = b"taken"
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(4, ALIGNMENT)
    yield arena
    arena.close()


def resident_kib(pid: int, name: str) -> int:
    """How much of the mapping has memory behind it."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = name in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_slots_are_apart_and_aligned(arena: Arena) -> None:
    for index in range(4):
        arena.slot(index)[:] = bytes([index + 1]) * ALIGNMENT
    assert [bytes(arena.slot(i)[:1]) for i in range(4)] == [b"\1", b"\2", b"\3", b"\4"]
    assert arena.nbytes == len(arena.memory) == 4 * ALIGNMENT


@pytest.mark.parametrize("index", [-1, 4])
def test_there_is_no_slot_beyond_the_last_and_none_from_the_end(arena: Arena, index: int) -> None:
    with pytest.raises(IndexError, match="of 4"):
        arena.slot(index)


@pytest.mark.parametrize(("slots", "size"), [(0, ALIGNMENT), (1, 0), (1, ALIGNMENT + 512)])
def test_sizes_that_cannot_work_are_refused(slots: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot make an arena"):
        Arena.create(slots, size)


def test_another_process_sees_and_changes_the_same_bytes(arena: Arena) -> None:
    arena.slot(0)[:5] = b"given"
    handle = pickle.dumps(arena.handle).hex()
    subprocess.run([sys.executable, "-c", ATTACH, handle], check=True, timeout=60)
    assert (bytes(arena.slot(1)[:5]), bytes(arena.slot(0)[:5])) == (b"given", b"taken")


def test_attaching_checks_the_size(arena: Arena) -> None:
    with pytest.raises(ValueError, match="not what"):
        Arena.attach(replace(arena.handle, slots=5))


def test_attaching_to_a_closed_arena_fails_cleanly() -> None:
    arena = Arena.create(1, ALIGNMENT)
    handle = arena.handle
    arena.close()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, ValueError)):
        Arena.attach(handle)
    assert set(os.listdir("/proc/self/fd")) == before


def test_nobody_can_shrink_it_under_the_others(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.handle.fd, ALIGNMENT)


def test_it_has_no_name_that_could_be_left_behind(arena: Arena) -> None:
    assert os.readlink(f"/proc/self/fd/{arena.handle.fd}").startswith("/memfd:")
    assert os.fstat(arena.handle.fd).st_nlink == 0


def test_memory_is_taken_when_it_is_populated() -> None:
    arena = Arena.create(256, ALIGNMENT)
    assert resident_kib(os.getpid(), "kvtiers-arena") == 0
    if arena.populate(0, 64):
        assert resident_kib(os.getpid(), "kvtiers-arena") == 64 * ALIGNMENT // 1024
        assert arena.populate(200, 10_000), "the end of the arena is the end of the request"
        assert arena.populate(256, 1), "nothing to do is done"
    arena.close()


def test_close_leaves_a_view_that_somebody_holds_readable() -> None:
    arena = Arena.create(1, mmap.PAGESIZE)
    view = arena.slot(0)
    view[:3] = b"abc"
    arena.close()
    arena.close()
    assert bytes(view[:3]) == b"abc"
