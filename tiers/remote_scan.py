"""Lists what lies in a remote filesystem tier, and brings its accounting up to date.

Names and sizes only, as ``fs_scan`` does for folders.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvtiers.policies.sharded import ShardedDict
from kvtiers.tiers.base import ChunkKey, Entry
from kvtiers.tiers.fs_layout import FACTS, TEMPORARY, hash_of, is_chunk_folder
from kvtiers.tiers.fs_namespace import NamespaceBook
from kvtiers.tiers.named_ledger import Ledger
from kvtiers.tiers.remote_layout import RemoteLayout, begun_at, name_of
from kvtiers.tiers.remote_store import Found, Store

# No write takes as long; what is older was left by a writer that died. The time is in
# its name, as the writer's clock said: stores do not all tell one.
_ORPHAN_SECONDS = 3600


class Scanner:
    """Walks the root of one tier; see ``Tier.scan``. Raises OSError where a listing fails."""

    def __init__(
        self, store: Store, layout: RemoteLayout, ledger: Ledger, namespaces: NamespaceBook
    ) -> None:
        self._store = store
        self._layout = layout
        self._ledger = ledger
        self._namespaces = namespaces

    def scan(self) -> Iterator[Entry]:
        """Every chunk of every namespace, and what is no chunk with key None."""
        with self._ledger.scanning() as counted:
            for found in self._store.listing(self._layout.base):
                if not found.folder:
                    yield _stranger(found)
                elif found.name == TEMPORARY:
                    self._sweep(found.path)
                else:
                    yield from self._namespace(found, counted)

    def _namespace(self, namespace: Found, counted: ShardedDict[bytes, int]) -> Iterator[Entry]:
        folders = []
        for found in self._store.listing(namespace.path):
            if found.folder and is_chunk_folder(found.name):
                folders.append(found)
            elif found.folder and found.name == TEMPORARY:
                self._sweep(found.path)
            elif found.name != FACTS:
                yield _stranger(found)
        known = self._namespaces.known(namespace.name)
        for files in self._store.below(folders):
            for found in files:
                digest = hash_of(found.parent.rpartition("/")[2], found.name)
                if digest is None:
                    yield _stranger(found)
                    continue
                key = ChunkKey(known, digest)
                counted[name_of(key)] = found.nbytes
                yield Entry(key, found.nbytes, found.modified, found.path)

    def _sweep(self, folder: str) -> None:
        oldest = time.time() - _ORPHAN_SECONDS
        old = [
            found.path
            for found in self._store.listing(folder)
            if not found.folder and (begun_at(found.name) or oldest) < oldest
        ]
        self._store.unlink(old)


def _stranger(found: Found) -> Entry:
    return Entry(None, found.nbytes, found.modified, found.path)
