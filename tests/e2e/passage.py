"""The same prompts without the connector, cold, from the CPU tier, and after a restart from disk.

A passage is run once and judged by several tests, since it takes engines to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import BLOCK, Answer, Engine, cpu, file_digests, fs


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
        fs: again, in a new engine.
        files: hash of the payload of every chunk file.
        cacheable: per prompt, how many tokens whole chunks hold.

    """

    without: list[tuple[int, ...]]
    cold: Step
    cpu: Step
    fs: Step
    files: dict[bytes, bytes]
    cacheable: list[int]


def pass_through(
    model: Path,
    prompts: Sequence[Sequence[int]],
    root: Path,
    *,
    arena: str = "64MiB",
    blocks_per_chunk: int = 1,
    max_tokens: int = 16,
    **options: Any,
) -> Passage:
    """Run the prompts one at a time, so that each is computed in the same batch every time."""
    tiers = [cpu(arena), fs(root)]
    extra = {"blocks_per_chunk": blocks_per_chunk}
    with Engine(model, **options) as engine:
        without = engine.ask_each(prompts, max_tokens)
    with Engine(model, tiers, extra=extra, **options) as engine:
        cold = _step(engine, prompts, max_tokens)
        engine.reset_gpu()
        from_cpu = _step(engine, prompts, max_tokens)
    with Engine(model, tiers, extra=extra, **options) as engine:
        from_fs = _step(engine, prompts, max_tokens)
    chunk = blocks_per_chunk * BLOCK
    return Passage(
        without=[answer.tokens for answer in without],
        cold=cold,
        cpu=from_cpu,
        fs=from_fs,
        files=file_digests(root),
        # Of a prompt that ends with a chunk too, though its last token is computed once more.
        cacheable=[len(prompt) // chunk * chunk for prompt in prompts],
    )


def _step(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Step:
    names = ("cpu", "fs")
    before = {name: engine.counts(name)["hits"] for name in names}
    answers = engine.ask_each(prompts, max_tokens)
    hits = {name: engine.counts(name)["hits"] - before[name] for name in names}
    return Step(answers, hits, engine.arena_digests())


def assert_served_by(step: Step, tier: str, passage: Passage) -> None:
    """All whole chunks of every prompt came from this tier, and nothing from another one."""
    assert [answer.cached for answer in step.answers] == passage.cacheable
    assert {name for name, hits in step.hits.items() if hits} == {tier}


def assert_nothing_cached(step: Step) -> None:
    """Every prompt was computed."""
    assert {answer.cached for answer in step.answers} == {0}
    assert not any(step.hits.values())
