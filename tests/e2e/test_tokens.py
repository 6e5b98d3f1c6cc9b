"""Greedy answers are the same with and without the connector, wherever the KV came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import Engine, cpu, fs
from models import prompts
from passage import (
    Passage,
    assert_nothing_cached,
    assert_same_through_every_tier,
    assert_served_by,
    pass_through,
)


def test_twenty_answers_are_the_same_when_nothing_is_cached(smollm2_passage: Passage) -> None:
    assert_nothing_cached(smollm2_passage.cold)
    assert smollm2_passage.cold.tokens == smollm2_passage.without


def test_twenty_answers_are_the_same_from_the_cpu_tier(smollm2_passage: Passage) -> None:
    assert_served_by(smollm2_passage.cpu, "cpu", smollm2_passage)
    assert smollm2_passage.cpu.tokens == smollm2_passage.without


def test_twenty_answers_are_the_same_from_the_filesystem_after_a_restart(
    smollm2_passage: Passage,
) -> None:
    assert_served_by(smollm2_passage.fs, "fs", smollm2_passage)
    assert smollm2_passage.fs.tokens == smollm2_passage.without


def test_twenty_answers_are_twenty_different_ones(smollm2_passage: Passage) -> None:
    assert len(set(smollm2_passage.without)) == 20


def test_chunks_of_two_blocks_give_the_same_answers(llama: Path, tmp_path: Path) -> None:
    # 700 tokens are five blocks: the last of them is no whole chunk.
    passage = pass_through(llama, prompts(4, 700), tmp_path, blocks_per_chunk=2)
    assert set(passage.cacheable) == {512}
    assert_same_through_every_tier(passage)


@pytest.mark.parametrize("which", ["every chunk", "one chunk"])
def test_wrong_bytes_in_the_arena_would_be_noticed(llama: Path, which: str) -> None:
    """The other tests compare answers, which proves nothing unless wrong KV changes them."""
    prompt = prompts(1, 700)[0]
    with Engine(llama, [cpu()]) as engine:
        right = engine.ask(prompt)
        engine.reset_gpu()
        chunks = list(engine.arena().values())
        for chunk in chunks if which == "every chunk" else chunks[:1]:
            chunk[:] = chunk[::-1].tobytes()
        wrong = engine.ask(prompt)
    assert wrong.cached == 640
    assert wrong.tokens != right.tokens


def test_a_prefix_is_loaded_for_another_prompt_that_begins_with_it(
    llama: Path, tmp_path: Path
) -> None:
    first, second = prompts(2, 700)
    other = first[:512] + second[:200]
    with Engine(llama) as engine:
        without = engine.ask(other)
    with Engine(llama, [cpu(), fs(tmp_path)]) as engine:
        engine.ask(first)
        engine.reset_gpu()
        assert engine.ask(other).tokens == without.tokens
        engine.drop_arena()
        answer = engine.ask(other)
        assert answer.tokens == without.tokens
        assert answer.cached == 640
        assert engine.counts("fs")["hits"] == 5
