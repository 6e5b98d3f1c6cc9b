"""Copies that fail on one of two ranks: a chunk is only as good as each rank's part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine import BLOCK
from faulty_bench import CHUNKS, Bench

ALL = CHUNKS * BLOCK


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    model = request.getfixturevalue(request.param)
    with Bench(model, folder, tensor_parallel=2) as bench:
        yield bench


def fates(bench: Bench, kind: str) -> list[tuple[int, str]]:
    return sorted((job["rank"], job["fate"]) for job in bench.faults.jobs(kind))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_recomputed_on_both(bench: Bench, rank: int) -> None:
    question = bench.stored()
    bench.faults.order("load", "garbage", rank=rank)
    assert bench.ask(question) == 0
    assert fates(bench, "load") == sorted([(rank, "garbage"), (1 - rank, "ok")])
    bench.forget()
    assert bench.ask(question) == ALL


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_on_one_rank_is_never_read(bench: Bench, rank: int) -> None:
    question = bench.question()
    bench.faults.order("store", "garbage", rank=rank)
    assert bench.ask(question) == 0
    bench.forget()
    assert bench.ask(question) == 0
    assert fates(bench, "load") == []
    bench.forget()
    assert bench.ask(question) == ALL


def test_a_load_that_ends_on_one_rank_long_before_the_other(bench: Bench) -> None:
    question = bench.stored()
    bench.faults.order("load", "garbage", rank=0)
    bench.faults.order("load", "ok", rank=1, held=True)
    name = bench.engine.submit(question.prompt, 8)
    bench.step_until(lambda: len(bench.faults.jobs("load")) == 2)
    for _ in range(5):
        assert not bench.engine.step()
    assert bench.engine.hierarchy.pinned() > 0, "slots were given up that a rank still reads"
    bench.faults.release()
    bench.check(question, bench.answer_to(name))
    bench.quiet()
