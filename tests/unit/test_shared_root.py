"""Two engines at one root, one of them stopped or killed before each single call it makes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtiers.tiers.base import WriteOutcome
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.keeper_logs import SILENT_SECONDS
from kvtiers.tiers.lease import PATIENCE, LeaseLostError
from root_kit import (
    FILE,
    PAYLOAD,
    Clock,
    Engine,
    before_call,
    bytes_of,
    files_of,
    key,
    run_killed,
    settled,
)

CAPACITY = 16


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """No power is lost here, and a few hundred snapshots are written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


AWAY = max(SILENT_SECONDS, PATIENCE) + 1


class Pair:
    """An engine that keeps the bound of a nearly full root, and another that stores there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.holder = self.engine()
        self.holder.step()
        self.other = self.engine()
        settled([self.other, self.holder])
        self.holder.write(*(key(n) for n in range(4)))
        settled([self.other, self.holder])
        self.other.write(*(key(n, prompt=1) for n in range(2)))
        settled([self.other, self.holder])
        assert (self.holder.keeps, self.other.keeps) == (True, False)
        assert len(files_of(root)) == 6

    def engine(self) -> Engine:
        return Engine(self.root, CAPACITY, self.clock)

    def fill(self, engine: Engine, rounds: int = 7, seconds: float = AWAY) -> None:
        """The engine stores all it may; others are given up if it takes that long."""
        for prompt in range(10, 10 + rounds):
            self.clock.now += seconds
            engine.step()
            engine.write(*(key(n, prompt=prompt) for n in range(3)))
            self.check()

    def cram(self, engine: Engine) -> None:
        """The engine stores until it is refused."""
        for n in range(2 * CAPACITY):
            if engine.write(key(n, prompt=50)) == [WriteOutcome.REFUSED]:
                return
        pytest.fail("it is never refused")

    def check(self) -> None:
        assert bytes_of(self.root) <= CAPACITY * FILE

    def take_stock(self) -> None:
        """Whoever keeps the bound counts every file, and has room for more."""
        self.check()
        late = self.engine()
        self.fill(late, rounds=3)
        late.step()
        assert late.keeps
        assert set(map(str, files_of(self.root))) <= late.counted()
        assert late.write(key(0, prompt=99)) == [WriteOutcome.STORED]
        late.step()
        self.check()
        assert [f.name for f in self.root.rglob("*.over")] == []


def store(engine: Engine) -> Callable[[], object]:
    return lambda: engine.write(*(key(n, prompt=2) for n in range(2)))


def every_call(tmp_path: Path) -> Iterator[tuple[int, Pair]]:
    """A fresh pair for each call before which somebody is stopped."""
    for count in range(1, 400):
        yield count, Pair(tmp_path / str(count))
    pytest.fail("it never came to an end")


ACTIONS = {
    "a store of a replica": lambda pair: (pair.other, store(pair.other)),
    "a store of the holder": lambda pair: (pair.holder, store(pair.holder)),
    "a step of a replica": lambda pair: (pair.other, pair.other.step),
    "a step of the holder": lambda pair: (pair.holder, pair.holder.step),
    "an end of a replica": lambda pair: (pair.other, pair.other.close),
    "an end of the holder": lambda pair: (pair.holder, pair.holder.close),
}


@pytest.fixture(params=ACTIONS.values(), ids=ACTIONS.keys())
def action(request):
    return request.param


def busy(pair: Pair) -> None:
    """So that a step has something to read, to evict, to grant and to write down."""
    pair.holder.read(key(0), key(1))
    pair.holder.write(key(0, prompt=3), key(1, prompt=3))
    pair.other.read(key(0, prompt=1))
    pair.holder.keeping._keeper._logs.unsaved = 1 << 30  # a snapshot is due


def test_a_kill_before_any_call_leaves_no_file_uncounted(tmp_path, action):
    for count, pair in every_call(tmp_path):
        busy(pair)
        killed, act = action(pair)
        if not run_killed(act, count):
            break
        survivor = pair.other if killed is pair.holder else pair.holder
        pair.check()
        if survivor is pair.holder:
            settled([pair.holder])
            pair.clock.now += AWAY
            settled([pair.holder])
            # Nor is anything counted for ever that never came.
            assert set(map(str, files_of(pair.root))) == pair.holder.counted()
        pair.fill(survivor)
        pair.take_stock()


@pytest.mark.parametrize("torn", [1, 2])
def test_a_kill_in_the_middle_of_a_write_leaves_no_file_uncounted(tmp_path, action, torn):
    pair = Pair(tmp_path / "root")
    busy(pair)
    killed, act = action(pair)
    run_killed(act, torn, torn=True)
    survivor = pair.other if killed is pair.holder else pair.holder
    pair.fill(survivor)
    pair.take_stock()


@pytest.mark.parametrize("seconds", [PATIENCE + 1, AWAY], ids=["not yet fenced", "fenced"])
def test_one_that_was_given_up_and_goes_on_cannot_break_the_bound(tmp_path, action, seconds):
    for count, pair in every_call(tmp_path):
        busy(pair)
        stopped, act = action(pair)
        rest = pair.other if stopped is pair.holder else pair.holder
        passed = []

        def meanwhile(pair=pair, rest=rest, passed=passed) -> None:
            passed.append(1)
            pair.fill(rest, seconds=seconds)
            pair.cram(rest)

        with before_call(count, meanwhile):
            act()
        pair.check()
        if not passed:
            break
        for engine in (stopped, rest) * 2:
            engine.step()
            engine.write(*(key(n, prompt=5) for n in range(2)))
            pair.check()
        pair.take_stock()


def test_what_is_about_to_appear_is_not_taken_for_evicted(tmp_path):
    """The root fills and is evicted from, over and over, while a store hangs."""
    for count, pair in every_call(tmp_path):
        passed = []

        def meanwhile(pair=pair, passed=passed) -> None:
            passed.append(1)
            pair.fill(pair.holder, rounds=9, seconds=1.0)
            pair.holder.step()

        with before_call(count, meanwhile):
            store(pair.other)()
        pair.cram(pair.holder)
        pair.cram(pair.other)
        pair.check()
        if not passed:
            break
        settled([pair.other, pair.holder])
        assert set(map(str, files_of(pair.root))) <= pair.holder.counted()


def test_what_one_found_gone_another_may_be_about_to_store(tmp_path):
    for count, pair in every_call(tmp_path):
        third = pair.engine()
        settled([third, pair.holder])
        passed = []

        def meanwhile(pair=pair, third=third, passed=passed) -> None:
            passed.append(1)
            pair.holder.step()
            third.read(key(0, prompt=2), key(1, prompt=2))
            settled([third, pair.holder])

        with before_call(count, meanwhile):
            store(pair.other)()
        pair.cram(pair.holder)
        pair.cram(pair.other)
        pair.check()
        if not passed:
            break
        settled([pair.other, third, pair.holder])
        assert set(map(str, files_of(pair.root))) <= pair.holder.counted()


def test_what_a_former_holder_granted_still_counts(tmp_path):
    pair = Pair(tmp_path)
    third = pair.engine()
    settled([third, pair.holder, pair.other])
    before = pair.other.keeping.member._limit - pair.other.keeping.member._log.announced
    assert before >= FILE
    pair.clock.now += PATIENCE + 1  # the holder is silent, and the others are not given up
    settled([third], steps=1)
    pair.clock.now += PATIENCE + 1
    settled([third])
    assert third.keeps
    pair.cram(third)
    pair.other.write(*(key(n, prompt=3) for n in range(before // FILE)))
    pair.check()


def test_what_is_stored_until_the_moment_of_being_fenced_counts(tmp_path):
    for count, pair in every_call(tmp_path):
        pair.clock.now += AWAY
        passed = []

        def meanwhile(pair=pair, passed=passed) -> None:
            passed.append(pair.other.write(key(0, prompt=3)))

        with before_call(count, meanwhile):
            pair.holder.step()
        if not passed:
            break
        settled([pair.holder])
        assert set(map(str, files_of(pair.root))) <= pair.holder.counted()


def test_two_keepers_at_once_are_harmless(tmp_path):
    """The first is thought dead in the middle of an eviction, and finishes it."""
    for count, pair in every_call(tmp_path):
        pair.holder.write(key(0, prompt=3), key(1, prompt=3))
        both = []

        def meanwhile(pair=pair, both=both) -> None:
            pair.clock.now += AWAY
            for _ in range(4):
                pair.clock.now += PATIENCE + 1
                pair.other.step()
            both.append(pair.holder.keeps and pair.other.keeps)

        with before_call(count, meanwhile):
            pair.holder.step()
        if not both:
            break
        assert both == [True]
        pair.holder.step()
        assert not pair.holder.keeps or count == 1
        pair.take_stock()


@pytest.mark.parametrize("last", [False, True], ids=["a round", "its end"])
def test_a_holder_that_loses_the_lease_before_any_call_is_told_just_that(tmp_path, last):
    """`kvtiers gc` shows what else goes wrong, and what is gone then is not wrong."""
    for count, pair in every_call(tmp_path):
        busy(pair)
        keeper, lost = pair.holder.keeping._keeper, []

        def meanwhile(pair=pair, lost=lost) -> None:
            lost.append(True)
            pair.clock.now += AWAY
            for _ in range(4):
                pair.clock.now += PATIENCE + 1
                pair.other.step()

        with before_call(count, meanwhile):
            try:
                if last:
                    keeper.resign()
                else:
                    keeper.round()
            except LeaseLostError:
                assert lost
        if not lost:
            break


def half_written(root: Path) -> list[Path]:
    """Wherever they lie."""
    return list(root.rglob("*.kv.*"))


def test_a_store_that_stops_half_way_leaves_nothing(tmp_path):
    pair = Pair(tmp_path)
    before = files_of(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD, hard))
    try:
        assert pair.other.write(key(0, prompt=3)) == [WriteOutcome.FAILED]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert half_written(tmp_path) == []
    settled([pair.other, pair.holder])
    assert files_of(tmp_path) == before
    assert pair.holder.counted() == set(map(str, before))


def test_who_comes_second_with_a_chunk_leaves_nothing(tmp_path, monkeypatch):
    pair = Pair(tmp_path)
    real, seen = FsTier._write_file, []

    def slow(tier: FsTier, path: str, *rest: object) -> None:
        real(tier, path, *rest)
        if not seen:
            seen.extend(half_written(tmp_path))
            assert pair.holder.write(key(0, prompt=3)) == [WriteOutcome.STORED]

    monkeypatch.setattr(FsTier, "_write_file", slow)
    assert pair.other.write(key(0, prompt=3)) == [WriteOutcome.EXISTS]
    assert len(seen) == 1
    assert half_written(tmp_path) == []


def test_what_a_former_holder_granted_itself_still_counts(tmp_path):
    """It asks itself in memory; more than anybody would grant it of their own accord."""
    for count, pair in every_call(tmp_path):
        passed = []

        def meanwhile(pair=pair, passed=passed) -> None:
            passed.append(1)
            pair.fill(pair.other, rounds=3, seconds=PATIENCE + 1)
            pair.cram(pair.other)

        with before_call(count, meanwhile):
            pair.holder.write(*(key(n, prompt=2) for n in range(6)))
        pair.check()
        if not passed:
            break
        settled([pair.holder, pair.other])
        pair.check()


def test_what_is_about_to_appear_counts_for_the_next_holder_too(tmp_path):
    """It starts from a snapshot in which the announcement is, and its end is not."""
    for count, pair in every_call(tmp_path):
        third = pair.engine()
        settled([third, pair.holder])
        passed = []

        def meanwhile(pair=pair, third=third, passed=passed) -> None:
            passed.append(1)
            settled([pair.holder], steps=1)
            pair.holder.close()
            pair.fill(third, rounds=9, seconds=1.0)
            pair.cram(third)
            assert third.keeps

        with before_call(count, meanwhile):
            store(pair.other)()
        pair.cram(pair.other)
        pair.check()
        if not passed:
            break
        settled([pair.other, third])
        assert set(map(str, files_of(pair.root))) <= third.counted()
