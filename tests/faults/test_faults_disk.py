"""A disk that is really full or really read-only, and a process without descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import connector_config, cpu, fs
from fault_cases import DEADLINE, case
from fault_mount import remount, small_disk
from fault_trial import ALL, Row, Trial
from faulty_bench import Bench

DISK = 8 << 20
"""Bytes of the small disk: room for two dozen chunks."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("disk") / "mnt", DISK) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def bench(llama: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    config = connector_config([cpu(), fs(disk / "fs", deadline=DEADLINE)])
    # Not with copies that fail on cue, which read their cues from files.
    with Bench(llama, tmp_path_factory.mktemp("unused"), config=config) as bench:
        yield bench


@case("enospc")
def test_a_disk_that_others_fill_refuses_stores_and_serves(
    bench: Bench, row: Row, disk: Path
) -> None:
    trial = Trial(bench, row)
    old, new = trial.stored_below(), bench.question()
    with trial.watching(), open(disk / "others", "wb") as others:
        with contextlib.suppress(OSError):
            while others.write(bytes(4096)):
                others.flush()
        assert trial.ask(new) == 0
        bench.quiet()
        os.unlink(disk / "others")
    trial.recovers(new)
    trial.recovers(old)


@case("read-only")
def test_a_disk_that_becomes_read_only_serves_and_takes_stores_again_later(
    bench: Bench, row: Row, disk: Path
) -> None:
    trial = Trial(bench, row)
    old, new = trial.stored_below(), bench.question()
    with trial.watching():
        remount(disk, "ro")
        try:
            assert trial.ask(new) == 0
            bench.quiet()
            bench.engine.drop_arena()
            assert trial.ask(old) == ALL, "what is there can be read"
            bench.quiet()
        finally:
            remount(disk, "rw")
    trial.recovers(new)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing of this process can open anything."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@case("emfile-read")
def test_reads_without_descriptors_are_misses(bench: Bench, row: Row) -> None:
    trial = Trial(bench, row)
    question = trial.stored_below()
    with trial.watching(), no_descriptors():
        assert trial.ask(question) == 0
        bench.quiet()
    trial.recovers(question)


@case("emfile-write")
def test_stores_without_descriptors_are_lost_and_nothing_else(bench: Bench, row: Row) -> None:
    trial = Trial(bench, row)
    question = bench.question()
    with trial.watching(), no_descriptors():
        assert trial.ask(question) == 0
        bench.quiet()
    trial.recovers(question)
