"""The file system below a tier fails, or stops answering."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from engine import cpu, fs
from fault_cases import DEADLINE, case
from fault_mount import (
    EVERYTHING,
    HOLD,
    FaultMount,
    FaultyFolder,
    open_faulty_folder,
)
from fault_trial import ALL, Row, Trial
from faulty_bench import Bench
from kvtiers.tiers.breaker import BreakerState

STALL = 60.0
"""Seconds of the long stall."""


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyFolder]:
    made = tmp_path_factory.mktemp("mount")
    with open_faulty_folder(made, mount=not request.config.getoption("--no-mounts")) as opened:
        yield opened


@pytest.fixture(scope="module")
def bench(
    llama: Path, folder: FaultyFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    tier = fs(folder.path / "fs", deadline=DEADLINE)
    with Bench(llama, tmp_path_factory.mktemp("orders"), [cpu(), tier]) as bench:
        yield bench


@pytest.fixture
def trial(bench: Bench, row: Row, folder: FaultyFolder) -> Iterator[Trial]:
    row.means = folder.means
    yield Trial(bench, row)
    folder.clear()


READS: Mapping[str, tuple[dict[str, int | str], str]] = {
    "eio-read": ({"read": errno.EIO}, ""),
    "eio-all": ({EVERYTHING: errno.EIO}, ""),
    "eacces-file": ({"open": errno.EACCES}, ".kv"),
    "eacces-all": ({EVERYTHING: errno.EACCES}, ""),
    "stall-read": ({"read": HOLD}, ""),
}


@case(*READS)
def test_a_read_that_fails_or_hangs_is_a_miss(trial: Trial, folder: FaultyFolder) -> None:
    question = trial.stored_below()
    with trial.watching():
        folder.set(*READS[trial.row.case.id])
        assert trial.ask(question) == 0
        folder.clear()
        trial.bench.quiet()
    trial.recovers(question)


STORES: Mapping[str, tuple[dict[str, int | str], str]] = {
    "eio-write": ({"write": errno.EIO}, ""),
    # Of a file that is not there, the kernel asks for its attributes and no more.
    "stall-lookup": ({"access": HOLD, "getattr": HOLD}, ".kv"),
    "stall-store": ({"write": HOLD}, ""),
}


@case(*STORES)
def test_a_lookup_or_store_that_fails_or_hangs_delays_nothing_else(
    trial: Trial, folder: FaultyFolder
) -> None:
    question = trial.bench.question()
    with trial.watching():
        folder.set(*STORES[trial.row.case.id])
        assert trial.ask(question) == 0
        # Stores are behind the engine's back: the arena serves meanwhile.
        assert trial.bench.engine.llm.reset_prefix_cache()
        assert trial.ask(question) == ALL
        folder.clear()
        trial.bench.quiet()
    trial.recovers(question)


@case("enotconn")
def test_a_mount_whose_daemon_dies_is_used_again_once_it_is_mounted(
    trial: Trial, folder: FaultyFolder
) -> None:
    question = trial.stored_below()
    with trial.watching():
        if isinstance(folder, FaultMount):
            folder.kill()
        else:
            folder.set({EVERYTHING: errno.ENOTCONN})
        assert trial.ask(question) == 0
        trial.bench.quiet()
        if isinstance(folder, FaultMount):
            folder.remount()
        folder.clear()
    trial.recovers(question)


@case("stall-60s")
def test_a_mount_that_stalls_for_a_minute_costs_a_deadline_and_then_nothing(
    trial: Trial, folder: FaultyFolder
) -> None:
    engine, question = trial.bench.engine, trial.stored_below()
    with trial.watching():
        folder.set({EVERYTHING: HOLD})
        end = time.monotonic() + STALL
        while time.monotonic() < end:
            trial.ask(question)
            assert engine.llm.reset_prefix_cache()
            engine.hierarchy.spoil(range(engine.hierarchy._residency.cpu.arena.slots))
        assert engine.usage("fs").breaker is not BreakerState.CLOSED
        folder.clear()
    trial.recovers(question)
