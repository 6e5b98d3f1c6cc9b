"""Tenants and their quotas: nobody is above for long, and nobody else pays for it."""

import inspect
import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.policies import ChunkFacts, ChunkId, Policy, PolicyRequest, Run, ScoredPolicy, TierInfo
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.around import PolicyAround
from kvtiers.policies.conformance import CHUNK_BYTES, PolicyConformance, _reachable
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.prefix_order import PrefixOrder
from kvtiers.policies.quota import QuotaPolicy, with_quotas


class ByUse(ScoredPolicy):
    """The fewest uses go first."""

    def score(self, chunk: ChunkFacts, now: float) -> float:
        return chunk.uses


def bound(tiers, chunks=2):
    return [replace(tier, tenant_quota=chunks * CHUNK_BYTES) for tier in tiers]


class _Conformance(PolicyConformance):
    inner: type[Policy]

    @pytest.fixture
    def policy_factory(self):
        return lambda tiers, clock: with_quotas(self.inner(bound(tiers), clock=clock))


class TestAroundLru(_Conformance):
    inner = LruPolicy
    prefix_closed = True


class TestAroundArc(_Conformance):
    inner = ArcPolicy


class TestAroundScored(_Conformance):
    inner = ByUse
    prefix_closed = True


def run_of(tenant: str, begin: int, end: int, prompt: int = 0) -> Run:
    """Chunks ``begin`` to ``end`` of a tenant's prompt."""
    ids = [f"{tenant}/{prompt}/{i}" for i in range(end)]
    parent = ids[begin - 1] if begin else None
    return Run(tuple(ids[begin:]), begin, CHUNK_BYTES, 0, parent, tenant)


class Driver:
    """One tier, filled as a hierarchy fills it."""

    def __init__(self, policy_class: type[Policy], capacity: int, quota: int | None) -> None:
        limit = None if quota is None else quota * CHUNK_BYTES
        info = TierInfo("cpu", capacity * CHUNK_BYTES, tenant_quota=limit)
        self.policy = with_quotas(policy_class([info]))
        self.capacity = capacity
        self.quota = quota
        self.held: dict[ChunkId, str] = {}

    def chunks_of(self, tenant: str) -> int:
        return sum(owner == tenant for owner in self.held.values())

    def store(self, run: Run) -> list[str]:
        """Returns whose chunks made room, in order."""
        run = run.head(self.policy.admit(run, "cpu"))
        missing = [chunk for chunk in run.chunks if chunk not in self.held]
        short = len(self.held) + len(missing) - self.capacity
        named = (c for c in self.policy.victims("cpu", short * CHUNK_BYTES) if c not in run.chunks)
        gone = list(itertools.islice(named, max(0, short)))
        losers = [self.held[chunk] for chunk in gone]
        self.drop(gone)
        room = self.capacity - len(self.held)
        if missing[room:]:
            run = run.head(run.chunks.index(missing[room]))
        if len(run):
            self.held.update(dict.fromkeys(run.chunks, run.tenant))
            self.policy.on_insert(run, "cpu")
        return losers

    def use(self, run: Run) -> None:
        self.policy.on_access(run, PolicyRequest("r", (run,), tenant=run.tenant), "cpu")

    def drop(self, chunks: Iterable[ChunkId]) -> None:
        gone = list(chunks)
        for chunk in gone:
            del self.held[chunk]
        self.policy.on_remove(gone, "cpu")

    def chores(self) -> None:
        self.drop(self.policy.expired("cpu"))


RUNS = st.builds(
    lambda tenant, begin, n, prompt: run_of(tenant, begin, begin + n, prompt),
    st.sampled_from(["", "red", "blue", "green"]),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(0, 2),
)
STEPS = st.lists(st.tuples(st.sampled_from(["store", "use", "chores", "lose"]), RUNS), max_size=40)
POLICIES = st.sampled_from([LruPolicy, ArcPolicy, ByUse])


@settings(max_examples=300, deadline=None)
@given(POLICIES, STEPS, st.integers(1, 8), st.integers(4, 12))
def test_nobody_is_above_once_the_hooks_have_run_and_nobody_within_pays(
    policy_class, steps, quota, capacity
) -> None:
    tier = Driver(policy_class, capacity, quota)
    tenants = ("red", "blue", "green")
    for step, run in steps:
        if step == "store":
            before = {tenant: tier.chunks_of(tenant) for tenant in tenants}
            for tenant in tier.store(run):
                others = [t for t in tenants if t not in (tenant, run.tenant)]
                if tenant == "" or before[tenant] <= quota:
                    # Its turn by the policy's order, since nobody else was above any more.
                    assert all(tier.chunks_of(other) <= quota for other in others)
        elif step == "use":
            tier.use(run)
        elif step == "lose":
            tier.drop([chunk for chunk in run.chunks if chunk in tier.held])
        tier_before = dict(tier.held)
        if step == "chores":
            tier.chores()
            assert all(tier.chunks_of(tenant) <= quota for tenant in tenants)
            # No more was dropped than was above, and of nobody else.
            for tenant in ("", *tenants):
                had = sum(owner == tenant for owner in tier_before.values())
                assert tier.chunks_of(tenant) == (min(had, quota) if tenant else had)


@settings(max_examples=200, deadline=None)
@given(POLICIES, STEPS, st.integers(4, 12))
def test_with_quotas_that_nobody_reaches_all_is_as_the_policy_says(
    policy_class, steps, capacity
) -> None:
    tiers = [Driver(policy_class, capacity, quota) for quota in (None, 1000)]
    assert not isinstance(tiers[0].policy, QuotaPolicy)
    assert isinstance(tiers[1].policy, QuotaPolicy)
    for step, run in steps:
        for tier in tiers:
            if step == "store":
                tier.store(run)
            elif step == "use":
                tier.use(run)
            elif step == "lose":
                tier.drop([chunk for chunk in run.chunks if chunk in tier.held])
            else:
                tier.chores()
        plain, bounded = (list(tier.policy.victims("cpu", 1)) for tier in tiers)
        assert plain == bounded
        assert tiers[0].held == tiers[1].held


def test_a_tenant_that_floods_a_full_tier_replaces_its_own() -> None:
    tier = Driver(LruPolicy, capacity=8, quota=4)
    tier.store(run_of("blue", 0, 3))
    for prompt in range(10):
        tier.store(run_of("red", 0, 4, prompt))
        # It may use the one chunk of room that there is to spare.
        assert tier.chunks_of("red") <= 5
    tier.chores()
    assert (tier.chunks_of("blue"), tier.chunks_of("red")) == (3, 4)
    # What red holds is its last prompt whole, and no holes.
    assert all(chunk in tier.held for chunk in run_of("red", 0, 4, 9).chunks)


def test_a_tenant_within_its_quota_makes_room_where_others_are_above() -> None:
    tier = Driver(LruPolicy, capacity=8, quota=4)
    tier.store(run_of("blue", 0, 2))
    tier.store(run_of("red", 0, 4, 0))
    tier.store(run_of("red", 0, 2, 1))
    assert tier.chunks_of("red") == 6
    assert tier.store(run_of("green", 0, 2)) == ["red", "red"]
    # Blue's are the oldest, and still there.
    assert tier.chunks_of("blue") == 2


def test_there_is_room_to_spare_and_all_the_same_it_is_brought_down() -> None:
    tier = Driver(LruPolicy, capacity=100, quota=4)
    for prompt in range(3):
        tier.store(run_of("red", 0, 4, prompt))
        tier.store(run_of("", 0, 4, prompt))
    tier.chores()
    assert (tier.chunks_of("red"), tier.chunks_of("")) == (4, 12)
    assert all(chunk in tier.held for chunk in run_of("red", 0, 4, 2).chunks)


def test_of_a_prompt_larger_than_the_quota_the_head_is_kept() -> None:
    tier = Driver(LruPolicy, capacity=100, quota=4)
    # In two steps, as an engine stores a long prompt.
    tier.store(run_of("red", 0, 3))
    tier.store(run_of("red", 3, 9))
    assert set(tier.held) == set(run_of("red", 0, 4).chunks)
    assert tier.policy.admit(run_of("", 0, 9), "cpu") == 9


def test_the_coldest_goes_by_use_and_not_by_arrival() -> None:
    tier = Driver(LruPolicy, capacity=100, quota=4)
    for prompt in range(2):
        tier.store(run_of("red", 0, 2, prompt))
    tier.use(run_of("red", 0, 2, 0))
    tier.store(run_of("red", 0, 2, 2))
    assert list(tier.policy.expired("cpu")) == list(reversed(run_of("red", 0, 2, 1).chunks))


def test_what_a_scan_finds_of_a_tenant_counts_as_its_oldest() -> None:
    tier = Driver(LruPolicy, capacity=100, quota=2)
    tier.store(run_of("red", 0, 1, 0))
    found = run_of("red", 0, 2, 1)
    tier.held.update(dict.fromkeys(found.chunks, "red"))
    tier.policy.on_found(found, "cpu", 60.0)
    assert list(tier.policy.expired("cpu")) == [found.chunks[1]]


def test_a_store_that_never_arrives_costs_nobody_else_anything() -> None:
    tier = Driver(LruPolicy, capacity=8, quota=4)
    tier.store(run_of("red", 0, 4, 0))
    tier.store(run_of("blue", 0, 4, 0))
    tier.policy.admit(run_of("red", 0, 4, 1), "cpu")
    tier.policy.admit(run_of("blue", 0, 1, 1), "cpu")
    assert next(tier.policy.victims("cpu", 1)).startswith("blue")


def test_no_more_of_what_is_above_is_looked_at_than_is_taken(monkeypatch) -> None:
    tier = Driver(LruPolicy, capacity=1000, quota=1)
    for prompt in range(100):
        tier.store(run_of("red", 0, 1, prompt))
    looked_at, whole = [], PrefixOrder.__iter__
    monkeypatch.setattr(PrefixOrder, "__iter__", lambda order: map(note, whole(order)))

    def note(chunk: ChunkId) -> ChunkId:
        looked_at.append(chunk)
        return chunk

    coldest = next(tier.policy.victims("cpu", 1))
    assert next(iter(tier.policy.expired("cpu"))) == coldest
    assert looked_at == [coldest] * 2


def test_every_tier_has_a_quota_of_its_own() -> None:
    tiers = [TierInfo("cpu", tenant_quota=CHUNK_BYTES), TierInfo("fs")]
    policy = with_quotas(LruPolicy(tiers))
    run = run_of("red", 0, 3)
    # It must come through the first tier to get into the next.
    assert (policy.admit(run, "cpu"), policy.admit(run, "fs")) == (3, 3)
    for tier in ("cpu", "fs"):
        policy.on_insert(run, tier)
    assert len(list(policy.expired("cpu"))) == 2
    assert list(policy.expired("fs")) == []


def test_the_first_tier_lets_through_what_the_widest_quota_holds() -> None:
    quotas = {"cpu": 1, "fs": 4, "redis": 2}
    tiers = [TierInfo(name, tenant_quota=n * CHUNK_BYTES) for name, n in quotas.items()]
    policy = with_quotas(LruPolicy(tiers))
    run = run_of("red", 0, 9)
    assert [policy.admit(run, tier) for tier in quotas] == [4, 4, 2]
    assert policy.admit(run.tail(3), "cpu") == 1
    assert policy.admit(run.tail(5), "cpu") == 0


def test_nothing_is_remembered_of_tenants_that_are_gone() -> None:
    policy = QuotaPolicy(LruPolicy([TierInfo("cpu", tenant_quota=CHUNK_BYTES)]))
    sizes = []
    for number in range(200):
        run = run_of(f"tenant{number}", 0, 4)
        policy.on_insert(run, "cpu")
        policy.on_remove(run.chunks, "cpu")
        sizes.append(_reachable(policy))
    assert max(sizes[100:]) <= max(sizes[:100])


def test_no_question_and_no_news_misses_the_inner_policy() -> None:
    methods = {
        name
        for name, member in inspect.getmembers(Policy, inspect.isfunction)
        if not name.startswith("_") and name != "setup"
    }
    assert methods <= vars(PolicyAround).keys()
    assert issubclass(QuotaPolicy, PolicyAround)
