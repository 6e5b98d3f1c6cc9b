"""Replays cells of a grid, each in one of several processes."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from typing import Any

from kvtiers.policies import Policy, Run, TierInfo
from kvtiers.policies.placement import with_placement
from kvtiers.simulator.choices import PolicyChoice
from kvtiers.simulator.faults import Fault, fault_of
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.replay import Tally, replay
from kvtiers.simulator.serving import serve
from kvtiers.simulator.stack import CPU, StackModel
from kvtiers.simulator.task import Cell, Task

_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def outcomes(
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    jobs: int,
    on_progress: Callable[[float], None],
) -> dict[Cell, Tally | Fault]:
    """What became of each cell: its figures, or what its policy raised.

    Args:
        tasks: what the cells number.
        cells: what to replay, those that take longest first.
        jobs: processes at a time.
        on_progress: told which share of the work is done, a few times a second.

    """
    # Where it is safe to fork, the traces need not be copied to each process.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    done = context.Array("d", len(cells), lock=False)
    futures = [Future.of(task.trace) for task in tasks]
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(cells)), context, _begin, (_Work(tasks, futures, cells, done),)
    )
    try:
        promises = {pool.submit(_one, i): cell for i, cell in enumerate(cells)}
        _await(promises, done, on_progress)
        return {cell: promise.result() for promise, cell in promises.items()}
    except BaseException:
        # Nobody waits for them now, and an interrupt may have reached this process alone.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        # Not left to Python's exit, which would wake the pool's thread by what that just closes.
        pool.shutdown(cancel_futures=True)


def _await(
    promises: Iterable[Promise[Tally | Fault]],
    done: Sequence[float],
    report: Callable[[float], None],
) -> None:
    """Wait until all are done, or a process was killed."""
    left = set(promises)
    while left:
        report(sum(done) / len(done))
        ready, left = wait(left, _POLL_SECONDS, FIRST_COMPLETED)
        for promise in ready:
            promise.result()
    report(1.0)


@dataclass(frozen=True, slots=True)
class _Work:
    tasks: Sequence[Task]
    futures: Sequence[Future]
    cells: Sequence[Cell]
    # What share of each cell is done.
    done: Any


_work: _Work


def _begin(work: _Work) -> None:
    """First thing in a process."""
    global _work
    _work = work
    # What a policy prints is not of the results, which may be written to the output.
    sys.stdout = sys.stderr
    # Of stores that were under way when the last request ended, for one.
    logging.getLogger("kvtiers").setLevel(logging.ERROR)
    _end_with_parent()
    # Without a word; the parent is the one who says what was interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent() -> None:
    """End with the parent however that ends: killed, it can end nobody itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _one(index: int) -> Tally | Fault:
    """Replay one cell; what its policy raises ends nothing but that."""
    number, _, choice = _work.cells[index]
    requests = len(_work.tasks[number].trace.requests)

    def note(served: int) -> None:
        _work.done[index] = served / requests

    try:
        return _tally(*_work.cells[index], note)
    except BaseException as error:  # noqa: BLE001 - sys.exit, too; an interrupt raises nothing here
        return fault_of(error, choice.module)
    finally:
        _work.done[index] = 1.0


def _tally(
    number: int, capacity: int, choice: PolicyChoice, on_request: Callable[[int], None]
) -> Tally:
    task = _work.tasks[number]
    if choice.is_optimum:
        future = _work.futures[number]
        return optimum(task.trace, future, task.total(capacity), task.score_from, on_request)
    if task.stack is not None:
        return _serve(task, task.stack, capacity, choice, on_request)
    return replay(task.trace, choice.make, capacity, task.score_from, on_request)


def _serve(
    task: Task,
    stack: StackModel,
    capacity: int,
    choice: PolicyChoice,
    on_request: Callable[[int], None],
) -> Tally:
    """Replay one cell through the live hierarchy, with the stack's rules of placement."""

    def make(
        tiers: Sequence[TierInfo], clock: Callable[[], float], cost: Callable[[Run], float]
    ) -> Policy:
        return with_placement(choice.make(tiers, clock, cost), stack.placement)

    sizes = {**task.others, CPU: capacity}
    return serve(task.trace, stack, sizes, make, task.chunk_bytes, task.score_from, on_request)
