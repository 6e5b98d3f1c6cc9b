"""The filesystem tier where its path is a URL: one object a chunk, on any fsspec filesystem.

It keeps the layout and format of ``fs``, and what it promises. What differs, and why:

- Nothing is touched to record its use: an object's time can't be set, and writing it anew
  costs as much as storing it. Within one engine the policy keeps its own order; after a
  restart the order is that of writing. What is evicted too early is stored again at its
  next use, and then is young.
- Nothing is cached of what is there: other engines write too, and a stale "no" would lose
  what they stored. The hierarchy's directory remembers what was found.
- A damaged object is removed and not set aside, since storing it again under another name
  is a copy over the network, and for the same money.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

from kvtiers.tiers.at_rest import AtRestTier, check_capacity
from kvtiers.tiers.base import (
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    TierConfigError,
    Usage,
    WriteOutcome,
)
from kvtiers.tiers.fs_files import FULL
from kvtiers.tiers.fs_layout import TEMPORARY
from kvtiers.tiers.fs_namespace import MOST_BYTES, NamespaceBook
from kvtiers.tiers.fs_quarantine import Stuck
from kvtiers.tiers.named_ledger import Ledger
from kvtiers.tiers.remote_config import RemoteFsConfig
from kvtiers.tiers.remote_layout import RemoteLayout, name_of
from kvtiers.tiers.remote_lookup import Lookup
from kvtiers.tiers.remote_open import AwayError, open_store, try_out
from kvtiers.tiers.remote_scan import Scanner
from kvtiers.tiers.remote_store import Store

T = TypeVar("T")


class RemoteFsTier(AtRestTier):
    """Chunks as objects or files below a URL; made by ``FsTier.variant``.

    A chunk is seen when all of it is there: see ``remote_dialects``. Every read is
    verified; a damaged one is removed and counts as corrupt. Several engines may use one
    URL: what the others write is found by lookups, and counted by the next ``scan``.

    Nothing is asked of the store at construction; ``probe`` does that.

    Args:
        config: see ``RemoteFsConfig``.
        payload_bytes: size of each chunk, a multiple of ``ALIGNMENT``.

    Raises:
        TierConfigError: ``capacity`` is below one chunk, or a chunk is more than the
            store takes.

    """

    Config: ClassVar[type[RemoteFsConfig]] = RemoteFsConfig
    shared: ClassVar[bool] = True
    persistent: ClassVar[bool] = True
    config: RemoteFsConfig

    def __init__(self, config: RemoteFsConfig, payload_bytes: int) -> None:
        super().__init__(config, payload_bytes)
        check_capacity("filesystem", config.capacity, self.chunk_bytes)
        self._store, root = open_store(config, self.chunk_bytes)
        self._layout = RemoteLayout(root)
        self._lookup = Lookup(self._store, self._layout, payload_bytes)
        self._ledger = Ledger(config.capacity)
        self._namespaces = NamespaceBook(_RemoteFacts(self._store, self._layout))
        self._stuck = Stuck()

    def probe(self) -> str | None:
        """See ``Tier.probe``. Writes, lists, reads and removes a small file."""
        trial = self._layout.trial()
        try:
            try_out(self._store, trial, f"{trial}.new", self.config)
        except AwayError as error:
            if self.config.required:
                raise TierConfigError(
                    f"The filesystem tier is required, but {error}. Start the store, correct "
                    "'path' or 'storage_options', or set 'required' to false to start without it."
                ) from error
            return str(error)
        return None

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``. As many requests at once as there are connections."""
        namespaces = {key.namespace.id: key.namespace for key in keys}
        usable = {name: self._namespaces.accepts(each) for name, each in namespaces.items()}
        asked = [key for key in keys if usable[key.namespace.id]]
        there = iter(self._lookup.find(asked))
        return [
            usable[key.namespace.id] and next(there) and not self._unreadable.hides(key)
            for key in keys
        ]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``. fsspec hands out bytes of its own in most cases: one more copy."""
        return self._one_by_one(self._read, ReadOutcome.FAILED, keys, buffers)

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``. A store that says it is full is ``REFUSED``, as is the bound."""
        return self._one_by_one(self._write, WriteOutcome.FAILED, keys, buffers)

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``. Works for namespaces whose chunks are refused too."""
        names = [name_of(key) for key in keys]
        paths = [self._path(key) for key in keys]
        with self._ledger.changing(names, self._until()):
            # Before, since object stores do not say whether there was something to delete.
            there = [
                path
                for path, size in zip(paths, self._store.sizes(paths), strict=True)
                if size is not None
            ]
            self._store.unlink(there)
            for name in names:
                self._ledger.absent(name)
        return len(there)

    def scan(self) -> Iterator[Entry]:
        """See ``Tier.scan``. Also counts what it finds, and sweeps temporary files.

        Safe beside all other calls; what they do meanwhile is neither lost nor
        counted twice.
        """
        return Scanner(self._store, self._layout, self._ledger, self._namespaces).scan()

    def namespaces(self, most: int) -> list[Namespace]:
        """See ``Tier.namespaces``. A listing, and a request for each."""
        return self._namespaces.newest(most)

    def usage(self) -> Usage:
        """See ``Tier.usage``. What others wrote counts once it is scanned."""
        return self._ledger.usage()

    def _one_by_one(
        self,
        act: Callable[[ChunkKey, memoryview], T],
        failed: T,
        keys: Sequence[ChunkKey],
        buffers: Sequence[memoryview],
    ) -> list[T]:
        """An outcome for each chunk. In a store that hangs the first one is the last one tried.

        The others would keep the caller's buffers for as long again, each.
        """
        outcomes: list[T] = []
        for key, payload in zip(keys, buffers, strict=True):
            begun = time.monotonic()
            outcomes.append(act(key, payload))
            if outcomes[-1] is failed and time.monotonic() - begun >= self.config.timeout:
                break
        return outcomes + [failed] * (len(keys) - len(outcomes))

    # One chunk --------------------------------------------------------------------

    def _read(self, key: ChunkKey, payload: memoryview) -> ReadOutcome:
        path = self._path(key)
        try:
            if not self._namespaces.accepts(key.namespace):
                return ReadOutcome.MISS
            tail = self._tail_buffer()
            read = self._store.read_into(path, [payload, tail])
        except OSError as error:
            self._log_error("read", error)
            return ReadOutcome.FAILED
        if read is None:
            return ReadOutcome.MISS
        defect = self._defect(read, tail, key, payload)
        if defect is None:
            self._stuck.discard(path)
            return ReadOutcome.HIT
        if defect.foreign:
            self._log_foreign(path, defect)
            return ReadOutcome.UNREADABLE
        self._log_once(defect, f"{path}: {defect.value}. It counts as a miss, and is removed.")
        self._remove_damaged(key)
        return ReadOutcome.CORRUPT

    def _remove_damaged(self, key: ChunkKey) -> None:
        """Or remember it, if that fails, so that a write replaces it.

        If somebody stored it anew meanwhile, that is lost, and will be stored again.
        """
        path = self._path(key)
        try:
            self.remove([key])
        except OSError as error:
            self._stuck.add(path)
            self._log_error("remove", error)
        else:
            self._stuck.discard(path)

    def _write(self, key: ChunkKey, payload: memoryview) -> WriteOutcome:
        try:
            if not self._namespaces.accepts(key.namespace, create=True):
                return WriteOutcome.REFUSED
            with self._ledger.changing([name_of(key)], self._until()):
                replace = self._path(key) in self._stuck or self._unreadable.may_replace(key)
                if not replace and self._lookup.ask([key])[0]:
                    taken = self._unreadable.must_leave(key)
                    return WriteOutcome.TAKEN if taken else WriteOutcome.EXISTS
                return self._store_chunk(key, payload)
        except OSError as error:
            self._log_error("write", error)
            return WriteOutcome.REFUSED if error.errno in FULL else WriteOutcome.FAILED

    def _store_chunk(self, key: ChunkKey, payload: memoryview) -> WriteOutcome:
        path = self._path(key)
        if not self._ledger.reserve(self.chunk_bytes):
            return WriteOutcome.REFUSED
        reserved = self.chunk_bytes
        try:
            metadata = self._tail_buffer()
            stored = self._packed(key, payload, metadata)
            # Bytes of our own: a request that timed out may still be reading them.
            content = b"".join((stored, metadata))
            self._store.publish(path, self._layout.temporary_for(path), content)
            self._stuck.discard(path)
            self._unreadable.discard(key)
            self._ledger.present(name_of(key), self.chunk_bytes, reserved=reserved)
            reserved = 0
            return WriteOutcome.STORED
        finally:
            self._ledger.release(reserved)

    # Small things -----------------------------------------------------------------

    def _path(self, key: ChunkKey) -> str:
        return self._layout.place(key).path

    def _until(self) -> float:
        """How long to wait for another thread's request about the same chunk."""
        return time.monotonic() + 2 * self.config.timeout

    def _log_error(self, doing: str, error: OSError) -> None:
        text = self.config.storage_options.without_secrets(str(error))
        self._log_once((doing, type(error), error.errno), f"Could not {doing} a chunk: {text}.")


class _RemoteFacts:
    """``FactsFiles`` in a store."""

    def __init__(self, store: Store, layout: RemoteLayout) -> None:
        self._store = store
        self._layout = layout

    def guard(self, namespace_id: str) -> None:
        """See ``FactsFiles.guard``. There are no links in a store."""

    def where(self, namespace_id: str) -> str:
        """See ``FactsFiles.where``."""
        return str(self._layout.facts(namespace_id))

    def load(self, namespace_id: str) -> bytes:
        """See ``FactsFiles.load``."""
        path = self.where(namespace_id)
        [content] = self._store.ranges([path], 0, MOST_BYTES + 1)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "No facts", path)
        return content

    def newest(self, most: int) -> list[str]:
        """See ``FactsFiles.newest``. Object stores tell no times of what is only a prefix."""
        listed = self._store.listing(self._layout.base)
        found = [each for each in listed if each.folder and each.name != TEMPORARY]
        found.sort(key=lambda each: -each.modified)
        return [each.name for each in found[:most]]

    def store(self, namespace_id: str, content: bytes) -> None:
        """See ``FactsFiles.store``."""
        path = self.where(namespace_id)
        self._store.publish(path, self._layout.temporary_for(path), content)
