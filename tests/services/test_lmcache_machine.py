"""LMCache's batches against a model of LMCache and of tiers that fail, stall and lie.

LMCache's calls, the tiers' answers and time are rules of one state machine, so
hypothesis looks for an order of them that loses a batch, answers it twice, hands out
wrong bytes, or touches LMCache's memory when it may not.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import hierarchy_kit as kit
import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvtiers.connector.lmcache_jobs import Job, JobKind, Jobs
from kvtiers.connector.lmcache_pieces import Bytes, StoredObject
from kvtiers.tiers import ReadOutcome, WriteOutcome
from kvtiers.tiers.workers import OpKind

EXAMPLES = int(os.environ.get("KVTIERS_MACHINE_EXAMPLES", "60"))
STEPS = int(os.environ.get("KVTIERS_MACHINE_STEPS", "60"))

SLOTS = 16
CAPACITY = 24 * kit.CHUNK
PROMPT = 4
UNTOUCHED = 0xEE
TIERS = ("near", "far")
# One piece, with its length in it or not, and several.
SIZES = (1, kit.CHUNK - 8, kit.CHUNK - 7, 2 * kit.CHUNK, 3 * kit.CHUNK + 5)
NAMES = st.sampled_from([(prompt, i) for prompt in "abc" for i in range(PROMPT)])
BATCHES = st.lists(NAMES, min_size=1, max_size=6, unique=True)


def key(prompt: str, index: int) -> str:
    """What LMCache calls the object of a prompt."""
    digest = hashlib.sha256(f"{prompt}{index}".encode()).hexdigest()
    return f"model-{prompt}@00000001@0@{digest}"


def size_of(prompt: str, layout: int) -> int:
    """All objects of a model have one size; another layout has another."""
    return SIZES[("abc".index(prompt) + layout) % len(SIZES)]


def truth(name: tuple[str, int], nbytes: int) -> Bytes:
    """The only right content of an object of that size."""
    data = hashlib.shake_128(f"{name}{nbytes}".encode()).digest(nbytes)
    return np.frombuffer(data, np.uint8)


@dataclass
class Batch:
    """What the model of LMCache knows of a batch."""

    job: Job
    names: list[tuple[str, int]]


class LmcacheMachine(RuleBasedStateMachine):
    @initialize(bounded=st.booleans())
    def build(self, bounded: bool) -> None:
        capacity = CAPACITY if bounded else None
        self.tiers = {name: kit.DictTier(capacity) for name in TIERS}
        self.stack = kit.Stack(SLOTS, self.tiers)
        self.jobs = Jobs(self.stack.h, SLOTS, self.stack.clock, kit.DEADLINE)
        self.under_way: dict[Job, Batch] = {}
        self.ended: list[Batch] = []
        self.serial = 0
        # Of every object that a store named: another one can't be found.
        self.offered: set[str] = set()
        self.layout = 0

    # LMCache ------------------------------------------------------------------

    def submit(self, kind: JobKind, names: list[tuple[str, int]], buffers: list[Bytes]) -> None:
        self.serial += 1
        job = Job(self.serial, kind, [key(*name) for name in names], buffers)
        self.under_way[job] = Batch(job, names)
        self.jobs.add(job)

    @rule(prompt=st.sampled_from("abc"), n=st.integers(1, PROMPT))
    def look_up(self, prompt: str, n: int) -> None:
        self.submit(JobKind.EXISTS, [(prompt, i) for i in range(n)], [])

    @rule(names=BATCHES)
    def store(self, names: list[tuple[str, int]]) -> None:
        self.offered.update(key(*name) for name in names)
        sources = [truth(name, size_of(name[0], self.layout)).copy() for name in names]
        self.submit(JobKind.SET, names, sources)

    @rule(names=BATCHES)
    def load(self, names: list[tuple[str, int]]) -> None:
        sizes = [size_of(prompt, self.layout) for prompt, _ in names]
        targets = [np.full(nbytes, UNTOUCHED, np.uint8) for nbytes in sizes]
        self.submit(JobKind.GET, names, targets)

    @rule(names=BATCHES)
    def delete(self, names: list[tuple[str, int]]) -> None:
        self.submit(JobKind.DELETE, names, [])

    @rule(layout=st.integers(0, 1))
    def another_engine(self, layout: int) -> None:
        """Of the same model's name, with objects of another size."""
        self.layout = layout

    @rule()
    def step(self) -> None:
        for job in self.jobs.step():
            batch = self.under_way.pop(job)
            assert not job.open
            self.check(batch)
            self.ended.append(batch)

    def check(self, batch: Batch) -> None:
        job = batch.job
        assert all(answer is not None for answer in job.answers)
        if job.kind is JobKind.GET:
            for name, answer, target in zip(batch.names, job.answers, job.buffers, strict=True):
                wanted = truth(name, len(target))
                assert np.array_equal(target, wanted) if answer else (target == UNTOUCHED).all()
        if job.kind in (JobKind.GET, JobKind.EXISTS, JobKind.DELETE):
            found = {k for k, answer in zip(job.keys, job.answers, strict=True) if answer}
            assert found <= self.offered
        # From now on the memory is LMCache's again.
        for buffer in job.buffers:
            buffer[:] = UNTOUCHED

    # The tiers ----------------------------------------------------------------

    @rule()
    def all_goes_well(self) -> None:
        """For a while: most days are like that, and faults are met with full tiers."""
        for _ in range(6):
            for workers in self.stack.workers.values():
                workers.run()
            self.step()

    @rule(tier=st.sampled_from(TIERS))
    def tier_works(self, tier: str) -> None:
        self.stack.workers[tier].run()

    @rule(tier=st.sampled_from(TIERS))
    def tier_begins(self, tier: str) -> None:
        workers = self.stack.workers[tier]
        if workers.queued:
            workers.begin(workers.queued[0])

    @rule(tier=st.sampled_from(TIERS))
    def tier_raises(self, tier: str) -> None:
        workers = self.stack.workers[tier]
        for op in (workers.running + workers.queued)[:1]:
            if op.kind is not OpKind.SCAN:
                workers.end_failed(op)

    @rule(
        tier=st.sampled_from(TIERS),
        outcome=st.sampled_from([ReadOutcome.MISS, ReadOutcome.CORRUPT, ReadOutcome.FAILED]),
    )
    def read_ends(self, tier: str, outcome: ReadOutcome) -> None:
        workers = self.stack.workers[tier]
        for op in workers.of(OpKind.READ)[:1]:
            if outcome is not ReadOutcome.FAILED:
                self.tiers[tier].remove(op.keys)
            workers.end_reads(op, outcome)

    @rule(
        tier=st.sampled_from(TIERS),
        outcome=st.sampled_from([WriteOutcome.FAILED, WriteOutcome.REFUSED]),
    )
    def write_ends(self, tier: str, outcome: WriteOutcome) -> None:
        workers = self.stack.workers[tier]
        for op in workers.of(OpKind.WRITE)[:1]:
            workers.end_writes(op, outcome)

    @rule(seconds=st.sampled_from([0.1, 1.0, kit.DEADLINE + 1]))
    def time_passes(self, seconds: float) -> None:
        self.stack.clock.now += seconds

    # What must hold -----------------------------------------------------------

    @invariant()
    def memory_of_ended_batches_is_left_alone(self) -> None:
        for batch in getattr(self, "ended", []):
            assert all((buffer == UNTOUCHED).all() for buffer in batch.job.buffers)

    @invariant()
    def sources_are_not_written(self) -> None:
        for batch in getattr(self, "under_way", {}).values():
            if batch.job.kind is JobKind.SET:
                for name, source in zip(batch.names, batch.job.buffers, strict=True):
                    assert np.array_equal(source, truth(name, len(source)))

    def teardown(self) -> None:
        """Whatever the tiers did, and even if they hang for ever, every batch ends."""
        if not hasattr(self, "jobs"):
            return
        for _ in range(4 * (len(self.under_way) + 2)):
            self.stack.clock.now += kit.DEADLINE + 1
            self.step()
        assert not self.under_way
        assert not self.jobs.busy
        for workers in self.stack.workers.values():
            workers.run()
        self.stack.settle()
        self.step()
        assert self.stack.h.pinned() == 0


LmcacheMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_batches = LmcacheMachine.TestCase


def test_a_batch_that_ended_at_its_deadline_is_not_written_by_what_lands_later() -> None:
    """Its first object was still being read when the last one's turn came too late."""
    far = kit.DictTier()
    stack = kit.Stack(SLOTS, {"far": far})
    workers = stack.workers["far"]
    jobs = Jobs(stack.h, SLOTS, stack.clock, kit.DEADLINE)
    size = 3 * kit.CHUNK - 8
    names = [("a", i) for i in range(5)]
    sources = [truth(name, size).copy() for name in names]
    jobs.add(Job(1, JobKind.SET, [key(*name) for name in names], sources))
    while jobs.busy:
        jobs.step()
        workers.run()
    stack.h.spoil(range(SLOTS))

    def load(number: int, wanted: list[tuple[str, int]]) -> Job:
        targets = [np.full(size, UNTOUCHED, np.uint8) for _ in wanted]
        job = Job(number, JobKind.GET, [key(*name) for name in wanted], targets)
        jobs.add(job)
        return job

    load(2, names[:2])
    jobs.step()
    late = load(3, names[2:])
    stack.clock.now += 3
    workers.run(OpKind.READ)
    jobs.step()
    first = set(StoredObject.of(late.keys[0], size, kit.CHUNK).pieces)
    reads = workers.of(OpKind.READ)
    still_read = [op for op in reads if first & {k.hash for k in op.keys}]
    for op in set(reads) - set(still_read):
        workers.end_reads(op, ReadOutcome.MISS)
    stack.clock.now += 2.1
    assert late in jobs.step()
    assert late.answers == [False] * 3
    for op in still_read:
        workers.end(op)
    jobs.step()
    assert all((target == UNTOUCHED).all() for target in late.buffers)
