"""What this replica knows of each chunk: where copies of it are."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from kvtiers.policies import Run

_SHARDS = 256
# Chunks that can be looked at without being felt, in about a millisecond.
_PART = 2048


class State(enum.IntEnum):
    """Whether the arena holds a chunk."""

    ABSENT = 0
    FILLING = 1
    """The GPU is storing it into a slot."""
    PROMOTING = 2
    """A lower tier is read into a slot."""
    READY = 3
    """All of it is in a slot, and may be loaded."""


class Chunk:
    """One chunk. ``slot`` is -1 unless the arena has, or is getting, a copy.

    Attributes:
        key: prefix hash and group, as the engine names it.
        position: index in its prefix, -1 if unknown.
        group: KV-cache group.
        parent: key of the chunk before it, None if first or unknown.
        where: bit i is set if lower tier i is known to hold a copy.
        tenant: who it belongs to, "" if unknown.

    """

    __slots__ = ("group", "key", "parent", "position", "slot", "state", "tenant", "where")

    def __init__(
        self, key: bytes, position: int, group: int, parent: bytes | None, tenant: str = ""
    ) -> None:
        self.key = key
        self.position = position
        self.group = group
        self.parent = parent
        self.tenant = tenant
        self.slot = -1
        self.state = State.ABSENT
        self.where = 0


class Directory:
    """Chunks by key.

    Split into shards by the first byte of the key (a hash, so evenly): one
    Python dict of a million keys stops the scheduler for 40 to 90 ms when it
    grows; 256 small ones never for one.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, Chunk]] = [{} for _ in range(_SHARDS)]

    def get(self, key: bytes) -> Chunk | None:
        """The chunk, if anything is known of it."""
        return self._shards[key[0]].get(key)

    def ensure(
        self,
        key: bytes,
        position: int = -1,
        group: int = 0,
        parent: bytes | None = None,
        tenant: str = "",
    ) -> Chunk:
        """The chunk, made if nothing is known of it yet."""
        shard = self._shards[key[0]]
        chunk = shard.get(key)
        if chunk is None:
            chunk = shard[key] = Chunk(key, position, group, parent, tenant)
            return chunk
        if chunk.position < 0 <= position:
            chunk.position, chunk.group, chunk.parent = position, group, parent
        chunk.tenant = chunk.tenant or tenant
        return chunk

    def forget(self, chunk: Chunk) -> None:
        """Drop a chunk of which no tier is known to hold a copy."""
        self._shards[chunk.key[0]].pop(chunk.key, None)

    def clear(self) -> None:
        """Forget everything."""
        for shard in self._shards:
            shard.clear()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def parts(self) -> Iterator[list[Chunk]]:
        """All chunks, a few thousand at a time; others may come and go in between."""
        part: list[Chunk] = []
        for shard in self._shards:
            part += shard.values()
            if len(part) >= _PART:
                yield part
                part = []
        yield part

    def __iter__(self) -> Iterator[Chunk]:
        for shard in self._shards:
            yield from shard.values()


def runs_of(chunks: Iterable[Chunk], chunk_bytes: int) -> list[Run]:
    """Group chunks into runs: neighbours of one prefix, head first, per group."""
    runs: list[Run] = []
    current: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: (c.group, c.position)):
        if current and not _follows(current[-1], chunk):
            runs.append(_run(current, chunk_bytes))
            current = []
        current.append(chunk)
    if current:
        runs.append(_run(current, chunk_bytes))
    return runs


def _follows(before: Chunk, after: Chunk) -> bool:
    return (
        after.group == before.group
        and after.position == before.position + 1
        and after.parent == before.key
        and after.tenant == before.tenant
    )


def _run(chunks: list[Chunk], chunk_bytes: int) -> Run:
    first = chunks[0]
    return Run(
        tuple(c.key for c in chunks),
        max(first.position, 0),
        chunk_bytes,
        first.group,
        first.parent,
        first.tenant,
    )
