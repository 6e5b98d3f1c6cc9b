"""The same prompts without the connector, cold, from the CPU tier, and after a restart from below.

A passage is run once and judged by several tests, since it takes engines to run: three,
and one more with a Redis. A shape of model or engine is a few lines:

    def test_answers_are_the_same_with_an_fp8_cache(llama, redis_server, tmp_path):
        passage = pass_through(
            llama, prompts(2, 700), tmp_path, redis=redis_server.url, kv_cache_dtype="fp8"
        )
        assert_same_through_every_tier(passage)

What is no argument of ``pass_through`` is an option of ``Engine``, and so of ``vllm.LLM``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import BLOCK, Answer, Engine, cpu, file_digests, fs, redis_tier


@dataclass(frozen=True)
class Step:
    """One time through all prompts.

    Attributes:
        answers: one per prompt.
        hits: chunks served, by tier, in this step alone.
        arena: hash of every chunk in the CPU tier after it.

    """

    answers: list[Answer]
    hits: dict[str, int]
    arena: dict[bytes, bytes]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """What the engine generated."""
        return [answer.tokens for answer in self.answers]


@dataclass(frozen=True)
class Passage:
    """What happened.

    Attributes:
        without: answers of an engine without the connector.
        cold: the first time with the connector; nothing is cached yet.
        cpu: again, after the GPU's cache was emptied.
        redis: again, in a new engine without the filesystem tier; None without a Redis.
        fs: again, in a new engine without the Redis tier.
        files: hash of the payload of every chunk file.
        cacheable: per prompt, how many tokens whole chunks hold.

    """

    without: list[tuple[int, ...]]
    cold: Step
    cpu: Step
    redis: Step | None
    fs: Step
    files: dict[bytes, bytes]
    cacheable: list[int]


def pass_through(
    model: Path,
    prompts: Sequence[Sequence[int]],
    root: Path,
    *,
    redis: str | None = None,
    arena: str = "64MiB",
    block: int = BLOCK,
    blocks_per_chunk: int = 1,
    max_tokens: int = 16,
    asking: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Passage:
    """Run the prompts one at a time, so that each is computed in the same batch every time.

    Args:
        model: folder of the model.
        prompts: token ids.
        root: folder of the filesystem tier.
        redis: URL of an empty Redis; None leaves it out.
        arena: capacity of the CPU tier; all prompts must fit.
        block: tokens of a block, where vLLM takes others than it usually does on CPU.
        blocks_per_chunk: see docs/configuration.md.
        max_tokens: to generate.
        asking: per prompt, further arguments of ``Engine.ask``; () for none.
        extra: further keys of ``kv_connector_extra_config``.
        options: of ``Engine``.

    """
    near, disk = [cpu(arena)], [fs(root)]
    below = [] if redis is None else [redis_tier(redis)]
    extra = {"blocks_per_chunk": blocks_per_chunk, **(extra or {})}
    questions = list(zip(prompts, asking or [{}] * len(prompts), strict=True))

    def engine(tiers: Sequence[Mapping[str, Any]]) -> Engine:
        return Engine(model, tiers, extra=extra, **options)

    with Engine(model, **options) as plain:
        without = _step(plain, questions, max_tokens)
    with engine(near + below + disk) as first:
        cold = _step(first, questions, max_tokens)
        first.reset_gpu()
        from_cpu = _step(first, questions, max_tokens)
    from_redis = None
    if below:
        with engine(near + below) as second:
            from_redis = _step(second, questions, max_tokens)
    with engine(near + disk) as last:
        from_fs = _step(last, questions, max_tokens)
    chunk = blocks_per_chunk * block
    return Passage(
        without=without.tokens,
        cold=cold,
        cpu=from_cpu,
        redis=from_redis,
        fs=from_fs,
        files=file_digests(root),
        # Of a prompt that ends with a chunk too, though its last token is computed once more.
        cacheable=[len(prompt) // chunk * chunk for prompt in prompts],
    )


def _step(
    engine: Engine,
    questions: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
    max_tokens: int,
) -> Step:
    before = _hits(engine)
    answers = [engine.ask(prompt, max_tokens, **options) for prompt, options in questions]
    hits = {name: count - before.get(name, 0) for name, count in _hits(engine).items()}
    return Step(answers, hits, engine.arena_digests() if engine.tiered else {})


def _hits(engine: Engine) -> dict[str, int]:
    names = ("cpu", "redis", "fs") if engine.tiered else ()
    return {name: engine.counts(name)["hits"] for name in names}


def assert_same_through_every_tier(passage: Passage) -> None:
    """Answers as without the connector; all whole chunks came from the tier that was to serve."""
    assert len(set(passage.without)) == len(passage.without), "answers that do not tell KV apart"
    assert_nothing_cached(passage.cold)
    assert passage.cold.tokens == passage.without
    for tier in ("cpu", "redis", "fs"):
        step = getattr(passage, tier)
        if step is not None:
            assert_served_by(step, tier, passage)
            assert step.tokens == passage.without, tier


def assert_served_by(step: Step, tier: str, passage: Passage) -> None:
    """All whole chunks of every prompt came from this tier, and nothing from another one."""
    assert [answer.cached for answer in step.answers] == passage.cacheable
    assert {name for name, hits in step.hits.items() if hits} == {tier}


def assert_nothing_cached(step: Step) -> None:
    """Every prompt was computed."""
    assert {answer.cached for answer in step.answers} == {0}
    assert not any(step.hits.values())
