"""Which of many chunks a store holds, for the fewest requests.

Asking about one chunk costs a request, and 1.6 ms of processor time on S3; a listing
gets a thousand names with one, for 75 ms. So a short question is asked chunk by chunk,
whatever else the namespace holds; for a long one a sample tells which way is cheaper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvtiers.tiers import format as chunk_format
from kvtiers.tiers.base import ChunkKey
from kvtiers.tiers.remote_layout import RemoteLayout
from kvtiers.tiers.remote_store import Store

# Below this a sample is not worth its own request.
_SHORT = 64
# Names that are listed for what asking about one chunk costs.
_NAMES_PER_REQUEST = 20
# Folders of a namespace, equally full as hashes are evenly spread.
_FOLDERS = 256


class Lookup:
    """Finds chunks of one size. Stateless: others store and remove at any time.

    Args:
        store: what to ask.
        layout: where chunks lie in it.
        payload_bytes: size of a chunk.

    """

    def __init__(self, store: Store, layout: RemoteLayout, payload_bytes: int) -> None:
        self._store = store
        self._layout = layout
        self._payload_bytes = payload_bytes
        self._object_bytes = payload_bytes + chunk_format.METADATA_BYTES

    def find(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether each chunk seems to be there. Raises OSError."""
        by_namespace: defaultdict[str, list[ChunkKey]] = defaultdict(list)
        for key in keys:
            by_namespace[key.namespace.id].append(key)
        there: set[ChunkKey] = set()
        for namespace_id, some in by_namespace.items():
            if self._listing_is_cheaper(some):
                paths = self._listed(f"{self._layout.base}/{namespace_id}")
                there.update(key for key in some if self._layout.place(key).path in paths)
            else:
                there.update(key for key, yes in zip(some, self.ask(some), strict=True) if yes)
        return [key in there for key in keys]

    def ask(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether a whole chunk lies under each key, by the metadata at its end. Raises OSError."""
        paths = [self._layout.place(key).path for key in keys]
        tails = self._store.ranges(paths, self._payload_bytes, self._object_bytes)
        return [self._is_of(tail, key) for tail, key in zip(tails, keys, strict=True)]

    def _listing_is_cheaper(self, keys: Sequence[ChunkKey]) -> bool:
        if len(keys) <= _SHORT:
            return False
        sample = self._store.listing(self._layout.place(keys[0]).folder)
        return len(sample) * _FOLDERS <= len(keys) * _NAMES_PER_REQUEST

    def _listed(self, folder: str) -> set[str]:
        """Paths of all files below that have a chunk's size."""
        return {
            found.path
            for files in self._store.below(self._store.listing(folder))
            for found in files
            if found.nbytes == self._object_bytes
        }

    def _is_of(self, tail: bytes | None, key: ChunkKey) -> bool:
        found = chunk_format.unpack(memoryview(tail or b""))
        return (
            isinstance(found, chunk_format.Metadata)
            and (found.namespace, found.hash) == (key.namespace.id, key.hash)
            and found.payload_bytes == self._payload_bytes
        )
