"""A disk that is really full or really read-only, and a process without descriptors."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import connector_config, cpu, fs
from fault_cases import DEADLINE, case
from fault_mount import PretendedDisk, SmallDisk, open_disk
from fault_trial import ALL, Row, Trial
from faulty_bench import Bench

NBYTES = 8 << 20
"""Of the disk: room for two dozen chunks."""


@pytest.fixture(scope="module")
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SmallDisk | PretendedDisk]:
    folder = tmp_path_factory.mktemp("disk")
    with open_disk(folder, NBYTES, mount=not request.config.getoption("--no-mounts")) as opened:
        yield opened


@pytest.fixture(scope="module")
def bench(
    llama: Path, disk: SmallDisk | PretendedDisk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    config = connector_config([cpu(), fs(disk.path / "fs", deadline=DEADLINE)])
    # Not with copies that fail on cue, which read their cues from files.
    with Bench(llama, tmp_path_factory.mktemp("unused"), config=config) as bench:
        yield bench


@case("enospc")
def test_a_disk_that_others_fill_refuses_stores_and_serves(
    bench: Bench, row: Row, disk: SmallDisk | PretendedDisk
) -> None:
    trial = Trial(bench, row)
    row.means = disk.means
    old, new = trial.stored_below(), bench.question()
    with trial.watching(), disk.full():
        assert trial.ask(new) == 0
        bench.quiet()
    trial.recovers(new)
    trial.recovers(old)


@case("read-only")
def test_a_disk_that_becomes_read_only_serves_and_takes_stores_again_later(
    bench: Bench, row: Row, disk: SmallDisk | PretendedDisk
) -> None:
    trial = Trial(bench, row)
    row.means = disk.means
    old, new = trial.stored_below(), bench.question()
    with trial.watching(), disk.read_only():
        assert trial.ask(new) == 0
        bench.quiet()
        bench.engine.drop_arena()
        assert trial.ask(old) == ALL, "what is there can be read"
        bench.quiet()
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
