"""The requests of a soak: random, concurrent, some given up; every answer is compared."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvtiers.tools.server import ServerError
from models import prompts
from soak_fleet import Replica

TOKENS = 16
LIMIT = 60.0
"""Seconds that a request may take, with everything else that this machine does."""
_ABORTED = 0.1
_PAUSE = 0.05
_SHOWN = 5
_HEADS, _TAILS = 24, 6
_SHORT = 16

Prompt = list[int]


@dataclass(frozen=True)
class Question:
    """A prompt, and the words of the answer of an engine without a cache."""

    prompt: Prompt
    words: Sequence[str]


def universe(seed: int) -> list[Prompt]:
    """Prompts from 16 to 1,500 tokens; those with one head share from a block to ten of it."""
    choose = random.Random(seed)
    heads = prompts(_HEADS, 1300, seed)
    made = [
        head[: 128 * choose.randint(1, 10)] + tail
        for head in heads
        for tail in prompts(_TAILS, choose.randint(1, 190), choose.randrange(1 << 30))
    ]
    return made + prompts(_SHORT, _SHORT, seed + 1)


@dataclass
class Tally:
    """What became of the requests. Any thread may count.

    Attributes:
        counts: by outcome.
        examples: what went wrong, the first few.
        seconds: of every request that was answered.
        cached_tokens: that were not computed.

    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, seconds: float, cached: int) -> None:
        """Rightly, after so many seconds."""
        with self._lock:
            self.counts["right"] += 1
            self.seconds.append(seconds)
            self.cached_tokens += cached

    def count(self, outcome: str, example: str = "") -> None:
        """Something else came of it."""
        with self._lock:
            self.counts[outcome] += 1
            if example and len(self.examples) < _SHOWN:
                self.examples.append(f"{outcome}: {example}")


class Gate:
    """Lets threads do rounds, and who closes it wait until none is in one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._inside = 0
        self.ended = False

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Waits while the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self.ended)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Let no rounds begin."""
        with self._changed:
            self._open = False

    def close(self, seconds: float) -> bool:
        """Whether nobody is in a round any more, within so many seconds."""
        self.shut()
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, seconds)

    def open(self) -> None:
        """Let rounds begin again."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def end(self) -> None:
        """There are no more rounds."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Client(threading.Thread):
    """Asks one request after the other.

    Args:
        seed: of its choices.
        replicas: whom it asks.
        questions: what it asks.
        gate: when.
        tally: what became of it.

    """

    def __init__(
        self,
        seed: int,
        replicas: Sequence[Replica],
        questions: Sequence[Question],
        gate: Gate,
        tally: Tally,
    ) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._choose = random.Random(seed)
        self._replicas = replicas
        self._questions = questions
        self._gate = gate
        self._tally = tally

    def run(self) -> None:
        """Until the gate ends."""
        while not self._gate.ended:
            with self._gate.round():
                self._once()

    def _once(self) -> None:
        up = [replica for replica in self._replicas if replica.up]
        if not up or self._gate.ended:
            time.sleep(_PAUSE)
            return
        # Some prompts are asked far more often than others, as in life.
        index = int(len(self._questions) * self._choose.random() ** 2)
        question, replica = self._questions[index], self._choose.choice(up)
        life = replica.lives
        try:
            if self._choose.random() < _ABORTED:
                self._hang_up(replica, question)
            else:
                self._ask(replica, question)
        except (ServerError, OSError, http.client.HTTPException) as error:
            went_down = not replica.up or replica.lives != life
            late = isinstance(error, TimeoutError)
            outcome = "lost with its replica" if went_down else "hung" if late else "failed"
            self._tally.count(outcome, "" if went_down else f"{replica.name}: {error!r}")
            # A dead server refuses at once: asking on and on would take all of a core.
            time.sleep(_PAUSE)

    def _ask(self, replica: Replica, question: Question) -> None:
        tokens = self._choose.choice([1, 1, 2, 4, TOKENS])
        begun = time.monotonic()
        body = _body(replica, question, tokens)
        answer = replica.server.post("/v1/completions", body, timeout=LIMIT)
        seconds = time.monotonic() - begun
        choice = answer["choices"][0]
        words, finish = choice["text"].split(), choice["finish_reason"]
        # A server that is stopped gives what it has of an answer, and says so.
        due = question.words[: tokens if finish == "length" else len(words)]
        if words != list(due):
            self._tally.count("wrong", f"{len(question.prompt)} tokens to {replica.name}: {words}")
            return
        if finish != "length":
            raise ServerError(f"The answer ended with {finish!r} after {len(words)} words.")
        details = answer["usage"].get("prompt_tokens_details") or {}
        self._tally.answered(seconds, details.get("cached_tokens") or 0)

    def _hang_up(self, replica: Replica, question: Question) -> None:
        """As a client does who has waited long enough."""
        address = urlsplit(replica.server.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=LIMIT)
        body = json.dumps(_body(replica, question, TOKENS))
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        time.sleep(self._choose.random() ** 2)
        connection.close()
        self._tally.count("given up")


def _body(replica: Replica, question: Question, tokens: int) -> dict[str, object]:
    return {
        "model": replica.server.model,
        "prompt": question.prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        # The tiny models' first word is one, and would be left out.
        "skip_special_tokens": False,
    }
