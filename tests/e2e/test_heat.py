"""What a real engine's probe measures is the attention of the model, computed by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import BLOCK, Engine, cpu, fs
from kvtiers.connector.heat import NO_COST, HeatCost
from kvtiers.policies import Run
from kvtiers.policies.attention_heat import AttentionHeatPolicy
from kvtiers.tools.heat_model import HeatModel
from models import prompts

LAYERS, WINDOW = 2, 8
FIRST, SECOND, THIRD = prompts(3, 900, seed=5)
# In a model as small as this, measuring is a large part of everything.
HEAT = {"layers": LAYERS, "window": WINDOW, "budget": 1.0}


def by_hand(model: Path, prompt: list[int], window: int) -> np.ndarray:
    """``[layers, kv_heads, chunks]`` of the whole chunks after the first."""
    found: dict[int, np.ndarray] = {}

    def observe(layer: int, query: Any, keys: Any, scale: float) -> None:
        heads, _, tokens = keys.shape
        group = query.shape[1] // heads
        shared = keys.repeat_interleave(group, dim=0)
        logits = torch.einsum("qhd,hdt->hqt", query, shared) * scale
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        shares = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)[:, -window:]
        whole = tokens // BLOCK
        chunks = shares[..., : whole * BLOCK].reshape(heads, group, window, whole, BLOCK).sum(-1)
        # All of the window sees every whole chunk: the prompts end in the middle of one.
        found[layer] = chunks.mean(dim=(1, 2))[:, 1:].numpy()

    HeatModel(model).run(prompt, observe)
    return np.stack([found[layer] for layer in sorted(found)])


class Heard:
    """An engine, and what its connector tells the hierarchy of heat."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.told: list[tuple[Run, list[float]]] = []
        self.cost = NO_COST
        manager = engine.connector._manager
        tell = manager.measured

        def measured(run: Run, heat: Sequence[float]) -> None:
            self.told.append((run, list(heat)))
            tell(run, heat)

        plan = engine.connector._heat_watch._plan
        pay = plan.spent

        def spent(cost: HeatCost, *, measured: bool = False) -> None:
            self.cost += cost
            pay(cost, measured=measured)

        manager.measured, plan.spent = measured, spent

    def book(self, run: Run) -> np.ndarray:
        """``[layers, kv_heads, chunks]``."""
        return self.engine.connector._heat_watch.book.heat_of(run)


@contextmanager
def heard(
    model: Path, heat: Any = HEAT, tiers: Sequence[dict[str, Any]] = (), **options: Any
) -> Iterator[Heard]:
    extra = {"policy": "attention-heat", "attention_heat": heat}
    with Engine(model, [cpu(), *tiers], extra=extra, **options) as engine:
        yield Heard(engine)


def test_the_probe_measures_the_models_attention(llama: Path) -> None:
    with heard(llama, max_num_batched_tokens=400) as engine:
        # What the first takes is known before there is another.
        engine.engine.ask(THIRD, max_tokens=1)
        assert len(engine.told) == 1
        engine.told.clear()
        # Two at once, in several steps each, and the ends of both in one batch.
        engine.engine.ask_all([FIRST, SECOND], max_tokens=4)
        assert len(engine.told) == 2
        found = {run.chunks: engine.book(run) for run, _ in engine.told}
        for run, heat in engine.told:
            assert (run.start, len(run)) == (1, 900 // BLOCK - 1)
            np.testing.assert_allclose(heat, found[run.chunks].mean(axis=(0, 1)), rtol=1e-5)
        expected = [by_hand(llama, prompt, WINDOW) for prompt in (FIRST, SECOND)]
        for ours, right in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-6)
        assert np.abs(expected[0] - expected[1]).max() > 0.01, "the prompts must differ"
        assert 0 < engine.cost.probe_s < engine.cost.prefill_s
        policy = engine.engine.hierarchy.policy
        assert isinstance(policy, AttentionHeatPolicy)
        assert policy._usual, "it heard of none"
        # With a hit in the GPU's cache few queries are left to measure.
        engine.engine.ask(FIRST[: 5 * BLOCK + 3], max_tokens=1)
        run, _ = engine.told[-1]
        assert len(run) == 4


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="vLLM for CPU wants a core for each rank"
)
def test_the_heads_of_all_ranks_come_together(llama: Path) -> None:
    with heard(llama, tensor_parallel=2) as engine:
        engine.engine.ask(THIRD, max_tokens=2)
        ((run, _),) = engine.told
        right = by_hand(llama, THIRD, WINDOW)
        np.testing.assert_allclose(engine.book(run), right, rtol=1e-3, atol=1e-6)


def test_an_engine_hears_through_a_shared_tier_what_another_measured(
    llama: Path, tmp_path: Path
) -> None:
    heat, tiers = HEAT | {"share": True}, [fs(tmp_path / "root")]
    with heard(llama, heat, tiers) as first:
        first.engine.ask(FIRST, max_tokens=1)
        ((theirs, _),) = first.told
        measured = first.book(theirs)
    with heard(llama, heat, tiers) as second:
        # A thread reads what there is; it is taken in with what the engine measures itself.
        share, patience = second.engine.connector._heat_watch._share, time.monotonic() + 60
        while not share._others and time.monotonic() < patience:
            time.sleep(0.01)
        second.engine.ask(SECOND, max_tokens=1)
        assert [run.chunks for run, _ in second.told][1:] == [theirs.chunks]
        # On the way its figures were half floats.
        np.testing.assert_allclose(second.book(theirs), measured, rtol=1e-3, atol=1e-6)
