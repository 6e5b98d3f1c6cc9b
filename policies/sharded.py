"""A dict that grows without a pause one would notice.

A Python dict moves all its entries when it grows: tens of milliseconds at a
million entries, on the thread that schedules the engine. Many small dicts, of
which a key's hash picks one, grow one at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_SHARDS = 256
_MASK = _SHARDS - 1
_PART = 256
# Entries that can be forgotten without a pause one would notice.
_FORGOTTEN_AT_ONCE = 2048


class ShardedDict(Generic[K, V]):
    """The part of a dict's interface that policies need, in 256 pieces."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[K, V]] = [{} for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, key: K) -> bool:
        return key in self._shards[hash(key) & _MASK]

    def __delitem__(self, key: K) -> None:
        del self._shards[hash(key) & _MASK][key]

    def __setitem__(self, key: K, value: V) -> None:
        self._shards[hash(key) & _MASK][key] = value

    def get(self, key: K) -> V | None:
        """The value of ``key``, None if there is none."""
        return self._shards[hash(key) & _MASK].get(key)

    def get_all(self, keys: Iterable[K]) -> list[V | None]:
        """The value of each of ``keys``, None where there is none."""
        shards = self._shards
        return [shards[hash(key) & _MASK].get(key) for key in keys]

    def pop_all(self, keys: Iterable[K], default: V) -> list[V]:
        """Take ``keys`` out. Returns their values, ``default`` where there is none."""
        shards = self._shards
        return [shards[hash(key) & _MASK].pop(key, default) for key in keys]

    def remove(self, keys: Iterable[K]) -> None:
        """Take ``keys`` out, all of which are there."""
        shards = self._shards
        for key in keys:
            del shards[hash(key) & _MASK][key]

    def assign(self, keys: Iterable[K], value: V) -> None:
        """Give all ``keys`` the same value."""
        shards = self._shards
        for key in keys:
            shards[hash(key) & _MASK][key] = value

    def assign_each(self, keys: Iterable[K], values: Iterable[V]) -> None:
        """Give each of ``keys`` the value at its place in ``values``."""
        shards = self._shards
        for key, value in zip(keys, values, strict=True):
            shards[hash(key) & _MASK][key] = value

    def update(self, entries: Mapping[K, V]) -> None:
        """Set all of these."""
        for key, value in entries.items():
            self[key] = value

    def pop(self, key: K, default: V) -> V:
        """Take ``key`` out. Returns its value, ``default`` if there is none."""
        return self._shards[hash(key) & _MASK].pop(key, default)

    def pieces(self) -> Iterator[Mapping[K, V]]:
        """What it is made of, to be read only."""
        return iter(self._shards)

    def parts(self) -> Iterator[list[K]]:
        """All keys, some at a time; others may come and go in between."""
        keys: list[K] = []
        for shard in self._shards:
            keys += shard
            while len(keys) >= _PART:
                yield keys[:_PART]
                keys = keys[_PART:]
        if keys:
            yield keys

    def give_back(self) -> Iterator[None]:
        """Forget everything, step by step: a million entries at once would be a pause too.

        Few entries take few steps, or who forgets often would fall behind.
        """
        forgotten = 0
        for number in range(_SHARDS):
            forgotten += len(self._shards[number])
            self._shards[number] = {}
            if forgotten >= _FORGOTTEN_AT_ONCE:
                forgotten = 0
                yield
