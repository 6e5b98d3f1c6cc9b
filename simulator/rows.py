"""What a reader of one format hands over, and what becomes a trace of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from kvtiers.simulator.errors import TraceError, in_row
from kvtiers.simulator.numbering import Ids, Interner, Numbering
from kvtiers.simulator.trace import Trace, TraceRequest

_SMALL_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One request as its file has it.

    Attributes:
        request: all but its stretches.
        ids: full blocks of the prompt and then of the output as far as the file has
            those: an array of small integers, or a list of whatever else names them.

    """

    request: TraceRequest
    ids: Ids | Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Source:
    """One file, open for reading.

    Attributes:
        path: of the file.
        block_tokens: tokens that one id stands for.
        rows: in order of arrival. Iterating raises TraceError where a row is damaged.
        block_bytes: bytes of a block, 0 if unknown.
        place: says where in the file a request stands, by the path and the request's ``row``.
        recorded: whether the blocks are the chunks of the cache that was recorded.
        absolute: whether times count from the epoch; a trace's count from its first.
        computes_last: whether the engine computes the last token of every prompt, whatever is
            cached. Then a chunk that ends where the prompt does is never hit by it: it is
            stored like one of the output.
        recording: which recording it is of, as each has ids of its own; empty if of none.

    """

    path: str
    block_tokens: int
    rows: Iterable[Row]
    block_bytes: int = 0
    place: Callable[[str, int], str] = in_row
    recorded: bool = False
    absolute: bool = False
    computes_last: bool = False
    recording: str = ""


def make_trace(name: str, sources: Sequence[Source], chunk_tokens: int | None) -> Trace:
    """One trace of files that follow one another, of which ids mean the same.

    A file whose times begin before the one before it ended is moved behind that.

    Args:
        name: what tables call it.
        sources: in order.
        chunk_tokens: a multiple of the files' blocks. None: as recorded, and for
            other files the smallest multiple of at least 256 tokens.

    Raises:
        TraceError: a row is damaged, files don't fit together, or chunks of that size
            can't be made of their blocks.

    """
    first = sources[0]
    for other in sources[1:]:
        if other.block_tokens != first.block_tokens:
            raise TraceError(
                f"{other.path} has blocks of {other.block_tokens} tokens and {first.path} has "
                f"blocks of {first.block_tokens}: they can't be one stream."
            )
        if other.recording != first.recording:
            raise TraceError(
                f"{other.path} and {first.path} are not of one recording, and each numbers its "
                "chunks by itself: as one stream, chunks of equal number would be taken for equal. "
                "Replay them without --concat, one after the other."
            )
    stream = _Stream(_chunk_tokens(first, chunk_tokens))
    for source in sources:
        stream.add(source)
    if not stream.requests:
        raise TraceError(f"{first.path} has no requests.")
    nbytes = first.block_bytes * stream.tokens // first.block_tokens
    return Trace(name, stream.tokens, stream.placed(), stream.numbering.count, nbytes)


def _chunk_tokens(source: Source, wanted: int | None) -> int:
    block = source.block_tokens
    if wanted is None:
        return block if source.recorded else -(-_SMALL_BLOCK // block) * block
    if wanted < block or wanted % block:
        raise TraceError(
            f"chunks of {wanted} tokens can't be made of {source.path}: its blocks have {block} "
            f"tokens, and a chunk is a multiple of them, such as {block} or {2 * block}."
        )
    return wanted


class _Stream:
    """Requests of several files, one after the other, with their chunks numbered.

    Attributes:
        tokens: of a chunk.
        numbering: of all chunks.
        requests: so far, without their chunks.

    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.numbering = Numbering()
        self.requests: list[TraceRequest] = []
        # Each request's chunks, those of the output too.
        self._paths: list[tuple[range, ...]] = []
        # How many of them it asks for.
        self._asked: list[int] = []
        self._interner = Interner()
        # When the trace began, where times count from the epoch.
        self._origin = 0.0

    def add(self, source: Source) -> None:
        """Put a file's requests behind what is there."""
        step = self.tokens // source.block_tokens
        shift: float | None = None
        for row in source.rows:
            if source.absolute and not self.requests:
                self._origin = row.request.arrival
            if shift is None:
                shift = max(0.0, self._last - row.request.arrival + self._origin) - self._origin
            request = self._timed(source, row.request, shift)
            ids = row.ids if isinstance(row.ids, np.ndarray) else self._interner.intern(row.ids)
            try:
                path = self.numbering.number(ids[step - 1 :: step])
            except ValueError as error:
                raise TraceError(f"{source.place(source.path, request.row)}: {error}") from None
            self.requests.append(request)
            self._paths.append(path)
            self._asked.append((request.input_tokens - source.computes_last) // self.tokens)

    def placed(self) -> list[TraceRequest]:
        """All requests with their chunks."""
        paths = self.numbering.rearranged(self._paths)
        return [
            _with_chunks(request, path, asked)
            for request, path, asked in zip(self.requests, paths, self._asked, strict=True)
        ]

    @property
    def _last(self) -> float:
        return self.requests[-1].arrival if self.requests else 0.0

    def _timed(self, source: Source, request: TraceRequest, shift: float) -> TraceRequest:
        arrival = request.arrival + shift
        if arrival < self._last:
            # A recording has them in the order of admission.
            if not source.recorded:
                raise TraceError(
                    f"{source.place(source.path, request.row)}: it arrives at {request.arrival:g} "
                    "s, before the request before it. Requests must stand in order of arrival."
                )
            arrival = self._last
        return request if arrival == request.arrival else replace(request, arrival=arrival)


def _with_chunks(request: TraceRequest, path: tuple[range, ...], asked: int) -> TraceRequest:
    prompt, output = _split(path, asked)
    return replace(request, stretches=prompt, output_stretches=output)


def _split(stretches: tuple[range, ...], n: int) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """The first ``n`` chunks, and the rest."""
    head, tail = list[range](), list[range]()
    for stretch in stretches:
        if stretch[:n]:
            head.append(stretch[:n])
        if stretch[n:]:
            tail.append(stretch[n:])
        n = max(0, n - len(stretch))
    return tuple(head), tuple(tail)
