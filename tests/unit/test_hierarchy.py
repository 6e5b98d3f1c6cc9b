"""What the hierarchy does for an engine, one scene a test.

Time stands still unless a test moves it, and tiers answer when a test says so; the
tests at the end use real threads.
"""

from __future__ import annotations

import errno
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hierarchy_kit import (
    CHUNK,
    DEADLINE,
    FIRST,
    DemotingLru,
    DictTier,
    ManualWorkers,
    Stack,
    prefix,
    truth,
)
from kvtiers.policies import ChunkId, PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import ChunkKey, Namespace, ReadOutcome, TierConfig, WriteOutcome, fs
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind

HIT, MISS, PENDING, UNKNOWN = Lookup.HIT, Lookup.MISS, Lookup.PENDING, Lookup.UNKNOWN
SOON = 20.0


def stack_with(slots: int, *runs: Run, capacity: int | None = None, **kwargs: object) -> Stack:
    """An arena over one tier that holds ``runs``."""
    tier = DictTier(capacity)
    for run in runs:
        tier.put(run)
    return Stack(slots, {"disk": tier}, **kwargs)  # type: ignore[arg-type]


def prefixes(name: str, n: int) -> set[object]:
    """The only chunks of so many prompts."""
    return {prefix(f"{name}{i}", 1).chunks[0] for i in range(n)}


def true_bytes(stack: Stack, slots: Sequence[int], run: Run) -> bool:
    keys = [k for k in run.chunks if isinstance(k, bytes)]
    return [bytes(stack.cpu.arena.slot(s)) for s in slots] == [truth(k) for k in keys]


# The way up -----------------------------------------------------------------


def test_what_a_tier_holds_is_asked_for_once_promoted_and_loaded() -> None:
    run = prefix("p", 4)
    stack = stack_with(8, run)
    disk = stack.workers["disk"]
    stack.begin("r", run)
    assert stack.look("r", run) == [UNKNOWN] * 4
    disk.run(OpKind.CONTAINS)
    assert stack.look("r", run) == [PENDING] * 4
    stack.h.tick()
    disk.run(OpKind.READ)
    assert stack.look("r", run) == [HIT] * 4
    assert true_bytes(stack, stack.load("r", run), run)
    assert disk.count(OpKind.CONTAINS) == 1, "the whole request in one batch"


def test_the_tier_that_served_a_request_is_told_after_its_admission() -> None:
    run = prefix("p", 2)
    stack = stack_with(8, run)
    stack.begin("r", run)
    stack.settle()
    stack.load("r", run)
    first = run.chunks[0]
    assert isinstance(first, bytes)
    assert stack.h.source_of("r", first) is stack.tiers["disk"]
    stack.h.loaded("r")
    stack.h.end("r")
    stack.begin("later", run)
    stack.load("later", run)
    assert stack.h.source_of("later", first) is None, "the arena had it"


def test_a_request_waits_while_its_chunks_are_asked_for_and_read() -> None:
    run = prefix("p", 4)
    stack = stack_with(8, run)
    disk = stack.workers["disk"]
    stack.begin("r", run)
    assert stack.h.waits("r"), "nobody has answered"
    disk.run(OpKind.CONTAINS)
    assert stack.h.waits("r"), "its turn has not come"
    stack.h.tick()
    assert stack.h.waits("r"), "it is being read"
    disk.run(OpKind.READ)
    assert not stack.h.waits("r")
    assert stack.look("r", run) == [HIT] * 4


def test_a_request_waits_no_longer_than_its_patience() -> None:
    run = prefix("p", 4)
    stack = stack_with(8, run)
    stack.begin("r", run)
    assert stack.h.waits("r")
    stack.clock.now += SOON
    assert not stack.h.waits("r")
    assert stack.look("r", run) == [MISS] * 4


def test_a_request_with_nothing_to_wait_for_does_not_wait() -> None:
    stack = stack_with(8)
    assert not stack.h.waits("unknown")
    stack.begin("r", prefix("p", 4))
    stack.settle()
    assert not stack.h.waits("r")


def test_promotion_begins_before_the_engine_looks() -> None:
    run = prefix("p", 4)
    stack = stack_with(8, run)
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [HIT] * 4


def test_requests_for_one_prefix_share_its_read_and_all_keep_it() -> None:
    run = prefix("p", 4)
    stack = stack_with(4, run)
    stack.settle()
    for name in "abc":
        stack.begin(name, run)
    stack.h.tick()
    reads = stack.workers["disk"].of(OpKind.READ)
    assert sorted(k.hash for op in reads for k in op.keys) == sorted(run.chunks)
    stack.settle()
    stack.load("a", run)
    stack.h.loaded("a")
    assert stack.store(prefix("other", 2)) == [], "b and c have not loaded it yet"
    for name in "bc":
        assert stack.look(name, run) == [HIT] * 4
        assert true_bytes(stack, stack.load(name, run), run)
        stack.h.loaded(name)
    assert stack.workers["disk"].count(OpKind.READ) == len(reads)
    assert len(stack.store(prefix("other", 2))) == 2


def test_a_request_that_comes_during_the_read_keeps_it_too() -> None:
    run = prefix("p", 4)
    stack = stack_with(4, run)
    stack.settle()
    stack.begin("a", run)
    stack.h.tick()
    stack.begin("b", run)
    stack.settle()
    stack.load("a", run)
    stack.h.loaded("a")
    assert stack.store(prefix("other", 1)) == []
    assert stack.look("b", run) == [HIT] * 4


def test_promotions_come_in_order_of_arrival_when_the_arena_is_small() -> None:
    runs = {name: prefix(name, 3) for name in "abc"}
    stack = stack_with(4, *runs.values())
    stack.settle()
    for name, run in runs.items():
        stack.begin(name, run)
    served = []
    for _ in range(3):
        stack.settle()
        ready = [name for name, run in runs.items() if set(run.chunks) <= stack.ready()]
        served += [name for name in ready if name not in served]
        name = served[-1]
        stack.load(name, runs[name])
        stack.h.loaded(name)
        stack.h.end(name)
    assert served == ["a", "b", "c"]


def test_half_a_prefix_is_never_promoted_while_it_can_wait() -> None:
    first, second = prefix("a", 3), prefix("b", 3)
    stack = stack_with(4, first, second)
    stack.settle()
    stack.begin("a", first)
    stack.begin("b", second)
    stack.settle()
    assert stack.ready() == set(first.chunks)
    assert stack.look("b", second) == [PENDING] * 3


def test_waiting_for_room_evicts_nothing() -> None:
    first, second, cached = prefix("a", 2), prefix("b", 3), prefix("c", 2)
    stack = stack_with(4, first, second)
    stack.settle()
    stack.store(cached)
    stack.begin("a", first)
    stack.settle()
    stack.begin("b", second)
    stack.settle()
    assert stack.ready() == {*first.chunks, *cached.chunks}


def test_a_request_larger_than_the_arena_gets_its_head_at_once() -> None:
    run = prefix("p", 10)
    stack = stack_with(4, run)
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [HIT] * 4 + [MISS] * 6
    assert true_bytes(stack, stack.load("r", run.head(4)), run.head(4))


def test_what_lies_beside_a_promotion_is_kept_for_the_same_request() -> None:
    """Two groups: the engine finds one in the arena and must wait for the other."""
    full, window = prefix("p", 3, 0), prefix("p", 3, 1)
    stack = stack_with(6, window)
    stack.settle()
    stack.store(full)
    stack.begin("r", full, window, windowed=frozenset({1}))
    stack.settle()
    assert stack.look("r", full) + stack.look("r", window) == [HIT] * 3 + [PENDING] * 3
    stack.settle()
    stack.store(prefix("other", 3))
    assert stack.look("r", full) + stack.look("r", window) == [HIT] * 6


def test_a_hold_ends_after_a_while_so_that_others_can_go_on() -> None:
    first, second = prefix("a", 3), prefix("b", 3)
    stack = stack_with(4, first, second)
    stack.settle()
    stack.begin("a", first)
    stack.begin("b", second)
    stack.settle()
    stack.clock.now += DEADLINE
    stack.settle()
    assert set(second.chunks) <= stack.ready()


def test_a_request_that_started_without_loading_holds_nothing() -> None:
    run = prefix("p", 3)
    stack = stack_with(4, run)
    stack.begin("r", run)
    stack.settle()
    assert stack.h.pinned() == 3
    stack.h.admitted("r", {})
    assert stack.h.pinned() == 0


def test_a_read_that_lands_after_the_start_is_held_for_nobody() -> None:
    run = prefix("p", 3)
    stack = stack_with(4, run)
    stack.begin("started", run)
    stack.begin("ended", run)
    stack.workers["disk"].run()
    stack.h.tick()
    stack.h.admitted("started", {})
    stack.h.end("ended")
    stack.settle()
    assert stack.ready() == set(run.chunks)
    assert stack.h.pinned() == 0


def test_waiting_for_slots_ends_too() -> None:
    run = prefix("p", 3)
    stack = stack_with(4, run)
    stack.settle()
    stack.h.reserve("engine", [prefix("busy", 2)])
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [PENDING] * 3
    stack.clock.now += DEADLINE
    assert stack.look("r", run) == [MISS] * 3
    stack.settle()
    assert stack.workers["disk"].count(OpKind.READ) == 0


def test_a_preempted_request_may_wait_again() -> None:
    run = prefix("p", 3)
    stack = stack_with(3, run)
    stack.begin("r", run)
    stack.settle()
    stack.load("r", run)
    stack.h.loaded("r")
    stack.clock.now += 100 * DEADLINE
    stack.store(prefix("other", 3))
    assert stack.look("r", run) == [PENDING] * 3
    stack.settle()
    assert stack.look("r", run) == [HIT] * 3


def test_two_lower_tiers_are_asked_at_once_and_the_nearer_one_is_read() -> None:
    run = prefix("p", 2)
    near, far = DictTier(), DictTier()
    near.put(run.head(1))
    far.put(run)
    stack = Stack(4, {"near": near, "far": far})
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [HIT] * 2
    read = {
        n: [k.hash for op in w.submitted for k in op.keys if op.kind is OpKind.READ]
        for n, w in stack.workers.items()
    }
    assert read == {"near": [run.chunks[0]], "far": [run.chunks[1]]}


def test_a_found_chunk_takes_its_place_in_its_prefix() -> None:
    """A scan tells keys only; the policy must still see runs, or it evicts heads first."""
    seen: list[Run] = []

    class Watching(LruPolicy):
        def on_insert(self, run: Run, tier: str) -> None:
            seen.append(run)
            super().on_insert(run, tier)

        def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
            seen.append(run)
            super().on_access(run, request, tier)

    run = prefix("p", 4)
    stack = stack_with(4, run, policy=Watching)
    stack.settle()
    seen.clear()
    stack.begin("r", run)
    stack.settle()
    stack.load("r", run)
    assert seen
    assert all(s.start == run.chunks.index(s.chunks[0]) for s in seen)
    assert seen[-1] == run
    stack.h.loaded("r")
    stack.store(prefix("other", 1))
    assert stack.ready() >= set(run.chunks[:3]), "the tail goes first"


# Tiers that fail ------------------------------------------------------------


def test_a_stuck_lookup_delays_nobody_beyond_its_deadline() -> None:
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.begin("r", run)
    disk = stack.workers["disk"]
    for op in list(disk.queued):
        disk.begin(op)
    assert stack.look("r", run) == [UNKNOWN] * 2
    stack.clock.now += DEADLINE
    stack.h.tick()
    assert stack.look("r", run) == [MISS] * 2
    disk.run()
    stack.h.tick()
    assert stack.look("r", run) == [MISS] * 2, "an answer after that changes nothing"


def test_a_late_answer_does_not_count_for_another_tier() -> None:
    run = prefix("p", 2)
    near, far = DictTier(deadline=1.0), DictTier()
    far.put(run)
    stack = Stack(4, {"near": near, "far": far})
    stack.begin("r", run)
    late = stack.workers["near"].of(OpKind.CONTAINS)[0]
    stack.workers["near"].begin(late)
    stack.clock.now += 1.0
    stack.h.tick()
    stack.workers["near"].end(late)
    assert stack.look("r", run) == [UNKNOWN] * 2, "the far tier still owes an answer"
    stack.settle()
    assert stack.look("r", run) == [HIT] * 2


def test_a_stuck_read_becomes_a_miss_and_its_slots_stay_out_of_use() -> None:
    run = prefix("p", 3)
    stack = stack_with(4, run)
    stack.begin("r", run)
    disk = stack.workers["disk"]
    disk.run()
    stack.h.tick()
    stuck = list(disk.queued)
    for op in stuck:
        disk.begin(op)
    stack.clock.now += DEADLINE
    stack.h.tick()
    assert stack.look("r", run) == [MISS] * 3
    assert stack.h.pinned() == 3
    assert stack.store(prefix("other", 4)) == list(prefix("other", 1).chunks)
    for op in stuck:
        for buffer in op.buffers:
            buffer[:] = bytes(CHUNK)
        disk.end_failed(op)
    stack.settle()
    assert stack.h.pinned() == 0
    assert stack.ready() == set(prefix("other", 1).chunks)
    assert stack.cpu.free_slots == 3


def test_a_queued_read_that_is_overdue_gives_its_slots_back_at_once() -> None:
    run = prefix("p", 3)
    stack = stack_with(4, run)
    stack.begin("r", run)
    stack.workers["disk"].run()
    stack.h.tick()
    stack.clock.now += DEADLINE
    stack.h.tick()
    assert stack.h.pinned() == 0
    assert stack.h.idle()
    assert stack.look("r", run) == [MISS] * 3


def test_a_corrupt_chunk_is_a_miss_and_forgotten() -> None:
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.begin("r", run)
    disk = stack.workers["disk"]
    disk.run()
    stack.h.tick()
    bad, good = disk.of(OpKind.READ)
    disk.end_reads(bad, ReadOutcome.CORRUPT)
    disk.end(good)
    stack.h.tick()
    assert stack.look("r", run) == [MISS, HIT]
    assert stack.counts()["disk"]["corrupt"] == 1
    stack.begin("again", run)
    assert disk.of(OpKind.CONTAINS)[0].keys == [ChunkKey(FIRST, run.chunks[0])], "asked anew"


def test_a_chunk_of_other_keys_is_a_miss_and_no_reason_to_look_through_the_tier() -> None:
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.settle()
    disk = stack.workers["disk"]
    [lower] = stack.h._lower
    stack.begin("r", run)
    stack.h.tick()
    theirs, ours = disk.of(OpKind.READ)
    scans = disk.count(OpKind.SCAN)
    disk.end_reads(theirs, ReadOutcome.UNREADABLE)
    disk.end(ours)
    stack.h.tick()
    assert stack.look("r", run) == [MISS, HIT]
    counts = stack.counts()["disk"]
    assert counts["unreadable"] == 1
    assert not counts.keys() & {"corrupt", "failures"}
    assert not lower.stale, "nobody removed anything"
    stack.store(run)
    [write] = disk.of(OpKind.WRITE)
    disk.begin(write)
    disk.end_writes(write, WriteOutcome.TAKEN)
    stack.settle()
    assert stack.counts()["disk"]["refused"] == 1
    assert lower.refused == 0, "no room is made, as it would not help"
    assert disk.count(OpKind.SCAN) == scans
    there = [stack.h._residency.get(k).where & lower.bit for k in run.chunks]
    assert [bool(bit) for bit in there] == [False, True]


def test_what_could_not_be_read_is_asked_for_again_and_stored_anew() -> None:
    """Or a file that can't be read would stay for ever: nobody would write it again."""
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.settle()
    disk = stack.workers["disk"]
    stack.begin("r", run)
    stack.h.tick()
    bad, good = disk.of(OpKind.READ)
    disk.end_reads(bad, ReadOutcome.FAILED)
    disk.end(good)
    stack.h.tick()
    assert stack.look("r", run) == [MISS, HIT]
    stack.store(run)
    assert [op.keys for op in disk.of(OpKind.WRITE)] == [[ChunkKey(FIRST, run.chunks[0])]]
    stack.settle()
    stack.begin("beside", run)
    assert disk.of(OpKind.CONTAINS) == [], "it exists, so it is known to be there again"


def test_a_chunk_that_came_too_late_is_still_known_to_be_there() -> None:
    """To store it anew would burden a slow tier for nothing."""
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.settle()
    stack.begin("r", run)
    stack.h.tick()
    stack.clock.now += DEADLINE
    stack.h.tick()
    assert stack.look("r", run) == [MISS] * 2
    stack.store(run)
    assert stack.workers["disk"].count(OpKind.WRITE) == 0


def test_a_file_that_can_not_be_read_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prefix("p", 1)
    tier = FsTier(FsTier.Config(path=tmp_path, capacity=8 * 2 * CHUNK), CHUNK)
    stack = Stack(4, {"fs": tier})
    stack.store(run)
    stack.settle()
    (file,) = tmp_path.glob("v1/*/??/*.kv")
    bad = file.stat().st_ino
    sound = fs.transfer_in

    def transfer_in(descriptor: int, *rest: object) -> int:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fs, "transfer_in", transfer_in)
    for name, found in [("first", MISS), ("second", HIT)]:
        stack.h.spoil(range(4))
        stack.begin(name, run)
        stack.settle()
        assert stack.look(name, run) == [found]
        stack.h.end(name)
        stack.store(run)
        stack.settle()
    assert bad not in {path.stat().st_ino for path in tmp_path.glob("v1/*/??/*.kv")}


def break_down(stack: Stack) -> ManualWorkers:
    """Lookups fail until the breaker opens."""
    disk = stack.workers["disk"]
    for i in range(5):
        stack.begin(f"r{i}", prefix(f"p{i}", 1))
        disk.end_failed(disk.of(OpKind.CONTAINS)[0])
        stack.h.poll()
    assert stack.h.stats()[-1].breaker is BreakerState.OPEN
    return disk


def recover(stack: Stack) -> None:
    """A probe is answered, and then a lookup."""
    stack.clock.now += 30
    stack.settle()
    assert stack.h.stats()[-1].breaker is BreakerState.CLOSED
    stack.begin("after", prefix("after", 1))
    stack.settle()


def test_a_failing_tier_is_left_alone_then_probed_then_used_again() -> None:
    stack = stack_with(4)
    stack.settle()
    disk = break_down(stack)
    before = len(disk.submitted)
    stack.clock.now += 0.9
    stack.h.tick()
    assert len(disk.submitted) == before, "too early"
    stack.clock.now += 0.1
    stack.h.tick()
    assert [op.kind for op in disk.submitted[before:]] == [OpKind.PROBE]
    run = prefix("beside", 3)
    stack.begin("beside", run)
    assert stack.look("beside", run) == [MISS] * 3, "nobody waits for the probe"
    disk.run()
    stack.h.tick()
    assert stack.h.stats()[-1].breaker is BreakerState.CLOSED
    stack.begin("after", prefix("z", 3))
    assert disk.submitted[-1].request_id == "after"


def test_a_tier_that_is_left_alone_costs_nothing() -> None:
    """No call, no wait, no pin, no backlog: as if there were no such tier."""
    held = prefix("held", 3)
    stack = stack_with(8, held)
    stack.settle()
    disk, tier = break_down(stack), stack.tiers["disk"]
    assert isinstance(tier, DictTier)
    calls, submitted = len(tier.calls), len(disk.submitted)
    for name in "abc":
        run = prefix(name, 8)
        stack.begin(name, run)
        stack.begin(f"{name} held", held)
        assert not stack.h.waits(name)
        assert stack.look(name, run) == [MISS] * 8
        assert stack.look(f"{name} held", held) == [MISS] * 3
        assert len(stack.store(run)) == 8, "the arena is there for all of it"
        stack.h.tick()
        assert stack.h.pinned() == 0
        assert stack.h._lower[0].backlog == {}
    assert (len(tier.calls), len(disk.submitted)) == (calls, submitted)
    assert stack.counts()["disk"]["dropped"] == 3 * 8


def test_a_tier_that_takes_no_stores_serves_what_it_has() -> None:
    """As a disk does that is read-only, or a Redis that can't save."""
    held = prefix("held", 3)
    stack = stack_with(16, held)
    stack.settle()
    disk = stack.workers["disk"]
    for number in range(5):
        stack.store(prefix(f"p{number}", 1))
        disk.end_writes(disk.of(OpKind.WRITE)[0], WriteOutcome.FAILED)
        stack.h.tick()
    assert stack.h.stats()[-1].breaker is BreakerState.CLOSED
    assert stack.h.room() == 0
    assert not stack.h.reachable()
    before = disk.count(OpKind.WRITE)
    stack.store(prefix("q", 2))
    assert disk.count(OpKind.WRITE) == before
    assert stack.h._lower[0].backlog == {}
    stack.begin("r", held)
    stack.settle()
    assert stack.look("r", held) == [HIT] * 3


def test_stores_are_tried_again_with_one_and_taken_up_once_it_goes_well() -> None:
    stack = stack_with(16)
    stack.settle()
    disk = stack.workers["disk"]
    for number in range(5):
        stack.store(prefix(f"p{number}", 1))
        disk.end_writes(disk.of(OpKind.WRITE)[0], WriteOutcome.FAILED)
        stack.h.tick()
    stack.clock.now += 1.0
    assert stack.h.room() > 0
    stack.store(prefix("try", 1))
    stack.store(prefix("beside", 1))
    (again,) = disk.of(OpKind.WRITE)
    disk.end_writes(again, WriteOutcome.FAILED)
    stack.h.tick()
    stack.clock.now += 1.0
    stack.store(prefix("too early", 1))
    assert disk.of(OpKind.WRITE) == []
    stack.clock.now += 1.0
    stack.store(prefix("second", 1))
    stack.settle()
    stack.store(prefix("more", 2))
    assert len(disk.of(OpKind.WRITE)) == 2
    assert stack.counts()["disk"]["dropped"] == 2


def test_what_a_tier_has_not_begun_is_a_miss_at_once_when_it_is_left_alone() -> None:
    runs = [prefix(name, 2) for name in "abcdef"]
    stack = stack_with(16, *runs)
    stack.settle()
    for number, run in enumerate(runs):
        stack.begin(str(number), run)
    stack.begin("asks", prefix("unknown", 1))
    stack.h.tick()
    disk = stack.workers["disk"]
    for op in disk.of(OpKind.READ)[:5]:
        disk.end_failed(op)
    stack.h.tick()
    assert disk.queued == []
    assert stack.h.pinned() == 0
    for number, run in enumerate(runs):
        assert stack.look(str(number), run) == [MISS] * 2
    assert not stack.h.waits("asks")


def test_a_tier_that_hangs_is_probed_once_at_a_time_and_ever_less_often() -> None:
    stack = stack_with(4)
    stack.settle()
    disk = break_down(stack)
    times = []
    for _ in range(4000):
        before = disk.count(OpKind.PROBE)
        stack.h.tick()
        if disk.count(OpKind.PROBE) > before:
            times.append(stack.clock.now)
            disk.queued[-1].started = True  # and never comes back
            disk.running.append(disk.queued.pop())
        stack.clock.now += 0.1
    waits = [round(later - sooner) for sooner, later in itertools.pairwise(times)]
    cooldowns = [wait - DEADLINE for wait in waits]
    assert cooldowns[:6] == [2, 4, 8, 16, 32, 60]
    assert set(cooldowns[6:]) == {60}
    assert stack.h.idle(), "probes are nobody's moves"


def test_a_tier_that_flaps_is_in_the_log_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    stack = stack_with(4)
    stack.settle()
    flaps = 20
    for _ in range(flaps):
        break_down(stack)
        recover(stack)
    said = [r.getMessage() for r in caplog.records if r.name.endswith("outages")]
    why = "contains() keeps failing, lastly it raised OSError; next try in 1 s"
    alone = f"The disk tier is left alone for now and probed again by itself: {why}"
    back = "The disk tier answers again after 30 s, and is used."
    assert said == [alone, back]
    stack.clock.now += 600
    break_down(stack)
    said = [r.getMessage() for r in caplog.records if r.name.endswith("outages")]
    assert said[2:] == [f"{alone} (and {flaps - 1} times more since that was last said)"]


def test_an_outage_that_began_unsaid_is_said_if_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    stack = stack_with(4)
    stack.settle()
    break_down(stack)
    recover(stack)
    disk = break_down(stack)
    caplog.clear()
    for _ in range(20):
        stack.clock.now += 60
        stack.h.tick()
        for op in disk.of(OpKind.PROBE):
            disk.end_failed(op)
    said = [r.getMessage() for r in caplog.records if r.name.endswith("outages")]
    assert len(said) == 1
    assert "left alone" in said[0]


def test_a_bad_probe_keeps_the_tier_out_for_longer() -> None:
    stack = stack_with(4)
    stack.settle()
    disk = break_down(stack)
    stack.clock.now += 1.0
    stack.h.tick()
    disk.end_failed(disk.queued[0])
    stack.h.poll()
    stack.clock.now += 1.5
    stack.h.tick()
    assert not disk.queued
    stack.clock.now += 0.5
    stack.h.tick()
    assert [op.kind for op in disk.queued] == [OpKind.PROBE]


def test_how_calls_end_that_were_given_up_says_nothing_of_a_tier_that_answers_again() -> None:
    runs = [prefix(f"p{n}", 1) for n in range(6)]
    stack = stack_with(16, *runs)
    stack.settle()
    disk = stack.workers["disk"]
    for n, run in enumerate(runs):
        stack.begin(f"r{n}", run)
        disk.run(OpKind.CONTAINS)
        stack.h.tick()
    hanging = disk.of(OpKind.READ)
    assert len(hanging) == 6
    for op in hanging:
        disk.begin(op)
    stack.clock.now += DEADLINE
    stack.h.tick()
    (tier,) = stack.h._lower
    assert tier.breaker.state is BreakerState.OPEN
    stack.clock.now += 1.0
    stack.h.tick()
    disk.run(OpKind.PROBE)
    stack.h.tick()
    for op in hanging:
        disk.end_failed(op)
    stack.h.tick()
    assert tier.breaker.state is BreakerState.CLOSED
    assert stack.counts()["disk"]["failures"] == 6, "counted all the same"
    assert stack.h.pinned() == 0


def test_a_chunk_that_only_a_broken_tier_holds_is_a_miss() -> None:
    run = prefix("p", 1)
    stack = stack_with(4, run)
    stack.settle()
    disk = stack.workers["disk"]
    for i in range(5):
        stack.begin(f"r{i}", prefix(f"p{i}", 2))
        disk.end_failed(disk.queued[0])
    stack.h.poll()
    stack.begin("r", run)
    assert stack.look("r", run) == [MISS]


def test_a_kind_of_error_is_logged_once_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = stack_with(4)
    disk = stack.workers["disk"]
    disk.run()
    for i in range(3):
        stack.begin(f"r{i}", prefix(f"p{i}", 1))
        disk.end_failed(disk.queued[0])
    stack.h.poll()
    assert len([r for r in caplog.records if "contains()" in r.message]) == 1
    assert stack.counts()["disk"]["failures"] == 3


def test_a_failed_read_counts_once_for_each_of_its_chunks() -> None:
    run = prefix("p", 4)
    stack = stack_with(4, run)
    stack.begin("r", run)
    disk = stack.workers["disk"]
    disk.run()
    stack.h.tick()
    for op in disk.of(OpKind.READ):
        disk.end_failed(op)
    stack.h.tick()
    assert stack.counts()["disk"]["failures"] == 4


def test_a_failed_load_is_not_tried_again_for_that_request() -> None:
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.begin("r", run)
    stack.settle()
    stack.load("r", run)
    stack.h.load_failed("r")
    stack.h.loaded("r")
    assert stack.look("r", run) == [MISS] * 2
    assert stack.h.pinned() == 0
    stack.begin("other", run)
    stack.settle()
    assert stack.look("other", run) == [HIT] * 2, "others read it anew"
    assert stack.look("r", run) == [MISS] * 2


def test_after_a_failed_load_a_request_loads_nothing_else_either() -> None:
    run, other = prefix("p", 2), prefix("q", 2)
    stack = stack_with(8, run, other)
    stack.begin("r", run)
    stack.settle()
    stack.load("r", run)
    stack.h.load_failed("r")
    stack.h.loaded("r")
    stack.begin("other", other)
    stack.settle()
    assert stack.look("other", other) == [HIT] * 2
    assert stack.look("r", other) == [MISS] * 2


# The way down ---------------------------------------------------------------


def test_a_store_is_readable_when_it_has_ended_and_goes_down_behind() -> None:
    run = prefix("p", 2)
    stack = stack_with(8)
    taken = stack.h.reserve("r", [run])
    stack.begin("r", run)
    assert stack.look("r", run) == [PENDING] * 2, "not before it is written"
    for k, slot in taken:
        stack.cpu.arena.slot(slot)[:] = truth(k)
    stack.h.stored(list(run.chunks))
    assert stack.look("r", run) == [HIT] * 2
    stack.settle()
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    assert {k.hash: v for k, v in disk.chunks.items()} == {k: truth(k) for k in run.chunks}


def test_a_failed_store_is_never_readable() -> None:
    run = prefix("p", 2)
    stack = stack_with(4)
    stack.h.reserve("r", [run])
    stack.h.stored(list(run.chunks), success=False)
    assert (stack.ready(), stack.h.pinned(), stack.cpu.free_slots) == (set(), 0, 4)


def test_a_spoiled_slot_is_never_readable_though_its_store_ends_well() -> None:
    run = prefix("p", 2)
    stack = stack_with(4)
    (_, bad), _ = stack.h.reserve("r", [run])
    stack.h.spoil([bad, bad, -1])
    stack.h.stored(list(run.chunks))
    assert stack.ready() == {run.chunks[1]}
    assert stack.cpu.free_slots == 3


def test_a_spoiled_store_is_not_published_by_the_store_after_it() -> None:
    """Found by review: the second store's slot was published when the first ended."""
    run = prefix("p", 1)
    stack = stack_with(4)
    ((_, bad),) = stack.h.reserve("r", [run])
    stack.h.spoil([bad])
    assert stack.h.reserve("r", [run]) == [], "the first one has not ended"
    stack.h.stored(list(run.chunks))
    assert stack.ready() == set()
    assert stack.h.pinned() == 0
    assert stack.store(run) == list(run.chunks)


def test_a_chunk_that_is_there_or_coming_is_not_stored_twice() -> None:
    run = prefix("p", 4)
    stack = stack_with(8, run.head(1))
    stack.begin("r", run.head(1))
    stack.settle()
    first = stack.h.reserve("r", [run.head(2)])
    assert [k for k, _ in first] == [run.chunks[1]]
    assert [k for k, _ in stack.h.reserve("r", [run])] == list(run.chunks[2:])


def test_room_for_a_tail_is_not_made_by_evicting_its_head() -> None:
    run = prefix("p", 3)
    stack = Stack(3)
    stack.store(run.head(2))
    stack.store(prefix("newer", 1))
    assert stack.store(run) == [run.chunks[2]]
    assert stack.ready() == set(run.chunks)


def test_what_finds_no_room_is_dropped_from_the_tail_and_counted() -> None:
    run = prefix("p", 6)
    stack = Stack(4)
    assert [k for k, _ in stack.h.reserve("r", [run])] == list(run.chunks[:4])
    assert stack.counts()["cpu"]["dropped"] == 2


def test_what_the_policy_does_not_admit_is_not_stored() -> None:
    class Picky(LruPolicy):
        def admit(self, run: Run, tier: str) -> int:
            return 1 if tier == "cpu" else 0

    stack = stack_with(4, policy=Picky)
    assert stack.store(prefix("p", 3)) == list(prefix("p", 1).chunks)
    stack.settle()
    assert stack.workers["disk"].count(OpKind.WRITE) == 0
    counts = stack.counts()
    assert (counts["cpu"]["refused"], counts["disk"]["refused"]) == (2, 1)


def test_what_a_request_waits_for_is_promoted_whatever_the_policy_admits() -> None:
    class HeadOnly(LruPolicy):
        def admit(self, run: Run, tier: str) -> int:
            return min(1, len(run))

    run = prefix("p", 3)
    stack = stack_with(4, run, policy=HeadOnly)
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [HIT] * 3


def test_a_tier_that_is_behind_pins_a_share_at_most_and_catches_up() -> None:
    stack = stack_with(8)
    for name in "abc":
        assert len(stack.store(prefix(name, 2))) == 2
    assert stack.h.pinned() == 2
    stack.settle()
    assert stack.h.pinned() == 0
    assert stack.workers["disk"].count(OpKind.WRITE) == 6, "no prefix has a hole"
    assert "dropped" not in stack.counts()["disk"]


def test_a_prompt_larger_than_the_budget_is_stored_whole_and_in_order() -> None:
    stack = stack_with(8)
    run = prefix("p", 7)
    stack.store(run)
    stack.settle()
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    assert [k.hash for k in disk.chunks] == list(run.chunks)


def test_what_is_evicted_before_a_slow_tier_gets_to_it_is_dropped_and_counted() -> None:
    stack = stack_with(8)
    stack.store(prefix("a", 6))
    stack.store(prefix("b", 6))  # the arena had to let some go
    stack.settle()
    assert stack.counts()["disk"]["dropped"] == 4
    assert stack.workers["disk"].count(OpKind.WRITE) == 8


def test_the_backlog_of_a_tier_that_hangs_stays_bounded() -> None:
    stack = stack_with(8)
    for i in range(20):
        stack.store(prefix(f"p{i}", 2))
    (tier,) = stack.h._lower
    assert len(tier.backlog) <= 8
    assert stack.h.pinned() == 2


def test_a_backlog_is_dropped_when_the_breaker_opens() -> None:
    stack = stack_with(8)
    disk = stack.workers["disk"]
    stack.store(prefix("p", 6))
    (tier,) = stack.h._lower
    for _ in range(4):
        tier.store_breaker.failure(OpKind.WRITE)
    disk.end_failed(disk.of(OpKind.WRITE)[0])
    stack.h.tick()
    assert tier.backlog == {}
    assert disk.of(OpKind.WRITE) == [], "nor does what was queued pin slots any longer"
    assert stack.h.pinned() == 0
    assert stack.counts()["disk"]["dropped"] == 5


def test_queued_stores_give_way_when_slots_are_needed_and_started_ones_do_not() -> None:
    stack = stack_with(8)
    disk = stack.workers["disk"]
    stack.store(prefix("a", 2))
    started, queued = disk.of(OpKind.WRITE)
    disk.begin(started)
    assert len(stack.h.reserve("r", [prefix("big", 8)])) == 7
    assert disk.cancelled == [queued]
    assert stack.counts()["disk"]["dropped"] == 1


def test_no_more_queued_stores_are_given_up_than_needed() -> None:
    stack = stack_with(8)
    stack.store(prefix("a", 2))
    assert len(stack.h.reserve("r", [prefix("big", 7)])) == 7
    assert len(stack.workers["disk"].cancelled) == 1


def test_eviction_demotes_ahead_where_the_policy_asks_for_it() -> None:
    stack = stack_with(8, policy=DemotingLru)
    stack.store(prefix("old", 8))
    assert stack.workers["disk"].count(OpKind.WRITE) == 0
    stack.store(prefix("new", 1))
    stack.settle()
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    demoted = {k.hash for k in disk.chunks}
    assert demoted == set(prefix("old", 8).chunks[5:7]), "those after what had to go at once"
    stack.store(prefix("newer", 1))
    stack.settle()
    assert not set(prefix("old", 8).chunks[6:]) & stack.ready()
    assert stack.counts()["cpu"]["evictions"] == 2


def test_a_demoted_chunk_comes_back_from_below() -> None:
    old = prefix("old", 4)
    stack = stack_with(8, policy=DemotingLru)
    stack.store(old)
    for i in range(10):
        stack.store(prefix(f"new{i}", 1))
        stack.settle()
    tail = Run(old.chunks[-1:], 3, CHUNK, 0, old.chunks[-2])
    stack.begin("r", tail)
    stack.settle()
    assert stack.look("r", tail) == [HIT]


def test_without_a_tier_to_demote_to_room_is_made_all_the_same() -> None:
    stack = Stack(4, policy=DemotingLru)
    stack.store(prefix("old", 4))
    assert len(stack.store(prefix("new", 4))) == 4


def test_a_bounded_tier_is_evicted_between_watermarks_in_the_policys_order() -> None:
    stack = stack_with(64, capacity=20 * CHUNK)
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    sizes = []
    for i in range(30):
        stack.store(prefix(f"p{i:02}", 1))
        stack.settle()
        sizes.append(len(disk.chunks))
    assert max(sizes) <= 18 + 1, "above the high watermark only until it is evicted"
    assert min(sizes[18:]) == 16, "down to the low one"
    kept = {k.hash for k in disk.chunks}
    assert kept == {prefix(f"p{i:02}", 1).chunks[0] for i in range(30 - len(kept), 30)}


def test_a_chunk_that_is_being_read_is_no_victim_below() -> None:
    old = prefix("old", 1)
    stack = stack_with(40, old, capacity=10 * CHUNK)
    stack.settle()
    stack.begin("r", old)
    stack.h.tick()
    disk = stack.workers["disk"]
    (read,) = disk.of(OpKind.READ)
    disk.begin(read)
    for i in range(12):
        stack.store(prefix(f"p{i}", 1))
        disk.run(OpKind.WRITE, OpKind.REMOVE)
        stack.h.tick()
    assert disk.count(OpKind.REMOVE) > 0
    disk.end(read)
    stack.h.tick()
    assert stack.look("r", old) == [HIT]


def test_what_others_left_in_a_bounded_tier_is_evicted_too() -> None:
    theirs = Namespace("theirs")
    tier = DictTier(10 * CHUNK)
    tier.put(prefix("theirs", 10), theirs)
    stack = Stack(8, {"disk": tier})
    stack.settle()
    assert len(tier.chunks) <= 9
    stack.store(prefix("mine", 1))
    stack.settle()
    assert ChunkKey(FIRST, prefix("mine", 1).chunks[0]) in tier.chunks


# Resets and restarts --------------------------------------------------------


def test_after_a_reset_nothing_stale_is_served_and_nothing_shared_is_deleted() -> None:
    run = prefix("p", 3)
    stack = stack_with(8, run)
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    stack.begin("before", run)
    stack.settle()
    before = dict(disk.chunks)
    stack.h.reset(Namespace("second"))
    assert stack.look("before", run) == [MISS] * 3
    stack.begin("after", run)
    stack.settle()
    assert stack.look("after", run) == [MISS] * 3
    assert disk.chunks == before
    assert stack.h.pinned() == 0


def test_a_read_from_before_the_reset_lands_for_nobody() -> None:
    run = prefix("p", 3)
    stack = stack_with(4, run)
    stack.begin("r", run)
    disk = stack.workers["disk"]
    disk.run()
    stack.h.tick()
    stack.h.reset(Namespace("second"))
    assert stack.cpu.free_slots == 1, "the tier may still write into the others"
    stack.begin("new", run)
    stack.settle()
    assert stack.ready() == set()
    assert stack.cpu.free_slots == 4


def test_answers_from_before_a_reset_say_nothing_of_what_comes_after() -> None:
    run, stored = prefix("p", 2), prefix("q", 2)
    stack = stack_with(8, run)
    stack.begin("old", run)
    stack.store(stored)
    stack.h.reset(Namespace("second"))
    stack.workers["disk"].run()
    stack.begin("new", run, stored)
    assert stack.look("new", run) + stack.look("new", stored) == [UNKNOWN] * 4


def test_slots_that_the_engine_used_at_a_reset_rest_until_the_flush() -> None:
    run, other = prefix("p", 2), prefix("q", 1)
    stack = stack_with(4)
    stack.store(other)
    stack.settle()
    stack.begin("loads", other)
    stack.load("loads", other)
    stack.h.reserve("stores", [run])
    stack.h.reset(Namespace("second"))
    assert (stack.h.pinned(), stack.cpu.free_slots) == (3, 1)
    assert len(stack.store(prefix("new", 4))) == 1
    stack.settle()
    stack.h.flushed()
    assert stack.h.pinned() == 0
    assert stack.cpu.free_slots == 3


def test_a_request_that_lived_through_a_reset_stores_nothing_more() -> None:
    run = prefix("p", 2)
    stack = Stack(4)
    stack.begin("old", run)
    stack.h.reset(Namespace("second"))
    assert stack.h.reserve("old", [run]) == []
    stack.begin("new", run)
    assert len(stack.h.reserve("new", [run])) == 2


def test_what_a_reset_left_below_still_counts_and_can_be_evicted() -> None:
    stack = stack_with(32, capacity=10 * CHUNK)
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    stack.settle()
    for i in range(8):
        stack.store(prefix(f"p{i}", 1))
        stack.settle()
    stack.h.reset(Namespace("second"))
    new = [prefix(f"n{i}", 1).chunks[0] for i in range(6)]
    for i in range(6):
        stack.store(prefix(f"n{i}", 1))
        stack.settle()
    kept = {k.hash for k in disk.chunks if k.namespace.id == "second"}
    assert kept == set(new), "the old namespace's go first"


def test_a_restart_finds_what_is_there_without_asking_for_it() -> None:
    run = prefix("p", 3)
    stack = stack_with(8, run)
    stack.settle()
    stack.begin("r", run)
    assert stack.workers["disk"].count(OpKind.CONTAINS) == 0
    assert stack.look("r", run) == [PENDING] * 3


def test_a_large_scan_is_taken_in_over_many_steps() -> None:
    stack = stack_with(4, prefix("p", 2000))
    stack.workers["disk"].run()
    known = []
    for _ in range(10):
        known.append(len(stack.h._residency.directory))
        stack.h.tick()
    assert known == [*range(0, 2000, 256), 2000, 2000]
    assert stack.h.idle()


def test_after_a_restart_the_oldest_goes_first_and_before_what_is_new() -> None:
    tier = DictTier(20 * CHUNK)
    old = [prefix(f"old{i:02}", 1) for i in range(16)]
    for run in old:
        tier.put(run)
    stack = Stack(32, {"disk": tier})
    new = prefix("new", 1)
    stack.store(new)
    stack.settle()
    for i in range(3):
        stack.store(prefix(f"newer{i}", 1))
        stack.settle()
    kept = {k.hash for k in tier.chunks}
    assert kept == {*new.chunks, *(r.chunks[0] for r in old[3:]), *prefixes("newer", 3)}


def test_a_full_tier_with_nothing_known_in_it_is_scanned_again_but_not_at_once() -> None:
    tier = DictTier(10 * CHUNK)
    stack = Stack(32, {"disk": tier})
    stack.settle()
    tier.put(prefix("theirs", 10), Namespace("theirs"))
    disk = stack.workers["disk"]
    stack.store(prefix("p", 1))
    stack.settle()
    assert disk.count(OpKind.SCAN) == 1
    stack.clock.now += 60
    stack.store(prefix("q", 1))
    stack.settle()
    assert disk.count(OpKind.SCAN) == 2
    assert len(tier.chunks) <= 9


def test_a_full_tier_whose_scan_failed_takes_stores_again_soon() -> None:
    tier = DictTier(10 * CHUNK)
    tier.put(prefix("theirs", 10), Namespace("theirs"))
    stack = Stack(32, {"disk": tier})
    disk = stack.workers["disk"]
    (scan,) = disk.of(OpKind.SCAN)
    disk.begin(scan)
    disk.end_failed(scan)
    stack.store(prefix("refused", 1))
    for _ in range(4):
        stack.settle()
        stack.clock.now += 2.0
    stack.store(prefix("p", 1))
    stack.settle()
    assert prefix("p", 1).chunks[0] in {k.hash for k in tier.chunks}


# Figures --------------------------------------------------------------------


def test_hits_and_misses_of_the_tiers_add_up() -> None:
    run = prefix("p", 10)
    stack = stack_with(16, run.head(6))
    stack.settle()
    stack.store(run.head(4))
    stack.begin("r", run)
    stack.settle()
    assert stack.look("r", run) == [HIT] * 6 + [MISS] * 4
    stack.h.load("r", list(run.chunks[2:6]))
    stack.h.admitted("r", {0: 2})
    counts = stack.counts()
    assert (counts["cpu"]["hits"], counts["cpu"]["misses"]) == (2, 6)
    assert (counts["disk"]["hits"], counts["disk"]["misses"]) == (2, 4)
    assert stack.counts()["cpu"] == {}, "counts are taken"


def test_the_gpus_share_is_shown_where_somebody_observes_it() -> None:
    tier = CpuTier(CpuTier.Config(capacity=4 * CHUNK), CHUNK)
    usage = tier.usage()
    h = Hierarchy(
        tier, {}, lambda infos, clock: LruPolicy(infos), FIRST, observed={"gpu": lambda: usage}
    )
    run = prefix("p", 3)
    h.begin(PolicyRequest("r", [run]))
    h.admitted("r", {0: 2})
    gpu, cpu = h.stats()
    assert (gpu.name, dict(gpu.counts), gpu.usage) == ("gpu", {"hits": 2, "misses": 1}, usage)
    assert (cpu.name, dict(cpu.counts)) == ("cpu", {"misses": 1})


def test_a_chunk_served_again_from_the_arena_is_no_second_hit_below() -> None:
    run = prefix("p", 2)
    stack = stack_with(4, run)
    stack.begin("r", run)
    stack.settle()
    for _ in range(2):
        stack.load("r", run)
        stack.h.loaded("r")
    counts = stack.counts()
    assert counts["disk"]["hits"] == 2
    assert counts["cpu"]["hits"] == 2


def test_a_policy_hears_of_a_request_in_the_order_it_was_promised() -> None:
    heard: list[str] = []

    class Listening(LruPolicy):
        def on_request(self, request: PolicyRequest) -> None:
            heard.append("request")

        def admit(self, run: Run, tier: str) -> int:
            heard.append(f"admit {tier}")
            return len(run)

        def on_insert(self, run: Run, tier: str) -> None:
            heard.append(f"insert {tier}")
            super().on_insert(run, tier)

        def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
            heard.append(f"access {tier}")

        def on_start(self, request: PolicyRequest) -> None:
            heard.append("start")

        def on_finish(self, request: PolicyRequest) -> None:
            heard.append("finish")

    run = prefix("p", 2)
    tier = DictTier()
    tier.config = tier.config.model_copy(update={"threads": 1})
    tier.put(run)
    stack = Stack(4, {"disk": tier}, Listening)
    stack.begin("r", run)
    stack.workers["disk"].run(OpKind.CONTAINS)
    stack.h.tick()
    stack.workers["disk"].run(OpKind.READ)
    stack.h.tick()
    stack.load("r", run)
    stack.h.loaded("r")
    stack.h.end("r")
    promoted = ["insert disk", "admit cpu", "insert cpu"]
    assert heard == ["request", *promoted, "access disk", "start", "finish"]


# Real threads ---------------------------------------------------------------


class GatedTier(DictTier):
    """Writes wait for ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.ended: queue.Queue[str] = queue.Queue()

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        assert self.gate.wait(SOON)
        try:
            return super().write(keys, buffers)
        finally:
            self.ended.put("write")

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        try:
            return super().read(keys, buffers)
        finally:
            self.ended.put("read")


def until(condition: Callable[[], bool], h: Hierarchy) -> None:
    """Step, as an engine would, until something is so."""
    pause = threading.Event()
    for _ in range(int(SOON * 1000)):
        h.tick()
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it did not come to that")


def threaded(tier: DictTier, slots: int) -> tuple[Hierarchy, CpuTier]:
    cpu = CpuTier(CpuTier.Config(capacity=slots * CHUNK), CHUNK)
    h = Hierarchy(cpu, {"disk": tier}, lambda infos, clock: LruPolicy(infos), FIRST)
    return h, cpu


def test_a_load_is_served_while_every_store_hangs() -> None:
    run = prefix("p", 2)
    tier = GatedTier()
    tier.put(run)
    h, cpu = threaded(tier, 32)
    stores = prefix("s", 8)
    for k, slot in h.reserve("engine", [stores]):
        cpu.arena.slot(slot)[:] = truth(k)
    h.stored(list(stores.chunks))
    h.begin(PolicyRequest("r", [run]))
    until(lambda: all(h.lookup("r", k) is HIT for k in run.chunks), h)
    assert tier.ended.get(timeout=SOON) == "read"
    assert len(tier.chunks) == 2
    tier.gate.set()
    until(h.idle, h)
    assert len(tier.chunks) == 10
    h.close()


@pytest.mark.parametrize(("option", "value"), [("threads", 0), ("deadline", 0.0)])
def test_a_tier_without_threads_or_time_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        TierConfig.model_validate({"type": "dict", option: value})


def test_close_lets_stores_end() -> None:
    tier = GatedTier()
    h, cpu = threaded(tier, 16)
    run = prefix("p", 4)
    for k, slot in h.reserve("engine", [run]):
        cpu.arena.slot(slot)[:] = truth(k)
    h.stored(list(run.chunks))
    threading.Timer(0.0, tier.gate.set).start()
    h.close(SOON)
    assert {k.hash for k in tier.chunks} == set(run.chunks)


def test_close_does_not_wait_for_a_tier_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    tier = GatedTier()
    h, _ = threaded(tier, 16)
    run = prefix("p", 6)
    h.reserve("engine", [run])
    h.stored(list(run.chunks))
    h.close(0.0)
    assert tier.chunks == {}
    assert "6 chunks had not reached the disk tier" in caplog.text
    tier.gate.set()


# What a policy asks for on its own -------------------------------------------


class Foresight(LruPolicy):
    """Fetches and drops what a test tells it to."""

    with_request: Sequence[Run] = ()
    without_request: Sequence[Run] = ()
    dead: Sequence[bytes] = ()

    def prefetch(self, request: PolicyRequest) -> Sequence[Run]:
        return self.with_request

    def anticipate(self) -> Sequence[Run]:
        return self.without_request

    def expired(self, tier: str) -> Sequence[bytes]:
        return self.dead


def foresight(slots: int, *runs: Run) -> tuple[Stack, Foresight]:
    """A stack that knows from its first scan what its tier holds."""
    stack = stack_with(slots, *runs, policy=Foresight)
    stack.settle()
    assert isinstance(stack.h.policy, Foresight)
    return stack, stack.h.policy


def keys_of(run: Run) -> list[bytes]:
    return [k for k in run.chunks if isinstance(k, bytes)]


def resident(stack: Stack, run: Run) -> list[bool]:
    names = [ChunkKey(stack.h.namespace, k) for k in keys_of(run)]
    return stack.cpu.contains(names)


def test_a_policy_fetches_along_with_a_request_what_will_be_asked_for_next() -> None:
    coming = prefix("next", 3)
    stack, policy = foresight(8, coming)
    policy.with_request = [coming]
    stack.begin("r", prefix("now", 2))
    stack.settle()
    assert resident(stack, coming) == [True] * 3
    assert stack.h.pinned() == 0, "nobody waits for it"


def test_a_policy_fetches_once_a_second_what_it_expects() -> None:
    coming = prefix("next", 3)
    stack, policy = foresight(8, coming)
    policy.without_request = [coming]
    stack.settle()
    assert resident(stack, coming) == [False] * 3
    stack.clock.now += 1.0
    stack.settle()
    assert resident(stack, coming) == [True] * 3


def test_what_requests_wait_for_comes_before_what_a_policy_expects() -> None:
    asked, coming = prefix("asked", 4), prefix("next", 4)
    stack, policy = foresight(4, asked, coming)
    blocker = prefix("blocker", 4)
    stack.store(blocker)
    stack.h.load("running", keys_of(blocker))  # all slots are in use
    stack.begin("r", asked)
    stack.settle()
    policy.without_request = [coming]
    stack.clock.now += 1.0
    stack.settle()
    assert resident(stack, coming) == [False] * 4
    stack.h.loaded("running")
    stack.settle()
    assert resident(stack, asked) == [True] * 4


def test_expired_chunks_are_dropped_though_there_is_room() -> None:
    run = prefix("p", 3)
    stack, policy = foresight(8)
    stack.store(run)
    stack.settle()
    policy.dead = keys_of(run)[1:]
    stack.clock.now += 1.0
    stack.settle()
    assert resident(stack, run) == [True, False, False]
    assert len(list(stack.tiers["disk"].scan())) == 1


def test_what_a_policy_names_twice_is_fetched_and_dropped_once() -> None:
    """A policy may be anybody's, and a slot that is given twice holds two chunks."""

    class Stutter(Foresight):
        def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
            return (chunk for chunk in super().victims(tier, n_bytes) for _ in range(2))

    coming = prefix("next", 2)
    stack = stack_with(4, coming, policy=Stutter)
    stack.settle()
    policy = stack.h.policy
    assert isinstance(policy, Stutter)
    policy.with_request = [Run(coming.chunks + coming.chunks, 0, CHUNK)]
    stack.begin("r", prefix("now", 2))
    stack.settle()
    assert resident(stack, coming) == [True] * 2
    assert stack.cpu.free_slots == 2
    stack.store(prefix("p", 4))
    assert sorted(stack.cpu._free) == sorted(set(stack.cpu._free))
    stack.settle()
    policy.dead = [k for k in stack.ready() for _ in range(2)]
    stack.clock.now += 1.0
    stack.settle()
    assert sorted(stack.cpu._free) == [0, 1, 2, 3]


def test_a_chunk_in_use_outlives_its_time() -> None:
    run = prefix("p", 2)
    stack, policy = foresight(8)
    stack.store(run)
    stack.settle()
    stack.h.load("running", keys_of(run))
    policy.dead = keys_of(run)
    stack.clock.now += 1.0
    stack.settle()
    assert resident(stack, run) == [True, True]
    stack.h.loaded("running")
    stack.clock.now += 1.0
    stack.settle()
    assert resident(stack, run) == [False, False]


def test_a_policy_learns_how_fast_a_tier_reads_and_writes() -> None:
    run = prefix("p", 2)
    stack = stack_with(8)
    (_, disk) = stack.h.policy.tiers
    assert disk.read_seconds(CHUNK) == disk.write_seconds(CHUNK) == 0, "nothing was measured"
    stack.store(run)
    for op in stack.workers["disk"].of(OpKind.WRITE):
        op.seconds = 2.0
    stack.settle()
    assert disk.write_seconds(CHUNK) == pytest.approx(2.0)
    assert disk.read_seconds(CHUNK) == 0


# Others at the same place ----------------------------------------------------


def full_tier(stack: Stack) -> DictTier:
    disk = stack.tiers["disk"]
    assert isinstance(disk, DictTier)
    return disk


def test_a_tier_that_refuses_below_its_bound_makes_room_of_its_own() -> None:
    stack = stack_with(16)
    disk = stack.workers["disk"]
    stack.store(prefix("old", 10))
    stack.settle()
    stack.store(prefix("new", 2))
    for op in disk.of(OpKind.WRITE):
        disk.end_writes(op, WriteOutcome.REFUSED)  # others have filled the disk
    stack.settle()
    assert stack.counts()["disk"]["evictions"] == 2, "as much as was refused"
    assert len(full_tier(stack).chunks) == 8
    stack.store(prefix("newer", 1))
    stack.settle()
    assert len(full_tier(stack).chunks) == 9


def test_a_tier_from_which_others_remove_is_looked_through_again() -> None:
    stack = stack_with(16, capacity=10 * CHUNK)
    stack.store(prefix("a", 8))
    stack.settle()
    chunks = full_tier(stack).chunks
    for name in list(chunks)[-3:]:
        chunks[ChunkKey(Namespace("e" * 32), name.hash)] = chunks.pop(name)
    scans = stack.workers["disk"].count(OpKind.SCAN)
    stack.clock.now += 1000.0
    stack.store(prefix("b", 3))  # evicts what is not there any more
    stack.settle()
    assert stack.workers["disk"].count(OpKind.SCAN) == scans + 1
    assert len(chunks) <= 10
    stack.store(prefix("c", 3))  # and what others have stored, now that it is known
    stack.settle()
    assert len(chunks) <= 10


def test_what_others_store_in_a_shared_tier_is_looked_at_now_and_then() -> None:
    stack = stack_with(16, capacity=100 * CHUNK)
    full_tier(stack).shared = True  # type: ignore[misc]
    disk = stack.workers["disk"]
    before = disk.count(OpKind.SCAN)
    stack.clock.now += 1000.0
    stack.settle()
    assert disk.count(OpKind.SCAN) == before, "nothing was stored, so nothing can be too much"
    stack.store(prefix("a", 2))
    for _ in range(10):
        stack.clock.now += 1.0
        stack.settle()
    assert disk.count(OpKind.SCAN) == before + 1


def test_private_chunks_stay_in_the_engine() -> None:
    stack = stack_with(8)
    full_tier(stack).persistent = True  # type: ignore[misc]
    stack.h.reset(Namespace("f" * 32, shareable=False))
    stack.h.flushed()
    run = prefix("p", 2)
    stack.store(run)
    stack.settle()
    assert full_tier(stack).chunks == {}
    stack.begin("r", run)
    assert stack.look("r", run) == [HIT] * 2
    stack.begin("other", prefix("q", 2))
    assert stack.look("other", prefix("q", 2)) == [MISS] * 2, "nor is anything asked for there"


# What goes without a word ----------------------------------------------------------------


def known(stack: Stack) -> set[bytes]:
    """Of which chunks of its own the engine remembers anything."""
    return {chunk.key for chunk in stack.h._residency.directory}


def look_again(stack: Stack, after: float = 1000.0) -> None:
    """One more chunk is stored, and some time later the tier is scanned for that."""
    stack.store(prefix("more", 1))
    stack.settle()
    stack.clock.now += after
    stack.settle()


@pytest.mark.parametrize("capacity", [None, 100 * CHUNK])
def test_what_a_shared_tier_drops_by_itself_is_not_remembered_for_ever(
    capacity: int | None,
) -> None:
    """A Redis with a TTL, or one that evicts, says nothing of what it drops."""
    stack = stack_with(8, capacity=capacity)
    tier = full_tier(stack)
    tier.shared = True  # type: ignore[misc]
    others = Namespace("e" * 32)
    tier.put(prefix("others", 3), others)
    look_again(stack)
    assert len(stack.h._residency.lower[0].foreign) == 3
    for number in range(20):
        tier.chunks.clear()
        stack.store(prefix(f"p{number}", 4))
        stack.settle()
        look_again(stack)
    assert len(known(stack)) <= 8 + 5, "the arena's, and what the tier holds"
    assert not stack.h._residency.lower[0].foreign
    policy = stack.h.policy
    assert set(policy.victims("disk", 1 << 40)) == {key.hash for key in tier.chunks}


def test_an_unbounded_shared_tier_is_looked_through_seldom() -> None:
    stack = stack_with(8, capacity=None)
    full_tier(stack).shared = True  # type: ignore[misc]
    disk = stack.workers["disk"]
    before = disk.count(OpKind.SCAN)
    look_again(stack, 60.0)
    assert disk.count(OpKind.SCAN) == before
    look_again(stack, 1000.0)
    assert disk.count(OpKind.SCAN) == before + 1


def test_what_is_stored_during_a_scan_is_not_taken_for_gone() -> None:
    stack = stack_with(8, capacity=100 * CHUNK)
    full_tier(stack).shared = True  # type: ignore[misc]
    disk = stack.workers["disk"]
    stack.store(prefix("early", 1))
    stack.settle()
    stack.clock.now += 1000.0
    stack.h.tick()
    [scan] = disk.of(OpKind.SCAN)
    disk.begin(scan)
    disk.end(scan)  # as it was: the answer is not taken in yet
    run = prefix("late", 3)
    stack.store(run)
    disk.run(OpKind.WRITE)
    stack.settle()
    assert set(run.chunks) <= set(stack.h.policy.victims("disk", 1 << 40))


def test_a_scan_that_fails_forgets_nothing() -> None:
    stack = stack_with(8, capacity=100 * CHUNK)
    full_tier(stack).shared = True  # type: ignore[misc]
    disk = stack.workers["disk"]
    stack.store(prefix("early", 3))
    stack.settle()
    stack.clock.now += 1000.0
    stack.h.tick()
    disk.end_failed(disk.of(OpKind.SCAN)[0])
    stack.settle()
    assert len(set(stack.h.policy.victims("disk", 1 << 40))) == 3
