"""Mooncake's JSONL: one request a line, with the ids of its blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

``timestamp`` in milliseconds; blocks of 512 tokens, of which the last may be partial (Qin et
al., "Mooncake", FAST 2025, and everyone who took the format over). Alibaba's Qwen-Bailian
traces have the same keys with seconds, blocks of 16 tokens, and ``chat_id``,
``parent_chat_id`` (-1 for none) and ``turn`` besides, from which sessions are made.

A file does not say how many tokens its blocks have. It is the size of which every prompt
has as many ids as blocks, the partial one counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from kvtiers.simulator.errors import TraceError, in_line
from kvtiers.simulator.json_lines import Line, begins_with_key, read_lines
from kvtiers.simulator.rows import Row, Source
from kvtiers.simulator.trace import TraceRequest

# Mooncake's first; then others that engines and routers use.
_SIZES = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)
# Lines after which the size of a block is taken for known.
_SAMPLE = 200
_NO_PARENT = -1


def recognises(head: bytes) -> bool:
    """Whether a file that begins so is one of these."""
    return begins_with_key(head, "hash_ids")


def open_source(path: str) -> Source:
    """Open a file for reading.

    Raises:
        TraceError: its blocks have no size that fits all prompts.

    """
    tokens = _block_tokens(path, list(islice(read_lines(path), _SAMPLE)))
    return Source(path, tokens, _rows(path, tokens), place=in_line)


def _block_tokens(path: str, lines: Sequence[Line]) -> int:
    lengths = [(int(line.number("input_length")), len(_ids(line))) for line in lines]
    for tokens in _SIZES:
        if all(-(-length // tokens) == ids for length, ids in lengths):
            return tokens
    raise TraceError(
        f"{path}: the number of hash_ids fits input_length for no size of blocks among "
        f"{', '.join(map(str, sorted(_SIZES)))} tokens: each prompt must have one id for each "
        "block, a partial one at its end included."
    )


def _rows(path: str, tokens: int) -> Iterator[Row]:
    sessions = _Sessions()
    for line in read_lines(path):
        length, ids = int(line.number("input_length")), _ids(line)
        if len(ids) < length // tokens:
            raise TraceError(
                f"{line.place}: {len(ids)} blocks of {tokens} tokens are fewer than its "
                f"prompt of {length} tokens has."
            )
        chats = "chat_id" in line.value
        request = TraceRequest(
            row=line.count,
            arrival=line.number("timestamp") / (1 if chats else 1000),
            input_tokens=length,
            output_tokens=int(line.number("output_length", 0)),
            session=sessions.session(line) if chats else "",
            turn=_turn(line.value) if chats else None,
            hints={"type": line.value["type"]} if "type" in line.value else {},
        )
        yield Row(request, ids[: length // tokens])


def _ids(line: Line) -> list[Any]:
    return line.listed("hash_ids", (int, str))


def _turn(value: dict[str, Any]) -> int | None:
    turn = value.get("turn")
    return turn - 1 if isinstance(turn, int) else None


class _Sessions:
    """Which conversation a request belongs to, by the request before it."""

    def __init__(self) -> None:
        self._roots: dict[str | int, str | int] = {}

    def session(self, line: Line) -> str:
        chat, parent = line.name("chat_id"), line.name("parent_chat_id")
        root = chat if parent in (_NO_PARENT, "") else self._roots.get(parent, parent)
        self._roots[chat] = root
        return str(root)
