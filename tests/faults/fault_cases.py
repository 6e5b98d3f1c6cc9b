"""The fault matrix: every fault that a kvtiers engine must survive, in one list.

The tests of this folder run them, one or more cases each, and the table of
docs/reliability.md is written from what they saw. ``test_faults_page`` holds the three
to each other: a case without a test, a test without a case, or a table that is behind
the list fails it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

ENGINE = "engine"
"""A real vLLM engine answers a prompt before, during and after the fault."""
HIERARCHY = "hierarchy"
"""The hierarchy over the real tier, with our own threads and no vLLM."""
PROCESSES = "processes"
"""The same, in processes of their own, of which some are killed."""

DEADLINE = 1.0
"""Seconds; of every tier here, unless its case says otherwise."""
MARGIN = 15.0
"""Seconds beyond the deadline in which an answer must have come.

For computing the prompt, and for whatever else a busy machine does: a request that
waits for a tier that never answers would wait for minutes.
"""


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        id: short name, also of the test.
        fault: what goes wrong, for a reader.
        how: how the test makes it so.
        where: ``ENGINE``, ``HIERARCHY`` or ``PROCESSES``.
        tiers: what is below the arena while it happens.
        shows: the figures that must go up, as "tier counter".
        deadline: seconds, as configured for the tier; None where no tier is waited for.

    """

    id: str
    fault: str
    how: str
    where: str
    tiers: str
    shows: tuple[str, ...]
    deadline: float | None = DEADLINE


def _files() -> list[Case]:
    """One chunk of four on disk is not what its name says; it is the third."""
    faults = {
        "missing": ("is missing", "the file is deleted", "fs misses"),
        "truncated": ("is truncated", "the file is cut in half", "fs corrupt"),
        "payload-bit": (
            "has a flipped bit in its payload",
            "one bit of the file is flipped",
            "fs corrupt",
        ),
        "metadata-bit": (
            "has a flipped bit in its metadata",
            "one bit of the last 4 KiB is flipped",
            "fs corrupt",
        ),
        "wrong-key": (
            "is another chunk under its name",
            "the file of the chunk before it is copied over it",
            "fs corrupt",
        ),
        "wrong-namespace": (
            "belongs to another namespace",
            "the same payload is sealed for another namespace",
            "fs corrupt",
        ),
        "zero-length": ("is empty", "the file is truncated to nothing", "fs corrupt"),
        "directory": ("is a directory", "a directory takes the file's place", "fs corrupt"),
    }
    return [
        Case(f"file-{name}", f"A chunk's file {fault}", how, ENGINE, "cpu, fs", (shown,))
        for name, (fault, how, shown) in faults.items()
    ]


def _mounts() -> list[Case]:
    """What a file system can do to a tier."""

    def made(name: str, fault: str, how: str, *shows: str) -> Case:
        return Case(name, fault, how, ENGINE, "cpu, fs", shows)

    return [
        made("eio-read", "EIO on reading", "read() fails", "fs failures"),
        made("eio-write", "EIO on storing", "write() fails", "fs failures"),
        made("eio-all", "EIO on everything", "every call fails", "fs failures"),
        made("eacces-file", "EACCES on chunk files", "open() of *.kv fails", "fs corrupt"),
        made("eacces-all", "EACCES on everything", "every call fails", "fs failures"),
        made("enotconn", "The mount's daemon dies", "SIGKILL; mounted anew later", "fs failures"),
        made("stall-read", "The mount stalls in a read", "read() is held", "fs timeouts"),
        made(
            "stall-lookup",
            "The mount stalls in a lookup",
            "access() and stat() are held",
            "fs timeouts",
        ),
        made("stall-store", "The mount stalls in a store", "write() is held", "fs misses"),
        made(
            "stall-60s",
            "The mount stalls for 60 s",
            "every call is held for 60 s while requests go on",
            "fs timeouts",
            "fs breaker_opened",
        ),
        made("enospc", "ENOSPC", "a small tmpfs is filled by others", "fs refused"),
        made("read-only", "Remounted read-only", "remount,ro of a tmpfs", "fs failures"),
        made(
            "emfile-read",
            "EMFILE on reading",
            "RLIMIT_NOFILE leaves the engine's process none",
            "fs failures",
        ),
        made(
            "emfile-write",
            "EMFILE on storing",
            "RLIMIT_NOFILE leaves the engine's process none",
            "fs failures",
        ),
    ]


CASES = {case.id: case for case in [*_files(), *_mounts()]}


def case(*ids: str) -> pytest.MarkDecorator:
    """Marks the test that runs these cases; it gets a ``row`` for each."""
    return pytest.mark.parametrize("row", [CASES[name] for name in ids], indirect=True, ids=ids)
