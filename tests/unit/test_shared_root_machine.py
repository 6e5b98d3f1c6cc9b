"""Engines at one root, in any order, stopped and killed at any call: the bound holds.

What is checked after every step: the files never take more than the capacity. At the end:
whoever keeps the bound then counts every file, and as long as there was room no file went.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from kvtiers.tiers.base import WriteOutcome
from kvtiers.tiers.keeper_logs import SILENT_SECONDS
from kvtiers.tiers.lease import PATIENCE
from root_kit import FILE, Clock, Engine, before_call, bytes_of, files_of, key, run_killed

PROMPTS = st.integers(0, 3)
LENGTHS = st.integers(1, 4)
ENGINES = st.integers(0, 2)
CALLS = st.integers(1, 60)


class Replicas(RuleBasedStateMachine):
    """Three engines; one that is killed comes back as another process."""

    capacity = 8

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.engines = [self.engine() for _ in range(3)]
        self.stored: set[str] = set()

    def engine(self) -> Engine:
        return Engine(self.root, self.capacity, self.clock)

    @rule(which=ENGINES, prompt=PROMPTS, n=LENGTHS)
    def store(self, which: int, prompt: int, n: int) -> None:
        self._write(which, prompt, n)

    def _write(self, which: int, prompt: int, n: int) -> None:
        keys = [key(number, prompt=prompt) for number in range(n)]
        outcomes = self.engines[which].write(*keys)
        for k, outcome in zip(keys, outcomes, strict=True):
            if outcome is WriteOutcome.STORED:
                self.stored.add(f"{k.hash.hex()}.kv")

    @rule(which=ENGINES, prompt=PROMPTS, n=LENGTHS)
    def load(self, which: int, prompt: int, n: int) -> None:
        self.engines[which].read(*(key(number, prompt=prompt) for number in range(n)))

    @rule(which=ENGINES)
    def step(self, which: int) -> None:
        self.engines[which].step()

    @rule(seconds=st.sampled_from([1.0, PATIENCE + 1, SILENT_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(which=ENGINES)
    def restart(self, which: int) -> None:
        self.engines[which].close()
        self.engines[which] = self.engine()

    @rule(which=ENGINES, prompt=PROMPTS, n=LENGTHS, count=CALLS, torn=st.booleans())
    def killed_in_a_store(self, which: int, prompt: int, n: int, count: int, torn: bool) -> None:
        count = 1 if torn else count
        if run_killed(lambda: self._write(which, prompt, n), count, torn):
            self.engines[which] = self.engine()

    @rule(which=ENGINES, count=CALLS, torn=st.booleans())
    def killed_in_a_step(self, which: int, count: int, torn: bool) -> None:
        count = 1 if torn else count
        if run_killed(self.engines[which].step, count, torn):
            self.engines[which] = self.engine()

    @rule(which=ENGINES, other=ENGINES, count=CALLS, prompt=PROMPTS, n=LENGTHS, away=st.booleans())
    def stopped_in_a_store(
        self, which: int, other: int, count: int, prompt: int, n: int, away: bool
    ) -> None:
        with before_call(count, lambda: self._meanwhile(which, other, away)):
            self._write(which, prompt, n)

    @rule(which=ENGINES, other=ENGINES, count=CALLS, away=st.booleans())
    def stopped_in_a_step(self, which: int, other: int, count: int, away: bool) -> None:
        with before_call(count, lambda: self._meanwhile(which, other, away)):
            self.engines[which].step()

    def _meanwhile(self, which: int, other: int, away: bool) -> None:
        """The others go on; for long enough to give the stopped one up, if ``away``."""
        if other == which:
            return
        engine = self.engines[other]
        engine.step()
        for prompt in range(4, 8):
            if away:
                self.clock.now += max(PATIENCE, SILENT_SECONDS) + 1
            engine.step()
            keys = [key(number, prompt=prompt) for number in range(3)]
            engine.write(*keys)
            assert bytes_of(self.root) <= self.capacity * FILE

    @invariant()
    def the_bound_holds(self) -> None:
        if hasattr(self, "root"):
            assert bytes_of(self.root) <= self.capacity * FILE

    def teardown(self) -> None:
        if hasattr(self, "root"):
            try:
                self._take_stock()
            finally:
                shutil.rmtree(self.root)

    def _take_stock(self) -> None:
        """An engine that comes later counts every file, and can store."""
        late = self.engine()
        for _ in range(6):
            self.clock.now += SILENT_SECONDS + 1
            late.step()
        assert late.keeps
        assert set(map(str, files_of(self.root))) <= late.counted()
        assert late.write(key(0, prompt=9)) == [WriteOutcome.STORED]
        assert bytes_of(self.root) <= self.capacity * FILE


class RoomyReplicas(Replicas):
    """With room for all there is, nothing that was stored ever goes."""

    capacity = 400

    @invariant()
    def nothing_goes(self) -> None:
        if hasattr(self, "root"):
            assert self.stored <= {file.name for file in files_of(self.root)}


def run(machine: type[Replicas], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_bound_holds_whoever_is_stopped_or_killed_where() -> None:
    run(Replicas, 60)


def test_no_file_goes_while_there_is_room() -> None:
    run(RoomyReplicas, 30)
