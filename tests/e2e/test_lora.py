"""LoRA adapters: each its own KV, by name, path and content, in every tier but vLLM's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, chunk_files, cpu, fs
from models import make_adapter, prompts
from passage import assert_same_through_every_tier, pass_through
from redis_server import RedisServer

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
PROMPT = prompts(1, 700)[0]
CACHEABLE = 640
Tokens = tuple[int, ...]


def adapter(path: Path, number: int = 1, *, in_place: bool = False) -> Any:
    """As vLLM's server makes it: reloaded in place it keeps its number, loaded anew not."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(path.name, number, str(path), load_inplace=in_place)


@pytest.fixture(scope="module")
def expected(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tokens]:
    """Answers without the connector, by the seed of the adapter's content."""
    folder = tmp_path_factory.mktemp("adapters")
    with Engine(llama, **OPTIONS) as engine:
        answers = {
            seed: engine.ask(PROMPT, lora=adapter(make_adapter(folder / str(seed), seed), seed))
            for seed in (1, 2, 3)
        }
    assert len({answer.tokens for answer in answers.values()}) == 3
    return {seed: answer.tokens for seed, answer in answers.items()}


def test_two_adapters_and_the_model_keep_to_themselves_in_every_tier(
    llama: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    """One prompt for all three: what one of them computed would be found by the others."""
    first = adapter(make_adapter(tmp_path / "first", 1), 1)
    second = adapter(make_adapter(tmp_path / "second", 2), 2)
    passage = pass_through(
        llama,
        [PROMPT] * 3,
        tmp_path / "fs",
        redis=redis_server.url,
        asking=[{}, {"lora": first}, {"lora": second}],
        **OPTIONS,
    )
    assert_same_through_every_tier(passage)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where one adapter lies, whatever its content."""
    return make_adapter(tmp_path / "adapter", 1)


@pytest.fixture
def engine(llama: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(llama, [cpu(), fs(tmp_path / "fs")], **OPTIONS) as started:
        yield started


def test_new_content_at_the_same_path_gets_nothing_of_the_old(
    llama: Path, engine: Engine, path: Path, tmp_path: Path, expected: dict[int, Tokens]
) -> None:
    def ask(lora: Any, content: int, cached: int) -> None:
        engine.reset_gpu()
        answer = engine.ask(PROMPT, lora=lora)
        assert (answer.tokens, answer.cached) == (expected[content], cached)

    ask(adapter(path), 1, 0)
    make_adapter(path, 2)
    ask(adapter(path, in_place=True), 2, 0)
    ask(adapter(path, in_place=True), 2, CACHEABLE)
    engine.drop_arena()
    ask(adapter(path, in_place=True), 2, CACHEABLE)
    # The old content again, in an adapter that was unloaded and loaded.
    make_adapter(path, 1)
    ask(adapter(path, 5), 1, CACHEABLE)
    make_adapter(path, 3)
    engine.close()
    with Engine(llama, [cpu(), fs(tmp_path / "fs")], **OPTIONS) as engine:
        ask(adapter(path), 3, 0)
        engine.drop_arena()
        ask(adapter(path), 3, CACHEABLE)


def test_what_builds_on_old_kv_in_vllms_own_cache_is_not_stored(
    engine: Engine, path: Path, tmp_path: Path, expected: dict[int, Tokens]
) -> None:
    engine.ask(PROMPT, lora=adapter(path))
    stored = chunk_files(tmp_path / "fs")
    make_adapter(path, 2)
    longer = PROMPT + prompts(1, 300, seed=9)[0]
    answer = engine.ask(longer, lora=adapter(path, in_place=True))
    assert answer.cached == CACHEABLE, "vLLM's block hash has no content: see docs/shapes.md"
    assert chunk_files(tmp_path / "fs") == stored
    engine.reset_gpu()
    answer = engine.ask(PROMPT, lora=adapter(path, in_place=True))
    assert (answer.tokens, answer.cached) == (expected[2], 0)


def test_a_reload_under_a_running_request_leaves_no_mixture_behind(llama: Path, path: Path) -> None:
    tiers = [cpu()]
    with Engine(llama, tiers, max_num_batched_tokens=256, **OPTIONS) as engine:
        engine.ask(PROMPT, 1, lora=adapter(path))
        pure = engine.arena_digests()
        assert len(pure) == CACHEABLE // 128
        engine.drop_arena()
        name = engine.submit(PROMPT, 1, lora=adapter(path))
        engine.step()
        make_adapter(path, 2)
        # What the server's /v1/load_lora_adapter does.
        engine.core.add_lora(adapter(path, in_place=True))
        answers = engine.run_until(lambda: not engine.scheduler.has_requests())
        assert answers[name].cached == 0
        engine.settle()
        assert engine.arena_digests().items() <= pure.items()
        engine.reset_gpu()
        engine.ask(PROMPT, 1, lora=adapter(path, in_place=True))
        renewed = engine.arena_digests()
        assert len(renewed.keys() - pure.keys()) == CACHEABLE // 128


def test_files_that_vllm_has_not_loaded_name_nothing(
    engine: Engine, path: Path, expected: dict[int, Tokens], caplog: pytest.LogCaptureFixture
) -> None:
    engine.ask(PROMPT, lora=adapter(path))
    stored = engine.arena_digests()
    make_adapter(path, 2)
    for _ in range(2):
        engine.reset_gpu()
        answer = engine.ask(PROMPT, lora=adapter(path))
        assert (answer.tokens, answer.cached) == (expected[1], 0), "neither loads nor stores"
    shutil.rmtree(path)
    for _ in range(2):
        engine.reset_gpu()
        answer = engine.ask(PROMPT, lora=adapter(path))
        assert (answer.tokens, answer.cached) == (expected[1], 0)
    assert engine.arena_digests() == stored
    said = [text for text in caplog.messages if "bypass the tiers" in text]
    assert len(said) == 2
    assert "not those that vLLM has loaded" in said[0]
