"""The policy ``attention-heat``: LRU, and a second chance for what is attended to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import PolicyRequest, Run, TierInfo
from kvtiers.policies.attention_heat import AttentionHeatPolicy
from kvtiers.policies.conformance import PolicyConformance
from kvtiers.policies.lru import LruPolicy


class TestAttentionHeatConformance(PolicyConformance):
    policy_class = AttentionHeatPolicy
    prefix_closed = True


class TestEasilyHotConformance(PolicyConformance):
    prefix_closed = True

    @pytest.fixture
    def policy_factory(self):
        config = AttentionHeatPolicy.Config(hot=0.01)
        return lambda tiers, clock: AttentionHeatPolicy(tiers, config, clock)


CONFIG = AttentionHeatPolicy.Config(hot=2.0)


def policy() -> AttentionHeatPolicy:
    """Holds three prompts of three chunks, the first one the oldest; 0.1 is usual anywhere."""
    made = AttentionHeatPolicy([TierInfo("cpu"), TierInfo("fs")], CONFIG)
    for name in "abc":
        made.on_insert(prompt(name), "cpu")
    made.on_heat(prompt("b"), [0.1, 0.1, 0.1])
    return made


def prompt(name: str) -> Run:
    return Run(tuple(f"{name}{i}" for i in range(3)))


def order(made: LruPolicy, tier: str = "cpu") -> list[object]:
    return list(made.victims(tier, 1))


LRU = ["a2", "a1", "a0", "b2", "b1", "b0", "c2", "c1", "c0"]


def test_without_heat_and_with_what_is_usual_it_is_lru() -> None:
    made = policy()
    assert order(made) == LRU
    made.on_heat(prompt("a"), [0.1, 0.15, 0.19])
    assert order(made) == LRU


def test_a_hot_chunk_goes_last_and_keeps_its_prefix_but_not_what_follows_it() -> None:
    made = policy()
    made.on_heat(prompt("a"), [0.1, 0.2, 0.1])
    assert order(made) == ["a2", "b2", "b1", "b0", "c2", "c1", "c0", "a1", "a0"]


def test_a_second_chance_is_spent_when_something_went_in_its_place() -> None:
    made = policy()
    made.on_heat(prompt("a"), [0.1, 0.2, 0.1])
    made.on_remove(["a2"], "cpu")  # which was older
    assert order(made) == ["b2", "b1", "b0", "c2", "c1", "c0", "a1", "a0"]
    made.on_remove(["b2"], "cpu")
    assert order(made) == ["a1", "a0", "b1", "b0", "c2", "c1", "c0"]


def test_what_cools_down_loses_its_second_chance() -> None:
    made = policy()
    made.on_heat(prompt("a"), [0.1, 0.1, 0.9])
    assert order(made)[0] == "b2"
    made.on_heat(prompt("a"), [0.1, 0.1, 0.1])
    assert order(made)[0] == "a2"


def test_attention_is_compared_with_what_is_usual_at_the_same_distance() -> None:
    made = AttentionHeatPolicy([TierInfo("cpu")], CONFIG)
    for name in "abc":
        made.on_insert(prompt(name), "cpu")
    made.on_heat(prompt("b"), [0.01, 0.01, 0.5])
    made.on_heat(prompt("a"), [0.03, 0.01, 0.5])
    assert order(made)[:3] == ["a2", "a1", "b2"]


def test_tiers_have_second_chances_of_their_own() -> None:
    made = policy()
    for name in "abc":
        made.on_insert(prompt(name), "fs")
    made.on_heat(prompt("a"), [0.1, 0.1, 0.9])
    made.on_remove(["b2"], "cpu")
    assert order(made)[0] == "a2"
    assert order(made, "fs")[0] == "b2"
    made.on_remove(["b2"], "fs")
    assert order(made, "fs")[0] == "a2"


@given(seed=st.integers(0, 1000), steps=st.integers(1, 60))
def test_where_all_attention_is_the_same_it_is_lru_exactly(seed: int, steps: int) -> None:
    draw, tiers = random.Random(seed), [TierInfo("cpu")]
    ours, plain = AttentionHeatPolicy(tiers), LruPolicy(tiers)
    held: list[object] = []
    for _ in range(steps):
        branch = draw.choice("abcd")
        run = Run(tuple(f"{branch}{i}" for i in range(draw.randint(1, 6))))
        for made in (ours, plain):
            made.on_access(run, PolicyRequest("r"), "cpu")
            made.on_insert(run, "cpu")
        ours.on_heat(run, [0.25] * len(run))
        held = order(plain)
        assert order(ours) == held
        gone = held[: draw.randint(0, len(held))]
        for made in (ours, plain):
            made.on_remove(gone, "cpu")
