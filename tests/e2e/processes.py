"""What a server's processes hold, and what is left of them: from /proc and /dev/shm."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

_SHM = Path("/dev/shm")
_ARENA = "memfd:kvtiers-arena"
_PASSING_SECONDS = 3.0


def of_session(session: int) -> dict[int, str]:
    """Living processes of a session, zombies left out, with their command lines."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == session and stat[0] not in "ZX":
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = command.replace(b"\0", b" ").decode().strip()
    return found


def wait_for_end(session: int, seconds: float = 90) -> None:
    """Until no process of the session is left. Fails if some are."""
    deadline = time.monotonic() + seconds
    while left := of_session(session):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def arenas(session: int) -> set[str]:
    """The arenas that processes of the session have mapped, by inode."""
    return {inode for pid in of_session(session) for inode in _arenas_of(pid)}


def mapped_by(arenas: set[str]) -> list[int]:
    """Living processes of anybody that have one of these arenas mapped."""
    return [pid for pid in _pids() if arenas & set(_arenas_of(pid))]


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {path.name for path in _SHM.iterdir()}


def abandoned_since(before: set[str]) -> set[str]:
    """Kinds of files in /dev/shm that are new, and that no living process uses.

    A kind is the name without what is random in it: ``psm_1f3a`` is ``psm_``.
    """
    deadline = time.monotonic() + _PASSING_SECONDS
    new = _unused() - before
    # Others on this machine make some for a moment, or have not mapped theirs yet.
    while new and time.monotonic() < deadline:
        time.sleep(0.2)
        new &= _unused()
    return {re.match(r"[a-z]+[._-]?", name, re.IGNORECASE)[0] for name in new}  # type: ignore[index]


def _unused() -> set[str]:
    there = shared_memory()
    return there - {name for pid in _pids() for name in _shared_memory_of(pid)}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _arenas_of(pid: int) -> Iterator[str]:
    for fields in _maps(pid):
        if len(fields) > 5 and _ARENA in fields[5]:
            yield fields[4]


def _shared_memory_of(pid: int) -> Iterator[str]:
    for fields in _maps(pid):
        if len(fields) > 5 and fields[5].startswith(f"{_SHM}/"):
            yield fields[5].removeprefix(f"{_SHM}/")


def _maps(pid: int) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            yield line.split(maxsplit=5)
