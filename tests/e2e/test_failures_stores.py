"""Copies into the arena that fail: nobody ever reads what they left there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine import BLOCK, chunk_files, cpu, fs
from faulty import HOLE
from faulty_bench import CHUNKS, TOKENS, Bench

ALL = CHUNKS * BLOCK


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    model = request.getfixturevalue(request.param)
    with Bench(model, folder, [cpu(), fs(folder / "fs")]) as bench:
        yield bench


def files(bench: Bench) -> set[bytes]:
    return set(chunk_files(bench.folder / "fs"))


def test_garbage_that_is_reported_as_good_would_be_noticed(bench: Bench) -> None:
    question = bench.question()
    bench.faults.order("store", "lie")
    bench.ask(question)
    bench.forget()
    assert bench.engine.ask(question.prompt, TOKENS).tokens != question.answer
    bench.forget()


@pytest.mark.parametrize("fate", ["raise", "refuse", "fail", "garbage", "half"])
def test_a_failed_store_is_never_read_by_a_request_or_a_lower_tier(bench: Bench, fate: str) -> None:
    question = bench.question()
    before, on_disk = bench.counted(), files(bench)
    bench.faults.order("store", fate)
    assert bench.ask(question) == 0
    assert bench.fates("store") == [fate]
    assert bench.counted()["failures"] == before["failures"] + bench.slots()
    assert bench.counted()["bytes_written"] == before["bytes_written"]
    assert files(bench) == on_disk
    bench.forget()
    assert bench.ask(question) == 0
    assert bench.fates("load") == []
    bench.forget()
    assert bench.ask(question) == ALL, "what was computed once more was not stored"


def test_stores_that_always_fail_leave_the_arena_empty_and_unpinned(bench: Bench) -> None:
    chunks = bench.engine.usage("cpu").usage.chunks
    questions = [bench.question() for _ in range(2)]
    bench.faults.order("store", "garbage", times=50)
    for question in questions:
        bench.ask(question)
    assert bench.fates("store") == ["garbage"] * 2
    assert bench.engine.usage("cpu").usage.chunks == chunks
    bench.forget()


def test_a_request_that_waits_for_a_store_that_fails_computes(bench: Bench) -> None:
    question = bench.question()
    bench.faults.order("store", "garbage", held=True)
    first = bench.engine.submit(question.prompt, TOKENS)
    bench.check(question, bench.answer_to(first))
    assert bench.fates("store") == ["garbage"]
    assert bench.engine.llm.reset_prefix_cache()
    second = bench.engine.submit(question.prompt, TOKENS)
    for _ in range(5):
        assert not bench.engine.step(), "the second request did not wait"
    bench.faults.release()
    bench.check(question, bench.answer_to(second))
    bench.quiet()
    assert bench.fates("load") == []


def test_a_store_outlives_its_aborted_request(bench: Bench) -> None:
    question = bench.question()
    bench.faults.order("store", "ok", held=True)
    name = bench.engine.submit(question.prompt, TOKENS)
    bench.step_until(lambda: bench.fates("store"))
    bench.engine.abort(name)
    for _ in range(5):
        bench.engine.step()
    bench.faults.release()
    bench.quiet()
    bench.forget()
    assert bench.ask(question) == ALL


def test_only_the_group_with_a_missing_block_is_refused(bench: Bench) -> None:
    question = bench.question()
    before = bench.counted()
    bench.faults.order(HOLE, "ok")
    assert bench.ask(question) == 0
    refused = bench.counted()["failures"] - before["failures"]
    groups = len(bench.engine.connector.scheduler.config.kv_group_configs)
    kept = bench.slots()
    assert refused in (CHUNKS, 2) if groups > 1 else refused == CHUNKS
    assert (kept > 0) == (groups > 1), "groups that are whole were not stored"
    bench.forget()
    assert bench.ask(question) == 0
    assert bench.fates("load") == []
    bench.forget()
    assert bench.ask(question) == ALL
