"""A model with sliding-window and full attention: groups that need different chunks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from engine import Engine, cpu
from models import WINDOW, prompts
from passage import Passage, assert_same_through_every_tier, pass_through


def test_answers_are_the_same_through_each_tier(gemma3_passage: Passage) -> None:
    assert gemma3_passage.redis is not None
    assert_same_through_every_tier(gemma3_passage)


def test_only_the_window_of_a_sliding_group_is_loaded(gemma3: Path) -> None:
    prompt = prompts(1, 1000)[0]
    with Engine(gemma3, [cpu()]) as engine:
        engine.ask(prompt[:700])
        engine.ask(prompt)
        engine.reset_gpu()
        assert engine.ask(prompt).cached == 896
        # Seven chunks of full attention, and for each other layer the window's two.
        assert engine.counts("cpu")["hits"] == 7 + 3 * 2
        # A key ends with its group.
        stored = Counter(key[-4:] for key in engine.arena())
    assert sorted(stored.values()) == [4, 4, 4, 7], "the arena has the first window too"


def test_files_hold_what_the_arena_held(gemma3_passage: Passage) -> None:
    assert gemma3_passage.files == gemma3_passage.cold.arena
    assert gemma3_passage.fs.arena.items() <= gemma3_passage.files.items()


def test_chunks_of_two_blocks_give_the_same_answers(gemma3: Path, tmp_path: Path) -> None:
    assert WINDOW == 256, "one chunk of two blocks is the window then"
    passage = pass_through(gemma3, prompts(4, 900), tmp_path, blocks_per_chunk=2)
    assert set(passage.cacheable) == {768}
    assert_same_through_every_tier(passage)
