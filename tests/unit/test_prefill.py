"""The engine's speed, from when steps are scheduled and when their output is there."""

from __future__ import annotations

import pytest
from kvtiers.connector.prefill import PrefillClock, Span
from kvtiers.policies import Run
from kvtiers.policies.base import one_second_a_chunk

TOKEN = 0.001
CHUNK = 128


class Engine:
    """Computes a token in a millisecond, and more where many stand before it."""

    def __init__(self, context_cost: float = 0.0) -> None:
        self.now = 50.0
        self.left: list[Span] = []
        self.clock = PrefillClock({0: CHUNK, 1: 2 * CHUNK}, lambda: self.left, lambda: self.now)
        self._context_cost = context_cost

    def step(self, *spans: Span, idle: float = 0.0) -> None:
        self.now += idle
        self.clock.scheduled(sum(new for _, new in spans), spans)
        self.now += self.cost(spans)
        self.clock.executed()

    def cost(self, spans: tuple[Span, ...]) -> float:
        return sum(new * (TOKEN + self._context_cost * (before + new / 2)) for before, new in spans)


def run(start: int, n: int, group: int = 0) -> Run:
    return Run(range(n), start, group=group)


def test_nothing_is_known_before_some_prompts_were_computed() -> None:
    engine = Engine()
    engine.step((0, 1024))
    engine.step((0, 1024))
    assert engine.clock.seconds(run(0, 8)) is None
    assert engine.clock.worth(run(0, 8)) == one_second_a_chunk(run(0, 8))
    assert engine.clock.tokens_per_second() is None
    engine.step((0, 1024))
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)
    assert engine.clock.worth(run(0, 8)) == pytest.approx(1024 * TOKEN)
    assert engine.clock.tokens_per_second() == pytest.approx(1000)


def test_time_without_work_counts_for_nothing() -> None:
    engine = Engine()
    for _ in range(4):
        engine.step((0, 1024), idle=100.0)
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)


def test_a_step_that_is_scheduled_while_another_runs_has_its_own_share() -> None:
    engine = Engine()
    engine.clock.scheduled(1024, [(0, 1024)])
    for _ in range(4):
        engine.now += 0.1
        engine.clock.scheduled(1024, [(0, 1024)])
        engine.now += 1024 * TOKEN - 0.1
        engine.clock.executed()
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)


def test_steps_without_tokens_are_none() -> None:
    engine = Engine()
    for _ in range(3):
        engine.step((0, 1024))
        engine.clock.scheduled(0, [])
        engine.now += 7.0
        engine.clock.executed()
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)


def test_tokens_cost_more_behind_a_long_context() -> None:
    engine = Engine(context_cost=1e-6)
    for before in (0, 1024, 2048, 3072):
        engine.step((before, 1024))
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(engine.cost(((0, 1024),)))
    assert engine.clock.seconds(run(80, 8)) == pytest.approx(engine.cost(((10240, 1024),)))


def test_small_steps_say_nothing_of_large_ones() -> None:
    engine = Engine()
    for _ in range(3):
        engine.step((0, 1024))
    for _ in range(100):
        engine.clock.scheduled(1, [(4096, 1)])
        engine.now += 0.03
        engine.clock.executed()
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)


def test_a_large_step_replaces_what_small_ones_said() -> None:
    engine = Engine()
    for _ in range(9):
        engine.clock.scheduled(32, [(0, 32)])
        engine.now += 5.0
        engine.clock.executed()
    for _ in range(3):
        engine.step((0, 1024))
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)


def test_one_step_that_stalls_changes_nothing() -> None:
    engine = Engine()
    for stall in (0.0, 0.0, 60.0, 0.0, 0.0):
        engine.clock.scheduled(1024, [(0, 1024)])
        engine.now += 1024 * TOKEN + stall
        engine.clock.executed()
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)


def test_groups_have_chunks_of_their_own_size() -> None:
    engine = Engine()
    for _ in range(3):
        engine.step((0, 1024))
    both = [engine.clock.seconds(run(0, 8)), engine.clock.seconds(run(0, 4, group=1))]
    assert both == pytest.approx([1024 * TOKEN] * 2)


def test_of_a_group_that_only_other_models_have_nothing_is_known() -> None:
    engine = Engine()
    for _ in range(3):
        engine.step((0, 1024))
    assert engine.clock.seconds(run(0, 8, group=7)) is None
    assert engine.clock.worth(run(0, 8, group=7)) == 8.0


def test_prompts_under_way_keep_the_engine_busy() -> None:
    engine = Engine()
    engine.left = [(0, 512), (256, 512)]
    assert engine.clock.busy() == 0.0, "nobody knows"
    for _ in range(3):
        engine.step((0, 1024))
    assert engine.clock.busy() == pytest.approx(1024 * TOKEN)


def test_ends_that_are_never_told_mix_nothing_up_for_ever() -> None:
    engine = Engine()
    for _ in range(200):
        engine.clock.scheduled(1024, [(0, 1024)])
    while engine.clock._steps:
        engine.clock.executed()
    engine.clock.executed()
    for _ in range(33):
        engine.step((0, 1024))
    assert engine.clock.seconds(run(0, 8)) == pytest.approx(1024 * TOKEN)
