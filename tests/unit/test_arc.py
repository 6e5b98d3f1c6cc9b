"""ARC against libcachesim, and against itself."""

import random

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
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import Run, TierInfo
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.conformance import PolicyConformance
from libcachesim import ARC
from traces import real_prompts, zipf_ids


class TestArcConformance(PolicyConformance):
    policy_class = ArcPolicy


@pytest.mark.parametrize("capacity", [1, 2, 10, 100, 900])
def test_uniform_chunks_hit_as_in_libcachesim(capacity: int) -> None:
    assert_equal_hits(ArcPolicy, ARC, uniform_ids(20_000), capacity)


@pytest.mark.parametrize("capacity", [1, 2, 10, 100, 900])
def test_zipf_chunks_hit_as_in_libcachesim(capacity: int) -> None:
    assert_equal_hits(ArcPolicy, ARC, zipf_ids(random.Random(2), 20_000, 2000), capacity)


@pytest.mark.parametrize("capacity", [4, 8, 20, 64])
def test_loops_between_popular_chunks_hit_as_in_libcachesim(capacity: int) -> None:
    """The target moves up and down all the time, so that ties at the target occur."""
    assert_equal_hits(ArcPolicy, ARC, loops_between_popular_ids(capacity), capacity)


@pytest.mark.parametrize("capacity", [500, 5000])
def test_chunks_of_a_real_trace_hit_as_in_libcachesim(capacity: int) -> None:
    prompts = real_prompts(2000)
    ids = [chunk for prompt in prompts for chunk in reversed(prompt)]
    assert_equal_hits(ArcPolicy, ARC, ids, capacity)


@given(capacity=st.integers(1, 12), at_once=st.integers(1, 5), prompts=few_prompts)
def test_a_run_at_a_time_decides_as_a_chunk_at_a_time(
    capacity: int, at_once: int, prompts: list[list[int]]
) -> None:
    """So the ghosts and the target come out equal too: the next victims depend on them."""
    assert_runs_decide_as_chunks(ArcPolicy, prompts, capacity, at_once)


def order(policy: ArcPolicy, tier: str = "cpu") -> list[object]:
    return list(policy.victims(tier, 1))


def two_tiers() -> ArcPolicy:
    return ArcPolicy([TierInfo("cpu", 4), TierInfo("fs", 8)])


def test_the_use_that_a_copy_was_made_for_is_no_second_one() -> None:
    policy = two_tiers()
    for tier in ("cpu", "fs"):
        policy.on_insert(Run("ab"), tier)
    policy.on_access(Run("a"), REQUEST, "fs")
    policy.on_insert(Run("x"), "cpu")
    policy.on_insert(Run("x"), "fs")
    assert order(policy, "cpu") == ["b", "a", "x"]
    assert order(policy, "fs") == ["b", "x", "a"]


def test_a_use_on_the_gpu_counts_in_every_tier() -> None:
    policy = two_tiers()
    for tier in ("cpu", "fs"):
        policy.on_insert(Run("ab"), tier)
    policy.on_access(Run("b"), REQUEST, "gpu")
    assert order(policy, "cpu") == order(policy, "fs") == ["a", "b"]


def test_a_scan_does_not_push_out_what_was_used_twice() -> None:
    cache = ChunkTier(ArcPolicy, 10)
    for chunk in (1, 2, 3, 1, 2, 3):
        cache.get(chunk)
    for chunk in range(100, 200):
        cache.get(chunk)
    assert {1, 2, 3} <= cache.held


def test_a_chunk_that_returns_soon_after_its_eviction_counts_as_frequent() -> None:
    cache = ChunkTier(ArcPolicy, 4)
    for chunk in (1, 1, 2, 3, 4, 5):
        cache.get(chunk)
    assert 2 not in cache.held
    for chunk in (2, 6, 7, 8):
        cache.get(chunk)
    assert {1, 2} & cache.held == {2, 1}


def test_chunks_evicted_for_a_run_that_never_came_are_ghosts_all_the_same() -> None:
    policy = ArcPolicy([TierInfo("cpu", 4)])
    policy.on_insert(Run("abc"), "cpu")
    policy.on_access(Run("c"), REQUEST, "cpu")
    policy.admit(Run("x"), "cpu")
    policy.on_remove(["b"], "cpu")
    policy.admit(Run("b"), "cpu")  # "x" could not be written
    policy.on_insert(Run("b"), "cpu")
    # "b" is among the frequent, and the target of those used once has risen to one.
    assert order(policy) == ["c", "b", "a"]


def test_a_tier_without_a_bound_remembers_nothing_that_is_gone() -> None:
    policy = ArcPolicy([TierInfo("redis")])
    policy.on_insert(Run("ab"), "redis")
    policy.on_remove(["a"], "redis")
    policy.on_insert(Run("a"), "redis")
    policy.on_insert(Run("c"), "redis")
    assert order(policy, "redis") == ["b", "a", "c"]


def test_what_a_scan_finds_is_older_than_all_that_is_there() -> None:
    policy = ArcPolicy([TierInfo("fs", 10)])
    policy.on_insert(Run("a"), "fs")
    policy.on_found(Run("xy"), "fs", age=1.0)
    policy.on_found(Run("z"), "fs", age=2.0)
    assert order(policy, "fs") == ["z", "y", "x", "a"]
