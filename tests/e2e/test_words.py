"""Configuration words on real engines: what vLLM offers, and what is stored of it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from engine import BLOCK, Answer, Engine, cpu, fs
from kvtiers.connector.config_errors import ConfigError
from models import prompts


def positions(engine: Engine) -> Counter[int]:
    """How many chunks of each position in a prefix the arena holds."""
    directory = engine.hierarchy._residency.directory
    return Counter(chunk.position for chunk in directory if chunk.slot >= 0)


def drop(engine: Engine, keys: set[bytes]) -> None:
    """Take chunks out of the arena, as if they had been evicted."""
    found = [engine.hierarchy._residency.get(key) for key in keys]
    engine.hierarchy.spoil([chunk.slot for chunk in found if chunk is not None])


def test_nothing_is_stored_before_the_gpus_cache_is_fuller(llama: Path) -> None:
    short, long = prompts(1, 700)[0], prompts(1, 2620, seed=2)[0]
    settings = {"offload_threshold": 0.5}
    # The long prompt takes six steps, and passes half of the blocks in the third.
    with Engine(llama, [cpu()], blocks=32, extra=settings, max_num_batched_tokens=512) as engine:
        first = engine.ask(short)
        assert not engine.arena(), "five of 31 blocks hold cached KV"
        engine.ask(long)
        assert positions(engine) == dict.fromkeys(range(20), 1), "its head was offered again"
        of_long = set(engine.arena())
        assert engine.ask(short).cached == 640
        of_short = set(engine.arena()) - of_long
        assert len(of_short) == 5, "what the GPU still had was offered by a later request"
        # The same where a request also loads: the GPU has the head, the arena the tail.
        engine.reset_gpu()
        directory = engine.hierarchy._residency.directory
        head = {key for key in of_short if directory.ensure(key).position < 2}
        drop(engine, head)
        engine.ask(short[: 2 * BLOCK + 10])
        assert not head & set(engine.arena()), "turned away"
        engine.ask(long)
        again = engine.ask(short)
        assert again.cached == 640
        assert head <= set(engine.arena())
        engine.reset_gpu()
        assert engine.ask(short).tokens == again.tokens == first.tokens


def test_what_is_offered_late_on_a_hybrid_is_right(gemma3: Path) -> None:
    """Blocks that a window has left behind by then belong to others."""
    prompt, other = prompts(2, 2000)
    settings = {"offload_threshold": 0.4}
    with Engine(gemma3, [cpu()], blocks=64, extra=settings, max_num_batched_tokens=512) as engine:
        first = engine.ask(prompt)
        assert positions(engine)[0] == 1, "of full attention alone"
        engine.ask(other)
        engine.reset_gpu()
        again = engine.ask(prompt)
        assert (again.cached, again.tokens) == (1920, first.tokens)


def test_no_more_than_the_first_tokens_are_stored_and_more_is_loaded(
    llama: Path, tmp_path: Path
) -> None:
    prompt = prompts(1, 700)[0]
    with Engine(llama, [cpu(), fs(tmp_path)], extra={"max_tokens": 400}) as engine:
        first = engine.ask(prompt)
        assert positions(engine) == {0: 1, 1: 1, 2: 1}
        engine.drop_arena()
        again = engine.ask(prompt)
        assert (again.cached, again.tokens) == (384, first.tokens)
    with Engine(llama, [cpu(), fs(tmp_path)]) as engine:
        engine.ask(prompt)
    # What others stored beyond the limit is used.
    with Engine(llama, [cpu(), fs(tmp_path)], extra={"max_tokens": 400}) as engine:
        again = engine.ask(prompt)
        assert (again.cached, again.tokens) == (640, first.tokens)


def test_a_window_is_stored_where_the_longest_prefix_ends(gemma3: Path) -> None:
    prompt = prompts(1, 1000)[0]
    with Engine(gemma3, [cpu()], extra={"max_tokens": 600}) as engine:
        first = engine.ask(prompt)
        # Four chunks of full attention, and for each other layer the window's two.
        assert positions(engine) == {0: 1, 1: 1, 2: 4, 3: 4}
        engine.reset_gpu()
        again = engine.ask(prompt)
        assert (again.cached, again.tokens) == (512, first.tokens)


@pytest.mark.parametrize(("window", "early"), [(None, 5), (2 * BLOCK, 2), (0, 0)])
def test_only_the_window_is_promoted_while_a_request_queues(
    llama: Path, tmp_path: Path, window: int | None, early: int
) -> None:
    busy, prompt = prompts(2, 700)
    settings = {"prefetch_window": window}
    with Engine(llama, [cpu(), fs(tmp_path)], extra=settings, max_num_seqs=1) as engine:
        first = engine.ask(prompt)
        engine.drop_arena()
        chunk = engine.hierarchy.chunk_bytes

        def read() -> int:
            return engine.counts("fs")["bytes_read"] // chunk

        engine.submit(busy, max_tokens=200)
        # It takes a few steps until the tiers have said that they lack it.
        engine.run_until(lambda: len(engine.scheduler.running) == 1)
        name = engine.submit(prompt)
        engine.run_until(lambda: read() >= early and engine.hierarchy.idle())
        for _ in range(20):
            engine.step()
        assert read() == early
        assert len(engine.scheduler.running) == len(engine.scheduler.waiting) == 1
        answers: dict[str, Answer] = {}
        engine.run_until(lambda: name in answers, answers)
        assert read() == 5
        assert (answers[name].cached, answers[name].tokens) == (640, first.tokens)


def test_a_longest_prefix_below_one_chunk_is_refused_at_the_start(llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 100, which is below one chunk of 128"):
        Engine(llama, [cpu()], extra={"max_tokens": 100})


def test_headroom_and_padded_files_of_a_bounded_tier(llama: Path, tmp_path: Path) -> None:
    asked = prompts(4, 700)
    options = {"headroom": 0.5, "block_size": "64KiB", "buffer": "128KiB"}
    with Engine(llama, [cpu()]) as engine:
        chunk = len(next(iter(engine.arena().values()))) if engine.ask(asked[0]) else 0
    room = 12 * (chunk + 65536)
    with Engine(llama, [cpu(), fs(tmp_path, room, **options)]) as engine:
        first = engine.ask_each(asked)
        # By the folder's keeper, in its own time.
        deadline = time.monotonic() + 60
        while engine.usage("fs").usage.nbytes > 0.75 * room:
            assert time.monotonic() < deadline, engine.usage("fs")
            time.sleep(0.05)
        assert all(f.stat().st_size % 65536 == 0 for f in tmp_path.rglob("*.kv"))
        engine.drop_arena()
        again = engine.ask_each(asked[::-1])
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first[::-1]]
        assert engine.counts("fs")["hits"] > 0
