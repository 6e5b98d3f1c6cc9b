"""Numbers for chunks: equal for equal prefixes, and saying nothing of what the keys were.

The keys of a request's chunks are the path from the root of a tree to one of its nodes. What
a request brings anew is one stretch of that path, numbered consecutively, and is kept as one
entry under its first key. So a request is looked up stretch by stretch and compared as bytes,
and a chunk costs eight bytes, whatever its key is.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvtiers.policies.sharded import ShardedDict

Prints = npt.NDArray[np.uint64]

_WORD = 8
# A longest key, in words; a chunk's key has at most 64 bytes, an adapter's digest among them.
_MOST_WORDS = 16
# What a stretch takes beside its chunks: the objects of a dict entry and its share of the table.
_STRETCH_BYTES = 220


class ChunkNumbers:
    """Gives chunks their numbers. One thread at a time.

    Forgets what was used longest ago, in halves: a chunk that comes back after that has
    a new number. To use a chunk is to use all before it, so no chunk is forgotten before those that
    follow it are, and an id always follows the same id.

    Args:
        most_bytes: of memory for all that is known.

    """

    def __init__(self, most_bytes: int = 128 << 20) -> None:
        self._most_bytes = most_bytes // 2
        # The salt: without these numbers nobody can tell what a chunk's print would be.
        self._factors = np.array([secrets.randbits(64) | 1 for _ in range(_MOST_WORDS)], np.uint64)
        self._size_factor = secrets.randbits(57)
        self._next = 0
        self._bytes = 0
        # Print of a stretch's first chunk -> its first number, then the prints of all.
        self._young: ShardedDict[int, bytes] = ShardedDict()
        self._old: ShardedDict[int, bytes] = ShardedDict()

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """The numbers of the chunks of a prompt, as runs: first number, length.

        Args:
            keys: of the chunks from the first of the prompt on, all equally long.

        """
        if self._bytes > self._most_bytes:
            self._forget()
        prints = self._prints(keys) if keys else b""
        runs: list[tuple[int, int]] = []
        at, n = 0, len(keys)
        while at < n:
            rest = prints[at * _WORD :]
            stretch = self._stretch(int.from_bytes(rest[:_WORD], "little"))
            if stretch is None:
                runs.append((self._add(rest), n - at))
                break
            length = _common(stretch, rest)
            runs.append((int.from_bytes(stretch[:_WORD], "little"), length))
            at += length
        return runs

    def forget_all(self) -> None:
        """No chunk is what it was: all that come from now on have new numbers."""
        for known in (self._young, self._old):
            for _ in known.give_back():
                pass
        self._bytes = 0

    def _prints(self, keys: Sequence[bytes]) -> bytes:
        """Salted hashes of the keys, 64 bits each: a sum of its words times secret factors."""
        size = len(keys[0])
        words = -(-size // _WORD)
        padded = np.zeros((len(keys), words * _WORD), np.uint8)
        padded[:, :size] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), size)
        factors = self._factors[:words]
        prints: Prints = padded.view("<u8") @ factors + np.uint64(self._size_factor * size)
        return prints.astype("<u8").tobytes()

    def _stretch(self, first: int) -> bytes | None:
        stretch = self._young.get(first)
        if stretch is None:
            stretch = self._old.pop(first, b"") or None
            if stretch is not None:
                self._keep(first, stretch)
        return stretch

    def _add(self, prints: bytes) -> int:
        number = self._next
        self._next += len(prints) // _WORD
        stretch = number.to_bytes(_WORD, "little") + prints
        self._keep(int.from_bytes(prints[:_WORD], "little"), stretch)
        return number

    def _keep(self, first: int, stretch: bytes) -> None:
        self._young[first] = stretch
        self._bytes += len(stretch) + _STRETCH_BYTES

    def _forget(self) -> None:
        for _ in self._old.give_back():
            pass
        self._old, self._young = self._young, self._old
        self._bytes = 0


def _common(stretch: bytes, prints: bytes) -> int:
    """How many chunks of a stretch the prints begin with; at least one, by which it was found."""
    known = stretch[_WORD : _WORD + len(prints)]
    if prints.startswith(known):
        return len(known) // _WORD
    n = len(known) // _WORD
    differ = np.frombuffer(known, "<u8") != np.frombuffer(prints, "<u8", n)
    return int(np.argmax(differ))
