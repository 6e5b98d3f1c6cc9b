"""Images: two behind one text share no KV from the first image on, and each finds its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import Engine, cpu, fs
from model_vision import IMAGE, make_idefics3, make_image
from models import prompts
from passage import assert_same_through_every_tier, pass_through
from redis_server import RedisServer

_READS = {"skip_tokenizer_init": False}
"""vLLM's processor of images wants the model's tokenizer."""


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Idefics 3."""
    return make_idefics3(tmp_path_factory.mktemp("models") / "idefics3")


def _shows(seed: int) -> dict[str, Any]:
    return {"multi_modal_data": {"image": make_image(seed)}}


def test_one_text_with_two_images_has_two_answers_through_every_tier(
    idefics3: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    text = prompts(1, 400)[0]
    text[20] = IMAGE
    asking = [_shows(1), _shows(2)]
    passage = pass_through(
        idefics3,
        [text, text],
        tmp_path,
        redis=redis_server.url,
        max_tokens=8,
        asking=asking,
        **_READS,
    )
    assert_same_through_every_tier(passage)
    assert passage.cacheable == [384, 384]


def test_what_precedes_an_image_is_shared(idefics3: Path, tmp_path: Path) -> None:
    text = prompts(1, 400)[0]
    text[200] = IMAGE
    with Engine(idefics3, **_READS) as engine:
        without = [engine.ask(text, 8, **_shows(seed)) for seed in (1, 2)]
    with Engine(idefics3, [cpu(), fs(tmp_path)], **_READS) as engine:
        first = engine.ask(text, 8, **_shows(1))
        engine.drop_arena()
        other = engine.ask(text, 8, **_shows(2))
        engine.drop_arena()
        again = engine.ask(text, 8, **_shows(1))
    assert [first.tokens, other.tokens] == [answer.tokens for answer in without]
    assert again.tokens == first.tokens
    assert (first.cached, other.cached, again.cached) == (0, 128, 384)
