"""Copies to the GPU that fail: the request recomputes, once, and says the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine import BLOCK
from faulty_bench import CHUNKS, TOKENS, Bench

ALL = CHUNKS * BLOCK
FAILURES = ["raise", "refuse", "fail", "garbage", "half"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    model = request.getfixturevalue(request.param)
    with Bench(model, tmp_path_factory.mktemp("faults")) as bench:
        yield bench


def test_what_was_stored_is_loaded_and_wrong_bytes_would_be_noticed(bench: Bench) -> None:
    question = bench.stored()
    assert bench.ask(question) == ALL
    bench.forget()
    bench.faults.order("load", "lie")
    assert bench.engine.ask(question.prompt, TOKENS).tokens != question.answer
    bench.forget()


@pytest.mark.parametrize("fate", FAILURES)
def test_a_failed_load_is_recomputed_and_never_tried_again(bench: Bench, fate: str) -> None:
    question = bench.stored()
    failures = bench.counted()["failures"]
    bench.faults.order("load", fate)
    assert bench.ask(question) == 0
    assert bench.fates("load") == [fate]
    (load,) = bench.faults.jobs("load")
    assert bench.counted()["failures"] == failures + len(load["slots"])
    bench.forget()
    assert bench.ask(question) == ALL, "what was recomputed was not stored"


def test_copies_that_always_fail_cost_one_attempt_a_request(bench: Bench) -> None:
    question = bench.stored()
    bench.faults.order("load", "garbage", times=50)
    for attempt in (1, 2, 3):
        assert bench.ask(question) == 0
        assert bench.fates("load") == ["garbage"] * attempt
        bench.engine.reset_gpu()


def test_requests_that_wait_for_a_load_that_fails_recompute_too(bench: Bench) -> None:
    question = bench.stored()
    bench.faults.order("load", "garbage")
    answers = bench.engine.ask_all([question.prompt] * 3, TOKENS)
    for answer in answers:
        bench.check(question, answer)
    bench.quiet()
    assert bench.fates("load").count("garbage") == 1


def test_a_load_behind_a_hit_of_the_gpu_fails(bench: Bench) -> None:
    question = bench.stored()
    bench.engine.ask(question.prompt[: 2 * BLOCK + 1], 1)
    bench.faults.forget()
    bench.faults.order("load", "garbage")
    assert bench.ask(question) in (0, 2 * BLOCK)
    assert bench.fates("load") == ["garbage"]


@pytest.mark.parametrize("fate", ["ok", "garbage"])
def test_a_request_is_aborted_during_its_load(bench: Bench, fate: str) -> None:
    question = bench.stored()
    bench.faults.order("load", fate, held=True)
    name = bench.engine.submit(question.prompt, TOKENS)
    bench.step_until(lambda: bench.fates("load"))
    assert bench.engine.hierarchy.pinned() > 0
    bench.engine.abort(name)
    for _ in range(5):
        bench.engine.step()
    assert bench.engine.hierarchy.pinned() > 0, "slots were given up that a copy still reads"
    bench.faults.release()
    bench.quiet()
    assert bench.ask(question) == (ALL if fate == "ok" else 0)


def test_nothing_else_failed(bench: Bench) -> None:
    """The last of the file: with all that went wrong, the engine serves, and from the cache."""
    question = bench.stored()
    assert bench.ask(question) == ALL
    assert bench.fates("load") == ["ok"]
