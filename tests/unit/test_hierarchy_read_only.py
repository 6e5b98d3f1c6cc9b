"""Lower tiers that belong to others: read, and neither stored in nor kept to a bound."""

import pytest
from hierarchy_kit import CHUNK, DemotingLru, DictTier, Stack, prefix
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers.requests import Lookup


def filled(capacity: int | None) -> DictTier:
    """With eight chunks in it."""
    tier = DictTier(capacity)
    tier.put(prefix("p", 8))
    return tier


@pytest.mark.parametrize("policy", [LruPolicy, DemotingLru])
@pytest.mark.parametrize("capacity", [4 * CHUNK, None], ids=["above its bound", "without bound"])
def test_a_chunk_is_read_and_nothing_is_written_or_removed(
    policy: type[LruPolicy], capacity: int | None
) -> None:
    tier = filled(capacity)
    stack = Stack(4, {"far": tier}, policy, stores=False)
    before = dict(tier.chunks)
    stack.settle()
    stack.begin("r", prefix("p", 3))
    stack.settle()
    assert stack.look("r", prefix("p", 3)) == [Lookup.HIT] * 3
    # More than the arena has room for: something must go, and nowhere.
    for name in ("q", "s", "t"):
        stack.store(prefix(name, 3))
        stack.settle()
    assert not {"write", "remove"} & set(tier.calls)
    assert tier.chunks == before


@pytest.mark.parametrize("policy", [LruPolicy, DemotingLru])
def test_a_tier_of_ones_own_is_written_to(policy: type[LruPolicy]) -> None:
    tier = filled(None)
    stack = Stack(4, {"far": tier}, policy)
    for name in ("q", "s", "t"):
        stack.store(prefix(name, 3))
        stack.settle()
    assert "write" in tier.calls


def test_a_tier_of_ones_own_is_kept_to_its_bound() -> None:
    tier = filled(4 * CHUNK)
    Stack(4, {"far": tier}).settle()
    assert "remove" in tier.calls
    assert len(tier.chunks) <= 4
