"""What every case shows: the engine lives, the answer is right and in time, the fault is
counted, and all is as before once it is gone."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine import BLOCK
from fault_cases import MARGIN, Case
from faulty_bench import CHUNKS, TOKENS, Bench, Question

ALL = CHUNKS * BLOCK
"""Tokens of a question that whole chunks hold."""
PATIENCE = 90.0
"""Seconds until all must be as before: a breaker's cooldown doubles while the fault lasts."""
_BUCKETS = (1, 2, 5, 10, 20, 60)


@dataclass
class Row:
    """What one case has shown; empty texts until it has.

    Attributes:
        case: which.
        means: what made the fault, if the machine had a choice.
        answer: what the request got.
        wait: how long it took.
        shown: figures that went up.
        after: what the first requests after the fault got.

    """

    case: Case
    means: str = ""
    answer: str = ""
    wait: str = ""
    shown: str = ""
    after: str = ""
    _slowest: float = 0.0

    def complete(self) -> bool:
        """Whether the test has seen all that the table tells."""
        return all((self.answer, self.wait, self.shown, self.after))

    def waited(self, seconds: float) -> None:
        """A request was answered after so long."""
        bound = (self.case.deadline or 0) + MARGIN
        assert seconds <= bound, f"answered after {seconds:.1f} s, and not within {bound:.1f} s"
        self._slowest = max(self._slowest, seconds)
        under = next(bucket for bucket in (*_BUCKETS, bound) if self._slowest <= bucket)
        self.wait = f"under {under:g} s"

    def counted(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Figures of all tiers, as "tier counter", when the fault was made and when it ended."""
        rose = {name for name in after if after[name] > before.get(name, 0)}
        missing = set(self.case.shows) - rose
        assert not missing, f"{missing} did not go up; these did: {sorted(rose)}"
        self.shown = ", ".join(self.case.shows)


class Trial:
    """One case on an engine.

    Args:
        bench: the engine, held against one without a connector.
        row: to fill in.

    """

    def __init__(self, bench: Bench, row: Row) -> None:
        self.bench = bench
        self.row = row

    def stored_below(self) -> Question:
        """A question whose chunks lie in a lower tier, and neither in the arena nor on the GPU."""
        question = self.bench.stored()
        self.bench.engine.drop_arena()
        return question

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The fault is made, met and undone inside; its figures must go up meanwhile."""
        before = self.figures()
        yield
        self.row.counted(before, self.figures())

    def figures(self) -> Counter[str]:
        """All counters of all tiers, as "tier counter"."""
        self.bench.counted()
        engine = self.bench.engine
        return Counter(
            {
                f"{tier} {name}": n
                for tier in engine._counts
                for name, n in engine._counts[tier].items()
            }
            # vLLM's own figure: ``vllm:num_preemptions``.
            | {"vllm preemptions": engine.preemptions}
        )

    def ask(self, question: Question) -> int:
        """The answer is right and in time. Returns the tokens that were not computed.

        Does not wait for what it set off, which may hang.
        """
        begun = time.monotonic()
        answer = self.bench.answer_to(self.bench.engine.submit(question.prompt, TOKENS))
        self.row.waited(time.monotonic() - begun)
        self.bench.check(question, answer)
        loaded = answer.cached // BLOCK
        self.row.answer = f"the same tokens; {loaded} of {CHUNKS} chunks loaded"
        return answer.cached

    def recovers(self, question: Question) -> None:
        """The fault is gone: without anybody's doing, lower tiers serve the question again."""
        self.bench.quiet()
        end = time.monotonic() + PATIENCE
        asked = 0
        while self.below(question) < ALL:
            asked += 1
            assert time.monotonic() < end, "the fault is gone, and the tier was not used again"
        # Once to store anew what the fault cost.
        self.row.after = "hits at once" if asked <= 1 else "hits again, by itself"

    def recovers_above(self, question: Question) -> None:
        """The same where there is no lower tier: the arena serves."""
        self.bench.forget()
        if self.bench.ask(question) < ALL:
            self.bench.forget()
            assert self.bench.ask(question) == ALL, "what was computed was not stored"
        self.row.after = "hits at once"

    def loads_again(self, question: Question, tier: str) -> None:
        """The same where the engine weighs loading against computing."""
        before = self.bench.counted(tier)["hits"]
        end = time.monotonic() + PATIENCE
        while self.bench.counted(tier)["hits"] == before:
            assert time.monotonic() < end, "the tier is quick again, and was not used again"
            self.below(question)
        self.row.after = "hits again, by itself"

    def below(self, question: Question) -> int:
        """Ask once more, with nothing of it in the arena or on the GPU."""
        self.bench.engine.drop_arena()
        return self.bench.ask(question)
