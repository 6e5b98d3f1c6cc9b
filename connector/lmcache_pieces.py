"""LMCache's objects as pieces of one size, and where in its prompt each object lies.

A tier stores chunks of one size, and LMCache's objects have as many sizes as there
are models, object groups and serializers on its server; which ones, nobody knows
when the server starts. So an object is cut into pieces of a fixed size, the last one
padded, and a piece is a chunk:

    object   ├── piece 0 ──┼── piece 1 ──┼── … ──┼── rest │ zeros │ length (8 bytes) ──┤
    index          n-1           n-2                            0

One tier, one ledger and one bound serve all sizes, and a large object is moved by
several threads. What it costs is the padding, half a piece for each object on average.

The last piece is the one that can be found by the object's name alone, as LMCache
asks for objects without their size, and policies evict a prefix tail first: so what
is left of an object that lost a piece is not taken for one. All other pieces are named
by the object's size too, or those of two layouts under one name would be mixed.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from kvtiers.policies import Run

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
"""A one-dimensional view of somebody's memory. numpy copies it without the interpreter
lock, which assigning to a memoryview keeps."""

_LENGTH = struct.Struct("<Q")
_INDEX = struct.Struct(">I")
_DIGEST_BYTES = 24
# Of keys whose place is remembered: about 30 MB, and a thousand prompts of 16,000 tokens.
_MOST_PLACES = 64 * 1024


class Place(NamedTuple):
    """Where an object lies in its prompt.

    Attributes:
        position: counted in objects.
        parent: id of the last piece of the object before it, None at the head.

    """

    position: int
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a known size.

    Attributes:
        key: LMCache's name for it.
        nbytes: its size.
        pieces: ids of its pieces, head first.

    """

    key: str
    nbytes: int
    pieces: tuple[bytes, ...]

    @classmethod
    def of(cls, key: str, nbytes: int, piece_bytes: int) -> StoredObject:
        """The object, cut into pieces."""
        count = -(-(nbytes + _LENGTH.size) // piece_bytes)
        sized = _digest(f"{key}\0{nbytes}")
        body = tuple(sized + _INDEX.pack(index) for index in range(count - 1, 0, -1))
        return cls(key, nbytes, (*body, tail_of(key)))


def tail_of(key: str) -> bytes:
    """Id of the last piece of an object of any size."""
    return _digest(key) + _INDEX.pack(0)


def _digest(text: str) -> bytes:
    # A salt from a client's JSON may hold half of a surrogate pair.
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:_DIGEST_BYTES]


def fill(slot: memoryview, source: Bytes, index: int, pieces: int) -> None:
    """Copy piece ``index``, counted from the head, of an object into a slot.

    Args:
        slot: writable, as long as a piece.
        source: all of the object.
        index: which piece.
        pieces: how many it has.

    """
    target = np.frombuffer(slot, np.uint8)
    part = source[index * len(target) : (index + 1) * len(target)]
    np.copyto(target[: len(part)], part)
    target[len(part) :] = 0
    if index == pieces - 1:
        _LENGTH.pack_into(slot, len(slot) - _LENGTH.size, len(source))


def length_in(tail: memoryview) -> int:
    """Size of the object that ends with this piece."""
    (nbytes,) = _LENGTH.unpack_from(tail, len(tail) - _LENGTH.size)
    return int(nbytes)


def gather(target: Bytes, slots: Sequence[memoryview]) -> None:
    """Copy an object out of the slots of its pieces, all of them, head first."""
    step = len(slots[0])
    for index, slot in enumerate(slots):
        part = target[index * step : (index + 1) * step]
        np.copyto(part, np.frombuffer(slot, np.uint8, len(part)))


class Prefixes:
    """Which object follows which, as LMCache's lookups tell.

    LMCache looks a whole prompt up before it stores or loads a part of it, and its
    names say nothing of their order. A lookup names the objects of a prompt from the
    head, one row for each KV-cache group and rank. Without this a policy could not
    tell the head of a prefix from its tail, and would evict the head first.
    """

    def __init__(self, most: int = _MOST_PLACES) -> None:
        self._most = most
        self._places: OrderedDict[bytes, Place] = OrderedDict()

    def learn(self, keys: Sequence[str]) -> None:
        """Take in the keys of one lookup, in its order."""
        row: tuple[str, ...] | None = None
        place = Place(0, None)
        for key in keys:
            if (found := _row(key)) != row:
                row, place = found, Place(0, None)
            tail = tail_of(key)
            position = self._put(tail, place).position
            place = Place(position + 1, tail)
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def _put(self, tail: bytes, place: Place) -> Place:
        """Note where an object lies, and return it: the parent that it once had stays.

        LMCache's names need not tell a prefix (it can cache parts that are reused in any
        order), and policies rely on a chunk that always follows the same one.
        """
        known = self._places.get(tail)
        if known is not None and (known.parent is not None or self._is_behind(place, tail)):
            place = known
        self._places[tail] = place
        self._places.move_to_end(tail)
        return place

    def _is_behind(self, place: Place, tail: bytes) -> bool:
        """Whether what lies there follows that object, directly or not."""
        for _ in range(place.position):
            if place.parent is None or place.parent == tail:
                break
            place = self._places.get(place.parent, Place(0, None))
        return place.parent == tail

    def run_of(self, objects: Sequence[StoredObject], piece_bytes: int) -> Run:
        """The pieces of objects that follow each other, as one run."""
        first = objects[0]
        place = self._places.get(first.pieces[-1], Place(0, None))
        return Run(
            chunks=tuple(piece for item in objects for piece in item.pieces),
            start=place.position * len(first.pieces),
            chunk_bytes=piece_bytes,
            group=group_of(first.key),
            parent=place.parent,
            tenant=tenant_of(first.key),
        )

    def follows(self, before: StoredObject, after: StoredObject) -> bool:
        """Whether two objects of one size are neighbours in a prompt."""
        place = self._places.get(after.pieces[-1])
        return (
            place is not None
            and place.parent == before.pieces[-1]
            and len(before.pieces) == len(after.pieces)
        )


def group_of(key: str) -> int:
    """The KV-cache group in LMCache's ``model@rank@group@hash[@salt]``, 0 if there is none.

    Names may be anything, and the directory keeps groups in 16 bits.
    """
    fields = key.split("@")
    try:
        group = int(fields[2], 16)
    except (IndexError, ValueError):
        return 0
    return group if 0 <= group < 1 << 16 else 0


def tenant_of(key: str) -> str:
    """The ``cache_salt`` in a key, "" if there is none."""
    fields = key.split("@")
    return fields[4] if len(fields) > 4 else ""


def _row(key: str) -> tuple[str, ...]:
    """All of a key that is equal for the objects of one prompt, KV-cache group and rank."""
    fields = key.split("@")
    return (*fields[:3], *fields[4:])
