"""``kvtiers simulate``: replays traces through policies, beside the clairvoyant optimum."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from kvtiers.simulator import choices, grid, plot, report
from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.faults import Fault
from kvtiers.simulator.formats import ENDINGS, files_of, read_trace
from kvtiers.simulator.stack import CPU, StackModel, read_stack
from kvtiers.simulator.task import Task
from kvtiers.simulator.trace import Trace
from kvtiers.tiers.units import read_size
from kvtiers.tools import outputs
from kvtiers.tools.places import printable
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_CAPACITIES = ("0.01", "0.02", "0.05", "0.1")
_STDOUT = "-"
# Of a table in a file or a pipe.
_WIDTH = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers simulate``."""
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        help="a file, or the name of one in the folder that KVTIERS_TRACES says "
        "(../shared/traces by default)",
    )
    what = parser.add_argument_group("what to simulate")
    _add_caches(what)
    _add_reading(what)
    _add_results(parser.add_argument_group("results"))


def _add_caches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policies",
        "--policy",
        metavar="NAME,NAME",
        action="append",
        help="such as lru,arc,min, where min is the optimum; options of one as in "
        "'patient:half_life=300'; all that are installed by default",
    )
    group.add_argument(
        "--capacity",
        "--capacities",
        metavar="SIZE",
        action="append",
        help="of the tier: chunks (5000), bytes (2GiB), or a share of the trace's distinct chunks "
        f"(0.02 or 2%%); repeat it for several; {', '.join(_CAPACITIES)} by default",
    )
    group.add_argument(
        "--footprint",
        metavar="CHUNKS",
        type=int,
        help="what shares of capacity are taken of, if not the trace's own distinct chunks: those "
        "of the whole that it is a part of",
    )
    group.add_argument(
        "--tiers",
        metavar="FILE",
        help="replay through the live hierarchy over the tiers of this YAML file, on a virtual "
        "clock; --capacity is that of its cpu tier then",
    )


def _add_reading(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chunk-tokens",
        "--chunk-size",
        metavar="N",
        type=int,
        help="tokens of a chunk, a multiple of the trace's block",
    )
    group.add_argument(
        "--chunk-bytes", metavar="SIZE", help="bytes of a chunk, for figures in bytes"
    )
    group.add_argument(
        "--concat", action="store_true", help="the files are parts of one trace, in this order"
    )
    group.add_argument(
        "--score-from",
        metavar="N",
        default="0",
        help="how many requests warm up, or which share of them (0.5 or 50%%); those that come "
        "after count",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", metavar="FILE", nargs="?", const=_STDOUT, help="write JSON; - is the output"
    )
    group.add_argument("--parquet", metavar="FILE", help="write Parquet")
    group.add_argument("--plot", metavar="FILE", help="draw curves: a .png, .svg or .pdf")
    group.add_argument(
        "--jobs", "-j", metavar="N", type=int, help="processes at a time; one a core by default"
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay, and show. 0, or 1 if a policy failed, whose results are left out.

    Raises:
        SimulatorError: what was asked for can't be simulated.
        OSError: a result can't be written.

    """
    named = _policies(arguments.policies)
    stack = read_stack(arguments.tiers) if arguments.tiers else None
    capacities = _capacities(arguments.capacity, stack)
    _check_outputs(arguments)
    if arguments.plot and len(capacities) == 1:
        _tell("a plot of one capacity has points; for curves, give several with --capacity.")
    tasks = [_task(trace, capacities, stack, arguments) for trace in _traces(arguments)]
    results, failures = _replayed(tasks, named, arguments.jobs)
    _tell_failures(failures)
    _show(results, arguments)
    return 1 if failures else 0


def _policies(given: Sequence[str] | None) -> list[choices.PolicyChoice]:
    """Those of an option that was repeated, had commas, or both; or all that can be had."""
    return choices.all_policies(_tell) if given is None else choices.policies(",".join(given))


def _tell(text: str) -> None:
    print(f"kvtiers: {text}", file=sys.stderr)


def _capacities(given: Sequence[str] | None, stack: StackModel | None) -> list[choices.Capacity]:
    """All values of an option that was repeated, had commas, or both; or what stands for it."""
    cpu = stack.named(CPU) if stack is not None else None
    if given is None and cpu is not None:
        return [cpu.capacity]
    words = _CAPACITIES if given is None else ",".join(given).split(",")
    return [choices.Capacity.parse(word.strip()) for word in words]


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse now what would fail after the work is done."""
    reads = [str(file) for place in arguments.traces for file in files_of(place)]
    if arguments.tiers:
        reads.append(arguments.tiers)
    if arguments.json and outputs.ending(arguments.json) in ENDINGS:
        raise SimulatorError(
            f"--json {arguments.json}: JSON would be written there, and the name is that of a "
            "trace. Name a file that ends in .json, or write '--json -' for the output."
        )
    if arguments.parquet:
        outputs.check_ending("--parquet", arguments.parquet, ".parquet", "")
        report.need_pyarrow()
    if arguments.plot:
        plot.check(arguments.plot)
    written: dict[str, str] = {}
    for option in ("--json", "--parquet", "--plot"):
        path = getattr(arguments, option.strip("-"))
        if path is None or (option, path) == ("--json", _STDOUT):
            continue
        outputs.check_output(option, path, reads)
        other = written.setdefault(os.path.realpath(path), option)
        if other != option:
            raise SimulatorError(f"{option} {path}: {other} is written there. Name another.")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise SimulatorError(f"--jobs {arguments.jobs}: write 1 or more.")


def _traces(arguments: argparse.Namespace) -> Iterable[Trace]:
    tokens = arguments.chunk_tokens
    if arguments.concat:
        return [read_trace(*arguments.traces, chunk_tokens=tokens)]
    places = list(dict.fromkeys(arguments.traces))
    traces = [read_trace(place, chunk_tokens=tokens) for place in places]
    names = Counter(trace.name for trace in traces)
    # Tables and plots tell them apart by name, and in two folders two may have the same.
    return [
        trace if names[trace.name] == 1 else replace(trace, name=place)
        for place, trace in zip(places, traces, strict=True)
    ]


def _task(
    trace: Trace,
    capacities: Sequence[choices.Capacity],
    stack: StackModel | None,
    arguments: argparse.Namespace,
) -> Task:
    if not trace.footprint:
        raise SimulatorError(
            f"no prompt of {trace.name} fills a chunk of {trace.chunk_tokens} tokens, so there is "
            "nothing to hit. Make them smaller with --chunk-tokens, down to the trace's block."
        )
    footprint = trace.footprint if arguments.footprint is None else arguments.footprint
    if footprint < trace.footprint:
        raise SimulatorError(
            f"--footprint {footprint}: {trace.name} alone has {trace.footprint} distinct chunks."
        )
    chunk_bytes = _chunk_bytes(trace, stack, arguments.chunk_bytes)
    others = [tier for tier in stack.tiers if tier.name != CPU] if stack is not None else []
    return Task(
        trace,
        [capacity.resolve(footprint, chunk_bytes) for capacity in capacities],
        footprint,
        choices.score_from(arguments.score_from, len(trace.requests)),
        chunk_bytes,
        stack,
        {tier.name: tier.capacity.resolve(footprint, chunk_bytes)[0] for tier in others},
    )


def _chunk_bytes(trace: Trace, stack: StackModel | None, given: str | None) -> int:
    """The size of a chunk as far as somebody says it: the command line, the trace, the stack."""
    if given is not None:
        if nbytes := read_size(given):
            return nbytes
        raise SimulatorError(f"--chunk-bytes '{given}': write a size, such as 32MiB.")
    nbytes = trace.chunk_bytes or (stack.chunk_bytes if stack is not None else None) or 0
    if stack is not None and not nbytes:
        raise SimulatorError(
            f"{trace.name} does not say how many bytes a chunk has, and with --tiers time depends "
            "on it. Say so with --chunk-bytes, or with chunk_bytes in the file."
        )
    return nbytes


def _replayed(
    tasks: Sequence[Task], named: Sequence[choices.PolicyChoice], jobs: int | None
) -> tuple[list[grid.Result], list[grid.Failure]]:
    console = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Refreshed by hand: a thread of its own would be in the way of forking.
    with Progress(
        *columns, console=console, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=1.0)

        def note(share: float) -> None:
            progress.update(bar, completed=share, refresh=True)

        try:
            return grid.run(tasks, named, jobs or os.cpu_count() or 1, note)
        except BrokenProcessPool:
            raise SimulatorError(
                "a process of the simulation was killed, most likely for want of memory. Each of "
                "them holds a policy of its own: try fewer with --jobs."
            ) from None


def _tell_failures(failures: Sequence[grid.Failure]) -> None:
    """Each fault of a policy once for each trace, with the capacities that it had it at."""
    sizes: dict[tuple[str, str, Fault], list[str]] = {}
    for each in failures:
        same = sizes.setdefault((each.policy, each.trace, each.fault), [])
        same.append(f"{each.capacity_chunks:,}")
    for (policy, trace, fault), chunks in sizes.items():
        _tell(
            f"policy '{policy}' failed on {trace} with a capacity of {' and of '.join(chunks)} "
            f"chunks: {printable(fault.what)} ({printable(fault.where)}). It has no results there."
        )


def _show(results: Sequence[grid.Result], arguments: argparse.Namespace) -> None:
    if arguments.json == _STDOUT:
        print(report.as_json(results), end="")  # nothing, where the shell closed it with `>&-`
    else:
        console = Console()
        wide = Console(width=_WIDTH)
        for i, table in enumerate(report.tables(results)):
            if not console.is_terminal or wide.measure(table).maximum > console.width:
                console = wide  # a terminal breaks lines, where figures would be cut off
            console.print(*([""] if i else []), table, sep="\n")
    if arguments.json and arguments.json != _STDOUT:
        with open(arguments.json, "w") as file:
            file.write(report.as_json(results))
    if arguments.parquet:
        report.write_parquet(results, arguments.parquet)
    if arguments.plot and results:
        plot.write_plot(results, arguments.plot)
