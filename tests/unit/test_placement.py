"""What lower tiers take, and when: nothing that was seen once, and nothing that does not pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hierarchy_kit import CHUNK, DictTier, Stack, prefix
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.conformance import PolicyConformance, VirtualClock
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.placement import Placement, PlacementPolicy, with_placement
from kvtiers.policies.placement_history import UseHistory
from kvtiers.policies.quota import with_quotas
from kvtiers.tiers.requests import Lookup

REUSED = Placement("reused")
WORTH = Placement("worth")
DEMOTE = Placement("all", "on_eviction")
DEMOTE_REUSED = Placement("reused", "on_eviction")
DEMOTE_WORTH = Placement("worth", "on_eviction")
RULES = [REUSED, WORTH, DEMOTE, DEMOTE_REUSED, DEMOTE_WORTH]
SOON = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class _Conformance(PolicyConformance):
    effort = SOON
    inner: type[Policy] = LruPolicy
    rule: Placement

    @pytest.fixture
    def policy_factory(self):
        return lambda tiers, clock: with_placement(self.inner(tiers, clock=clock), self.rule)


class TestReused(_Conformance):
    rule = REUSED
    prefix_closed = True


class TestDemotedWhenWorthIt(_Conformance):
    rule = DEMOTE_WORTH
    inner = ArcPolicy


class TestWorthWithinQuotas(_Conformance):
    @pytest.fixture
    def policy_factory(self):
        return lambda tiers, clock: with_quotas(with_placement(LruPolicy(tiers), WORTH))


# In a hierarchy ---------------------------------------------------------------


def stack_of(
    slots: int,
    rule: Placement,
    *,
    compute: Callable[[Run], float] = len,
    capacity: int | None = None,
    **options: object,
) -> Stack:
    """An arena over a disk that is under ``rule``."""

    def make(infos: Sequence[TierInfo], clock: Callable[[], float]) -> Policy:
        return with_placement(LruPolicy(infos, None, clock, compute), rule)

    disk = DictTier(capacity, tenant_quota=options.get("tenant_quota"))  # type: ignore[arg-type]
    return Stack(slots, {"disk": disk}, make, **options)  # type: ignore[arg-type]


def ask(stack: Stack, name: str, run: Run) -> None:
    """A request for all of the run: loads what there is, computes and stores the rest."""
    stack.clock.now += 1.0
    stack.begin(name, run)
    stack.settle()
    hits = sum(answer is Lookup.HIT for answer in stack.look(name, run))
    stack.load(name, run.head(hits))
    stack.h.loaded(name)
    stack.store(run, name)
    stack.h.end(name)
    stack.settle()


def on_disk(stack: Stack) -> set[bytes]:
    return {key.hash for key in stack.tiers["disk"].chunks}  # type: ignore[attr-defined]


def spared(stack: Stack) -> int:
    """Chunks that the disk was spared since last asked."""
    return stack.counts()["disk"].get("bytes_not_written", 0) // CHUNK


def test_what_was_asked_for_once_is_not_written_and_is_when_it_is_asked_for_again() -> None:
    stack, run = stack_of(16, REUSED), prefix("p", 3)
    ask(stack, "first", run)
    assert on_disk(stack) == set()
    ask(stack, "second", prefix("p", 5))
    assert on_disk(stack) == set(run.chunks), "the tail is new"
    assert spared(stack) == 0, "all of it is in the arena still"


def test_what_leaves_the_arena_unwritten_is_counted_once_and_for_good() -> None:
    stack = stack_of(4, REUSED)
    ask(stack, "a", prefix("a", 4))
    ask(stack, "b", prefix("b", 4))
    assert spared(stack) == 4
    ask(stack, "a again", prefix("a", 4))
    assert on_disk(stack) == set(prefix("a", 4).chunks), "computed twice: it proved its use"
    assert spared(stack) == 4, "those of b"
    ask(stack, "c", prefix("c", 4))
    assert spared(stack) == 0, "those of a are on the disk"


def test_write_through_as_ever_spares_nothing() -> None:
    stack = stack_of(4, Placement())
    for name in "abc":
        ask(stack, name, prefix(name, 4))
    assert len(on_disk(stack)) == 12
    assert spared(stack) == 0


def test_demotion_writes_what_the_arena_evicts_and_nothing_before() -> None:
    stack = stack_of(8, DEMOTE)
    for name in "abc":
        ask(stack, name, prefix(name, 2))
    assert on_disk(stack) == set()
    for name in "defghij":
        ask(stack, name, prefix(name, 2))
    assert set(prefix("a", 2).chunks) <= on_disk(stack)
    assert not on_disk(stack) & set(prefix("j", 2).chunks)


def test_demotion_of_what_was_reused_leaves_out_the_rest() -> None:
    stack = stack_of(8, DEMOTE_REUSED)
    for name in ("hot", "hot2"):
        ask(stack, name, prefix("hot", 2))
    for number in range(12):
        ask(stack, f"cold{number}", prefix(f"cold{number}", 2))
    assert on_disk(stack) == set(prefix("hot", 2).chunks)
    assert spared(stack) > 0


def test_a_tenant_above_its_quota_gets_no_more_than_that_of_what_is_reused() -> None:
    stack = stack_of(16, REUSED, tenant_quota=4 * CHUNK)
    run = prefix("p", 6, tenant="t")
    ask(stack, "first", run)
    ask(stack, "second", run)
    stack.clock.now += 2.0
    stack.settle()
    assert on_disk(stack) == stack.ready() == set(run.chunks[:4])


def test_a_slow_tier_is_written_to_only_where_computing_takes_longer() -> None:
    for compute, wanted in ((10.0, True), (1.0, False)):
        stack = stack_of(4, DEMOTE_WORTH, compute=lambda run, c=compute: c * len(run))
        # Three reads of a chunk that take two seconds each.
        disk = stack.workers["disk"]
        for number in range(3):
            stack.tiers["disk"].put(prefix(f"there{number}", 1))
            stack.begin(f"r{number}", prefix(f"there{number}", 1))
            disk.run()
            stack.h.tick()
            for op in list(disk.queued):
                disk.begin(op)
                stack.clock.now += 2.0
                disk.end(op)
            stack.h.tick()
            stack.h.end(f"r{number}")
        before = on_disk(stack)
        for number in range(6):
            ask(stack, f"new{number}", prefix(f"new{number}", 2))
        assert (len(on_disk(stack)) > len(before)) is wanted


# The index ---------------------------------------------------------------------


class Foretelling(LruPolicy):
    """Knows how likely each chunk is to be used."""

    odds = 0.0

    def reuse(self, run: Run, within: float) -> Sequence[float]:
        return [self.odds] * len(run)


def two_tiers(
    near: float, far: float, write: float = 0.0, capacity: int | None = None
) -> list[TierInfo]:
    """Below the arena two tiers, and the seconds that each needs to read a chunk."""

    def by_chunk(seconds: float) -> Callable[[int], float]:
        return lambda nbytes: seconds * nbytes / CHUNK

    return [
        TierInfo("cpu", 64 * CHUNK),
        TierInfo("near", capacity, read_seconds=by_chunk(near), write_seconds=lambda _n: write),
        TierInfo("far", capacity, read_seconds=by_chunk(far), write_seconds=lambda _n: write),
    ]


def policy_with(odds: float, infos: Sequence[TierInfo], rule: Placement = DEMOTE_WORTH) -> Policy:
    inner = Foretelling(infos, None, VirtualClock(), len)
    inner.odds = odds
    policy = with_placement(inner, rule)
    policy.on_request(PolicyRequest("r", (prefix("p", 4),)))
    return policy


def target(odds: float, *seconds: float, **options: float) -> str | None:
    policy = policy_with(odds, two_tiers(*seconds, **options))  # type: ignore[arg-type]
    return policy.demote(prefix("p", 4).chunks[-1], "cpu")


def test_a_chunk_goes_where_it_is_worth_most_or_nowhere() -> None:
    assert target(0.5, 0.1, 0.9) == "near"
    assert target(0.5, 0.9, 0.1) == "far", "a near tier may be the slow one"
    assert target(0.5, 0.1, 0.1) == "near", "of equals"
    assert target(0.5, 1.5, 0.9) == "far"
    assert target(0.5, 1.5, 2.0) is None, "both are slower than computing"
    assert target(0.0, 0.1, 0.1) is None, "nobody will ask for it"


def test_what_comes_before_a_demoted_chunk_goes_where_that_went() -> None:
    policy, run = policy_with(0.9, two_tiers(0.1, 0.5)), prefix("p", 4)
    tail = Run(run.chunks[2:], 2, CHUNK, parent=run.chunks[1])
    assert policy.admit(tail, "near") == 2
    policy.inner.odds = 0.0  # type: ignore[attr-defined]
    assert policy.demote(run.chunks[0], "cpu") is None, "what follows it was not told of yet"
    assert policy.demote(run.chunks[1], "cpu") == "near"
    assert policy.demote(run.chunks[1], "near") is None, "from there it is not worth it"
    assert policy.admit(run, "near") == 2, "nothing behind it"
    assert policy.admit(run, "far") == 0
    policy.on_remove(run.chunks[:2], "cpu")
    assert policy.demote(run.chunks[1], "cpu") is None, "it is gone"


@pytest.mark.parametrize(("rule", "most"), [(DEMOTE, 0), (DEMOTE_REUSED, 4)])
def test_what_comes_before_is_remembered_only_where_it_is_asked_for_and_within_bounds(
    rule: Placement, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks may go down whose parent has left the arena before them: nobody says so again."""
    monkeypatch.setattr("kvtiers.policies.placement._MOST_REMEMBERED", 4)
    policy = with_placement(LruPolicy([TierInfo("cpu", 100), TierInfo("disk", 100)]), rule)
    assert isinstance(policy, PlacementPolicy)
    for n in range(0, 40, 2):
        run = Run((n + 1,), 1, 1, parent=n)
        for again in range(2):
            policy.on_request(PolicyRequest(f"{n}-{again}", (run,)))
        assert policy.admit(run, "disk") == 1
    assert len(policy._before) == most


def test_a_write_to_a_tier_that_is_busy_serving_has_to_pay() -> None:
    policy = policy_with(0.01, two_tiers(0.1, 5.0, write=0.1))
    chunk = prefix("p", 4).chunks[-1]
    assert policy.demote(chunk, "cpu") == "near", "nobody is delayed by it"
    served = prefix("served", 100)
    policy.on_access(served, PolicyRequest("s", (served,)), "near")
    policy.clock.now += 10.0  # type: ignore[attr-defined]
    assert policy.demote(chunk, "cpu") is None, "it has been reading all the time"
    policy.clock.now += 1000.0  # type: ignore[attr-defined]
    assert policy.demote(chunk, "cpu") == "near"


def test_a_full_tier_takes_what_is_likelier_used_than_what_it_would_give_up() -> None:
    infos = two_tiers(0.1, 5.0, capacity=8 * CHUNK)
    policy = policy_with(0.5, infos)
    inner = policy.inner  # type: ignore[attr-defined]
    chunk = prefix("p", 4).chunks[-1]
    assert policy.demote(chunk, "cpu") == "near"
    policy.on_request(PolicyRequest("held", (prefix("held", 8),)))
    policy.on_insert(prefix("held", 8), "near")
    policy.on_remove(prefix("held", 8).chunks[-1:], "near")
    policy.clock.now += 5.0  # type: ignore[attr-defined]
    assert policy.demote(chunk, "cpu") is None, "no likelier than what is there"
    inner.reuse = lambda run, _within: [0.9 if chunk in run.chunks else 0.5] * len(run)
    assert policy.demote(chunk, "cpu") == "near"


def test_nothing_below_it_is_nothing_to_place() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    assert with_placement(policy, DEMOTE) is policy
    assert with_placement(policy, Placement()) is policy
    wide = LruPolicy([TierInfo("cpu"), TierInfo("fs")])
    assert with_placement(wide, Placement()) is wide
    assert isinstance(with_placement(wide, DEMOTE), PlacementPolicy)


# What chunks were seen to do -----------------------------------------------------


def test_the_odds_are_those_of_chunks_with_as_many_uses() -> None:
    clock = VirtualClock()
    history = UseHistory(clock, 100)
    for number in range(400):
        clock.now += 10.0
        history.use(prefix(f"once{number}", 1))
        if not number % 4:
            history.use(prefix("often", 1))
    assert history.chance(1, 0.0, math.inf) < 0.05
    assert history.chance(7, 0.0, math.inf) > 0.8
    assert history.chance(7, 0.0, 20.0) < 0.05, "it comes every 40 seconds"
    assert history.chance(7, 0.0, 80.0) > 0.8


def test_who_was_left_alone_for_long_has_the_odds_of_such() -> None:
    clock = VirtualClock()
    history = UseHistory(clock, 64)
    for number in range(600):
        clock.now += 1.0
        run = prefix(f"p{number}", 1)
        history.use(run)
        if number % 2:
            clock.now += 1.0
            history.use(run)
    young, old = (history.chance(1, age, math.inf) for age in (0.0, 30.0))
    # Half of the trials that have hardly begun count as lost.
    assert 0.35 < young < 0.55
    assert old < 0.1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.floats(0, 50)), max_size=60),
    st.integers(1, 40),
)
def test_what_is_remembered_is_the_latest_and_bounded(
    uses: list[tuple[int, int, float]], room: int
) -> None:
    clock = VirtualClock()
    history = UseHistory(clock, room)
    last: dict[object, float] = {}
    for number, n, seconds in uses:
        clock.now += seconds
        run = prefix(f"p{number}", n)
        history.use(run)
        for chunk in run.chunks:
            last.pop(chunk, None)
            last[chunk] = clock.now
        remembered = {c: past for c in last if (past := history.past(c)) is not None}
        # A generation ends with the run that fills it.
        assert len(remembered) <= 2 * (room + 5)
        assert set(list(last)[-room:]) <= set(remembered) or len(last) > room
        for chunk, past in remembered.items():
            assert abs(past.age(clock.now) - (clock.now - last[chunk])) <= 0.125
        counted = history._in_young, history._in_old
        assert sum(map(sum, counted)) == len(remembered)
        for known in range(1, 8):
            assert 0.0 < history.chance(known, 1.0, 100.0) < 1.0


def test_positions_are_remembered() -> None:
    history = UseHistory(VirtualClock(), 10)
    history.use(prefix("p", 9, group=3).tail(4))
    past = history.past(prefix("p", 9, group=3).chunks[-1])
    assert past is not None
    assert (past.uses, past.group, past.position) == (1, 3, 8)


# As it is configured -------------------------------------------------------------


def test_the_words_are_checked() -> None:
    config = load({"admission": "reused", "write": "on_eviction"}, {}).config
    assert config.placement == DEMOTE_REUSED
    assert load({}, {}).config.placement == Placement()
    assert isinstance(
        config.policy.make([TierInfo("cpu"), TierInfo("fs")], lambda: 0.0, len, config.placement),
        PlacementPolicy,
    )
    with pytest.raises(ConfigError, match=r"admission is 'reuse' .*'reused'"):
        load({"admission": "reuse"}, {})
    with pytest.raises(ConfigError, match=r"write is 'back' .*'through'"):
        load({"write": "back"}, {})
