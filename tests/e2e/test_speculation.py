"""Speculation: guesses are written into blocks before they are known to be right.

What follows a rejected guess overwrites it, and what is stored must be what stayed. So the
answers' own chunks are stored here, and the next turn is asked from each tier: a prompt that
goes on where the answer ended. EAGLE's drafter keeps KV too, in the same chunks; wrong bytes
there change no answer, only how many guesses are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, cpu, fs, redis_tier
from model_drafter import make_drafted_llama
from models import prompts
from redis_server import RedisServer

_FIRST, _NEXT = 200, 30
"""Tokens generated in the first turn, and in the next."""
# The first answer ends inside a block. The second ends with one, whose last token is
# sampled and never computed: that block is whole when the next turn has computed it.
_PROMPTS = [prompts(1, 100)[0], prompts(1, 184, seed=2)[0]]
_ASKED_NEXT = prompts(1, 20, seed=3)[0]
_CACHED = {"cpu": [256, 256], "redis": [256, 384], "fs": [256, 384]}


@dataclass
class Turns:
    """What one engine did.

    Attributes:
        tokens: of each prompt.
        cached: prompt tokens that were not computed.
        drafted: guesses, in all of them.
        accepted: how many of those were right.

    """

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Conversation:
    """The first turn without the connector and cold, the next one without it and from each tier."""

    plain: Turns
    cold: Turns
    plain_next: Turns
    later: dict[str, Turns]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and its drafter."""
    return make_drafted_llama(tmp_path_factory.mktemp("drafted"))


@pytest.fixture(scope="module", params=["ngram", "eagle"])
def method(request: pytest.FixtureRequest) -> str:
    """Who guesses."""
    return str(request.param)


@pytest.fixture(scope="module")
def conversation(
    method: str, drafted: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Conversation]:
    """Both turns of each prompt."""
    model, drafter = drafted
    folder = tmp_path_factory.mktemp(method)
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle":
        speculation["model"] = str(drafter)
    else:
        speculation |= {"prompt_lookup_min": 2, "prompt_lookup_max": 2}

    def engine(tiers: Sequence[dict[str, Any]] | None = None) -> Engine:
        extra = {"offload_prompt_only": False}
        return Engine(model, tiers, extra=extra, speculative_config=speculation)

    with RedisServer(folder / "redis") as redis:
        yield _converse(engine, [cpu()], [redis_tier(redis.url)], [fs(folder / "fs")], method)


def _converse(
    engine: Callable[..., Engine],
    near: list[dict[str, Any]],
    redis: list[dict[str, Any]],
    disk: list[dict[str, Any]],
    method: str,
) -> Conversation:
    later = {}
    with engine() as plain:
        first = _ask(plain, _PROMPTS, _FIRST, method)
        following = [
            [*prompt, *said, *_ASKED_NEXT]
            for prompt, said in zip(_PROMPTS, first.tokens, strict=True)
        ]
        plain.reset_gpu()
        plain_next = _ask(plain, following, _NEXT, method)
    with engine(near + redis + disk) as tiered:
        cold = _ask(tiered, _PROMPTS, _FIRST, method)
        assert len(tiered.arena()) == sum(_CACHED["cpu"]) // 128
        tiered.reset_gpu()
        later["cpu"] = _ask(tiered, following, _NEXT, method)
    for name, below in (("redis", redis), ("fs", disk)):
        with engine(near + below) as restarted:
            later[name] = _ask(restarted, following, _NEXT, method)
            assert restarted.counts(name)["hits"] == sum(_CACHED[name]) // 128
    return Conversation(first, cold, plain_next, later)


def _ask(engine: Engine, asked: list[list[int]], max_tokens: int, method: str) -> Turns:
    turns = Turns()
    count = engine.scheduler.make_spec_decoding_stats

    def counted(stats: Any, *, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any) -> Any:
        turns.drafted += num_draft_tokens
        turns.accepted += num_accepted_tokens
        return count(
            stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            **rest,
        )

    engine.scheduler.make_spec_decoding_stats = counted
    # Of eight tokens, pairs come again now and then, for n-grams to be found.
    few = {"allowed_token_ids": list(range(100, 108))} if method == "ngram" else None
    for prompt in asked:
        answer = engine.ask(prompt, max_tokens, sampling=few)
        turns.tokens.append(answer.tokens)
        turns.cached.append(answer.cached)
    del engine.scheduler.make_spec_decoding_stats
    return turns


def test_guesses_are_right_and_wrong(conversation: Conversation) -> None:
    """What the other tests need: blocks with both."""
    plain = conversation.plain
    assert 0.05 * plain.drafted < plain.accepted < 0.8 * plain.drafted


def test_the_first_answers_are_the_same(conversation: Conversation) -> None:
    assert conversation.cold == conversation.plain


@pytest.mark.parametrize("tier", ["cpu", "redis", "fs"])
def test_the_next_turn_is_the_same_from_each_tier(conversation: Conversation, tier: str) -> None:
    later = conversation.later[tier]
    assert conversation.plain_next.cached == [0, 0]
    assert later.cached == _CACHED[tier]
    assert later.tokens == conversation.plain_next.tokens
    assert len(set(later.tokens)) == 2


@pytest.mark.parametrize("tier", ["cpu", "redis", "fs"])
def test_as_many_guesses_are_right_as_without_the_connector(
    conversation: Conversation, tier: str
) -> None:
    """So the drafter's KV came back too."""
    later, plain = conversation.later[tier], conversation.plain_next
    assert (later.drafted, later.accepted) == (plain.drafted, plain.accepted)


def test_without_the_drafters_kv_fewer_guesses_are_right(
    drafted: tuple[Path, Path],
) -> None:
    """The test above would notice: only the layers of the drafter are wrong here."""
    model, drafter = drafted
    speculation = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
    prompt = prompts(1, 300)[0]
    with Engine(model, [cpu()], speculative_config=speculation) as engine:
        right = _ask(engine, [prompt], 60, "eagle")
        engine.reset_gpu()
        for chunk in engine.arena().values():
            drafters = chunk[len(chunk) // 2 :]
            drafters[:] = drafters[::-1].tobytes()
        wrong = _ask(engine, [prompt], 60, "eagle")
    assert wrong.cached == [256]
    assert wrong.tokens == right.tokens
    assert wrong.accepted < right.accepted
