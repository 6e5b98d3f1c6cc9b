"""The suite that certifies a policy, and what this one promises beyond it."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from kvtiers.policies import POLICIES, PolicyRequest, Run, TierInfo
from kvtiers_gdsf import GdsfPolicy
from pydantic import ValidationError

pytest.register_assert_rewrite("kvtiers.policies.conformance")

from kvtiers.policies.conformance import PolicyConformance  # noqa: E402 - rewritten before that

REQUEST = PolicyRequest("r")


class TestGdsf(PolicyConformance):
    policy_class = GdsfPolicy
    prefix_closed = True


class TestGdsfWithoutFrequency(PolicyConformance):
    prefix_closed = True

    @pytest.fixture
    def policy_factory(self):
        return lambda tiers, clock: GdsfPolicy(tiers, GdsfPolicy.Config(frequency=0), clock)


def made(**options: object) -> GdsfPolicy:
    return GdsfPolicy([TierInfo("cpu", 4)], GdsfPolicy.Config(**options))


def use(policy: GdsfPolicy, chunk: str, times: int = 1) -> None:
    for _ in range(times):
        policy.on_access(Run((chunk,)), REQUEST, "cpu")


def evict(policy: GdsfPolicy, n: int = 1) -> list[str]:
    chosen = list(islice(policy.victims("cpu", n), n))
    policy.on_remove(chosen, "cpu")
    return chosen


def test_it_is_found_by_its_entry_point() -> None:
    assert POLICIES.get("gdsf") is GdsfPolicy


def test_what_was_used_often_outlives_what_was_used_last() -> None:
    policy = made()
    policy.on_insert(Run(("often",)), "cpu")
    policy.on_insert(Run(("once",)), "cpu")
    use(policy, "often", 3)
    use(policy, "once")
    assert evict(policy) == ["once"]


def test_but_not_for_ever() -> None:
    policy = made()
    policy.on_insert(Run(("old",)), "cpu")
    use(policy, "old", 9)
    gone = []
    for i in range(11):
        policy.on_insert(Run((f"new{i}",)), "cpu")
        gone += evict(policy)
    assert gone == [*(f"new{i}" for i in range(9)), "old", "new9"]


def test_without_frequency_the_least_recently_used_goes_first() -> None:
    policy = made(frequency=0)
    for chunk in ("a", "b", "c"):
        policy.on_insert(Run((chunk,)), "cpu")
    use(policy, "b", 5)
    use(policy, "a")
    assert evict(policy, 3) == ["c", "b", "a"]


def test_what_is_dear_to_compute_again_stays_longer() -> None:
    """As attention makes it: the cost of a chunk grows with what it attends to."""
    policy = GdsfPolicy([TierInfo("cpu", 4)], recompute_seconds=lambda run: 1.0 + run.start)
    policy.on_insert(Run(("deep",), start=7, parent="elsewhere"), "cpu")
    policy.on_insert(Run(("head",)), "cpu")
    use(policy, "head", 3)
    assert evict(policy, 2) == ["head", "deep"]


def test_large_chunks_are_worth_less_per_byte() -> None:
    policy = made()
    policy.on_insert(Run(("large",), chunk_bytes=4), "cpu")
    policy.on_insert(Run(("small",), chunk_bytes=1), "cpu")
    use(policy, "large")
    assert evict(policy) == ["large"]


@pytest.mark.parametrize("frequency", [0, 0.5, 1, 2])
@pytest.mark.parametrize("capacity", [1, 7, 50])
def test_chunks_without_prefixes_are_evicted_as_the_paper_says(
    capacity: int, frequency: float
) -> None:
    ids = random.Random(capacity).choices(range(200), [1 / (n + 1) for n in range(200)], k=2000)
    policy, held = made(frequency=frequency), set()
    papers = {}  # value, turn of the last use, and uses of each chunk, as the paper has it
    age = 0.0
    for turn, chunk in enumerate(ids):
        if chunk in held:
            policy.on_access(Run((chunk,)), REQUEST, "cpu")
        else:
            if len(held) == capacity:
                (victim,) = evict(policy)
                assert victim == min(papers, key=papers.__getitem__)
                age = papers.pop(victim)[0]
                held.remove(victim)
            policy.on_insert(Run((chunk,)), "cpu")
            held.add(chunk)
        uses = papers[chunk][2] + 1 if chunk in papers else 1
        papers[chunk] = age + uses**frequency, turn, uses


@pytest.mark.parametrize("frequency", [-1, 5, float("nan"), "high"])
def test_a_frequency_that_makes_no_sense_is_refused(frequency: object) -> None:
    with pytest.raises(ValidationError, match="frequency"):
        GdsfPolicy.Config(frequency=frequency)
