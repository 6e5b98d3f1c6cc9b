"""Numbers for chunks: equal for equal prefixes, and saying nothing of what the keys were.

The keys of a request's chunks are the path from the root of a tree to one of its nodes. What
a request brings anew is one stretch of that path, numbered consecutively, and is kept as one
entry under its first key. A key stands for all before it, too, so what a request has in
common with a stretch is found by looking at few of them, and a chunk costs eight bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvtiers.policies.sharded import ShardedDict

# Of a key, what is kept of each chunk but a stretch's first: a hash, so these tell two
# prefixes apart that go on from the same chunk.
_PRINT = 8
_NUMBER = 8
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
        self._next = 0
        self._bytes = 0
        # Key of a stretch's first chunk -> its first number, then a print of each chunk.
        self._young: ShardedDict[bytes, bytes] = ShardedDict()
        self._old: ShardedDict[bytes, bytes] = ShardedDict()

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """The numbers of the chunks of a prompt, as runs: first number, length.

        Args:
            keys: of the chunks from the first of the prompt on; each begins with a hash.

        """
        # Between requests: all of a path is of one age, or its head is younger.
        if self._bytes > self._most_bytes:
            self._forget()
        runs: list[tuple[int, int]] = []
        at = 0
        while at < len(keys):
            stretch = self._stretch(keys[at])
            if stretch is None:
                runs.append((self._add(keys[at:]), len(keys) - at))
                break
            length = _common(stretch, keys, at)
            runs.append((int.from_bytes(stretch[:_NUMBER], "little"), length))
            at += length
        return runs

    def forget_all(self) -> None:
        """No chunk is what it was: all that come from now on have new numbers."""
        for known in (self._young, self._old):
            for _ in known.give_back():
                pass
        self._bytes = 0

    def _stretch(self, first: bytes) -> bytes | None:
        stretch = self._young.get(first)
        if stretch is None:
            stretch = self._old.pop(first, b"") or None
            if stretch is not None:
                self._keep(first, stretch)
        return stretch

    def _add(self, keys: Sequence[bytes]) -> int:
        number = self._next
        self._next += len(keys)
        prints = b"".join([key[:_PRINT] for key in keys])
        self._keep(keys[0], number.to_bytes(_NUMBER, "little") + prints)
        return number

    def _keep(self, first: bytes, stretch: bytes) -> None:
        self._young[first] = stretch
        self._bytes += len(stretch) + len(first) + _STRETCH_BYTES

    def _forget(self) -> None:
        for _ in self._old.give_back():
            pass
        self._old, self._young = self._young, self._old
        self._bytes = 0


def _common(stretch: bytes, keys: Sequence[bytes], at: int) -> int:
    """How many chunks a stretch and the keys from ``at`` on have in common; at least one."""
    most = min((len(stretch) - _NUMBER) // _PRINT, len(keys) - at)

    def differs(index: int) -> bool:
        begin = _NUMBER + index * _PRINT
        return stretch[begin : begin + _PRINT] != keys[at + index][:_PRINT]

    if not differs(most - 1):
        return most
    return bisect_left(range(most), True, lo=1, key=differs)
