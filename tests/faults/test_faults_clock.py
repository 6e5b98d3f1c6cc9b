"""The system's clock jumps, and files have times that it has not reached yet."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import chunk_files, cpu, fs
from fault_cases import DEADLINE, case
from fault_trial import ALL, Row, Trial
from faulty_bench import Bench

DAY = 86_400.0


@pytest.fixture(scope="module")
def bench(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("clock")
    with Bench(llama, folder, [cpu(), fs(folder / "fs", deadline=DEADLINE)]) as bench:
        yield bench


@contextlib.contextmanager
def jumped(seconds: float) -> Iterator[None]:
    """Wall clocks of this process say so much more; what measures time goes on as before."""
    now, now_ns = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + seconds)
        patch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))
        yield


@case("clock-forward", "clock-back")
def test_a_jump_of_the_clock_costs_nothing(bench: Bench, row: Row) -> None:
    trial = Trial(bench, row)
    stored, fresh = trial.stored_below(), bench.question()
    with trial.watching(), jumped(DAY if row.case.id == "clock-forward" else -DAY):
        assert trial.ask(fresh) == 0
        bench.quiet()
        assert trial.below(fresh) == ALL
        bench.engine.drop_arena()
        assert trial.ask(stored) == ALL
        bench.quiet()
    trial.recovers(stored)
    trial.recovers(fresh)


@case("clock-files")
def test_files_from_the_future_serve(bench: Bench, row: Row) -> None:
    trial = Trial(bench, row)
    stored = trial.stored_below()
    with trial.watching():
        for file in chunk_files(bench.folder / "fs").values():
            os.utime(file, (time.time() + DAY, time.time() + DAY))
        assert trial.ask(stored) == ALL
    trial.recovers(stored)
