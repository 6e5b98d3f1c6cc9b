"""The requests of a part as columns, until they become a Parquet file.

Columns are arrays from the start: turning thousands of Python objects into a table at once
would hold the interpreter for milliseconds, and the engine with it.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvtiers.policies import PolicyRequest
from kvtiers.tiers.recording_format import HIT
from kvtiers.tiers.recording_ids import ChunkNumbers

# Columns and their types, as ``array`` calls them, in the order of their values in a row.
_NUMBERS: Mapping[str, Any] = {
    "req": "q",
    "t_s": "d",
    "queued_s": "f",
    "busy_s": "f",
    "input_len": "i",
    "output_len": "i",
}
_NO_TURN = -1
_MOST_TURNS = 1 << 31
_PSEUDONYM_BYTES = 8


@dataclass(slots=True)
class Seen:
    """One request, as the engine's thread has seen it.

    Attributes:
        number: order of admission.
        at: seconds of its admission on the recorder's clock.
        prompt_chunks: full chunks of its prompt.
        hits: tokens that each tier served.
        ended: seconds of its end.
        facts: what is known of it, at its end.
        keys: of all its full chunks, at its end.

    """

    number: int
    at: float
    prompt_chunks: int
    hits: Mapping[str, int]
    ended: float = 0.0
    facts: PolicyRequest | None = None
    keys: Sequence[bytes] = ()


class Runs:
    """A column of lists of runs."""

    def __init__(self) -> None:
        self.starts, self.lengths = array("q"), array("i")
        self.offsets = array("i", [0])

    def append(self, runs: Sequence[tuple[int, int]]) -> None:
        """The runs of one more row."""
        for start, length in runs:
            self.starts.append(start)
            self.lengths.append(length)
        self.offsets.append(len(self.starts))


class Rows:
    """The rows of one part.

    Args:
        tiers: names, from nearest to the GPU to farthest.
        start: when the recording began, on the clock of ``Seen``.

    """

    def __init__(self, tiers: Sequence[str], start: float) -> None:
        self._start = start
        self._numbers: dict[str, array[Any]] = {
            name: array(code) for name, code in _NUMBERS.items()
        }
        self._hits = {tier: array("i") for tier in tiers}
        self._turns = array("i")
        self._texts: dict[str, list[str]] = {
            name: [] for name in ("session", "agent", "tenant", "finish")
        }
        self._runs = {"": Runs(), "output_": Runs()}

    def __len__(self) -> int:
        return len(self._turns)

    def append(self, seen: Seen, numbers: ChunkNumbers, pseudonym: Callable[[str], str]) -> None:
        """One more request, which has ended."""
        facts = seen.facts
        assert facts is not None
        values: tuple[float, ...] = (
            *(seen.number, seen.at - self._start, max(0.0, seen.at - facts.arrival)),
            *(seen.ended - seen.at, facts.prompt_tokens, facts.output_tokens),
        )
        for column, value in zip(self._numbers.values(), values, strict=True):
            column.append(value)
        for tier, column in self._hits.items():
            column.append(seen.hits.get(tier, 0))
        self._turns.append(_turn(facts.hints))
        self._texts["session"].append(pseudonym(facts.session))
        self._texts["agent"].append(pseudonym(str(facts.hints.get("agent") or "")))
        self._texts["tenant"].append(pseudonym(facts.tenant))
        self._texts["finish"].append(facts.finish_reason)
        prompt, output = split(numbers.runs(seen.keys), seen.prompt_chunks)
        self._runs[""].append(prompt)
        self._runs["output_"].append(output)

    def table(self, metadata: Mapping[str, str]) -> Any:
        """A ``pyarrow.Table`` of them, which shares memory with this: append no more meanwhile."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            name: pa.array(np.frombuffer(column, column.typecode))
            for name, column in self._numbers.items()
        }
        for prefix, runs in self._runs.items():
            offsets = pa.array(np.frombuffer(runs.offsets, "i4"))
            for name, items in (("run_start", runs.starts), ("run_len", runs.lengths)):
                values = pa.array(np.frombuffer(items, items.typecode))
                columns[prefix + name] = pa.ListArray.from_arrays(offsets, values)
        for tier, column in self._hits.items():
            columns[HIT + tier] = pa.array(np.frombuffer(column, "i4"))
        turns = np.frombuffer(self._turns, "i4")
        columns["turn"] = pa.array(turns, mask=turns == _NO_TURN)
        columns |= {name: pa.array(texts, pa.string()) for name, texts in self._texts.items()}
        return pa.table(columns, metadata=dict(metadata))


class Pseudonyms:
    """The same text for the same one, which can't be found out again, nor told by trying."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def __call__(self, text: str) -> str:
        """Sixteen hexadecimal digits; "" for ""."""
        if not text:
            return ""
        # What a client sent may hold half of a surrogate pair.
        data = text.encode(errors="surrogatepass")
        return hashlib.blake2b(data, digest_size=_PSEUDONYM_BYTES, key=self._salt).hexdigest()


def split(
    runs: Sequence[tuple[int, int]], n: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The runs of the first ``n`` chunks, and those of the rest."""
    head: list[tuple[int, int]] = []
    tail: list[tuple[int, int]] = []
    for start, length in runs:
        first = min(length, n)
        if first:
            head.append((start, first))
        if length > first:
            tail.append((start + first, length - first))
        n -= first
    return head, tail


def _turn(hints: Mapping[str, Any]) -> int:
    turn = hints.get("turn")
    return turn if type(turn) is int and 0 <= turn < _MOST_TURNS else _NO_TURN
