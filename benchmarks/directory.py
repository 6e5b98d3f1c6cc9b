"""What a million chunks in a lower tier cost the engine's scheduler.

    python -m benchmarks.directory [--chunks 1000000] [--policies lru arc] [--json FILE]

A hierarchy takes in what a scan of a tier finds, then forgets it at a reset, then stores
as many chunks anew, while a loop does what vLLM's scheduler does: requests come, each
chunk is looked up, a step ends. Between any two lookups it notes how long it was kept,
in processor time of its thread (what else the machine does is not in it) and by the
clock (all is in it, also waiting for the interpreter's lock). Every hundredth step a full
garbage collection is forced, as the garbage of a live engine would; the heap is frozen
before, as vLLM does. Memory is counted by ``tracemalloc`` in further runs, with the
policy and without any, so that its share is known.

About ten minutes on one core at a million chunks.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvtiers.policies import ChunkId, Policy, PolicyRequest, Run
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.leaf_heap import ChunkFacts
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.scored import ScoredPolicy
from kvtiers.tiers import ALIGNMENT, Namespace
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.hierarchy import Hierarchy
from rich.console import Console
from rich.table import Table

from benchmarks.full_tier import HERE, FullTier, hash_of
from benchmarks.record import Setup, describe

_SLOTS = 4096
# Chunks of a request, all of which have to be promoted; and of a store.
_PROMPT = 16
_RUN = 64
_COLLECT_EVERY = 100
_CALM_STEPS = 2000


class Nothing(Policy):
    """Keeps nothing, so that what is left is the directory's."""

    def on_insert(self, run: Run, tier: str) -> None:
        """Nothing to do."""

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Nothing to do."""

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:  # noqa: ARG002 - a policy's
        """Knows none."""
        return iter(())


class Uses(ScoredPolicy):
    """The simplest that an author would write."""

    def score(self, chunk: ChunkFacts, now: float) -> float:  # noqa: ARG002 - a policy's
        """How often it was used."""
        return chunk.uses


POLICIES: dict[str, type[Policy]] = {"lru": LruPolicy, "arc": ArcPolicy, "scored": Uses}


@dataclass(frozen=True)
class Phase:
    """What the loop saw while the hierarchy did one thing. Times in microseconds or as named.

    Attributes:
        policy, phase: which.
        lookup_us: median by the clock.
        lookup_p999_us: 99.9th percentile in processor time, with what the clocks take.
        pause_cpu_ms: longest between two lookups, processor time of the loop's thread.
        pause_wall_ms: the same by the clock.
        collection_ms: longest garbage collection, processor time, whichever thread it hit.
        seconds: of the whole phase.

    """

    policy: str
    phase: str
    lookup_us: float
    lookup_p999_us: float
    pause_cpu_ms: float
    pause_wall_ms: float
    collection_ms: float
    seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes a chunk, the key among them, as ``tracemalloc`` counts."""

    policy: str
    total: float
    policys_share: float


@dataclass
class DirectoryRecord:
    """A run. ``bare_collection_ms``: a full collection before there is any chunk."""

    setup: Setup
    chunks: int
    bare_collection_ms: float = 0.0
    memory: list[Memory] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


class Collections:
    """How long the collector stops everything."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._begun = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        # It runs on whichever thread made the garbage, and holds up all others.
        now = time.thread_time()
        if phase == "start":
            self._begun = now
        else:
            self.longest = max(self.longest, now - self._begun)

    def close(self) -> None:
        """Note nothing more."""
        gc.callbacks.remove(self._note)


class Loop:
    """The scheduler's loop: a request a step, all of its chunks looked up."""

    def __init__(self, hierarchy: Hierarchy, chunks: int) -> None:
        self._hierarchy = hierarchy
        self._chunks = chunks
        self._random = random.Random(1)
        self._steps = 0
        self._waiting = ""
        # No lists: the collector would walk them.
        self.lookups, self.lookups_cpu = array("d"), array("d")
        self.pause_cpu = self.pause_wall = 0.0

    def restart(self) -> None:
        """A new phase begins."""
        self.lookups, self.lookups_cpu = array("d"), array("d")
        self.pause_cpu = self.pause_wall = 0.0
        self._since = (time.thread_time(), time.perf_counter())

    def step(self, work: Callable[[], None] = lambda: None) -> None:
        """One step of an engine, and ``work`` in it."""
        self._steps += 1
        first = self._random.randrange(self._chunks // _PROMPT) * _PROMPT
        run = Run(tuple(map(hash_of, range(first, first + _PROMPT))), 0, ALIGNMENT)
        self._note()
        # Nobody's, so that nothing is promoted for it, while the last request waits.
        name = ""
        if self._hierarchy.idle():
            self._hierarchy.end(self._waiting)
            name = self._waiting = str(self._steps)
            self._hierarchy.begin(PolicyRequest(name, (run,)))
        for key in run.chunks:
            assert isinstance(key, bytes)
            # What has landed meanwhile is taken in here, and not in the lookup.
            self._hierarchy.poll()
            self._note()
            cpu, begun = time.thread_time(), time.perf_counter()
            self._hierarchy.lookup(name, key)
            self.lookups.append(time.perf_counter() - begun)
            self.lookups_cpu.append(time.thread_time() - cpu)
        self._note()
        work()
        self._note()
        self._hierarchy.tick()
        if not self._steps % _COLLECT_EVERY:
            gc.collect()

    def _note(self) -> None:
        now = (time.thread_time(), time.perf_counter())
        self.pause_cpu = max(self.pause_cpu, now[0] - self._since[0])
        self.pause_wall = max(self.pause_wall, now[1] - self._since[1])
        self._since = now

    def read(self, policy: str, phase: str, collections: Collections, seconds: float) -> Phase:
        """What was seen since ``restart``."""
        self._note()
        ordered = sorted(self.lookups_cpu)
        return Phase(
            policy,
            phase,
            round(statistics.median(self.lookups) * 1e6, 2),
            round(ordered[math.ceil(0.999 * len(ordered)) - 1] * 1e6, 2),
            round(self.pause_cpu * 1e3, 2),
            round(self.pause_wall * 1e3, 2),
            round(collections.longest * 1e3, 2),
            round(seconds, 1),
        )


def build(policy: type[Policy], found: int) -> Hierarchy:
    """A small arena over a tier that a scan finds so many chunks in."""
    cpu = CpuTier(CpuTier.Config(capacity=_SLOTS * ALIGNMENT), ALIGNMENT)
    tiers = {"full": FullTier(found)}
    return Hierarchy(cpu, tiers, lambda infos, clock: policy(infos, clock=clock), HERE)


def take_in(hierarchy: Hierarchy, chunks: int, step: Callable[[], None]) -> None:
    """Step until all that the scan finds is known."""
    while len(hierarchy._residency.directory) < chunks or hierarchy.behind():
        step()


def phases(name: str, chunks: int) -> Iterator[Phase]:
    """A million found, looked up, forgotten, and stored anew."""
    gc.collect()
    gc.freeze()
    hierarchy = build(POLICIES[name], chunks)
    loop = Loop(hierarchy, chunks)
    stored = iter(range(0, chunks - chunks % _RUN, _RUN))

    def forget() -> None:
        loop.step(lambda: hierarchy.reset(Namespace("ee" * 16, shareable=False)))
        while hierarchy.behind():
            loop.step()

    def store() -> None:
        for first in stored:
            loop.step(lambda first=first: _store(hierarchy, first))

    for phase, work in {
        "adopt": lambda: take_in(hierarchy, chunks, loop.step),
        "known": lambda: [loop.step() for _ in range(min(_CALM_STEPS, chunks // _PROMPT))],
        "reset": forget,
    }.items():
        yield _watch(name, phase, loop, work)
    hierarchy.close()
    del hierarchy, loop
    # Or the next phase would be charged with freeing it.
    gc.collect()
    hierarchy = build(POLICIES[name], 0)
    loop = Loop(hierarchy, chunks)
    yield _watch(name, "insert", loop, store)
    hierarchy.close()
    gc.unfreeze()


def _watch(name: str, phase: str, loop: Loop, work: Callable[[], object]) -> Phase:
    collections = Collections()
    begun = time.perf_counter()
    loop.restart()
    work()
    seen = loop.read(name, phase, collections, time.perf_counter() - begun)
    collections.close()
    return seen


def _store(hierarchy: Hierarchy, first: int) -> None:
    run = Run(tuple(map(hash_of, range(first, first + _RUN))), 0, ALIGNMENT)
    taken = hierarchy.reserve("", [run])
    hierarchy.stored([key for key, _ in taken])


def memory(name: str, alone: float, chunks: int) -> Memory:
    """Bytes a chunk, all in all and of the policy."""
    total = _bytes(POLICIES[name], chunks)
    return Memory(name, round(total, 1), round(total - alone, 1))


def _bytes(policy: type[Policy], chunks: int) -> float:
    tracemalloc.start()
    hierarchy = build(policy, chunks)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    take_in(hierarchy, chunks, lambda: _tick_or_rest(hierarchy))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    hierarchy.close()
    return (after - before) / chunks


def _tick_or_rest(hierarchy: Hierarchy) -> None:
    """Leave the interpreter to the scan, which tracing makes slow."""
    if hierarchy.behind():
        hierarchy.tick()
    else:
        time.sleep(0.01)


def table(record: DirectoryRecord) -> Table:
    """For reading."""
    columns = ("policy", "phase", "lookup µs", "p99.9", "pause ms, CPU", "by the clock", "gc ms")
    shown = Table(*columns, title=f"{record.chunks:,} chunks")
    for p in record.phases:
        times = (p.lookup_us, p.lookup_p999_us, p.pause_cpu_ms, p.pause_wall_ms, p.collection_ms)
        shown.add_row(p.policy, p.phase, *map(str, times))
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory", description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["lru", "arc"])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was measured there")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    record = DirectoryRecord(describe("none", "none", 0, rest=0), options.chunks)
    begun = time.thread_time()
    gc.collect()
    record.bare_collection_ms = round((time.thread_time() - begun) * 1e3, 2)
    for event in _measure(options.policies, record):
        console.print(event)
        # A run is long: what it has measured outlives an interruption.
        if options.json:
            record.save(options.json)
    console.print(table(record))


def _measure(names: Sequence[str], record: DirectoryRecord) -> Iterator[Phase | Memory]:
    alone = 0.0
    for name in names:
        for phase in phases(name, record.chunks):
            record.phases.append(phase)
            yield phase
        alone = alone or _bytes(Nothing, record.chunks)
        record.memory.append(memory(name, alone, record.chunks))
        yield record.memory[-1]


if __name__ == "__main__":
    main()
