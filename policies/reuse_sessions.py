"""Which conversation or agent a request belongs to, and what is known of it.

A client may say so (vLLM's ``session_id``). Where it does not, a request belongs to the
session whose last prompt it continues, or of whose last prompt it has more than half.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from math import log2

from kvtiers.policies.base import ChunkId
from kvtiers.policies.reuse_classes import Turn

# What the last gap counts for in the average of them.
_LAST_GAP = 0.3


@dataclass(slots=True, eq=False)
class Session:
    """One conversation or agent.

    Attributes:
        number: unique.
        key: what it is looked up by.
        turn: its last turn; None before the first.
        began: when that turn began.
        tails: last chunk of that turn's prompt, for each KV-cache group.
        mark: what is on the chunks that only this session uses.
        tokens: of the last prompt and its output.
        agent: it works for another session.

    """

    number: int
    key: Hashable
    turn: Turn | None = None
    began: float = 0.0
    tails: tuple[ChunkId, ...] = ()
    mark: int = 0
    tokens: int = 0
    agent: bool = False


class Sessions:
    """The last ``limit`` sessions that asked for something; the limit may be raised later."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_key: OrderedDict[Hashable, Session] = OrderedDict()
        self._by_number: dict[int, Session] = {}
        self._by_tail: dict[ChunkId, Session] = {}
        self._count = 0

    def named(self, key: Hashable) -> Session | None:
        """The session of that name."""
        return self._by_key.get(key)

    def numbered(self, number: int) -> Session | None:
        """The session of that number, None if it is too long ago."""
        return self._by_number.get(number)

    def ending_with(self, chunk: ChunkId) -> Session | None:
        """The session whose last prompt ended with ``chunk``."""
        return self._by_tail.get(chunk)

    def new(self, key: Hashable | None) -> Session:
        """A session, looked up by ``key``, or by its number if there is none."""
        self._count += 1
        session = Session(self._count, self._count if key is None else key)
        self._by_key[session.key] = session
        self._by_number[session.number] = session
        return session

    def oldest(self) -> Session | None:
        """The session to forget, None while there are few."""
        return next(iter(self._by_key.values())) if len(self._by_key) > self.limit else None

    def forget(self, session: Session) -> None:
        """Nothing more is known of it."""
        del self._by_key[session.key], self._by_number[session.number]
        self._leave(session)

    def take_turn(
        self, session: Session, now: float, tails: tuple[ChunkId, ...], new: int, chunks: int,
        tokens: int,
    ) -> Turn:  # fmt: skip
        """The session asks again.

        Args:
            session: which.
            now: when.
            tails: last chunks of its prompt.
            new: chunks of the prompt that it did not ask for before.
            chunks: of the prompt.
            tokens: of the prompt.

        """
        self._by_key.move_to_end(session.key)
        last = session.turn
        if last is None:
            turn = Turn(0, -1.0, 0.0, new, chunks, None, agent=session.agent)
        else:
            gap = max(0.0, now - session.began)
            step = log2(gap + 1)
            pace = step if last.number == 0 else last.pace + _LAST_GAP * (step - last.pace)
            message = tokens - session.tokens
            turn = Turn(last.number + 1, gap, pace, new, chunks, message, agent=session.agent)
        self._leave(session)
        session.turn, session.began, session.tails, session.tokens = turn, now, tails, tokens
        for tail in tails:
            self._by_tail[tail] = session
        return turn

    def end_turn(self, session: Session, now: float, turn: Turn) -> None:
        """The session's last request ended; ``turn`` says what came out."""
        session.turn, session.began = turn, now
        session.tokens += turn.output_tokens

    def _leave(self, session: Session) -> None:
        for tail in session.tails:
            if self._by_tail.get(tail) is session:
                del self._by_tail[tail]
