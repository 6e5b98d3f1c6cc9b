"""What requests in the queue are about to ask for is evicted after all else, and no later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hierarchy_kit import CHUNK, DEADLINE, DictTier, Stack, prefix
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import ChunkId, PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import queued
from kvtiers.tiers.queued import Queued


def ready(stack: Stack, run: Run) -> int:
    """How many chunks of the run the arena holds."""
    return len(stack.ready() & set(run.chunks))


def test_a_prefix_in_the_arena_outlives_what_comes_while_its_request_waits() -> None:
    stack, run = Stack(8), prefix("p", 3)
    stack.store(run)
    stack.begin("waits", run)
    # Longer than anything is held for it.
    stack.clock.now += 10 * DEADLINE
    for number in range(10):
        stack.store(prefix(f"other{number}", 2))
    assert ready(stack, run) == 3
    stack.load("waits", run)
    stack.h.loaded("waits")
    for number in range(10):
        stack.store(prefix(f"more{number}", 2))
    assert ready(stack, run) == 0, "it started, and its prefix aged since"


def test_it_is_evicted_when_there_is_nothing_else() -> None:
    stack, run = Stack(4), prefix("p", 3)
    stack.store(run)
    stack.begin("waits", run)
    assert len(stack.store(prefix("large", 4))) == 4
    assert ready(stack, run) == 0


def test_it_ages_again_once_its_request_is_gone() -> None:
    stack, run = Stack(4), prefix("p", 3)
    stack.store(run)
    stack.begin("one", run)
    stack.begin("other", run)
    stack.h.end("one")
    stack.store(prefix("a", 1))
    stack.store(prefix("b", 1))
    assert ready(stack, run) == 3, "one waits still"
    stack.h.end("other")
    stack.store(prefix("c", 1))
    assert ready(stack, run) == 2


def test_a_lower_tier_keeps_it_too() -> None:
    tier = DictTier(10 * CHUNK, headroom=0.4)
    stack = Stack(4, {"disk": tier}, window={0: 0})
    run = prefix("p", 3)
    tier.put(run)
    stack.begin("waits", run)
    stack.settle()
    for number in range(16):
        stack.store(prefix(f"other{number}", 2))
        stack.settle()
    held = {key.hash for key in tier.chunks}
    assert set(run.chunks) <= held
    assert len(held) < 16
    stack.h.end("waits")
    for number in range(16):
        stack.store(prefix(f"more{number}", 2))
        stack.settle()
    assert not set(run.chunks) & {key.hash for key in tier.chunks}


class Impatient(LruPolicy):
    """Has everything dropped a while after it came."""

    def setup(self) -> None:
        super().setup()
        self.since = self.clock()

    def expired(self, tier: str) -> Sequence[ChunkId]:
        return list(self.victims(tier, 1)) if self.clock() > self.since + 60.0 else []


def test_what_has_expired_goes_although_it_is_waited_for() -> None:
    stack, run = Stack(8, policy=Impatient), prefix("p", 3)
    stack.store(run)
    stack.begin("waits", run)
    stack.clock.now += 30.0
    stack.settle()
    assert ready(stack, run) == 3
    stack.clock.now += 60.0
    stack.settle()
    assert ready(stack, run) == 0


def test_a_quota_holds_for_who_waits_as_for_anybody() -> None:
    stack = Stack(16, tenant_quota=4 * CHUNK)
    mine, others = prefix("p", 4, tenant="t"), prefix("q", 3, tenant="t")
    stack.store(mine)
    stack.begin("waits", mine)
    stack.store(others)
    stack.clock.now += 2.0
    stack.settle()
    assert ready(stack, mine) + ready(stack, others) == 4


CHUNKS = st.lists(st.integers(0, 20), unique=True)


@given(CHUNKS, st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=5), st.integers(1, 5))
def test_all_are_named_once_and_those_waited_for_last(
    victims: list[int], waiting: list[list[int]], most: int
) -> None:
    known = Queued()
    for number, chunks in enumerate(waiting):
        known.enter(PolicyRequest(f"r{number}", (Run(tuple(chunks)),)))
    wanted = {chunk for chunks in waiting for chunk in chunks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queued, "_MOST_SPARED", 100)
        named = list(known.last(victims))
        assert named == [c for c in victims if c not in wanted] + [
            c for c in victims if c in wanted
        ]
        patch.setattr(queued, "_MOST_SPARED", most)
        assert sorted(known.last(victims)) == sorted(victims)
    for number, chunks in enumerate(waiting):
        request = PolicyRequest(f"r{number}", (Run((*chunks, 99)),))
        known.leave(request)
        known.leave(request)
    assert list(known.last(victims)) == victims
    assert not list(known._requests.parts())
