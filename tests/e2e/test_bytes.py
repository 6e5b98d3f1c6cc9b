"""Bytes come back from each tier as they were stored, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import Engine, chunk_files, cpu, file_digests, fs
from models import prompts
from passage import Passage


def test_files_hold_what_the_arena_held(smollm2_passage: Passage) -> None:
    chunks = sum(size // 128 for size in smollm2_passage.cacheable)
    assert len(smollm2_passage.cold.arena) >= chunks
    assert smollm2_passage.files == smollm2_passage.cold.arena
    assert len(set(smollm2_passage.files.values())) == len(smollm2_passage.files)


def test_serving_from_the_arena_leaves_its_bytes_alone(smollm2_passage: Passage) -> None:
    assert smollm2_passage.cpu.arena == smollm2_passage.cold.arena


def test_a_promotion_brings_back_what_was_stored(smollm2_passage: Passage) -> None:
    # Another engine's arena: every byte of it came from a file.
    promoted = smollm2_passage.fs.arena
    assert promoted
    assert promoted.items() <= smollm2_passage.cold.arena.items()
    chunks = sum(size // 128 for size in smollm2_passage.cacheable)
    assert len(promoted) >= chunks


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_load_brings_back_to_the_gpu_what_was_stored(llama: Path, blocks_per_chunk: int) -> None:
    """Loaded blocks, stored anew from the GPU by a longer prompt, give the same bytes."""
    long = prompts(1, 1400)[0]
    with Engine(llama, [cpu()], extra={"blocks_per_chunk": blocks_per_chunk}) as engine:
        engine.ask(long[:1300])
        stored = engine.arena_digests()
        engine.reset_gpu()
        assert engine.ask(long[:1300]).cached == 1280
        engine.hierarchy.spoil(range(engine.hierarchy._residency.cpu.arena.slots))
        assert not engine.arena()
        # Its first 1,280 tokens are on the GPU, where a load has put them.
        assert engine.ask(long).cached == 1280
        again = engine.arena_digests()
    assert len(stored) == 10 // blocks_per_chunk
    assert stored.items() <= again.items()


def test_a_flipped_bit_in_a_file_is_a_miss_and_recomputed(llama: Path, tmp_path: Path) -> None:
    prompt = prompts(1, 700)[0]
    with Engine(llama, [cpu(), fs(tmp_path)]) as engine:
        right = engine.ask(prompt)
        stored = file_digests(tmp_path)
        engine.drop_arena()
        third = next(c for c in engine.hierarchy._residency.directory if c.position == 2)
        damaged = chunk_files(tmp_path)[third.key]
        _flip_one_bit(damaged)
        answer = engine.ask(prompt)
        assert answer.tokens == right.tokens
        assert answer.cached == 2 * 128, "what lies before the damage is still of use"
        assert engine.counts("fs")["corrupt"] == 1
        assert engine.counts("fs")["hits"] == 2
        # The computed chunk takes the damaged one's place.
        engine.drop_arena()
        again = engine.ask(prompt)
    assert (again.tokens, again.cached) == (right.tokens, 640)
    assert file_digests(tmp_path) == stored


def _flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
