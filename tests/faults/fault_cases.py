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
MARGIN = 30.0
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
        made("enospc", "ENOSPC", "a small disk is filled by others", "fs refused"),
        made("read-only", "Remounted read-only", "the disk is remounted", "fs failures"),
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


def _redis() -> list[Case]:
    """What a Redis server can do to a tier."""

    def made(name: str, fault: str, how: str, *shows: str) -> Case:
        return Case(f"redis-{name}", f"Redis {fault}", how, ENGINE, "cpu, redis", shows)

    return [
        made("refused", "refuses connections", "nobody listens on its port", "redis failures"),
        made("killed-set", "dies during SET", "SIGKILL amid a value", "redis failures"),
        made("killed-get", "dies during GET", "SIGKILL amid a value", "redis failures"),
        made("hung", "hangs", "SIGSTOP", "redis timeouts"),
        made("slow", "is slow", "a proxy holds each request for 100 ms", "redis recomputed"),
        made("full", "is full", "maxmemory, noeviction: OOM", "redis refused"),
        made("evicting", "evicts by itself", "maxmemory, allkeys-lru", "redis misses"),
        made("empty", "is restarted, and empty", "SIGKILL, started anew", "redis misses"),
        made(
            "password",
            "wants another password",
            "requirepass is set, and all clients are cut off",
            "redis failures",
        ),
        made("wrong-type", "has a list under our key", "DEL, RPUSH", "redis corrupt"),
    ]


def _copies() -> list[Case]:
    """What can happen while blocks are copied between the GPU's cache and the arena."""

    def made(name: str, fault: str, how: str, *shows: str) -> list[Case]:
        models = {"one": "one KV-cache group", "several": "several groups"}
        return [
            Case(f"{name}-{groups}", f"{fault}; {text}", how, ENGINE, "cpu", shows, None)
            for groups, text in models.items()
        ]

    failing = "it raises, is refused, fails, leaves garbage, leaves half"
    return [
        *made("copy-load", "A worker reports a failed load", failing, "cpu failures"),
        *made("copy-store", "A worker reports a failed store", failing, "cpu failures"),
        *made("abort-load", "A request is aborted during its load", "the copy is held", "cpu hits"),
        *made(
            "preempt-load",
            "A request is preempted while another one loads",
            "all free blocks are taken; the copy is held",
            "vllm preemptions",
        ),
        *made(
            "preempt-store",
            "A request is preempted during its store",
            "all free blocks are taken; the copy is held",
            "vllm preemptions",
        ),
        *made(
            "reset-load",
            "A reset of the connector during a load",
            "the copy goes on behind everybody's back",
            "cpu misses",
        ),
        *made(
            "reset-store",
            "A reset of the connector during a store",
            "the copy goes on behind everybody's back, and writes garbage",
            "cpu misses",
        ),
    ]


def _processes() -> list[Case]:
    """What replicas do to each other."""

    def made(name: str, fault: str, how: str, *shows: str) -> Case:
        return Case(name, fault, how, PROCESSES, "cpu, fs", shows)

    return [
        made(
            "kill-store",
            "A replica is killed during a store",
            "SIGKILL with half of a chunk written",
            "fs misses",
        ),
        made(
            "kill-load",
            "A replica is killed during a load",
            "SIGKILL with half of a chunk read",
            "fs hits",
        ),
        made(
            "kill-gc",
            "A replica is killed while it keeps the root's bound",
            "SIGKILL before its fourth deletion",
            "fs evictions",
        ),
        made(
            "kill-gc-command",
            "`kvtiers gc` is killed",
            "SIGKILL before its fourth deletion; two others follow",
            "fs hits",
        ),
        made(
            "gc-reads",
            "Chunks are evicted while others read them",
            "one replica stores three times the bound, another reads",
            "fs misses",
        ),
        made(
            "two-gcs",
            "Two replicas would evict at once",
            "both store three times the bound of their root",
            "fs evictions",
        ),
        made("two-gc-commands", "`kvtiers gc` twice at once", "two processes", "fs hits"),
    ]


def _clocks() -> list[Case]:
    """What the system's clock can do."""

    def made(name: str, fault: str, how: str) -> Case:
        # No fault for the cache: it has to be seen that it serves.
        return Case(f"clock-{name}", fault, how, ENGINE, "cpu, fs", ("fs hits",))

    return [
        made("forward", "The clock jumps a day ahead", "time.time() of the process"),
        made("back", "The clock jumps a day back", "time.time() of the process"),
        made("files", "Files are from the future", "their times are a day ahead"),
    ]


CASES = {
    case.id: case
    for case in [*_files(), *_mounts(), *_redis(), *_processes(), *_clocks(), *_copies()]
}


def case(*ids: str) -> pytest.MarkDecorator:
    """Marks the test that runs these cases; it gets a ``row`` for each."""
    return pytest.mark.parametrize("row", [CASES[name] for name in ids], indirect=True, ids=ids)
