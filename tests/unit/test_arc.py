"""What ARC alone does; what it has in common with others is in test_reference_policies.py."""

import pytest
from chunk_tier import REQUEST, ChunkTier, assert_equal_hits, loops_between_popular_ids
from kvtiers.policies import Run, TierInfo
from kvtiers.policies.arc import ArcPolicy
from libcachesim import ARC


@pytest.mark.parametrize("capacity", [4, 8, 20, 64])
def test_loops_between_popular_chunks_hit_as_in_libcachesim(capacity: int) -> None:
    """The target moves up and down all the time, so that ties at the target occur."""
    assert_equal_hits(ArcPolicy, ARC, loops_between_popular_ids(capacity), capacity)


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
    assert list(policy.victims("cpu", 1)) == ["c", "b", "a"]
