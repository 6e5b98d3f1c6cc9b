"""What goes on, by itself, while the engine takes no steps; and what does not."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from hierarchy_kit import CHUNK, DEADLINE, FIRST, DictTier, Stack, key, prefix, truth
from kvtiers.policies import PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import ChunkKey, ReadOutcome, WriteOutcome
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import State
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.idle import IdleThread
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind

SOON = 20.0
NEVER = float("inf")


class ShortLived(LruPolicy):
    """Chunks of the arena live no longer than a test wants."""

    dead: Sequence[bytes] = ()

    def expired(self, tier: str) -> Sequence[bytes]:
        return self.dead if tier == "cpu" else ()


class Scene:
    """A hierarchy with real threads, and an engine that does one thing and then idles."""

    def __init__(self, tier: DictTier, slots: int = 16, policy: type[LruPolicy] = LruPolicy):
        self.tier = tier
        self.cpu = CpuTier(CpuTier.Config(capacity=slots * CHUNK), CHUNK)
        make = lambda infos, clock: policy(infos, clock=clock)  # noqa: E731 - a factory
        self.h = Hierarchy(self.cpu, {"disk": tier}, make, FIRST)

    def store(self, run: Run) -> None:
        for k, slot in self.h.reserve("engine", [run]):
            self.cpu.arena.slot(slot)[:] = truth(k)
        self.h.stored([k for k in run.chunks if isinstance(k, bytes)])

    @property
    def thread(self) -> IdleThread:
        assert self.h._idle is not None
        return self.h._idle


@pytest.fixture
def make() -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make_scene(*args: object, **kwargs: object) -> Scene:
        scenes.append(Scene(*args, **kwargs))  # type: ignore[arg-type]
        return scenes[-1]

    yield make_scene
    for scene in scenes:
        scene.h.close(0.0)


def wait_for(there: Callable[[], bool]) -> None:
    """Without any call that would step the hierarchy."""
    pause = threading.Event()
    for _ in range(int(SOON * 1000)):
        if there():
            return
        pause.wait(0.001)
    raise AssertionError("it did not come to that")


# By itself ------------------------------------------------------------------


def test_a_backlog_larger_than_the_budget_is_stored_while_the_engine_idles(
    make: Callable[..., Scene],
) -> None:
    scene = make(DictTier())
    run = prefix("p", 12)
    scene.store(run)
    wait_for(lambda: len(scene.tier.chunks) == 12)
    assert [k.hash for k in scene.tier.chunks] == list(run.chunks)
    wait_for(lambda: scene.h.pinned() == 0)


def test_what_the_policy_wants_dropped_goes_while_the_engine_idles(
    make: Callable[..., Scene],
) -> None:
    scene = make(DictTier(), policy=ShortLived)
    run = prefix("p", 3)
    scene.store(run)
    policy = scene.h.policy
    assert isinstance(policy, ShortLived)
    policy.dead = [k for k in run.chunks if isinstance(k, bytes)]
    wait_for(lambda: scene.cpu.usage().chunks == 0)


class Silent(DictTier):
    """Reads and lookups do not return before ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__(deadline=0.2)
        self.gate = threading.Event()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        assert self.gate.wait(SOON)
        return super().contains(keys)


def test_what_is_overdue_is_noticed_while_the_engine_idles(make: Callable[..., Scene]) -> None:
    scene = make(Silent())
    scene.h.begin(PolicyRequest("r", [prefix("p", 2)]))
    (tier,) = scene.h._lower
    wait_for(lambda: tier.counts["timeouts"] == 1)
    scene.tier.gate.set()  # type: ignore[attr-defined]
    wait_for(scene.h.idle)


class Broken(DictTier):
    """Lookups raise until the test repairs it."""

    broken = True

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        answers = super().contains(keys)
        if self.broken:
            raise OSError("the test says so")
        return answers


def test_a_tier_that_is_left_alone_is_back_before_the_next_request(
    make: Callable[..., Scene],
) -> None:
    tier = Broken()
    scene = make(tier)
    (lower,) = scene.h._lower
    for number in range(5):
        scene.h.begin(PolicyRequest(f"r{number}", [prefix(f"p{number}", 1)]))
        wait_for(lambda: not lower.ops and not scene.h._inbox.ops)
    assert lower.breaker.state is BreakerState.OPEN
    tier.broken = False
    wait_for(lambda: lower.breaker.state is BreakerState.CLOSED)


def test_a_scan_is_taken_in_while_the_engine_idles(make: Callable[..., Scene]) -> None:
    tier = DictTier()
    tier.put(prefix("p", 3000))
    scene = make(tier)
    wait_for(lambda: len(scene.h._residency.directory) == 3000)


# Nothing to do --------------------------------------------------------------


def test_with_nothing_due_it_sleeps_without_a_time_out(make: Callable[..., Scene]) -> None:
    scene = make(DictTier())
    scene.store(prefix("p", 12))
    wait_for(lambda: scene.thread.asleep and len(scene.tier.chunks) == 12 and scene.h.idle())
    assert scene.h.due() == NEVER
    turns = scene.thread.turns
    # A turn would come after one of these, were one due.
    for _ in range(3):
        scene.h.stats()
        scene.h.lookup("nobody", key("x"))
    assert scene.thread.asleep
    assert scene.thread.turns == turns


def settled(**kwargs: object) -> Stack:
    """By the clock of the test, and so without a thread."""
    stack = Stack(8, {"disk": DictTier()}, **kwargs)  # type: ignore[arg-type]
    stack.settle()
    return stack


def test_chunks_that_lie_where_they_belong_make_nothing_due() -> None:
    stack = settled()
    assert stack.h.due() == NEVER
    stack.store(prefix("p", 4))
    assert stack.h.due() == NEVER, "stores have no deadline: their end wakes the thread"
    stack.settle()
    assert stack.h.due() == NEVER
    stack.h.reset(FIRST)
    stack.h.flushed()
    stack.settle()
    stack.clock.now += 1.0
    stack.settle()
    assert stack.h.due() == NEVER


def test_an_answer_is_due_at_once_and_a_lookup_without_one_at_its_deadline() -> None:
    stack = settled()
    stack.begin("r", prefix("p", 2))
    assert stack.h.due() == stack.clock.now + DEADLINE
    stack.workers["disk"].run()
    assert stack.h.due() < stack.clock.now


def test_a_tier_that_is_left_alone_is_due_for_a_probe() -> None:
    stack = settled(away={"disk": "nobody answers"})
    assert stack.h.due() == stack.clock.now + 1.0
    stack.clock.now += 1.0
    stack.h.tick()
    assert stack.h.due() == stack.clock.now + DEADLINE, "and the probe for its end"


def test_what_is_held_for_a_request_is_due_when_it_has_waited_long_enough() -> None:
    stack = settled()
    run = prefix("p", 2)
    stack.store(run.head(1))
    tier = stack.tiers["disk"]
    assert isinstance(tier, DictTier)
    tier.put(run)
    stack.begin("r", run)
    stack.workers["disk"].run(OpKind.WRITE, OpKind.CONTAINS)
    stack.h.tick()
    assert stack.h.pinned() == 2
    stack.clock.now += 1.0
    stack.workers["disk"].run(OpKind.READ)
    stack.h.tick()
    assert stack.h.due() == min(r.hold_until for r in stack.h._requests.values())


def test_a_policy_that_lets_chunks_expire_is_asked_once_a_second_and_only_with_chunks() -> None:
    stack = Stack(8, policy=ShortLived)
    stack.h.tick()
    assert stack.h.due() == NEVER
    stack.store(prefix("p", 1))
    stack.h.tick()
    assert stack.h.due() == stack.clock.now + 1.0


def test_an_engine_at_work_is_left_alone() -> None:
    """The thread does not even ask for the lock while the engine has just been seen."""
    stack = Stack(8, {"disk": DictTier()})
    stack.settle()
    assert stack.h._rest() > 0
    stack.clock.now += 1.0
    assert stack.h._rest() <= 0
    stack.h.lookup("r", key("x"))
    stack.clock.now += 1.0
    assert stack.h._rest() > 0, "what it was told holds until its tick"
    stack.h.tick()
    stack.clock.now += 1.0
    assert stack.h._rest() <= 0


def test_a_hit_is_not_evicted_between_the_look_and_the_load() -> None:
    held, other = prefix("p", 4), prefix("q", 4)
    tier = DictTier()
    tier.put(other)
    stack = Stack(4, {"disk": tier})
    stack.store(held)
    stack.workers["disk"].run(OpKind.WRITE)
    stack.begin("r", held)
    stack.h.tick()
    stack.begin("other", other)
    stack.clock.now += 1.0
    assert stack.look("r", held) == [Lookup.HIT] * 4
    stack.workers["disk"].run(OpKind.CONTAINS)
    stack.h._turn()
    assert stack.workers["disk"].of(OpKind.READ) == [], "the others' room would be its own"
    assert -1 not in stack.load("r", held)


def test_whoever_calls_the_hierarchy_owns_it_meanwhile() -> None:
    """Each public method takes the lock: one that did not would meet the thread half-way."""
    public = {name: m for name, m in vars(Hierarchy).items() if not name.startswith("_")}
    unlocked = {n for n, m in public.items() if callable(m) and not hasattr(m, "__wrapped__")}
    # ``memory`` and ``shared_tier`` look at nothing that changes, and ``close`` first ends the
    # thread, which waits for the lock.
    assert unlocked == {"memory", "shared_tier", "close"}


def test_close_ends_the_thread(make: Callable[..., Scene]) -> None:
    scene = make(DictTier())
    thread = scene.thread._thread
    scene.h.close(0.0)
    assert not thread.is_alive()


def test_a_policy_that_raises_ends_the_thread_and_not_the_engine(
    make: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(LruPolicy):
        def expired(self, tier: str) -> Sequence[bytes]:
            raise ZeroDivisionError

    scene = make(DictTier(), policy=Raising)
    scene.store(prefix("p", 1))
    wait_for(lambda: not scene.thread._thread.is_alive())
    assert "while the engine idles" in caplog.text


# Real threads and chance ----------------------------------------------------


class Chancy(DictTier):
    """Fails a little, and loses chunks."""

    def __init__(self, seed: int) -> None:
        super().__init__(24 * CHUNK, deadline=0.5)
        self._chance = random.Random(seed)
        self._lock = threading.Lock()

    def _read(self, chunk_key: ChunkKey, buffer: memoryview) -> ReadOutcome:
        with self._lock:
            if self._chance.random() < 0.05:
                buffer[: CHUNK // 2] = b"\xff" * (CHUNK // 2)
                return ReadOutcome.FAILED
            return super()._read(chunk_key, buffer)

    def _write(self, chunk_key: ChunkKey, buffer: memoryview) -> WriteOutcome:
        with self._lock:
            if self._chance.random() < 0.05:
                return WriteOutcome.FAILED
            return super()._write(chunk_key, buffer)

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        with self._lock:
            return super().remove(keys)


class AtAnyMoment(Hierarchy):
    """The engine counts as idle between any two steps, and the thread hardly rests."""

    def _rest(self) -> float:
        return 1e-4 if self._in_step else 0.0


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads give way to each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("seed", range(4))
def test_turns_at_any_moment_break_nothing(seed: int) -> None:
    """An engine that stores, looks, loads and aborts, while the thread ticks between its calls.

    Each load must find the bytes of its chunks, whatever happened meanwhile, and in the
    end nothing may be left pinned.
    """
    chance = random.Random(seed)
    cpu = CpuTier(CpuTier.Config(capacity=10 * CHUNK), CHUNK)
    h = AtAnyMoment(cpu, {"disk": Chancy(seed)}, lambda i, c: LruPolicy(i, clock=c), FIRST)
    assert h._idle is not None
    loads = number = 0
    while loads < 200 or h._idle.turns < 200:
        number += 1
        assert number < 20_000, "the engine found nothing, or the thread took no part in it"
        run = prefix(chance.choice("abcdef"), chance.randint(1, 4))
        name = f"r{number}"
        h.begin(PolicyRequest(name, [run]))
        for _ in range(chance.randint(1, 4)):
            loads += load(h, cpu, name, run)
            if chance.random() < 0.9:
                h.tick()
        if chance.random() < 0.5:
            store(h, cpu, name, run)
        h.end(name)
    h.tick()
    wait_for(lambda: h.idle() and h.pinned() == 0)
    for chunk in list(h._residency.directory):
        if chunk.state is State.READY:
            assert bytes(cpu.arena.slot(chunk.slot)) == truth(chunk.key)
    h.close(SOON)


def load(h: Hierarchy, cpu: CpuTier, name: str, run: Run) -> int:
    """One look of the engine: it loads the leading hits, if nothing of them is pending."""
    keys = [k for k in run.chunks if isinstance(k, bytes)]
    hits = list(itertools.takewhile(lambda k: h.lookup(name, k) is Lookup.HIT, keys))
    slots = h.load(name, hits)
    assert -1 not in slots, "a chunk that was a hit in this step can't be loaded"
    for k, slot in zip(hits, slots, strict=True):
        assert bytes(cpu.arena.slot(slot)) == truth(k)
    h.admitted(name, {})
    h.loaded(name)
    return len(hits)


def store(h: Hierarchy, cpu: CpuTier, name: str, run: Run) -> None:
    taken = h.reserve(name, [run])
    for k, slot in taken:
        cpu.arena.slot(slot)[:] = truth(k)
    h.stored([k for k, _ in taken])
