"""What goes from a shared root is what was used longest ago, whoever used and whoever keeps it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kvtiers.tiers.base import ChunkKey, Namespace, ReadOutcome, WriteOutcome
from kvtiers.tiers.keeper_logs import SILENT_SECONDS
from kvtiers.tiers.lease import PATIENCE
from root_kit import NAMESPACE, Clock, Engine, files_of, key, settled

CAPACITY = 14
# Of two models, such as before and after new weights.
MODELS = [NAMESPACE, Namespace("cd" * 16, {"model": "tiny, trained on"})]

ENGINES = st.integers(0, 2)
PROMPTS = st.integers(0, 23)
ACTIONS = st.one_of(
    st.tuples(st.just("store"), ENGINES, PROMPTS),
    st.tuples(st.just("load"), ENGINES, PROMPTS),
    st.tuples(st.sampled_from(["step", "killed", "ends", "saves"]), ENGINES, st.just(0)),
    st.tuples(st.just("waits"), st.just(0), st.sampled_from([1, PATIENCE + 1, SILENT_SECONDS + 1])),
)


def chunk(number: int) -> ChunkKey:
    return key(0, MODELS[number % 2], prompt=number)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """No power is lost here, and many snapshots are written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Fleet:
    """Three engines, and by a record of its own when each chunk was last used.

    What an engine did is written down before another does anything: between two engines'
    records nothing else can tell which was first.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.engines = [self.engine() for _ in range(3)]
        self.used: dict[str, int] = {}
        self.now = 0
        settled(self.engines)

    def engine(self) -> Engine:
        return Engine(self.root, CAPACITY, self.clock)

    def there(self) -> set[str]:
        return {file.name for file in files_of(self.root)}

    def do(self, what: str, which: int, number: int) -> None:
        before = self.there()
        engine = self.engines[which]
        if what == "store":
            self.note(number, engine.write(chunk(number)) != [WriteOutcome.REFUSED])
            self.step(which)
        elif what == "load":
            self.note(number, engine.read(chunk(number)) == [ReadOutcome.HIT])
            self.step(which)
        elif what == "step":
            self.step(which)
        elif what == "saves" and engine.keeps:
            engine.keeping._keeper._logs.unsaved = 1 << 30
            self.step(which)
        elif what in ("killed", "ends"):
            if what == "ends":
                engine.close()
            self.engines[which] = self.engine()
        elif what == "waits":
            self.clock.now += number
        self.check(before)

    def hand_over(self) -> None:
        """Somebody keeps the bound, whoever did before."""
        for _ in range(2):
            self.do("waits", 0, PATIENCE + 1)
            for which in range(3):
                self.do("step", which, 0)
        assert any(engine.keeps for engine in self.engines)

    def note(self, number: int, used: bool) -> None:
        self.now += 1
        if used:
            self.used[f"{chunk(number).hash.hex()}.kv"] = self.now

    def step(self, which: int) -> None:
        self.engines[which].step()

    def check(self, before: set[str]) -> None:
        there = self.there()
        gone = before - there
        latest = max((self.used[name] for name in gone), default=0)
        older = {name for name in there & before if self.used[name] < latest}
        assert not older, (gone, older)


@settings(
    max_examples=100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(ACTIONS, min_size=20, max_size=80))
def test_what_goes_was_used_before_all_that_stays(actions):
    root = Path(tempfile.mkdtemp())
    try:
        fleet = Fleet(root)
        for action in actions:
            fleet.do(*action)
        fill(fleet)
    finally:
        shutil.rmtree(root)


def fill(fleet: Fleet) -> None:
    """Whoever keeps the bound in the end evicts all that there was."""
    fleet.hand_over()
    for number in range(30, 30 + CAPACITY):
        for which in range(3):
            fleet.do("store", which, number)
    assert max(fleet.used.values()) >= CAPACITY


@pytest.fixture
def fleet(tmp_path) -> Fleet:
    return Fleet(tmp_path / "root")


def test_who_takes_over_after_a_kill_merges_what_all_had_done(fleet):
    """Read log by log, all that one engine did would pass for older than what others did."""
    for number in range(9):
        fleet.do("store", number % 3, number)
    for number in (0, 3, 1):
        fleet.do("load", 1 + number % 2, number)
    [holder] = [which for which, engine in enumerate(fleet.engines) if engine.keeps]
    fleet.do("killed", holder, 0)
    fleet.hand_over()
    [keeper] = [engine.keeping._keeper for engine in fleet.engines if engine.keeps]
    order = [keeper._chunks._place(ident).name for ident, _ in keeper._chunks.in_order()]
    left = sorted(fleet.there(), key=fleet.used.__getitem__)
    assert [name for name in order if name in left] == left
    assert len(left) >= 6


def test_what_is_used_while_a_root_is_listed_is_no_older_than_what_is_found(fleet, monkeypatch):
    numbers = range(6)
    for number in numbers:
        fleet.do("store", 0, number)
    for engine in fleet.engines:
        engine.close()
    shutil.rmtree(fleet.root / "v1" / ".keeping")
    for number in numbers:
        file = fleet.root / "v1" / chunk(number).namespace.id / chunk(number).hash.hex()[:2]
        [path] = file.glob(f"{chunk(number).hash.hex()}.kv")
        os.utime(path, (1000 + number, 1000 + number))
    late, other = fleet.engine(), fleet.engine()
    late.read(chunk(0))
    other.read(chunk(2))
    other.keeping.member.flush()
    settled([late, other], steps=2)
    keeper = late.keeping._keeper
    order = [keeper._chunks._place(ident).name for ident, _ in keeper._chunks.in_order()]
    assert order == [f"{chunk(n).hash.hex()}.kv" for n in (1, 3, 4, 5, 2, 0)]


def test_a_prefix_that_the_gpu_serves_does_not_grow_old(fleet):
    prompts = [[key(n, prompt=prompt) for n in range(3)] for prompt in range(2)]
    for keys in prompts:
        for each in keys:
            fleet.engines[1].write(each)
            settled(fleet.engines)
    fleet.engines[1].tier.served_elsewhere(prompts[0][-1:])
    settled(fleet.engines)
    [keeper] = [engine.keeping._keeper for engine in fleet.engines if engine.keeps]
    order = [ident[2:] for ident, _ in keeper._chunks.in_order()]
    # A head is of use without its tail, and a tail without its head is of none.
    assert order == [k.hash for keys in (prompts[1], prompts[0]) for k in reversed(keys)]
