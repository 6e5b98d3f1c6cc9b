"""LMCache's lookup-hash log: one lookup a line, as its multiprocess server writes them.

    {"timestamp": 1711929600.1, "request_id": "...", "model_name": "...", "chunk_size": 256,
     "seq_len": 1024, "dtypes": ["bfloat16"], "shapes": [[32, 256, 128]],
     "chunk_hashes": ["0xab...", ...]}

The hashes are those of full chunks. The log tells lookups, so nothing of what was
generated. A folder of such files is one log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvtiers.simulator.errors import TraceError, in_line
from kvtiers.simulator.json_lines import Line, begins_with_key, read_lines
from kvtiers.simulator.rows import Row, Source
from kvtiers.simulator.trace import TraceRequest

_ELEMENT_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "half"), 2),
    **dict.fromkeys(("uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
}


def recognises(head: bytes) -> bool:
    """Whether a file that begins so is one of these."""
    return begins_with_key(head, "chunk_hashes")


def open_source(path: str) -> Source:
    """Open a file for reading.

    Raises:
        TraceError: its first line does not say what a chunk is.

    """
    line = next(iter(read_lines(path)))
    tokens = int(line.number("chunk_size"))
    if not tokens:
        raise line.wrong("chunk_size", "the tokens of a chunk", tokens)
    rows, nbytes = _rows(path, tokens), _chunk_bytes(line)
    return Source(path, tokens, rows, nbytes, in_line, recorded=True, absolute=True)


def _rows(path: str, tokens: int) -> Iterator[Row]:
    for line in read_lines(path):
        if line.number("chunk_size") != tokens:
            raise TraceError(
                f"{line.place}: chunks of {line.value['chunk_size']} tokens, and of "
                f"{tokens} before it. Replay the log of one configuration at a time."
            )
        length, hashes = int(line.number("seq_len")), line.listed("chunk_hashes", (str, int))
        if len(hashes) < length // tokens:
            raise TraceError(
                f"{line.place}: {len(hashes)} hashes are fewer than full chunks of "
                f"{tokens} tokens in {length}."
            )
        model = line.name("model_name")
        request = TraceRequest(
            row=line.count,
            arrival=line.number("timestamp"),
            input_tokens=length,
            hints={"model": model},
        )
        # Equal hashes of two models are not the same chunk.
        yield Row(request, [(model, each) for each in hashes[: length // tokens]])


def _chunk_bytes(line: Line) -> int:
    """Size of a chunk by its tensors; 0 if they are not named, or not known."""
    shapes, kinds = line.value.get("shapes"), line.value.get("dtypes")
    if not isinstance(shapes, list) or not isinstance(kinds, list) or len(shapes) != len(kinds):
        return 0
    tensors = zip(shapes, kinds, strict=True)
    sizes = [_elements(shape) * _ELEMENT_BYTES.get(str(kind), 0) for shape, kind in tensors]
    return sum(sizes) if all(sizes) else 0


def _elements(shape: Any) -> int:
    numbers = shape if isinstance(shape, list) else [0]
    return math.prod(each if isinstance(each, int) else 0 for each in numbers)
