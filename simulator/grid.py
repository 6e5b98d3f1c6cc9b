"""Many replays at once: traces by capacities by policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtiers.simulator.choices import LRU, MIN, PolicyChoice
from kvtiers.simulator.faults import Fault
from kvtiers.simulator.processes import outcomes
from kvtiers.simulator.replay import Tally
from kvtiers.simulator.task import Cell, Task


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
    found = outcomes(tasks, cells, jobs, on_progress)
    tallies = {cell: each for cell, each in found.items() if isinstance(each, Tally)}
    failures = [
        Failure(tasks[number].trace.name, choice.label, capacity, outcome)
        for (number, capacity, choice), outcome in found.items()
        if isinstance(outcome, Fault)
    ]
    return list(_results(tasks, choices, tallies)), failures


def _results(
    tasks: Sequence[Task], choices: Sequence[PolicyChoice], tallies: Mapping[Cell, Tally]
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
