"""The policies of the literature against libcachesim, and against themselves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import libcachesim
import pytest
from chunk_tier import (
    REQUEST,
    ChunkTier,
    assert_equal_hits,
    assert_runs_decide_as_chunks,
    few_prompts,
    loops_between_popular_ids,
    uniform_ids,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.policies import POLICIES, Policy, Run, TierInfo, wtinylfu
from kvtiers.policies.conformance import PolicyConformance
from kvtiers.policies.sketch import FrequencySketch
from traces import real_prompts, zipf_ids


@dataclass(frozen=True)
class Reference:
    """A policy and libcachesim's, with capacities (in chunks) at which both mean the same.

    libcachesim's S3-FIFO takes nothing in if a tenth of the cache is no more than one chunk,
    its W-TinyLFU if a hundredth is none; and where four fifths of the latter's main part are
    no whole number, a chunk too much in one segment makes it evict on a hit.
    """

    name: str
    theirs: type
    capacities: tuple[int, ...] = (1, 10, 100)

    def __str__(self) -> str:
        return self.name

    @property
    def ours(self) -> type[Policy]:
        return POLICIES.get(self.name)


REFERENCES = [
    Reference("fifo", libcachesim.FIFO),
    Reference("lru-2", libcachesim.LRUK),
    Reference("lfu", libcachesim.LFU),
    Reference("arc", libcachesim.ARC, (1, 2, 10, 100, 900)),
    Reference("s3fifo", libcachesim.S3FIFO, (20, 25, 100)),
    Reference("sieve", libcachesim.Sieve),
    Reference("w-tinylfu", libcachesim.WTinyLFU, (101, 202, 505)),
]
AT_EACH_CAPACITY = [
    pytest.param(reference, capacity, id=f"{reference}-{capacity}")
    for reference in REFERENCES
    for capacity in reference.capacities
]
each_reference = pytest.mark.parametrize("reference", REFERENCES, ids=str)
at_each_capacity = pytest.mark.parametrize(("reference", "capacity"), AT_EACH_CAPACITY)


class TestReferenceConformance(PolicyConformance):
    effort = settings(PolicyConformance.effort, max_examples=40)

    @pytest.fixture(params=REFERENCES, ids=str)
    def policy_factory(self, request):
        return lambda tiers, clock: request.param.ours(tiers, clock=clock)


# Against libcachesim ---------------------------------------------------------


@at_each_capacity
def test_uniform_chunks_hit_as_in_libcachesim(reference: Reference, capacity: int) -> None:
    assert_equal_hits(reference.ours, reference.theirs, uniform_ids(8_000), capacity)


@at_each_capacity
def test_zipf_chunks_hit_as_in_libcachesim(reference: Reference, capacity: int) -> None:
    ids = zipf_ids(random.Random(2), 8_000, 2000)
    assert_equal_hits(reference.ours, reference.theirs, ids, capacity)


@at_each_capacity
def test_loops_between_popular_chunks_hit_as_in_libcachesim(
    reference: Reference, capacity: int
) -> None:
    ids = loops_between_popular_ids(capacity)[:8_000]
    assert_equal_hits(reference.ours, reference.theirs, ids, capacity)


@pytest.mark.parametrize("capacity", [505, 5050])
@each_reference
def test_chunks_of_a_real_trace_hit_as_in_libcachesim(reference: Reference, capacity: int) -> None:
    prompts = real_prompts(400)
    ids = [chunk for prompt in prompts for chunk in reversed(prompt)]
    assert_equal_hits(reference.ours, reference.theirs, ids, capacity)


# A run at a time -------------------------------------------------------------


class ExactCounts:
    """What a sketch would be that tells all chunks apart."""

    def __init__(self, entries: int) -> None:
        self.counts = Counter[int]()

    def add_all(self, chunks: Sequence[int]) -> None:
        self.counts.update(chunks)

    def estimates(self, chunks: Sequence[int]) -> list[int]:
        return [self.counts[chunk] for chunk in chunks]

    def halve(self) -> None:
        for chunk in self.counts:
            self.counts[chunk] >>= 1


@pytest.fixture
def wide_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that runs of a few chunks fit in, and counts that do not depend on the order."""
    monkeypatch.setattr(wtinylfu, "_WINDOW_SHARE", 0.4)
    monkeypatch.setattr(wtinylfu, "FrequencySketch", ExactCounts)


@each_reference
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(capacity=st.integers(1, 16), at_once=st.integers(1, 5), prompts=few_prompts)
@pytest.mark.usefixtures("wide_window")
def test_a_run_at_a_time_decides_as_a_chunk_at_a_time(
    reference: Reference, capacity: int, at_once: int, prompts: list[list[int]]
) -> None:
    assert_runs_decide_as_chunks(reference.ours, prompts, capacity, at_once)


# What each of them is for ----------------------------------------------------


def tier_of(name: str, chunks: int | None) -> Policy:
    return POLICIES.get(name)([TierInfo("cpu", chunks)])


def order(policy: Policy, tier: str = "cpu") -> str:
    return "".join(map(str, policy.victims(tier, 1)))


@each_reference
def test_the_use_that_a_copy_was_made_for_is_no_second_one(reference: Reference) -> None:
    policy = reference.ours([TierInfo("cpu", 40), TierInfo("fs", 80)])
    for tier in ("cpu", "fs"):
        policy.on_insert(Run("ab"), tier)
    before = order(policy, "cpu")
    for _ in range(3):
        policy.on_access(Run("b"), REQUEST, "fs")
    assert order(policy, "cpu") == before == "ba"
    assert order(policy, "fs") == ("ba" if reference.name == "fifo" else "ab")


@each_reference
def test_a_use_on_the_gpu_counts_in_every_tier(reference: Reference) -> None:
    policy = reference.ours([TierInfo("cpu", 40), TierInfo("fs", 80)])
    for tier in ("cpu", "fs"):
        policy.on_insert(Run("ab"), tier)
    for _ in range(3):
        policy.on_access(Run("b"), REQUEST, "gpu")
    used = "ba" if reference.name == "fifo" else "ab"
    assert order(policy, "cpu") == order(policy, "fs") == used


@each_reference
def test_what_a_scan_finds_is_older_than_all_that_is_there(reference: Reference) -> None:
    policy = reference.ours([TierInfo("fs", 40)])
    policy.on_insert(Run("a"), "fs")
    policy.on_found(Run("axy"), "fs", age=1.0)
    policy.on_found(Run("z"), "fs", age=2.0)
    assert order(policy, "fs") == "zyxa"


@each_reference
def test_a_tier_without_a_bound_remembers_nothing_that_is_gone(reference: Reference) -> None:
    policy = tier_of(reference.name, None)
    for _ in range(2):
        policy.admit(Run("ab"), "cpu")
        policy.on_insert(Run("ab"), "cpu")
        policy.on_remove(["a"], "cpu")
    policy.on_insert(Run("a"), "cpu")
    policy.on_insert(Run("c"), "cpu")
    assert order(policy) == "bac"


@pytest.mark.parametrize("name", ["lru-2", "arc", "s3fifo", "w-tinylfu"])
def test_a_scan_does_not_push_out_what_was_used_often(name: str) -> None:
    cache = ChunkTier(POLICIES.get(name), 101)
    for chunk in [*range(102), *[50, 51, 52] * 4, *range(1000, 2000)]:
        cache.get(chunk)
    assert {50, 51, 52} <= cache.held


def test_an_lfu_keeps_what_nobody_asks_for_any_more() -> None:
    cache = ChunkTier(POLICIES.get("lfu"), 10)
    for chunk in list(range(9)) * 3 + [20, 21, 22, 21, 20]:
        cache.get(chunk)
    assert set(range(9)) <= cache.held


def test_a_ghost_that_comes_back_does_not_pass_the_small_queue_again() -> None:
    cache = ChunkTier(POLICIES.get("s3fifo"), 20)
    for chunk in range(30):
        cache.get(chunk)
    gone = min(set(range(30)) - cache.held)
    cache.get(gone)
    for chunk in range(100, 110):
        cache.get(chunk)
    assert gone in cache.held


def test_chunks_of_an_s3fifo_that_were_announced_and_never_came_are_no_victims() -> None:
    policy = tier_of("s3fifo", 20)
    policy.on_insert(Run(range(20)), "cpu")
    policy.admit(Run(range(20, 23)), "cpu")
    policy.on_remove(list(islice(policy.victims("cpu", 3), 3)), "cpu")
    assert len(list(policy.victims("cpu", 1))) == 17
    policy.on_insert(Run(range(20, 22)), "cpu")
    assert len(list(policy.victims("cpu", 1))) == 19
    policy.admit(Run(range(40, 42)), "cpu")
    assert set(policy.victims("cpu", 1)) < set(range(22))


def test_the_hand_of_a_sieve_waits_at_a_chunk_that_was_spared() -> None:
    policy = tier_of("sieve", 10)
    policy.on_insert(Run("abcdef"), "cpu")
    policy.on_access(Run("e"), REQUEST, "cpu")
    assert order(policy) == "fdcbae"
    policy.on_remove(["d"], "cpu")  # "f" is pinned
    assert order(policy) == "fcbae"
    policy.on_remove(["f", "c"], "cpu")
    # Only now has the hand passed "e", which is as good as unused when it comes round.
    policy.on_insert(Run("x"), "cpu")
    assert order(policy) == "baxe"


def test_a_tiny_lfu_takes_of_a_long_run_what_its_window_holds() -> None:
    policy = tier_of("w-tinylfu", 200)
    resident = Run(range(200))
    policy.on_insert(resident, "cpu")
    assert policy.admit(Run(range(1000, 1010)), "cpu") == 2


def test_a_tiny_lfu_takes_more_of_what_is_asked_for_again_and_again() -> None:
    policy = tier_of("w-tinylfu", 200)
    policy.on_insert(Run(range(200)), "cpu")
    run = Run(range(1000, 1010))
    assert [policy.admit(run, "cpu") for _ in range(2)] == [2, 10]


def test_a_large_tiny_lfu_fills_its_main_part_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wtinylfu, "_FILLS_AT_ONCE", 400)
    small, large = (
        ChunkTier(POLICIES.get("w-tinylfu"), 400),
        ChunkTier(POLICIES.get("w-tinylfu"), 500),
    )
    for chunk in range(300):
        small.get(chunk)
        large.get(chunk)
    assert small.policy._tiers["cpu"]._rings.sizes == [300, 0, 0]
    assert large.policy._tiers["cpu"]._rings.sizes == [5, 99, 196]


def test_a_large_tiny_lfu_that_has_filled_up_decides_as_libcachesims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wtinylfu, "_FILLS_AT_ONCE", 400)
    ids = [*range(1, 507), *zipf_ids(random.Random(4), 8_000, 2000)]
    assert_equal_hits(POLICIES.get("w-tinylfu"), libcachesim.WTinyLFU, ids, 505)


def test_a_sketch_counts_no_less_than_there_was_and_halves_it() -> None:
    sketch = FrequencySketch(100)
    seen = Counter(zipf_ids(random.Random(3), 500, 100))
    for chunk, times in seen.items():
        for _ in range(times):
            sketch.add_all([chunk])
    chunks = list(seen)
    assert all(e >= seen[c] for c, e in zip(chunks, sketch.estimates(chunks), strict=True))
    exact = sum(e == seen[c] for c, e in zip(chunks, sketch.estimates(chunks), strict=True))
    assert exact > 0.95 * len(chunks)
    before = sketch.estimates(chunks)
    sketch.halve()
    assert sketch.estimates(chunks) == [estimate // 2 for estimate in before]


def test_counters_of_a_sketch_stop_at_their_highest() -> None:
    sketch = FrequencySketch(10)
    sketch._counters[:] = 65_534
    for _ in range(3):
        sketch.add_all([b"a", b"b"])
    assert sketch.estimates([b"a", b"b"]) == [65_535, 65_535]
