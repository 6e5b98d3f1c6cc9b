"""Traces: which chunks each request's prompt consists of, and when it came.

Whatever a file calls its chunks, in a trace they are numbers from 0 on, arranged so that
neighbours in a prompt are neighbours in number wherever that can be. So a prompt is a few
``range`` objects, however long it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        row: where it stands in its file: the line, from 1, or the row of a table, from 0.
        arrival: seconds from the start of the trace.
        input_tokens, output_tokens: lengths.
        stretches: the prompt's full chunks that a cache may serve, head first.
        output_stretches: full chunks that the output added, where the trace has them.
            They follow the prompt's and are stored when the request ends.
        session: conversation or agent, "" if unknown.
        turn: number of the request within its session, from 0; None if unknown.
        tenant: who it belongs to, "" if unknown.
        finish_reason: why it ended, "" if unknown.
        hints: further columns that were known when it arrived.

    """

    row: int
    arrival: float
    input_tokens: int
    output_tokens: int = 0
    stretches: tuple[range, ...] = ()
    output_stretches: tuple[range, ...] = ()
    session: str = ""
    turn: int | None = None
    tenant: str = ""
    finish_reason: str = ""
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_chunks(self) -> int:
        """How many full chunks the prompt has."""
        return sum(map(len, self.stretches))

    def chunks(self) -> list[int]:
        """The prompt's full chunks, head first."""
        return list(chain.from_iterable(self.stretches))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: what tables call it.
        chunk_tokens: tokens of a chunk.
        requests: in order of arrival.
        footprint: distinct chunks; they are numbered from 0 to ``footprint - 1``.
        chunk_bytes: bytes of a chunk, 0 if the trace does not say.

    """

    name: str
    chunk_tokens: int
    requests: Sequence[TraceRequest]
    footprint: int
    chunk_bytes: int = 0

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def references(self) -> int:
        """Full chunks of all prompts, repetitions counted."""
        return sum(request.prompt_chunks for request in self.requests)
