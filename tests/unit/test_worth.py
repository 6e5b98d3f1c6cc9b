"""Load or recompute: what is decided, one scene a test, and how long a request then takes.

Time is simulated: a tier's calls take what the test says, on as many threads as the tier
has, and an engine that steps every millisecond asks, loads and computes.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hierarchy_kit import CHUNK, DEADLINE, DictTier, ManualWorkers, Stack, prefix
from hypothesis import example, given, settings
from kvtiers.policies import Run
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import Op, OpKind
from kvtiers.tiers.worth import Worth

STEP = 0.001
THREADS = 2
SLOTS = 64
HIT, MISS = Lookup.HIT, Lookup.MISS


class Computer:
    """The engine's speed: what it is, and what is believed of it.

    A chunk costs ``chunk`` seconds, and ``growth`` more for each that stands before it.
    """

    def __init__(self, chunk: float = 0.1, growth: float = 0.0, error: float = 1.0) -> None:
        self.chunk, self.growth, self.error = chunk, growth, error
        self.known = True
        self.under_way = 0.0

    def truth(self, start: int, n: int) -> float:
        return n * (self.chunk + self.growth * (start + n / 2))

    def seconds(self, run: Run) -> float | None:
        return self.error * self.truth(run.start, len(run)) if self.known else None

    def busy(self) -> float:
        return self.under_way


class Sim:
    """One request at a time, over tiers whose calls take time."""

    def __init__(self, computer: Computer, **tiers: tuple[float, float]) -> None:
        """``tiers``: seconds a call, and seconds a chunk, of each."""
        self.computer = computer
        self.costs = dict(tiers)
        self.tiers: dict[str, DictTier] = {name: DictTier() for name in tiers}
        self.stack = Stack(SLOTS, self.tiers, prefill=computer)
        self.h = self.stack.h
        self.serial = 0
        self.settle()

    def settle(self) -> None:
        """Let whatever is under way end."""
        self.h.tick()
        while not self.h.idle() or self.h.behind():
            self.pass_time(0.05)
            self.h.tick()

    # Time -------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Ops begin and end in their time; nobody looks at them meanwhile."""
        end = self.stack.clock.now + seconds
        while self._next_event(end):
            pass
        self.stack.clock.now = end

    def _next_event(self, end: float) -> bool:
        ending: list[tuple[float, int, ManualWorkers, Op]] = []
        for name, workers in self.stack.workers.items():
            scans = [op for op in workers.queued if op.kind is OpKind.SCAN]
            for op in scans:
                workers.end(op)
            while workers.queued and len(workers.running) < THREADS:
                workers.begin(workers.queued[0])
            for index, op in enumerate(workers.running):
                ending.append((op.began + self._cost(name, op), index, workers, op))
        if not ending:
            return False
        now, _, workers, op = min(ending, key=lambda event: event[:2])
        if now > end:
            return False
        self.stack.clock.now = max(self.stack.clock.now, now)
        workers.end(op)
        return True

    def _cost(self, name: str, op: Op) -> float:
        call, chunk = self.costs[name]
        return call + (len(op.keys) * chunk if op.kind is OpKind.READ else 0.0)

    # An engine --------------------------------------------------------------

    def known(self, **runs: Run) -> None:
        """Tiers hold these, and that was found out before."""
        for name, run in runs.items():
            self.tiers[name].put(run)
        for run in runs.values():
            self.stack.begin("before", run)
            self.h.end("before")
        self.settle()
        self.drop_arena()

    def drop_arena(self) -> None:
        self.h.spoil(range(SLOTS))

    def measure(self, *names: str) -> None:
        """Each tier has read a little, so that its speed is known."""
        for name in names:
            for n in range(2):
                run = prefix(f"measured {name} {n}", 4)
                self.tiers[name].put(run)
                self.computer.known = False
                self.stack.begin("measure", run)
                self.settle()
                self.h.end("measure")
                self.computer.known = True
                self.drop_arena()
        for name in names:
            tier = self.h._residency.named(name)
            assert tier is not None
            assert tier.reads.known

    def begin(self, run: Run) -> str:
        self.serial += 1
        name = f"r{self.serial}"
        self.stack.begin(name, run)
        return name

    def loadable(self, name: str, run: Run) -> int | None:
        """One look of the engine: leading hits, None if it is to ask again."""
        if self.h.waits(name):
            return None
        answers = self.stack.look(name, run)
        leading = answers[: answers.index(MISS)] if MISS in answers else answers
        return len(leading) if set(leading) <= {HIT} else None

    def ask(self, run: Run) -> tuple[int, float]:
        """Chunks that were loaded, and seconds to the first token."""
        arrived = self.stack.clock.now
        name = self.begin(run)
        while (loaded := self.loadable(name, run)) is None:
            self.h.tick()
            self.pass_time(STEP)
        waited = self.stack.clock.now - arrived
        if loaded:
            assert -1 not in self.stack.h.load(name, [bytes(k) for k in run.chunks[:loaded]])  # type: ignore[arg-type]
        self.h.admitted(name, {})
        self.h.loaded(name)
        self.h.tick()
        computing = self.computer.truth(loaded, len(run) - loaded)
        self.pass_time(computing)
        self.h.end(name)
        self.h.tick()
        return loaded, waited + computing

    def recomputed(self, tier: str) -> int:
        return self.stack.counts()[tier].get("recomputed", 0)


RUN = prefix("p", 16)
QUICK, SLOW = (0.001, 0.001), (0.1, 0.5)


def sim_with(computer: Computer | None = None, **costs: tuple[float, float]) -> Sim:
    """Every tier holds ``RUN`` and has been measured."""
    sim = Sim(computer or Computer(), **costs)
    sim.measure(*costs)
    sim.known(**dict.fromkeys(costs, RUN))
    sim.stack.counts()
    return sim


# What is decided ------------------------------------------------------------


def test_what_is_loaded_sooner_than_computed_is_loaded() -> None:
    sim = sim_with(disk=QUICK)
    assert sim.ask(RUN)[0] == 16
    assert sim.recomputed("disk") == 0


def test_what_is_computed_sooner_than_loaded_is_computed_at_once_and_counted() -> None:
    sim = sim_with(disk=SLOW)
    loaded, seconds = sim.ask(RUN)
    assert loaded == 0
    assert seconds <= 16 * 0.1 + 2 * STEP
    assert sim.recomputed("disk") == 16


def test_a_long_prefix_is_worth_a_load_that_a_short_one_is_not() -> None:
    """Latency, and attention over what stands before: both favour loads of much."""
    sim = sim_with(Computer(0.01, growth=0.01), disk=(0.1, 0.05))
    assert sim.ask(RUN.head(2))[0] == 0
    sim.drop_arena()
    assert sim.ask(RUN)[0] == 16


def test_what_has_landed_is_loaded_however_slow_the_rest() -> None:
    sim = sim_with(disk=SLOW)
    sim.stack.store(RUN.head(4))
    assert sim.ask(RUN)[0] == 4
    assert sim.recomputed("disk") == 12


def test_what_has_landed_is_not_what_is_weighed() -> None:
    """A call of a second is worth its while for 16 chunks, and not for the last four."""
    sim = sim_with(disk=(1.0, 0.02))
    for n in (1, 2, 4, 8, 1, 2, 4, 8, 1):
        sim.h._lower[0].reads.observe(n * CHUNK, 1.0 + n * 0.02)
    assert sim.ask(RUN)[0] == 16
    sim.drop_arena()
    sim.stack.store(RUN.head(12))
    assert sim.ask(RUN)[0] == 12


def test_while_others_compute_what_they_gave_up_a_load_costs_nothing() -> None:
    sim = sim_with(disk=(0.0, 0.3))
    other = prefix("other", 16)
    sim.known(disk=other)
    first = sim.begin(RUN)
    assert sim.loadable(first, RUN) == 0, "2.4 s to load, 1.6 to compute"
    second = sim.begin(other)
    assert sim.loadable(second, other) is None, "3.2 s to compute, behind the other"
    sim.h.end(second)
    sim.h.end(first)
    third = sim.begin(other)
    assert sim.loadable(third, other) == 0, "nobody computes any more"


def test_a_head_is_loaded_where_only_its_tail_lies_in_a_slow_tier() -> None:
    sim = Sim(Computer(), near=QUICK, far=SLOW)
    sim.measure("near", "far")
    sim.known(near=RUN.head(8), far=RUN)
    sim.stack.counts()
    assert sim.ask(RUN)[0] == 8
    counts = sim.stack.counts()
    assert ("recomputed" in counts["near"], counts["far"]["recomputed"]) == (False, 8)


def test_a_tail_is_not_loaded_behind_a_head_that_is_computed() -> None:
    sim = Sim(Computer(), near=QUICK, far=SLOW)
    sim.measure("near", "far")
    sim.known(near=RUN.tail(8), far=RUN.head(8))
    sim.stack.counts()
    assert sim.ask(RUN)[0] == 0


def test_loads_that_are_under_way_count() -> None:
    """A tier that is quick enough for one prompt is not for the tenth in a row."""
    sim = sim_with(disk=(0.0, 0.15))
    runs = [prefix(f"q{i}", 16) for i in range(2)]
    for run in runs:
        sim.known(disk=run)
    names = [sim.begin(run) for run in runs]
    assert [sim.loadable(*asked) for asked in zip(names, runs, strict=True)] == [None] * 2
    sim.h.tick()
    reads = sim.stack.workers["disk"].of(OpKind.READ)
    assert {k.hash for op in reads for k in op.keys} == set(runs[0].chunks), "the first is read"


def test_while_the_engine_is_busy_a_load_costs_nothing() -> None:
    sim = sim_with(disk=(0.0, 0.3))
    assert sim.ask(RUN)[0] == 0
    sim.drop_arena()
    sim.computer.under_way = 10.0
    assert sim.ask(RUN)[0] == 16


def test_before_its_turn_a_prompt_is_fetched_unless_that_is_hopeless() -> None:
    sim = sim_with(disk=(0.0, 0.15))
    disk = sim.stack.workers["disk"]
    sim.begin(RUN)
    sim.h.tick()
    assert disk.of(OpKind.READ), "1.2 s to load, 1.6 s to compute"
    hopeless = sim_with(disk=(0.0, 0.5))
    name = hopeless.begin(RUN)
    hopeless.h.tick()
    assert not hopeless.stack.workers["disk"].of(OpKind.READ), "4 s to load"
    hopeless.costs["disk"] = QUICK
    hopeless.measure("disk")
    hopeless.measure("disk")
    assert hopeless.loadable(name, RUN) is None, "worth it by the time of its turn"
    hopeless.h.tick()
    assert hopeless.stack.workers["disk"].of(OpKind.READ)


def test_who_waits_in_the_queue_has_the_time_of_those_before_it() -> None:
    sim = sim_with(disk=(0.0, 0.3))
    for i in range(2):
        sim.begin(prefix(f"unknown{i}", 16))
    sim.settle()
    sim.begin(RUN)
    sim.h.tick()
    assert sim.stack.workers["disk"].of(OpKind.READ), "2.4 s to load, 4.8 s to compute all"


def test_lookups_slower_than_computing_are_not_waited_for() -> None:
    sim = Sim(Computer(0.01), disk=(1.0, 0.001))
    sim.measure("disk")
    disk = sim.h._residency.named("disk")
    assert disk is not None
    assert disk.lookups.known or disk.lookups.observe(1, 1.0) is None
    for _ in range(3):
        disk.lookups.observe(1, 1.0)
    unknown = prefix("unknown", 16)
    sim.tiers["disk"].put(unknown)
    assert sim.ask(unknown) == (0, pytest.approx(0.16, abs=3 * STEP))
    sim.settle()
    first = unknown.chunks[0]
    assert isinstance(first, bytes)
    assert sim.h.holds(first), "the answer is of use to others"


def test_hybrids_load_all_groups_or_none() -> None:
    sim = sim_with(disk=SLOW)
    runs = (prefix("h", 8), prefix("h", 8, group=1))
    for run in runs:
        sim.known(disk=run)
    sim.stack.counts()
    sim.stack.begin("hybrid", *runs, windowed=frozenset({1}))
    assert not sim.h.waits("hybrid")
    sim.stack.look("hybrid", runs[0])
    sim.stack.look("hybrid", runs[1].tail(6))
    sim.h.tick()
    assert not sim.h.waits("hybrid")
    assert sim.stack.look("hybrid", runs[0]) == [MISS] * 8
    assert sim.stack.look("hybrid", runs[1].tail(6)) == [MISS] * 2
    assert sim.recomputed("disk") == 10


def test_hybrids_load_from_a_quick_tier() -> None:
    sim = sim_with(disk=QUICK)
    runs = (prefix("h", 8), prefix("h", 8, group=1))
    for run in runs:
        sim.known(disk=run)
    sim.stack.begin("hybrid", *runs, windowed=frozenset({1}))
    assert not sim.h.waits("hybrid")
    sim.stack.look("hybrid", runs[0])
    sim.stack.look("hybrid", runs[1].tail(6))
    sim.settle()
    assert sim.stack.look("hybrid", runs[0]) == [HIT] * 8
    assert sim.stack.look("hybrid", runs[1].tail(6)) == [HIT] * 2


def test_an_answer_that_nobody_waits_for_starts_no_read() -> None:
    sim = Sim(Computer(0.01), disk=(1.0, 0.001))
    sim.measure("disk")
    for _ in range(3):
        sim.h._lower[0].lookups.observe(1, 1.0)
    unknown = prefix("unknown", 16)
    sim.tiers["disk"].put(unknown)
    name = sim.begin(unknown)
    assert sim.loadable(name, unknown) == 0
    sim.h.admitted(name, {})
    reads = sim.stack.workers["disk"].count(OpKind.READ)
    sim.settle()
    assert sim.stack.workers["disk"].count(OpKind.READ) == reads


def test_a_miss_says_nothing_of_how_fast_hits_are() -> None:
    sim = sim_with(disk=SLOW)
    gone = [prefix(f"gone{i}", 16) for i in range(5)]
    for run in gone:
        sim.known(disk=run)
    sim.tiers["disk"].chunks.clear()
    sim.costs["disk"] = QUICK
    sim.computer.known = False
    for run in gone:
        assert sim.ask(run)[0] == 0
    assert sim.h._lower[0].reads.seconds(CHUNK) > 0.1


def test_without_measurements_everything_is_loaded() -> None:
    sim = sim_with(disk=SLOW)
    sim.computer.known = False
    assert sim.ask(RUN)[0] == 16


def test_a_tier_that_was_never_read_from_is_waited_for_as_long_as_computing_takes() -> None:
    sim = Sim(Computer(), disk=(0.0, 0.5))
    sim.known(disk=RUN)
    tier = sim.h._residency.named("disk")
    assert tier is not None
    assert not tier.reads.known
    loaded, seconds = sim.ask(RUN)
    assert loaded < 16
    assert 1.6 < seconds <= 2 * 1.6 + 3 * STEP
    assert sim.recomputed("disk") == 16 - loaded


def test_after_one_request_nobody_waits_for_a_tier_that_hangs() -> None:
    sim = Sim(Computer(), disk=(1e6, 0.0))
    sim.tiers["disk"].put(RUN)
    for k in RUN.chunks:
        assert isinstance(k, bytes)
        sim.h._residency.now_in(sim.h._lower[0], [sim.h._residency.directory.ensure(k)])
    assert sim.ask(RUN)[1] == pytest.approx(3.2, abs=3 * STEP), "as long again as computing"
    other = prefix("other", 16)
    for k in other.chunks:
        assert isinstance(k, bytes)
        sim.h._residency.now_in(sim.h._lower[0], [sim.h._residency.directory.ensure(k)])
    assert sim.ask(other)[1] == pytest.approx(1.6, abs=3 * STEP)


def test_a_call_that_hangs_takes_its_thread_and_not_the_tier() -> None:
    sim = sim_with(disk=QUICK)
    disk = sim.stack.workers["disk"]
    stuck = prefix("stuck", 1)
    sim.known(disk=stuck)
    sim.begin(stuck)
    sim.h.tick()
    (op,) = disk.of(OpKind.READ)
    disk.begin(op)
    disk.running.remove(op)
    sim.stack.clock.now += 1.0
    assert sim.ask(RUN)[0] == 16, "1.6 s to compute, half a second on the other thread"


def test_a_load_is_weighed_again_when_a_read_was_late() -> None:
    """The first read of two says that the second one is not worth its while."""
    sim = sim_with(Computer(1.0), disk=QUICK)
    name = sim.begin(RUN)
    assert sim.loadable(name, RUN) is None
    sim.h.tick()
    first, second = sim.stack.workers["disk"].of(OpKind.READ)
    tier = sim.h._lower[0]
    for _ in range(9):
        tier.reads.observe(8 * CHUNK, 20.0)
    first.seconds = 50.0
    sim.stack.workers["disk"].begin(first)
    sim.stack.workers["disk"].end(first)
    assert sim.loadable(name, RUN) == 8, "no time has passed"
    assert second in tier.ops, "it lands for others"


# A tier that was too slow ----------------------------------------------------


def test_a_tier_that_became_quick_is_used_again_by_itself() -> None:
    sim = sim_with(disk=SLOW)
    assert sim.ask(RUN)[0] == 0
    sim.costs["disk"] = QUICK
    sim.pass_time(12.0)
    asked = 0
    while sim.ask(RUN)[0] < 16:
        sim.drop_arena()
        sim.pass_time(1.0)
        asked += 1
        assert asked <= 4, "it is left alone for ever"
    assert asked > 1, "not by one read"


def test_a_slow_tier_is_measured_at_a_bounded_rate() -> None:
    sim = sim_with(disk=SLOW)
    before = sim.stack.workers["disk"].count(OpKind.READ)
    for _ in range(100):
        assert sim.ask(RUN)[0] == 0
        sim.drop_arena()
    reads = sim.stack.workers["disk"].submitted
    measured = sum(len(op.keys) for op in reads if op.kind is OpKind.READ) - before
    # 100 prompts of 1.6 s; 0.6 s a chunk, for a tenth of the time.
    assert 0 < measured <= THREADS * (160 * 0.1 / 0.6 + 2)


def test_what_several_requests_compute_is_measured_once() -> None:
    """Found by stress: a chunk was read into as many slots, and all but one were lost."""
    sim = sim_with(disk=SLOW)
    sim.drop_arena()
    before = sim.stack.workers["disk"].count(OpKind.READ)
    run = RUN.head(1)
    for name in "ab":
        sim.stack.begin(name, run)
    for name in "ab":
        assert sim.stack.look(name, run) == [MISS]
    sim.settle()
    assert sim.stack.workers["disk"].count(OpKind.READ) == before + 1
    for name in "ab":
        sim.h.end(name)
    assert sim.stack.ready() == set(run.chunks)
    assert sim.stack.cpu.free_slots == SLOTS - 1


def test_what_a_thousand_wait_for_is_not_added_up_for_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by stress: two thousand prompts at once stopped the engine for five seconds."""
    looked_at = 0
    left = Worth._left

    def counted(self: Worth, tier: LowerTier, op: Op) -> float:
        nonlocal looked_at
        looked_at += 1
        return left(self, tier, op)

    monkeypatch.setattr(Worth, "_left", counted)

    def effort(waiting: int) -> int:
        sim = sim_with(Computer(chunk=10.0), disk=QUICK)
        for number in range(waiting):
            sim.stack.begin(f"r{number}", prefix(f"p{number}", 2))
        before = looked_at
        for number in range(waiting):
            assert sim.h.waits(f"r{number}")
        return looked_at - before

    assert 0 < effort(200) <= 5 * effort(50)


# How long a request takes -----------------------------------------------------

costs = st.tuples(
    st.floats(0.0, 1.0).map(lambda s: round(s, 3)),
    st.floats(0.0005, 1.0).map(lambda s: round(s, 4)),
)
chunks = st.integers(1, 24)


@settings(max_examples=40, deadline=None)
@given(costs, chunks, st.sampled_from([0.0, 0.01]))
@example((0.0, 0.2), 16, 0.0)
def test_once_measured_no_tier_is_slower_than_no_cache(
    cost: tuple[float, float], n: int, growth: float
) -> None:
    computer = Computer(0.1, growth)
    sim = Sim(computer, disk=cost)
    sim.measure("disk")
    run = prefix("p", n)
    sim.known(disk=run)
    _, seconds = sim.ask(run)
    assert seconds <= 1.02 * computer.truth(0, n) + 3 * STEP


@settings(max_examples=40, deadline=None)
@given(costs, costs, chunks, st.sampled_from([0.5, 1.0, 2.0]))
@example((0.0, 0.0005), (1.0, 1.0), 24, 1.0)
def test_whatever_is_believed_of_a_tier_it_costs_as_much_as_computing_at_most(
    believed: tuple[float, float], true: tuple[float, float], n: int, error: float
) -> None:
    """With the engine's speed known exactly twice as long; else as far off as that is."""
    computer = Computer(0.1, error=error)
    sim = Sim(computer, disk=believed)
    sim.measure("disk")
    run = prefix("p", n)
    sim.known(disk=run)
    sim.costs["disk"] = true
    _, seconds = sim.ask(run)
    assert seconds <= (1 + error) * computer.truth(0, n) + 3 * STEP


@settings(max_examples=40, deadline=None)
@given(costs, chunks, st.booleans())
def test_nothing_makes_a_request_wait_beyond_the_deadline(
    cost: tuple[float, float], n: int, known: bool
) -> None:
    computer = Computer(10.0)
    sim = Sim(computer, disk=cost)
    sim.known(disk=prefix("p", n))
    computer.known = known
    loaded, seconds = sim.ask(prefix("p", n))
    assert seconds - computer.truth(loaded, n - loaded) <= DEADLINE + 2 * STEP


@settings(max_examples=25, deadline=None)
@given(costs, st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_requests_that_wait_for_a_tier_that_hangs_do_not_give_up_all_at_once(
    cost: tuple[float, float], sizes: list[int]
) -> None:
    """The engine has something to compute from when the first one gives up."""
    computer = Computer(0.1)
    sim = Sim(computer, disk=(1e6, 0.0))
    runs = [prefix(f"p{i}", n) for i, n in enumerate(sizes)]
    for run in runs:
        sim.tiers["disk"].put(run)
    names = [sim.begin(run) for run in runs]
    assert all(sim.loadable(name, run) is None for name, run in zip(names, runs, strict=True))
    deadlines = [sim.h._requests[name].deadline or 0.0 for name in names]
    computed = sim.stack.clock.now
    for n, deadline in zip(sizes, deadlines, strict=True):
        computed += computer.truth(0, n)
        assert deadline == pytest.approx(computed)


def test_how_long_a_chunk_takes_is_told() -> None:
    sim = sim_with(disk=(0.0, 0.25))
    (stats,) = (s for s in sim.h.stats() if s.name == "disk")
    assert stats.read_seconds == 0.5, "calls of two; one may take as long"
