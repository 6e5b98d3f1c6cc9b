"""A replica that stores much at once into a full root gets room, though another keeps the bound."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from kvtiers.tiers import membership
from kvtiers.tiers.base import WriteOutcome
from kvtiers.tiers.keeper import BEAT_SECONDS
from root_kit import FILE, Clock, Engine, bytes_of, filled, key, settled

CAPACITY = 100
BURST = 20


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """No power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Full:
    """A root that its keeper has filled, another engine, and one that is silent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        clock = Clock()
        self.holder, self.other, self.silent = (Engine(root, CAPACITY, clock) for _ in range(3))
        settled([self.holder, self.other, self.silent])
        for prompt in range(CAPACITY // 4):
            self.holder.write(*(key(n, prompt=prompt) for n in range(4)))
            self.holder.step()
        assert self.holder.keeps
        assert bytes_of(root) > 0.6 * CAPACITY * FILE

    def write(
        self, engine: Engine, count: int, prompt: int, meanwhile: Callable[[], object]
    ) -> list[WriteOutcome]:
        """Store while, whenever it waits and looks for a grant, something else happens."""
        keys = [key(n, prompt=prompt) for n in range(count)]
        look = engine.keeping.member._look

        def looked():
            meanwhile()
            assert bytes_of(self.root) <= CAPACITY * FILE
            return look()

        with (
            mock.patch.object(engine.keeping.member, "_look", looked),
            mock.patch.object(membership, "_POLL_SECONDS", 0.0),
        ):
            return engine.tier.write(keys, [filled(k) for k in keys])


@pytest.fixture
def full(tmp_path):
    return Full(tmp_path / "root")


def test_a_burst_is_stored_whole_when_the_keeper_hears_of_it_while_the_store_waits(full):
    rounds = []

    def keep() -> None:
        rounds.append(full.holder.keeping.step())

    for prompt in range(60, 65):
        stored = full.write(full.other, BURST, prompt, keep)
        assert stored == [WriteOutcome.STORED] * BURST
    # Each took what was left, and the keeper at most twice: room is made for what waits.
    assert len(rounds) <= 2 * 5
    assert max(rounds[1:]) < BEAT_SECONDS / 4, "it does not look again soon"


def test_what_a_refused_burst_wanted_is_free_for_the_next(full):
    assert WriteOutcome.REFUSED in full.other.write(*(key(n, prompt=60) for n in range(2 * BURST)))
    full.holder.step()
    full.other.step()
    again = full.other.write(*(key(n, prompt=60) for n in range(2 * BURST)))
    assert set(again) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
    assert bytes_of(full.root) <= CAPACITY * FILE


def test_a_burst_larger_than_all_of_the_root_gets_what_is_evicted_for_it(full):
    stored = full.write(full.other, 2 * CAPACITY, 60, full.holder.step)
    assert stored.count(WriteOutcome.STORED) > CAPACITY // 2
    assert bytes_of(full.root) <= CAPACITY * FILE


def test_a_keeper_whose_replicas_want_nothing_more_evicts_for_nobody(full):
    settled([full.holder, full.other, full.silent])
    before = full.holder.keeping.usage().evicted
    settled([full.holder, full.other, full.silent])
    assert full.holder.keeping.usage().evicted == before


def test_the_keepers_own_burst_is_stored_whole_as_its_thread_makes_room(full):
    keys = [key(n, prompt=60) for n in range(2 * BURST)]
    steps = []

    def wait(seconds: float) -> bool:
        steps.append(full.holder.keeping.step())
        return False

    with mock.patch.object(full.holder.keeping.member._closing, "wait", wait):
        stored = full.holder.tier.write(keys, [filled(k) for k in keys])
    assert stored == [WriteOutcome.STORED] * 2 * BURST
    assert steps
