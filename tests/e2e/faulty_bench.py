"""Engines whose copies fail, held against engines without a connector."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from engine import BLOCK, Answer, Engine, connector_config, cpu
from faulty import FOLDER_VARIABLE, Faults, FaultyConnector
from kvtiers.connector import stack
from kvtiers.tiers import Tier
from models import prompts

CHUNKS = 4
"""Whole blocks of every prompt of the pool."""
TOKENS = 8
_POOL = tuple(tuple(prompt) for prompt in prompts(20, CHUNKS * BLOCK + 10, seed=7))


@dataclass(frozen=True)
class Question:
    """A prompt, and what an engine without a connector says to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@functools.cache
def pool(model: Path) -> tuple[Question, ...]:
    """Prompts that share no block. Starts an engine the first time."""
    with Engine(model) as engine:
        answers = engine.ask_each(_POOL, TOKENS)
    # Otherwise equal answers would say nothing.
    assert len({answer.tokens for answer in answers}) == len(answers)
    return tuple(Question(p, a.tokens) for p, a in zip(_POOL, answers, strict=True))


def faulty_config(tiers: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """``connector_config`` with copies that fail on cue."""
    return {
        **connector_config(tiers, **extra),
        "kv_connector": FaultyConnector.__name__,
        "kv_connector_module_path": FaultyConnector.__module__,
    }


class Bench:
    """An engine with faulty copies; every answer is compared.

    Args:
        model: folder of the model.
        folder: for the orders.
        tiers: default a CPU tier of 64 MiB.
        wrap: what to put around each lower tier.
        make: builds the engine, from what ``Engine`` takes.
        config: replaces the whole ``kv_transfer_config``.
        options: of ``Engine``.

    Attributes:
        folder: as given.

    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        tiers: Sequence[Mapping[str, Any]] | None = None,
        *,
        wrap: Callable[[Tier], Tier] | None = None,
        make: Callable[..., Engine] = Engine,
        config: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self._fresh: Iterator[Question] = iter(pool(model))
        self.faults = Faults(folder)
        with pytest.MonkeyPatch.context() as patch:
            if wrap is not None:
                build = stack._build_tier
                patch.setattr(stack, "_build_tier", lambda *args: wrap(build(*args)))
            self.engine = make(
                model,
                transfer=config or faulty_config(tiers or [cpu()], **(extra or {})),
                environment={FOLDER_VARIABLE: str(folder)},
                **options,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.release()
        self.engine.close()

    def question(self) -> Question:
        """One that was not asked yet. The list of jobs starts anew."""
        self.faults.forget()
        return next(self._fresh)

    def stored(self) -> Question:
        """One whose chunks are in the CPU tier, and not on the GPU."""
        question = self.question()
        assert self.ask(question) == 0
        self.forget()
        return question

    def ask(self, question: Question) -> int:
        """Compares the answer, sees that nothing is left over; returns the cached tokens."""
        answer = self.engine.ask(question.prompt, TOKENS)
        self.check(question, answer)
        self.quiet()
        return answer.cached

    def check(self, question: Question, answer: Answer) -> None:
        """The answer is whole, and right."""
        assert answer.finished == "length"
        assert answer.tokens == question.answer

    def quiet(self) -> None:
        """No copy is under way, and no slot in use."""
        self.engine.settle()
        assert self.engine.hierarchy.idle()
        assert self.engine.hierarchy.pinned() == 0

    def forget(self) -> None:
        """Empty the GPU's prefix cache; the list of jobs starts anew."""
        self.engine.reset_gpu()
        self.faults.forget()

    def fates(self, kind: str) -> list[str]:
        """What became of the jobs of this kind."""
        return [job["fate"] for job in self.faults.jobs(kind)]

    def slots(self) -> int:
        """Arena slots that the jobs named."""
        return sum(len(job["slots"]) for job in self.faults.jobs())

    def counted(self, tier: str = "cpu") -> Counter[str]:
        """The tier's figures so far."""
        return Counter(self.engine.counts(tier))

    def step_until(self, done: Callable[[], object]) -> None:
        """Step until ``done`` says something true. Nobody may be answered meanwhile."""
        assert not self.engine.run_until(lambda: bool(done()))

    def answer_to(self, name: str) -> Answer:
        """Step until the request is answered."""
        answers: dict[str, Answer] = {}
        self.engine.run_until(lambda: name in answers, answers)
        return answers[name]
