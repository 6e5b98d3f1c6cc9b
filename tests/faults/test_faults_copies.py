"""Copies between the GPU's cache and the arena fail, or meet an abort, a preemption, a reset."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, Answer, Engine
from fault_cases import case
from fault_trial import Row, Trial
from faulty_bench import TOKENS, Bench, Question
from models import prompts

FATES = ("raise", "refuse", "fail", "garbage", "half")
MODELS = {"one": "llama", "several": "gemma3"}


def model_of(row: Row, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(MODELS[row.case.id.rpartition("-")[2]])
    return folder


@pytest.fixture
def trial(row: Row, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trial]:
    with Bench(model_of(row, request), tmp_path) as bench:
        yield Trial(bench, row)


@case("copy-load-one", "copy-load-several")
def test_a_load_that_fails_is_recomputed(trial: Trial) -> None:
    for fate in FATES:
        question = trial.bench.stored()
        with trial.watching():
            trial.bench.faults.order("load", fate)
            assert trial.ask(question) == 0
            assert trial.bench.fates("load") == [fate]
        trial.recovers_above(question)


@case("copy-store-one", "copy-store-several")
def test_a_store_that_fails_is_never_read(trial: Trial) -> None:
    for fate in FATES:
        question = trial.bench.question()
        with trial.watching():
            trial.bench.faults.order("store", fate)
            assert trial.ask(question) == 0
            trial.bench.quiet()
            assert trial.bench.fates("store") == [fate]
            trial.bench.forget()
            assert trial.ask(question) == 0, "what was not stored is served"
        trial.recovers_above(question)


@case("abort-load-one", "abort-load-several")
def test_an_abort_during_a_load_costs_nobody_anything(trial: Trial) -> None:
    bench, question = trial.bench, trial.bench.stored()
    with trial.watching():
        bench.faults.order("load", "ok", held=True)
        name = bench.engine.submit(question.prompt, TOKENS)
        bench.step_until(lambda: bench.fates("load"))
        bench.engine.abort(name)
        assert trial.ask(next_question(bench)) == 0
        assert bench.engine.hierarchy.pinned() > 0, "slots were given up that a copy still reads"
        bench.faults.release()
        bench.quiet()
    trial.recovers_above(question)
    trial.row.answer = "aborted; others get the same tokens"


@case("reset-load-one", "reset-load-several")
def test_a_reset_during_a_load_leaves_nothing_stale(trial: Trial) -> None:
    bench, question = trial.bench, trial.bench.stored()
    with trial.watching():
        bench.faults.order("load", "ok", held=True, deaf=True)
        begun = time.monotonic()
        name = bench.engine.submit(question.prompt, TOKENS)
        bench.step_until(lambda: bench.fates("load"))
        bench.engine.llm.reset_prefix_cache(reset_connector=True)
        assert trial.ask(next_question(bench)) == 0
        bench.faults.release()
        bench.check(question, bench.answer_to(name))
        trial.row.waited(time.monotonic() - begun)
        nothing_old_is_served(bench, question)
    trial.recovers_above(question)


@case("reset-store-one", "reset-store-several")
def test_a_reset_during_a_store_leaves_nothing_stale(trial: Trial) -> None:
    bench, question = trial.bench, trial.bench.question()
    with trial.watching():
        # What the copy writes when it is let go is garbage, and reported as good.
        bench.faults.order("store", "lie", held=True, deaf=True)
        assert trial.ask(question) == 0
        bench.engine.run_until(lambda: bool(bench.fates("store")))
        bench.engine.llm.reset_prefix_cache(reset_connector=True)
        assert trial.ask(next_question(bench)) == 0
        bench.faults.release()
        nothing_old_is_served(bench, question)
    trial.recovers_above(question)


def nothing_old_is_served(bench: Bench, question: Question) -> None:
    bench.quiet()
    bench.forget()
    assert bench.ask(question) == 0, "something from before the reset is served"


def next_question(bench: Bench) -> Question:
    """One that was not asked yet; orders and held copies stay."""
    return next(bench._fresh)


# Preemptions ---------------------------------------------------------------------------------

_PROMPTS = prompts(3, 508, seed=11)
"""Each fills its fourth block but for a few tokens."""
_OUTPUT = 24
_LOADED = 3 * BLOCK


@pytest.fixture(scope="module")
def alone() -> Callable[[Path], list[tuple[int, ...]]]:
    """Answers of an engine without the connector and with room for all."""

    @functools.cache
    def answers(model: Path) -> list[tuple[int, ...]]:
        with Engine(model) as engine:
            return [answer.tokens for answer in engine.ask_each(_PROMPTS, _OUTPUT)]

    return answers


@case("preempt-load-one", "preempt-load-several", "preempt-store-one", "preempt-store-several")
def test_a_preemption_during_a_copy_changes_no_answer(
    row: Row,
    alone: Callable[[Path], list[tuple[int, ...]]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    kind = row.case.id.split("-")[1]
    model = model_of(row, request)
    right = alone(model)
    with Bench(model, tmp_path) as bench:
        trial, engine = Trial(bench, row), bench.engine
        if kind == "load":
            engine.ask(_PROMPTS[2], 1)
            bench.forget()
        with trial.watching():
            bench.faults.order(kind, "ok", times=20, held=True)
            begun = time.monotonic()
            answers: dict[str, Answer] = {}
            names = [engine.submit(prompt, _OUTPUT) for prompt in _PROMPTS]
            # Of the last prompt, there is a load or it is computed as well.
            engine.run_until(lambda: bench.fates(kind) and computing(engine) > 1, answers)
            with no_free_blocks(engine) as starved:
                engine.run_until(lambda: starved() and engine.preemptions > 0, answers)
            held = [job for job in bench.faults.jobs(kind) if job["held"]]
            assert held, "no copy was under way when a request was preempted"
            bench.faults.release()
            engine.run_until(lambda: len(answers) == len(names), answers)
            row.waited(time.monotonic() - begun)
            assert [answers[name].tokens for name in names] == right
            bench.quiet()
        engine.reset_gpu()
        again = engine.ask(_PROMPTS[2], _OUTPUT)
        assert again.tokens == right[2]
        assert again.cached == _LOADED
        bench.quiet()
    row.answer = "the same tokens"
    row.after = "hits at once"


@contextlib.contextmanager
def no_free_blocks(engine: Engine) -> Iterator[Callable[[], bool]]:
    """As on a GPU whose cache is full: whoever needs a block more is preempted.

    Gives a function that takes what has become free, and says True.
    """
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken: list[Any] = []

    def take() -> bool:
        taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        return True

    try:
        yield take
    finally:
        pool.free_blocks(taken)


def computing(engine: Engine) -> int:
    """Running requests that have said something."""
    return sum(request.num_output_tokens > 0 for request in engine.scheduler.running)
