"""When a learned order is believed: not before it has said more than age does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.policies.reuse_proof import Proof, falling

counts = st.lists(st.tuples(st.floats(0.1, 50.0), st.floats(1.0, 1000.0)), min_size=1, max_size=8)


@given(counts)
def test_hazards_by_age_never_rise_and_keep_the_number_of_events(pairs) -> None:
    events, exposure = np.array(pairs).T
    hazards = falling(events, exposure)
    assert (np.diff(hazards) <= 1e-9 * hazards[:-1]).all()
    assert (hazards * exposure).sum() == pytest.approx(events.sum())


@given(counts, st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_no_other_hazards_that_never_rise_are_likelier(pairs, seed: int) -> None:
    events, exposure = np.array(pairs).T

    def likelihood(hazards: np.ndarray) -> float:
        return float((events * np.log(hazards) - exposure * hazards).sum())

    best, rng = likelihood(falling(events, exposure)), np.random.default_rng(seed)
    for _ in range(50):
        other = np.sort(rng.uniform(0.5, 1.5, len(events)) * events / exposure)[::-1]
        assert likelihood(other) <= best + 1e-9 * abs(best)


def test_nothing_is_proved_by_nothing() -> None:
    assert not Proof().holds


def test_many_small_gains_prove_what_a_single_large_one_does_not() -> None:
    assert Proof().further(np.full(100, 0.5)).holds
    assert not Proof().further(np.array([50.0])).holds


@pytest.mark.parametrize("alone", [-1000.0, 1000.0])
def test_one_that_was_far_off_does_not_hide_what_many_others_say(alone: float) -> None:
    assert Proof().further(np.append(np.full(100, 0.5), alone)).holds


def test_what_spoke_against_one_fit_does_not_count_against_the_next() -> None:
    wrong = Proof().further(np.full(100, -5.0)).older()
    assert wrong == Proof()
    assert wrong.further(np.full(100, 0.5)).holds


def test_what_spoke_for_the_model_is_forgotten_in_the_end() -> None:
    proof = Proof().further(np.full(100, 0.5))
    for _ in range(10):
        proof = proof.older().further(np.array([1.0, -1.0] * 50))
    assert not proof.holds


def test_what_spoke_for_the_model_long_ago_proves_nothing() -> None:
    proof = Proof().further(np.full(100, 0.5))
    assert proof.older().holds
    for _ in range(30):
        proof = proof.older()
    assert not proof.holds
