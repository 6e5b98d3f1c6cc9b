"""A tier that is slower than the engine: the engine computes, until the tier is quick again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from engine import BLOCK, Engine, cpu, fs
from kvtiers.connector import stack
from kvtiers.policies import Run
from kvtiers.tiers import ChunkKey, ReadOutcome, Tier
from kvtiers.tiers.wrappers import WrapperTier
from models import prompts

CHUNKS = 12
"""So many that computing them takes much longer than reading them from a page cache."""
SLOW = 0.5
"""Seconds a chunk: much longer than computing."""
PATIENCE = 120.0
"""Seconds for what is learnt by measuring, on a machine that others may use too."""


class Slowed(WrapperTier):
    """Takes so many seconds more for each chunk that is read."""

    seconds = 0.0

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        time.sleep(self.seconds * len(keys))
        return super().read(keys, buffers)


class SlowBench:
    """An engine over a disk that is as slow as the test says, and prompts that it has stored."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.made: list[Slowed] = []
        with pytest.MonkeyPatch.context() as patch:
            build = stack._build_tier
            patch.setattr(stack, "_build_tier", lambda *args: self._wrap(build(*args)))
            tiers = [cpu(), fs(folder / "fs", deadline=60.0)]
            self.engine = Engine(model, tiers, extra={"load_or_recompute": "auto"})
        self.prompts = prompts(3, CHUNKS * BLOCK + 10, seed=11)
        self.answers = [self.engine.ask(prompt, 4) for prompt in self.prompts]
        self.engine.settle()
        assert [answer.cached for answer in self.answers] == [0] * 3
        self._asked = 0

    def _wrap(self, tier: Tier) -> Slowed:
        self.made.append(Slowed(tier))
        return self.made[-1]

    def ask(self) -> int:
        """Ask for what only the disk holds; the answer is right. Returns the cached tokens."""
        self.engine.drop_arena()
        # As if the last one had been measured long ago.
        self.engine.hierarchy._promotion._worth._measured_at.clear()
        number = self._asked = (self._asked + 1) % len(self.prompts)
        answer = self.engine.ask(self.prompts[number], 4)
        assert answer.tokens == self.answers[number].tokens
        self.engine.settle()
        return answer.cached

    def until(self, cached: int) -> None:
        """Ask until that many tokens are loaded: how fast the tier is, is learnt by using it."""
        deadline = time.monotonic() + PATIENCE
        while self.ask() != cached:
            assert time.monotonic() < deadline, "it is never learnt"

    def counted(self) -> Counter[str]:
        return Counter(self.engine.counts("fs"))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlowBench]:
    model = request.getfixturevalue(request.param)
    bench = SlowBench(model, tmp_path_factory.mktemp("slow"))
    with bench.engine:
        yield bench


def test_the_engine_is_measured_as_it_computes_and_policies_are_told(bench: SlowBench) -> None:
    prefill = bench.engine.connector._manager._prefill
    assert prefill is not None
    assert prefill.tokens_per_second()
    run = Run((b"one", b"two"), start=1)
    assert bench.engine.hierarchy.policy.recompute_seconds(run) == prefill.seconds(run)


def test_a_quick_tier_is_used(bench: SlowBench) -> None:
    bench.until(CHUNKS * BLOCK)


def test_a_tier_that_is_slower_than_computing_is_not(bench: SlowBench) -> None:
    (tier,) = bench.made
    tier.seconds = SLOW
    bench.until(0)
    while (bench.engine.usage("fs").read_seconds or 0.0) < SLOW / 2:
        bench.ask()
    before = bench.counted()
    assert bench.ask() == 0
    after = bench.counted() - before
    assert after["recomputed"] >= CHUNKS
    assert after["timeouts"] == 0
    assert after["hits"] == 0


def test_and_is_used_again_by_itself_when_it_is_quick(bench: SlowBench) -> None:
    (tier,) = bench.made
    tier.seconds = 0.0
    bench.until(CHUNKS * BLOCK)
