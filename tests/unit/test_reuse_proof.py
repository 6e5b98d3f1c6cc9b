"""When a learned order is believed: not before it has said more than age does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.policies.reuse_proof import Proof, falling

ONES = np.ones(100)
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


def told(differences: np.ndarray, before: Proof = Proof()) -> Proof:  # noqa: B008 - frozen
    return before.further(differences, np.ones(len(differences)))


def test_nothing_is_proved_by_nothing() -> None:
    assert not Proof().holds


def test_many_small_gains_prove_what_a_single_large_one_does_not() -> None:
    assert told(0.5 * ONES).holds
    assert not told(np.array([50.0])).holds


@pytest.mark.parametrize("alone", [-1000.0, 1000.0])
def test_one_that_was_far_off_does_not_hide_what_many_others_say(alone: float) -> None:
    assert told(np.append(0.5 * ONES, alone)).holds


def test_what_spoke_against_one_fit_does_not_count_against_the_next() -> None:
    wrong = told(-5.0 * ONES).older()
    assert wrong == Proof()
    assert told(0.5 * ONES, wrong).holds


def test_what_spoke_for_the_model_is_forgotten_in_the_end() -> None:
    proof = told(0.5 * ONES)
    for _ in range(10):
        proof = told(np.array([1.0, -1.0] * 50), proof.older())
    assert not proof.holds


def test_what_spoke_for_the_model_long_ago_proves_nothing() -> None:
    proof = told(0.5 * ONES)
    assert proof.older().holds
    for _ in range(30):
        proof = proof.older()
    assert not proof.holds


def test_what_stands_for_many_says_no_more_for_being_far_off() -> None:
    weights = np.append(ONES, 20.0)
    assert Proof().further(np.append(ONES, -1000.0), weights).gain == 100.0 - 20 * 4
