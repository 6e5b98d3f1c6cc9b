"""Models that keep something other than the keys and values of every token.

Mamba's layers, and short convolutions, keep a state: what they know after a token. vLLM hands
over the one at the last whole block of a prompt. MLA keeps one latent vector for all heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
from engine import Engine, cpu, fs, redis_tier
from kvtiers.connector.config_errors import ConfigError
from models import prompts
from passage import Passage, assert_same_through_every_tier, pass_through
from redis_server import RedisServer

_MAKERS: dict[str, Callable[[Path], Path]] = {
    "mamba": models.make_mamba_hybrid,
    "convolution": models.make_convolution_hybrid,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM's Mamba kernel on CPU knows a state only at the end of a step: a step across
    # the end of a block fails, whatever the connector.
    "mamba": {"max_num_batched_tokens": 256, "max_model_len": 2048},
    "convolution": {"max_model_len": 2048},
}
_BLOCK = {"mamba": 256, "convolution": 128}
_STATE = 512
"""Tokens after which both models' states are kept, of the prompts below."""
_ATTENTION, _STATES = 2, {0, 1}
"""KV-cache groups of both models."""
_MLA = {"attention_backend": "CPU_MLA", "max_model_len": 1024}
"""Also where the CPU has AMX, for whose kernel vLLM leaves the prefix cache on."""


@pytest.fixture(scope="module", params=sorted(_MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    """What the layers beside attention are."""
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    return _MAKERS[kind](tmp_path_factory.mktemp("models") / kind)


@pytest.fixture(scope="module")
def hybrid_passage(
    kind: str, hybrid: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Passage]:
    """Two prompts through every tier."""
    root = tmp_path_factory.mktemp(kind)
    with RedisServer(root / "redis") as redis:
        yield pass_through(
            hybrid,
            prompts(2, _STATE + 1),
            root / "fs",
            redis=redis.url,
            block=_BLOCK[kind],
            max_tokens=8,
            **_OPTIONS[kind],
        )


def test_answers_are_the_same_through_every_tier(hybrid_passage: Passage) -> None:
    assert_same_through_every_tier(hybrid_passage)


def test_one_state_of_a_layer_is_stored_and_loaded_for_a_prompt(
    kind: str, hybrid_passage: Passage
) -> None:
    whole = _STATE // _BLOCK[kind]
    stored = Counter(_group(key) for key in hybrid_passage.cold.arena)
    assert stored == {_ATTENTION: 2 * whole, 0: 2, 1: 2}
    assert hybrid_passage.fs.hits["fs"] == 2 * (whole + len(_STATES))
    assert hybrid_passage.files == hybrid_passage.cold.arena


def test_wrong_bytes_of_either_kind_would_be_noticed(kind: str, hybrid: Path) -> None:
    # The convolutions look back two tokens: one token later a wrong state shows.
    prompt = prompts(1, _STATE + 1)[0]
    with Engine(hybrid, [cpu()], **_OPTIONS[kind]) as engine:
        right = engine.ask(prompt)
        for groups in ({_ATTENTION}, _STATES):
            engine.reset_gpu()
            chunks = [chunk for key, chunk in engine.arena().items() if _group(key) in groups]
            stored = [bytes(chunk) for chunk in chunks]
            for chunk in chunks:
                chunk[:] = chunk[::-1].tobytes()
            wrong = engine.ask(prompt)
            assert wrong.cached == _STATE
            assert wrong.tokens != right.tokens, groups
            for chunk, data in zip(chunks, stored, strict=True):
                chunk[:] = data


def test_the_next_turn_of_a_conversation_begins_where_the_state_was_kept(
    kind: str, hybrid: Path
) -> None:
    first, more = prompts(2, _STATE + 60)
    longer = first + more[:200]
    with Engine(hybrid, **_OPTIONS[kind]) as engine:
        without = engine.ask(longer, 8)
    with Engine(hybrid, [cpu()], **_OPTIONS[kind]) as engine:
        engine.ask(first, 8)
        engine.reset_gpu()
        answer = engine.ask(longer, 8)
        assert answer.tokens == without.tokens
        assert answer.cached == _STATE
        engine.reset_gpu()
        # Of a shorter prefix there is attention's part and no state.
        assert engine.ask(first[: _STATE - 20] + more[:50], 1).cached == 0


def test_several_blocks_a_chunk_are_refused_where_a_layer_keeps_states(
    kind: str, hybrid: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^blocks_per_chunk is 2, .*Mamba"):
        Engine(hybrid, [cpu()], extra={"blocks_per_chunk": 2}, **_OPTIONS[kind])


def _group(key: bytes) -> int:
    """A key ends with its group."""
    return int.from_bytes(key[-4:])


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek V2."""
    return models.make_mla(tmp_path_factory.mktemp("models") / "mla")


def test_mla_is_refused_where_vllm_switches_its_prefix_cache_off(mla: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Prefix caching is switched off.* for this model"):
        Engine(mla, [cpu()], **_MLA)


def test_answers_are_the_same_with_mla(
    mla: Path,
    tmp_path: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the prefix cache on, and compared with answers from that cache.

    vLLM's kernels for MLA on CPU answer otherwise when a prompt's head is cached, with or
    without the connector.
    """
    _leave_prefix_caching_on(monkeypatch)
    asked = prompts(2, 330)
    with Engine(mla, **_MLA) as engine:
        engine.ask_each(asked, 8)
        wanted = engine.ask_each(asked, 8)
    assert [answer.cached for answer in wanted] == [320, 320]
    assert len({answer.tokens for answer in wanted}) == 2
    redis, disk = redis_tier(redis_server.url), fs(tmp_path)
    with Engine(mla, [cpu(), redis, disk], **_MLA) as engine:
        assert [answer.cached for answer in engine.ask_each(asked, 8)] == [0, 0]
        engine.reset_gpu()
        assert engine.ask_each(asked, 8) == wanted
        assert engine.counts("redis")["hits"] == engine.counts("fs")["hits"] == 0
    for name, tier in (("redis", redis), ("fs", disk)):
        with Engine(mla, [cpu(), tier], **_MLA) as engine:
            assert engine.ask_each(asked, 8) == wanted, name
            assert engine.counts(name)["hits"] == 2 * 20
            engine.reset_gpu()
            for chunk in list(engine.arena().values())[:1]:
                chunk[:] = chunk[::-1].tobytes()
            assert engine.ask_each(asked, 8) != wanted, "one wrong chunk would be noticed"


def _leave_prefix_caching_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def update_but_cache(config: Any) -> None:
        update(config)
        config.cache_config.enable_prefix_caching = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(update_but_cache))
