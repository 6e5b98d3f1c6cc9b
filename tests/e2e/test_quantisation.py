"""KV and weights in fewer bits: the same answers through every tier, and no mixing with others."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import Engine, cpu, fs
from model_quantised import make_int8
from models import prompts
from passage import assert_same_through_every_tier, pass_through
from redis_server import RedisServer


def _has_avx512() -> bool:
    import torch

    return torch.cpu._is_avx512_supported()


@pytest.mark.skipif(not _has_avx512(), reason="vLLM's kernels for an fp8 cache on CPU want AVX-512")
def test_answers_are_the_same_with_an_fp8_cache(
    llama: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    passage = pass_through(
        llama,
        prompts(2, 300),
        tmp_path,
        redis=redis_server.url,
        max_tokens=8,
        kv_cache_dtype="fp8",
    )
    assert_same_through_every_tier(passage)
    with Engine(llama, [cpu(), fs(tmp_path)]) as engine:
        full = engine.ask(prompts(1, 300)[0], 8)
        assert full.cached == 0, "chunks of one format mean nothing in another"
        wide = len(next(iter(engine.arena().values())))
    with Engine(llama, [cpu(), fs(tmp_path)], kv_cache_dtype="fp8_e5m2") as engine:
        prompt = prompts(1, 300)[0]
        right = engine.ask(prompt, 8)
        assert right.cached == 0
        chunks = list(engine.arena().values())
        assert len(chunks[0]) * 4 == wide
        engine.reset_gpu()
        for chunk in chunks:
            chunk[:] = chunk[::-1].tobytes()
        assert engine.ask(prompt, 8).tokens != right.tokens


def test_answers_are_the_same_with_quantised_weights(
    llama: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    quantised = make_int8(tmp_path / "int8", llama)
    root = tmp_path / "fs"
    passage = pass_through(quantised, prompts(2, 300), root, redis=redis_server.url, max_tokens=8)
    assert_same_through_every_tier(passage)
    prompt = prompts(1, 300)[0]
    with Engine(llama, [cpu(), fs(root)]) as engine:
        plain = engine.ask(prompt, 8)
        assert plain.cached == 0, "plain weights find nothing of quantised ones"
        engine.reset_gpu()
        for chunk in engine.arena().values():
            chunk[:] = chunk[::-1].tobytes()
        assert engine.ask(prompt, 8).tokens != plain.tokens
