"""Many replays at once: traces by capacities by policies, in processes."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures import Future as Promise
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtiers.policies import Policy, Run, TierInfo
from kvtiers.policies.placement import with_placement
from kvtiers.simulator.choices import LRU, MIN, PolicyChoice
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
        gap_closed: (policy - LRU) / (MIN - LRU), None where MIN hits no more than LRU.
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


_Cell = tuple[int, int, PolicyChoice]  # number of the task, capacity, policy


def run(
    tasks: Sequence[Task],
    choices: Sequence[PolicyChoice],
    jobs: int,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> list[Result]:
    """Replay all, and compare each with LRU and the optimum.

    Args:
        tasks: what to replay.
        choices: through which policies. LRU and MIN are run in any case.
        jobs: processes at a time.
        on_progress: told which share of the work is done, a few times a second.

    Returns:
        By task, capacity and policy, in the order in which they were given.

    """
    all_choices = dict.fromkeys([*choices, LRU, MIN])
    # The longest first, so that none is left over at the end: a small tier moves the most.
    cells = [
        (number, capacity, choice)
        for choice in all_choices
        for number, task in enumerate(tasks)
        for capacity in sorted({chunks for chunks, _ in task.capacities})
    ]
    tallies = _tallies(tasks, cells, jobs, on_progress)
    return [
        _result(task, size, choice.label, [tallies[number, size[0], c] for c in (choice, LRU, MIN)])
        for number, task in enumerate(tasks)
        for size in dict.fromkeys(task.capacities)
        for choice in choices
    ]


def _result(
    task: Task, capacity: tuple[int, float], label: str, tallies: Sequence[Tally]
) -> Result:
    """A row, of the tallies of a policy, of LRU and of MIN."""
    tally, least, most = tallies
    gap = most.hit_tokens - least.hit_tokens
    size = task.chunk_bytes or None
    return Result(
        trace=task.trace.name,
        policy=label,
        capacity_chunks=capacity[0],
        capacity_share=capacity[1],
        token_hit_ratio=tally.token_hit_ratio,
        gap_closed=(tally.hit_tokens - least.hit_tokens) / gap if gap else None,
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


def _tallies(
    tasks: Sequence[Task],
    cells: Sequence[_Cell],
    jobs: int,
    on_progress: Callable[[float], None],
) -> dict[_Cell, Tally]:
    # Where it is safe to fork, the traces need not be copied to each process.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    done = context.Array("d", len(cells), lock=False)
    futures = [Future.of(task.trace) for task in tasks]
    pool = ProcessPoolExecutor(
        min(jobs, len(cells)), context, _begin, (_Work(tasks, futures, cells, done),)
    )
    try:
        promises = {pool.submit(_one, i): cell for i, cell in enumerate(cells)}
        _await(promises, done, on_progress)
        return {cell: promise.result() for promise, cell in promises.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _await(
    promises: dict[Promise[Tally], _Cell], done: Sequence[float], report: Callable[[float], None]
) -> None:
    """Wait until all are done, or one has failed."""
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


def _one(index: int) -> Tally:
    """Replay one cell."""
    number, capacity, choice = _work.cells[index]
    task = _work.tasks[number]
    requests = len(task.trace.requests)

    def note(served: int) -> None:
        _work.done[index] = served / requests

    if choice.is_optimum:
        future = _work.futures[number]
        tally = optimum(task.trace, future, task.total(capacity), task.score_from, note)
    elif task.stack is not None:
        tally = _serve(task, task.stack, capacity, choice, note)
    else:
        tally = replay(task.trace, choice.make, capacity, task.score_from, note)
    _work.done[index] = 1.0
    return tally


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
