"""vLLM's KV events: what a GPU's prefix cache stored, as ``kv_events_config`` publishes it.

A file holds batches: in JSON one a line, in msgpack one after the other as they came over
the wire. A batch is ``{"ts": seconds, "events": [...]}`` or the array ``[seconds, [...]]``; an
event is an object with its ``type``, or in older releases an array that begins with it.

**What can be told from them.** An event names blocks that were computed and the block
before them, so each stored stretch gives away its whole prefix, and is taken for a
request for it. A stretch that goes on where the last one of the same session ended, within
ten seconds, is more of the same request: several blocks are a prefill in parts, one
block is what decoding filled. What can't be told: requests that computed no full block,
the length of a prompt beyond its full blocks, and how long a request had waited. So a
replay understates hits of prompts that repeat as they are. Only blocks in GPU memory count:
what is stored in CPU memory or on disk is a copy. Removals are not needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtiers.simulator.errors import SimulatorError, TraceError, in_line, in_message
from kvtiers.simulator.json_lines import begins_with_key, read_values
from kvtiers.simulator.rows import Row, Source
from kvtiers.simulator.trace import TraceRequest

_GPU = (None, "GPU")
_STORED = "BlockStored"
# What hashes of blocks may be.
_NAMES = (int, str, bytes)
# Seconds since the epoch that no clock shows; tokens that no block has.
_LATEST, _MOST_TOKENS = 1e15, 1 << 20
# Of an event that is an array, behind its type.
_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
# After which a stretch is a request of its own.
_PAUSE_SECONDS = 10.0


def recognises(head: bytes) -> bool:
    """Whether a file that begins so is one of these."""
    return begins_with_key(head, "events") or _is_array(head) or _is_msgpack(head)


def open_source(path: str) -> Source:
    """Open a file for reading, and read all of it.

    Raises:
        SimulatorError: it is msgpack, and the package to read that is not installed.
        TraceError: it is damaged, or tells of no block.

    """
    with open(path, "rb") as file:
        packed = _is_msgpack(file.read(2))
    place = in_message if packed else in_line
    reading = _Reading(path, place)
    for count, batch in _from_msgpack(path) if packed else read_values(path):
        reading.batch(count, batch)
    if not reading.block_tokens:
        raise TraceError(f"{path}: no event in it tells of a block stored in GPU memory.")
    return Source(
        path, reading.block_tokens, reading.rows(), place=place, recorded=True, absolute=True
    )


def _is_array(head: bytes) -> bool:
    return head.lstrip()[:1] == b"[" and b"Block" in head


def _is_msgpack(head: bytes) -> bool:
    # An array of two or three, whose first entry is a float.
    return head[:1] in (b"\x92", b"\x93") and head[1:2] == b"\xcb"


# Batches ------------------------------------------------------------------------


def _from_msgpack(path: str) -> Iterator[tuple[int, Any]]:
    """The messages of a file, and which they are."""
    try:
        import msgpack
    except ImportError:
        raise SimulatorError(
            f"{path}: reading msgpack needs the package of that name. Try: "
            "pip install 'kvtiers[simulate]'."
        ) from None
    with open(path, "rb") as file:
        unpacker, count, end = msgpack.Unpacker(file, strict_map_key=False), 1, 0
        while True:
            try:
                batch = unpacker.unpack()
            except msgpack.OutOfData:
                if end < os.path.getsize(path):
                    raise TraceError(f"{in_message(path, count)}: it ends within it.") from None
                return
            except (ValueError, TypeError) as error:
                # TypeError: a list as the key of a map.
                told = str(error) or type(error).__name__
                raise TraceError(f"{in_message(path, count)}: it is no msgpack: {told}.") from None
            yield count, batch
            count, end = count + 1, unpacker.tell()


# Requests ------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A request as far as it is known.

    Attributes:
        batch: in which it began, from 1.
        arrival: seconds.
        last: when its last blocks were stored.
        session: as the event names it.
        blocks: its path, head first.
        prompt: how many of them are not of the output.

    """

    batch: int
    arrival: float
    last: float
    session: str
    blocks: list[Hashable] = field(default_factory=list)
    prompt: int = 0


class _Reading:
    """Puts requests together again."""

    def __init__(self, path: str, place: Callable[[str, int], str]) -> None:
        self.block_tokens = 0
        self._path, self._place = path, place
        self._count = 0
        self._parents: dict[Hashable, Hashable] = {}
        self._requests: list[_Open] = []
        # By session and last block.
        self._open: dict[tuple[str, Hashable], _Open] = {}

    def batch(self, count: int, batch: Any) -> None:
        """Take in what a batch tells, the ``count``-th of the file."""
        self._count = count
        if isinstance(batch, dict):
            batch = [batch.get("ts"), batch.get("events")]
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            raise self._damaged("a batch must have a time 'ts' and a list of 'events'")
        if not isinstance(batch[0], int | float) or not abs(batch[0]) <= _LATEST:
            raise self._damaged(f"the time of a batch must be in seconds, not {batch[0]!r:.60}")
        for event in batch[1]:
            self._event(float(batch[0]), self._named(event))

    def rows(self) -> Iterator[Row]:
        """The requests, as a source has them."""
        for request in self._requests:
            prompt = request.prompt * self.block_tokens
            about = TraceRequest(
                row=request.batch,
                arrival=request.arrival,
                input_tokens=prompt,
                output_tokens=len(request.blocks) * self.block_tokens - prompt,
                session=request.session,
            )
            yield Row(about, request.blocks)

    def _named(self, event: Any) -> dict[str, Any]:
        if isinstance(event, list) and event:
            return {"type": event[0], **dict(zip(_FIELDS, event[1:], strict=False))}
        if isinstance(event, dict):
            return event
        raise self._damaged(f"an event must be an object or an array, not {event!r:.60}")

    def _event(self, seconds: float, event: dict[str, Any]) -> None:
        if event.get("type") != _STORED or event.get("medium") not in _GPU:
            return
        if event.get("group_idx") not in (None, 0):
            return
        hashes, tokens = event.get("block_hashes"), event.get("block_size")
        if not isinstance(hashes, list) or not hashes:
            raise self._damaged(f"{_STORED} must have block_hashes, a list")
        if type(tokens) is not int or not 0 < tokens <= _MOST_TOKENS:
            raise self._damaged(f"block_size must be the tokens of a block, not {tokens!r:.60}")
        parent = event.get("parent_block_hash")
        for each in hashes if parent is None else (parent, *hashes):
            if not isinstance(each, _NAMES):
                raise self._damaged(f"a block's hash must be a number or bytes, not {each!r:.60}")
        if self.block_tokens and tokens != self.block_tokens:
            raise self._damaged(f"blocks of {tokens} tokens, and of {self.block_tokens} before it")
        self.block_tokens = tokens
        self._stored(seconds, event, hashes)

    def _stored(self, seconds: float, event: dict[str, Any], hashes: list[Hashable]) -> None:
        parent, session = event.get("parent_block_hash"), str(event.get("session_id") or "")
        for before, block in zip([parent, *hashes], hashes, strict=False):
            if self._parents.setdefault(block, before) != before:
                raise self._damaged(f"block {block!r:.40} follows another one than before")
        request = self._open.pop((session, parent), None)
        if request is None or seconds - request.last > _PAUSE_SECONDS:
            request = _Open(self._count, seconds, seconds, session, self._path_to(parent))
            request.prompt = len(request.blocks)
            self._requests.append(request)
            decoded = False
        else:
            decoded = len(hashes) == 1
        request.blocks += hashes
        request.prompt = request.prompt if decoded else len(request.blocks)
        request.last = seconds
        self._open[session, hashes[-1]] = request

    def _path_to(self, block: Hashable) -> list[Hashable]:
        path: list[Hashable] = []
        while block is not None and block in self._parents:
            if len(path) > len(self._parents):
                raise self._damaged(f"block {block!r:.40} follows itself")
            path.append(block)
            block = self._parents[block]
        return path[::-1]

    def _damaged(self, why: str) -> TraceError:
        return TraceError(f"{self._place(self._path, self._count)}: {why}.")
