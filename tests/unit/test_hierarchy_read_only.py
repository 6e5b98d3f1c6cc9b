"""Lower tiers that belong to others: read, and neither stored in nor kept to a bound."""

import pytest
from hierarchy_kit import CHUNK, DemotingLru, DictTier, Stack, prefix
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers.requests import Lookup


@pytest.fixture
def tier() -> DictTier:
    """With eight chunks in it, and a bound of four."""
    tier = DictTier(4 * CHUNK)
    tier.put(prefix("p", 8))
    return tier


@pytest.mark.parametrize("policy", [LruPolicy, DemotingLru])
def test_a_chunk_is_read_and_nothing_is_written_or_removed(
    tier: DictTier, policy: type[LruPolicy]
) -> None:
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


def test_the_same_tier_of_ones_own_is_kept_to_its_bound(tier: DictTier) -> None:
    stack = Stack(4, {"far": tier})
    stack.settle()
    stack.begin("r", prefix("p", 3))
    stack.settle()
    assert "remove" in tier.calls
    assert len(tier.chunks) <= 4
