"""Many replays at once: traces by capacities by policies, in processes."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures import Future as Promise
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtiers.policies import Policy, Run, TierInfo
from kvtiers.policies.placement import with_placement
from kvtiers.simulator.choices import LRU, MIN, PolicyChoice
from kvtiers.simulator.faults import Fault, fault_of
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.replay import Tally, replay
from kvtiers.simulator.serving import serve
from kvtiers.simulator.stack import CPU, StackModel
from kvtiers.simulator.trace import Trace

_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Task:
    """What is done with one trace.

    Attributes:
        trace: to replay.
        capacities: of the tier, in chunks, each with its share of the footprint.
        footprint: chunks that shares of capacity are taken of.
        score_from: first request that counts.
        chunk_bytes: size of a chunk, 0 if unknown.
        stack: tiers to replay through the live hierarchy; None for one tier and its policy.
            ``capacities`` are those of the arena then, its ``cpu``.
        others: capacities of the stack's other tiers, in chunks.

    """

    trace: Trace
    capacities: Sequence[tuple[int, float]]
    footprint: int
    score_from: int = 0
    chunk_bytes: int = 0
    stack: StackModel | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    def total(self, capacity: int) -> int:
        """Chunks that all tiers of all replicas hold together."""
        if self.stack is None:
            return capacity
        sizes = {**self.others, CPU: capacity}
        copies = {tier.name: 1 if tier.shared else self.stack.replicas for tier in self.stack.tiers}
        return sum(n * copies[name] for name, n in sizes.items())


@dataclass(frozen=True, slots=True)
class Result:
    """One replay. Fields of the same names stand in JSON and Parquet.

    Attributes:
        trace, policy: names.
        capacity_chunks: of the tier.
        capacity_share: the same as a share of the footprint, as it was asked for.
        token_hit_ratio: hit tokens over all input tokens.
        gap_closed: (policy - LRU) / (MIN - LRU), None where MIN hits no more than LRU, or one of
            the two failed.
        seconds: processor time that the replay took.
        hit_tokens: tokens saved from being computed.
        input_tokens: tokens of all prompts that count.
        requests: that count.
        written_chunks: that came into the tier, or the tiers of a stack.
        removed_chunks: that left the tier; of a stack None, for nobody counts them.
        written_bytes: what was written in bytes, None if the size of a chunk is unknown.
        capacity_bytes: of the tier, None likewise.
        chunk_tokens: tokens of a chunk.
        footprint_chunks: what shares were taken of.
        score_from: first request that counts.
        tiers: of a stack, by name: ``token_hit_ratio``, ``read_bytes``, ``written_bytes``.
        first_token_mean, first_token_p50, first_token_p99: of a stack, seconds.

    """

    trace: str
    policy: str
    capacity_chunks: int
    capacity_share: float
    token_hit_ratio: float
    gap_closed: float | None
    seconds: float
    hit_tokens: int
    input_tokens: int
    requests: int
    written_chunks: int
    removed_chunks: int | None
    written_bytes: int | None
    capacity_bytes: int | None
    chunk_tokens: int
    footprint_chunks: int
    score_from: int
    tiers: dict[str, dict[str, float]] | None = None
    first_token_mean: float | None = None
    first_token_p50: float | None = None
    first_token_p99: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Failure:
    """A replay that came to no end, as its policy raised something.

    Attributes:
        trace, policy: names.
        capacity_chunks: of the tier.
        fault: what was raised.

    """

    trace: str
    policy: str
    capacity_chunks: int
    fault: Fault


_Cell = tuple[int, int, PolicyChoice]  # number of the task, capacity, policy


def run(
    tasks: Sequence[Task],
    choices: Sequence[PolicyChoice],
    jobs: int,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> tuple[list[Result], list[Failure]]:
    """Replay all, and compare each with LRU and the optimum.

    Args:
        tasks: what to replay.
        choices: through which policies. LRU and MIN are run in any case.
        jobs: processes at a time.
        on_progress: told which share of the work is done, a few times a second.

    Returns:
        By task, capacity and policy, in the order in which they were given; and by policy, task
        and capacity those that failed, which have no result.

    """
    all_choices = dict.fromkeys([*choices, LRU, MIN])
    # The longest first, so that none is left over at the end: a small tier moves the most.
    cells = [
        (number, capacity, choice)
        for choice in all_choices
        for number, task in enumerate(tasks)
        for capacity in sorted({chunks for chunks, _ in task.capacities})
    ]
    outcomes = _outcomes(tasks, cells, jobs, on_progress)
    tallies = {cell: each for cell, each in outcomes.items() if isinstance(each, Tally)}
    failures = [
        Failure(tasks[number].trace.name, choice.label, capacity, outcome)
        for (number, capacity, choice), outcome in outcomes.items()
        if isinstance(outcome, Fault)
    ]
    return list(_results(tasks, choices, tallies)), failures


def _results(
    tasks: Sequence[Task], choices: Sequence[PolicyChoice], tallies: Mapping[_Cell, Tally]
) -> Iterator[Result]:
    for number, task in enumerate(tasks):
        for size in dict.fromkeys(task.capacities):
            least, most = (tallies.get((number, size[0], each)) for each in (LRU, MIN))
            for choice in choices:
                if tally := tallies.get((number, size[0], choice)):
                    gap = _gap_closed(tally, least, most)
                    yield _result(task, size, choice.label, tally, gap)


def _gap_closed(tally: Tally, least: Tally | None, most: Tally | None) -> float | None:
    if least is None or most is None or most.hit_tokens == least.hit_tokens:
        return None
    return (tally.hit_tokens - least.hit_tokens) / (most.hit_tokens - least.hit_tokens)


def _result(
    task: Task, capacity: tuple[int, float], label: str, tally: Tally, gap_closed: float | None
) -> Result:
    """A row."""
    size = task.chunk_bytes or None
    return Result(
        trace=task.trace.name,
        policy=label,
        capacity_chunks=capacity[0],
        capacity_share=capacity[1],
        token_hit_ratio=tally.token_hit_ratio,
        gap_closed=gap_closed,
        seconds=tally.seconds,
        hit_tokens=tally.hit_tokens,
        input_tokens=tally.input_tokens,
        requests=tally.requests,
        written_chunks=tally.written_chunks,
        removed_chunks=None if tally.tiers else tally.removed_chunks,
        written_bytes=size and tally.written_chunks * size,
        capacity_bytes=size and capacity[0] * size,
        chunk_tokens=task.trace.chunk_tokens,
        footprint_chunks=task.footprint,
        score_from=task.score_from,
        **_of_stack(tally),
    )


def _of_stack(tally: Tally) -> dict[str, Any]:
    """Further fields of a result, where there was a stack."""
    if not tally.tiers or not tally.first_token:
        return {}
    waits = sorted(tally.first_token)
    tiers = {
        name: {
            "token_hit_ratio": tier.hit_tokens / tally.input_tokens if tally.input_tokens else 0.0,
            "read_bytes": tier.read_bytes,
            "written_bytes": tier.written_bytes,
        }
        for name, tier in tally.tiers.items()
    }
    return {
        "tiers": tiers,
        "first_token_mean": sum(waits) / len(waits),
        "first_token_p50": waits[len(waits) // 2],
        "first_token_p99": waits[len(waits) * 99 // 100],
    }


# In processes ---------------------------------------------------------------------


def _outcomes(
    tasks: Sequence[Task],
    cells: Sequence[_Cell],
    jobs: int,
    on_progress: Callable[[float], None],
) -> dict[_Cell, Tally | Fault]:
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
        pool.shutdown(wait=False, cancel_futures=True)


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
    cells: Sequence[_Cell]
    # What share of each cell is done.
    done: Any


_work: _Work


def _begin(work: _Work) -> None:
    """First thing in a process."""
    global _work
    _work = work
    # Of stores that were under way when the last request ended, for one.
    logging.getLogger("kvtiers").setLevel(logging.ERROR)
    # Without a word; the parent is the one who says what was interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
