"""Resets of the connector while copies are under way, and what may be served afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import BLOCK, cpu, file_digests, fs
from faulty_bench import CHUNKS, TOKENS, Bench, Question

ALL = CHUNKS * BLOCK


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Iterator[Bench]:
    with Bench(model, tmp_path, [cpu(), fs(tmp_path / "fs")]) as bench:
        yield bench


def reset(bench: Bench) -> bool:
    return bool(bench.engine.llm.reset_prefix_cache(reset_connector=True))


def answered(bench: Bench, question: Question) -> None:
    bench.check(question, bench.answer_to(bench.engine.submit(question.prompt, TOKENS)))


def slots_of(bench: Bench, kind: str) -> list[set[int]]:
    return [set(job["slots"]) for job in bench.faults.jobs(kind)]


def test_slots_that_a_store_still_writes_to_after_a_reset_belong_to_nobody(bench: Bench) -> None:
    old, new = bench.question(), bench.question()
    # Garbage is written when it is let go: long after the reset, whatever was waited for.
    bench.faults.order("store", "lie", held=True, deaf=True)
    answered(bench, old)
    assert reset(bench)
    assert reset(bench), "a second reset before the first one's copies have ended"
    answered(bench, new)
    for _ in range(10):
        bench.engine.step()
    still, fresh = slots_of(bench, "store")
    assert not still & fresh, "a slot has a new owner while an old copy still writes to it"
    assert bench.engine.hierarchy.pinned() == len(still)
    bench.faults.release()
    bench.quiet()
    bench.forget()
    assert bench.ask(new) == ALL
    bench.forget()
    assert bench.ask(old) == 0, "a store from before the reset is served"
    assert slots_of(bench, "store")[0] & still, "the slots did not come back"


@pytest.mark.parametrize("fate", ["ok", "garbage"])
def test_slots_that_a_load_still_reads_after_a_reset_belong_to_nobody(
    bench: Bench, fate: str
) -> None:
    old, new = bench.question(), bench.question()
    bench.ask(old)
    bench.forget()
    bench.faults.order("load", fate, held=True, deaf=True)
    name = bench.engine.submit(old.prompt, TOKENS)
    bench.step_until(lambda: bench.fates("load"))
    assert not reset(bench), "vLLM's own cache is in use"
    answered(bench, new)
    (still,) = slots_of(bench, "load")
    (fresh,) = slots_of(bench, "store")
    assert not still & fresh, "a slot has a new owner while an old copy still reads it"
    bench.faults.release()
    bench.check(old, bench.answer_to(name))
    bench.quiet()
    bench.forget()
    assert bench.ask(old) == 0, "a chunk from before the reset is served"


def test_a_request_that_lives_through_a_reset_stores_nothing_from_before(bench: Bench) -> None:
    old = bench.question()
    name = bench.engine.submit(old.prompt, TOKENS)
    bench.engine.step()
    assert bench.engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.check(old, bench.answer_to(name))
    bench.quiet()
    bench.forget()
    assert bench.ask(old) == 0


def test_nothing_old_is_served_and_nothing_shared_is_deleted(
    bench: Bench, model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "fs"
    question = bench.question()
    bench.ask(question)
    shared, before = bench.engine.namespace, file_digests(root)
    assert len(before) >= CHUNKS
    assert reset(bench)
    assert bench.engine.namespace != shared
    assert bench.ask(question) == 0
    assert bench.fates("load") == []
    bench.forget()
    assert bench.ask(question) == ALL, "what was stored after the reset is not served"
    assert file_digests(root, shared) == before
    bench.engine.close()
    other = tmp_path / "other"
    other.mkdir()
    with Bench(model, other, [cpu(), fs(root)]) as fresh:
        assert fresh.engine.namespace == shared
        assert fresh.ask(fresh.question()) == ALL
