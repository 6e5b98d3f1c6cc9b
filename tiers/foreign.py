"""Chunks of other namespaces that a scan found in a tier.

They are nobody's business but that they take room: the tier's bound is for all it holds.
The policy knows each by a number, which tells it from the engine's own chunks, whose ids
are bytes. As ``ChunkKey`` objects a million of them would be a million more things for
the garbage collector to walk.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtiers.policies.sharded import ShardedDict
from kvtiers.tiers.base import ChunkKey, Namespace

# Above all of a hash's bits, so that its leading zeros count too.
_MARK = b"\1"
_NUMBER_BYTES = 4


class Foreign:
    """Ids of such chunks, and back. The hierarchy's thread only."""

    def __init__(self) -> None:
        self._namespaces: list[Namespace] = []
        self._numbers: dict[str, int] = {}
        # The tenants of those that have one; others share what stands for none.
        self._tenants: ShardedDict[int, str] = ShardedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, chunk_id: object) -> bool:
        return isinstance(chunk_id, int) and chunk_id in self._tenants

    def __iter__(self) -> Iterator[int]:
        for part in self.parts():
            yield from part

    def parts(self) -> Iterator[list[int]]:
        """All ids, some at a time; others may come and go in between."""
        return self._tenants.parts()

    def id_of(self, namespace: Namespace, chunk_hash: bytes) -> int:
        """The chunk's id, whether or not it is there."""
        number = self._numbers.get(namespace.id)
        if number is None:
            number = self._numbers[namespace.id] = len(self._namespaces)
            self._namespaces.append(namespace)
        return int.from_bytes(_MARK + number.to_bytes(_NUMBER_BYTES, "big") + chunk_hash, "big")

    def key_of(self, chunk_id: int) -> ChunkKey:
        """The name under which the tier knows the chunk."""
        named = chunk_id.to_bytes((chunk_id.bit_length() + 7) // 8, "big")[len(_MARK) :]
        namespace = self._namespaces[int.from_bytes(named[:_NUMBER_BYTES], "big")]
        tenant = self._tenants.get(chunk_id) or ""
        return ChunkKey(namespace, named[_NUMBER_BYTES:], tenant=tenant)

    def add(self, chunk_id: int, tenant: str) -> None:
        """The chunk is there."""
        self._tenants[chunk_id] = tenant

    def pop(self, chunk_id: int) -> list[ChunkKey]:
        """The chunk is there no more. Returns its key, if it was."""
        if chunk_id not in self._tenants:
            return []
        key = self.key_of(chunk_id)
        del self._tenants[chunk_id]
        return [key]
