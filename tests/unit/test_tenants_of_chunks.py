"""Whose a chunk is: known from the request on to the policy and to every tier."""

from dataclasses import replace

from hierarchy_kit import CHUNK, FIRST, DictTier, Stack, prefix, truth
from kvtiers.policies import Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import ChunkKey
from kvtiers.tiers.base import Namespace
from kvtiers.tiers.workers import OpKind

OURS = replace(prefix("p", 3), tenant="ours")


class Told(LruPolicy):
    """Remembers whose chunks it was told of, by tier."""

    def setup(self) -> None:
        super().setup()
        self.tenants: dict[str, dict[object, str]] = {tier.name: {} for tier in self.tiers}

    def _note(self, run: Run, tier: str) -> None:
        self.tenants[tier] |= dict.fromkeys(run.chunks, run.tenant)

    def on_insert(self, run: Run, tier: str) -> None:
        self._note(run, tier)
        super().on_insert(run, tier)

    def on_found(self, run: Run, tier: str, age: float) -> None:
        self._note(run, tier)
        super().on_found(run, tier, age)


def tenants_in(stack: Stack, tier: str) -> dict[object, str]:
    policy = stack.h.policy
    assert isinstance(policy, Told)
    return policy.tenants[tier]


def test_what_is_stored_carries_its_tenant_into_every_tier_and_to_the_policy() -> None:
    stack = Stack(16, {"disk": DictTier()}, policy=Told)
    stack.store(OURS)
    named = [key for op in stack.workers["disk"].of(OpKind.WRITE) for key in op.keys]
    assert [(key.tenant, key.position) for key in named] == [("ours", i) for i in range(3)]
    stack.settle()
    assert (
        tenants_in(stack, "cpu") == tenants_in(stack, "disk") == dict.fromkeys(OURS.chunks, "ours")
    )


def test_what_a_scan_found_without_a_tenant_is_told_it_by_the_request_that_wants_it() -> None:
    tier = DictTier()
    tier.put(OURS)
    stack = Stack(8, {"disk": tier}, policy=Told)
    stack.settle()
    assert set(tenants_in(stack, "disk").values()) == {""}
    stack.begin("r", OURS)
    stack.settle()
    assert tenants_in(stack, "cpu") == dict.fromkeys(OURS.chunks, "ours")


def test_the_tenant_that_a_scan_tells_is_kept_also_over_a_reset() -> None:
    tier = DictTier(capacity=100 * CHUNK)
    others = Namespace("e" * 32)
    for namespace in (FIRST, others):
        for key in OURS.chunks:
            assert isinstance(key, bytes)
            tier.chunks[ChunkKey(namespace, key, -1, "ours")] = truth(key, namespace)
    stack = Stack(8, {"disk": tier}, policy=Told)
    stack.settle()
    assert list(tenants_in(stack, "disk").values()) == ["ours"] * 6
    tenants_in(stack, "disk").clear()
    stack.h.reset(Namespace("f" * 32))
    stack.settle()
    assert list(tenants_in(stack, "disk").values()) == ["ours"] * 3


def test_chunks_of_two_tenants_are_never_in_one_run() -> None:
    tier = DictTier()
    for tenant, key in zip(("ours", "ours", "theirs"), OURS.chunks, strict=True):
        assert isinstance(key, bytes)
        tier.chunks[ChunkKey(FIRST, key, -1, tenant)] = truth(key)
    stack = Stack(8, {"disk": tier}, policy=Told)
    stack.settle()
    stack.begin("r", OURS)
    stack.settle()
    assert list(tenants_in(stack, "cpu").values()) == ["ours", "ours", "theirs"]
