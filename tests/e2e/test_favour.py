"""Soft pins in a real engine: a favoured prefix outlives a flood in vLLM's own cache."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path

import models
import pytest
from engine import BLOCK, Engine, cpu
from kvtiers.policies import POLICIES, PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy

KEPT, FLOOD = 4, 6
"""Whole blocks of the prompts."""


class FirstPrompt(LruPolicy):
    """Would have the GPU keep the first prompt it hears of."""

    def setup(self) -> None:
        super().setup()
        self.first: tuple[Run, ...] = ()

    def on_request(self, request: PolicyRequest) -> None:
        self.first = self.first or tuple(request.runs)

    def favour(self, n_bytes: int) -> Iterable[Run]:
        return self.first


@pytest.fixture
def first_prompt(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its name in a configuration, as if a package had brought it."""
    point = EntryPoint("first-prompt", f"{__name__}:{FirstPrompt.__name__}", "kvtiers.policies")
    monkeypatch.setitem(POLICIES._points, point.name, point)
    return point.name


def on_gpu(engine: Engine, prompt: list[int]) -> int:
    """Prompt tokens that vLLM's own cache serves, and no tier of ours."""
    before = engine.counts("gpu")["hits"]
    engine.ask(prompt, 1)
    return engine.counts("gpu")["hits"] - before


@pytest.mark.parametrize(("share", "chunk"), [(0.0, 1), (0.25, 2)])
def test_a_favoured_prefix_outlives_a_flood_and_the_cache_can_be_reset(
    llama: Path, first_prompt: str, share: float, chunk: int
) -> None:
    kept, *flood = models.prompts(12, FLOOD * BLOCK + 8)
    kept = kept[: KEPT * BLOCK + 8]
    extra = {"policy": first_prompt, "gpu_favour": share, "blocks_per_chunk": chunk}
    with Engine(llama, [cpu()], blocks=32, extra=extra) as engine:
        answer = engine.ask(kept)
        engine.ask_each(flood, 1)
        assert on_gpu(engine, kept) == (KEPT // chunk if share else 0)
        # Nothing is held: the cache is empty once it was reset.
        engine.reset_gpu()
        assert on_gpu(engine, kept) == 0
        assert engine.ask(kept).tokens == answer.tokens
