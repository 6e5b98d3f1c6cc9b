"""What a scan has found, kept until the engine's thread has taken it in.

A scan may find millions of chunks, in a thread of the scheduler's process. As objects in
a list they would stop the engine three times: while the list is sorted, whenever the
garbage collector walks it, and when it is freed. So they are kept in columns, sorted by
numpy, which lets other threads run, and become objects again a few hundred at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from kvtiers.policies.columns import Objects
from kvtiers.policies.sharded import ShardedDict
from kvtiers.tiers.base import ChunkKey, Entry, Namespace

# The engine's thread takes in one such batch a step, in about 2 ms.
_BATCH = 256


class Finding(NamedTuple):
    """A chunk that a scan found; see ``ChunkKey`` and ``Entry``."""

    namespace: Namespace
    hash: bytes
    tenant: str
    nbytes: int
    last_used: float


class Findings:
    """Entries of a scan. Filled by the scan's thread, then the engine's alone."""

    def __init__(self) -> None:
        self._hashes: Objects[bytes] = Objects()
        self._last_used = array("d")
        self._nbytes = array("Q")
        # Which namespace and tenant.
        self._owner = array("I")
        self._owners: list[tuple[Namespace, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._seen: dict[str, ShardedDict[bytes, None]] = {}
        self._order: Iterator[int] = iter(())

    def add(self, entry: Entry) -> None:
        """Take in an entry; what is no chunk is nothing to remember."""
        key = entry.key
        if key is None:
            return
        self._hashes.append(key.hash)
        self._last_used.append(entry.last_used)
        self._nbytes.append(entry.nbytes)
        self._owner.append(self._number(key))
        self._seen[key.namespace.id][key.hash] = None

    def _number(self, key: ChunkKey) -> int:
        name = (key.namespace.id, key.tenant)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._owners)
            self._owners.append((key.namespace, key.tenant))
            self._seen.setdefault(key.namespace.id, ShardedDict())
        return number

    def sort(self) -> None:
        """Nothing more is found: put it in order, last used first."""
        last_used = np.frombuffer(self._last_used)
        self._order = map(int, np.argsort(-last_used, kind="stable"))

    def batches(self) -> Iterator[list[Finding]]:
        """The chunks, in order."""
        while batch := [self._finding(i) for i in islice(self._order, _BATCH)]:
            yield batch

    def _finding(self, i: int) -> Finding:
        namespace, tenant = self._owners[self._owner[i]]
        return Finding(namespace, self._hashes[i], tenant, self._nbytes[i], self._last_used[i])

    def has(self, namespace_id: str, chunk_hash: bytes) -> bool:
        """Whether the chunk was found."""
        seen = self._seen.get(namespace_id)
        return seen is not None and chunk_hash in seen

    def give_back(self) -> Iterator[None]:
        """Let go of it, step by step. Nobody may use it any more."""
        self._last_used, self._nbytes, self._owner = array("d"), array("Q"), array("I")
        self._order = iter(())
        for seen in self._seen.values():
            yield from seen.give_back()
        yield from self._hashes.give_back()
