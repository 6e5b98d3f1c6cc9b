"""The filesystem tier: one file a chunk, on a local or mounted path. For URLs see ``remote_fs``."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvtiers.policies import Policy, TierInfo
from kvtiers.tiers import format as chunk_format
from kvtiers.tiers.at_rest import AtRestTier, check_capacity
from kvtiers.tiers.base import (
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    Tier,
    Usage,
    WriteOutcome,
)
from kvtiers.tiers.direct_io import opened, transfer_in, transfer_out
from kvtiers.tiers.fs_chunks import ChunkFiles
from kvtiers.tiers.fs_config import MAX_BLOCK_SIZE, FsConfig
from kvtiers.tiers.fs_files import FULL
from kvtiers.tiers.fs_layout import (
    Layout,
    Place,
    padded,
    private_folder,
    refuse_link,
    sizes_of_files,
)
from kvtiers.tiers.fs_ledger import Ledger
from kvtiers.tiers.fs_namespace import LocalFacts, NamespaceBook
from kvtiers.tiers.fs_root import check_block_size, choose_direct, prepare_root
from kvtiers.tiers.fs_scan import Scanner
from kvtiers.tiers.keeper import Terms
from kvtiers.tiers.keeper_listing import sweep
from kvtiers.tiers.remote_url import is_remote
from kvtiers.tiers.root_keeping import RootKeeping

logger = logging.getLogger(__name__)

_BUFFER = 1 << 20

# Removed, also by another host of an NFS mount, between lookup and read.
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
# A folder, link, FIFO or socket lies where the chunk should.
_NOT_A_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ESPIPE, errno.ENXIO})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
# What a bad sector gives, and for a while a mount in trouble.
_UNREADABLE = frozenset({errno.EIO, errno.EBADMSG})

# A prefix is of use up to its first gap, so it must go tail first, after a
# restart too, when the files' times are all that is known of their use. Each
# chunk is therefore stamped a little older than the one before it. A millisecond
# is about what a chunk takes to move, so the order also holds where one run is
# split into several calls.
_STAMP_STEP_NS = 1_000_000


class FsTier(AtRestTier):
    """Chunks as files under ``path``; see ``fs_layout`` for where, ``format`` for what.

    A chunk is written to a temporary file and renamed, so a reader sees all of it
    or nothing, also when the writer is killed. Every read is verified; a damaged
    file is moved aside and counts as corrupt. Several engines may use one root:
    what the others write is found by lookups.

    With a capacity, and once ``keep`` was called, the bound is one for the root and all
    who use it, and one of them keeps it: see ``root_keeping``. Without that call this tier
    counts for itself what it writes and what its own ``scan`` has passed.

    Args:
        config: see ``FsConfig``.
        payload_bytes: size of each chunk, a multiple of ``ALIGNMENT``.

    Raises:
        TierConfigError: the path can't be used, the file system has no room for
            one chunk and holds none, ``capacity`` is below one chunk, or ``direct`` is demanded
            where it does not work.

    """

    Config: ClassVar[type[FsConfig]] = FsConfig
    shared: ClassVar[bool] = True
    persistent: ClassVar[bool] = True
    on_disk: ClassVar[bool] = True
    keeps_itself: ClassVar[bool] = True
    config: FsConfig

    @classmethod
    def variant(cls, options: Mapping[str, object]) -> type[Tier]:
        """See ``Tier.variant``. A URL has a class of its own, and options for its store."""
        if not is_remote(options.get("path")):
            return cls
        from kvtiers.tiers.remote_fs import RemoteFsTier

        return RemoteFsTier

    def __init__(self, config: FsConfig, payload_bytes: int) -> None:
        super().__init__(config, payload_bytes)
        check_block_size(config.block_size, payload_bytes)
        # What a file takes with its padding.
        self._file_bytes = padded(self._whole_bytes, config.block_size)
        # Also of files that were written with another block size.
        self._sizes = sizes_of_files(self._whole_bytes, MAX_BLOCK_SIZE)
        check_capacity("filesystem", config.capacity, self._file_bytes)
        self._layout = Layout(config.path)
        prepare_root(config.path, self._layout.base, self._file_bytes)
        self._direct = choose_direct(config.direct, self._layout.base)
        self._buffer = self._bytes_a_call()
        self._ledger = Ledger(config.capacity)
        self._namespaces = NamespaceBook(LocalFacts(self._layout))
        self._files = ChunkFiles(self._ledger, self._log_error)
        self._keeping: RootKeeping | None = None

    def keep(
        self,
        info: TierInfo,
        make_policy: Callable[[Sequence[TierInfo], Callable[[], float]], Policy],
        *,
        stores: bool,
    ) -> None:
        """See ``Tier.keep``. Without a capacity only temporary files are swept, once."""
        if info.capacity is None:
            threading.Thread(target=self._sweep, name="kvtiers-sweep", daemon=True).start()
            return
        terms = Terms(info, self.config.headroom, self._file_bytes, make_policy)
        self._keeping = RootKeeping(self._layout, terms, stores=stores)
        self._ledger.lift()
        self._keeping.start()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``. One ``access`` a key: cheaper than ``stat``."""
        namespaces = {key.namespace.id: key.namespace for key in keys}
        usable = {name: self._accepts(namespace) for name, namespace in namespaces.items()}
        return [
            usable[key.namespace.id]
            and os.access(self._layout.place(key).path, os.F_OK)
            and not self._unreadable.hides(key)
            for key in keys
        ]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``. A hit is logged, or renews the file's modification time."""
        work = zip(keys, buffers, _stamps(keys), strict=True)
        outcomes = [self._read(key, payload, stamp) for key, payload, stamp in work]
        if self._keeping is not None:
            answers = list(zip(keys, outcomes, strict=True))
            self._keeping.member.used([k for k, outcome in answers if outcome is ReadOutcome.HIT])
            for key, outcome in answers:
                if outcome in (ReadOutcome.MISS, ReadOutcome.CORRUPT):
                    self._keeping.member.gone(key)
        return outcomes

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``. A full file system is ``REFUSED``, as is the bound."""
        work = list(zip(keys, buffers, _stamps(keys), strict=True))
        outcomes = [self._already(key, stamp) for key, _, stamp in work]
        missing = [i for i, outcome in enumerate(outcomes) if outcome is None]
        otherwise, granted = WriteOutcome.REFUSED, len(missing)
        # The first are written while room is made for the rest.
        while missing and granted:
            granted, otherwise = self._reserve([keys[i] for i in missing])
            for i in missing[:granted]:
                outcomes[i] = self._write(*work[i])
            missing = missing[granted:]
        return [otherwise if outcome is None else outcome for outcome in outcomes]

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``. Works for namespaces whose chunks are refused too."""
        return sum(self._remove(key) for key in keys)

    def scan(self) -> Iterator[Entry]:
        """See ``Tier.scan``. Also counts what it finds, and sweeps temporary files.

        Safe beside all other calls; what they do meanwhile is neither lost nor
        counted twice.
        """
        return Scanner(self._layout, self._ledger, self._namespaces).scan()

    @property
    def chunk_bytes(self) -> int:
        """See ``Tier.chunk_bytes``: with metadata and padding."""
        return self._file_bytes

    def served_elsewhere(self, keys: Sequence[ChunkKey]) -> None:
        """See ``Tier.served_elsewhere``. Written down by the next second's append."""
        if self._keeping is not None:
            self._keeping.member.used(keys)

    def namespaces(self, most: int) -> list[Namespace]:
        """See ``Tier.namespaces``. Lists one folder."""
        return self._namespaces.newest(most)

    def usage(self) -> Usage:
        """See ``Tier.usage``. Of the whole root once it is kept, else of what is known."""
        return self._ledger.usage() if self._keeping is None else self._keeping.usage()

    def close(self) -> None:
        """See ``Tier.close``."""
        if self._keeping is not None:
            self._keeping.close()

    # Reading ------------------------------------------------------------------

    def _read(self, key: ChunkKey, payload: memoryview, stamp: int) -> ReadOutcome:
        try:
            if not self._namespaces.accepts(key.namespace):
                return ReadOutcome.MISS
        except OSError as error:
            # The namespace's own, and no reason to touch the chunk.
            self._log_error("look up", error)
            return ReadOutcome.FAILED
        return self._read_file(key, payload, stamp)

    def _read_file(self, key: ChunkKey, payload: memoryview, stamp: int) -> ReadOutcome:
        place = self._layout.place(key)
        try:
            place.refuse_links()
            with opened(place.path, os.O_RDONLY, direct=self._direct) as descriptor:
                defect = self._fill(descriptor, key, payload)
                if defect is None:
                    self._files.stuck.discard(place.path)
                    if self._keeping is None:
                        _touch(descriptor, stamp)
                    return ReadOutcome.HIT
                if defect.foreign:
                    self._log_foreign(place.path, defect)
                    return ReadOutcome.UNREADABLE
                # While the descriptor is open nothing else can have its inode.
                self._files.quarantine(place, os.fstat(descriptor))
        except OSError as error:
            return self._not_read(place, error)
        self._log_once(defect, f"{place.path}: {defect.value}. It counts as a miss.")
        return ReadOutcome.CORRUPT

    def _fill(
        self, descriptor: int, key: ChunkKey, payload: memoryview
    ) -> chunk_format.Defect | None:
        tail = self._tail_buffer()
        nbytes = transfer_in(descriptor, payload, tail, self._buffer)
        return self._defect(nbytes, tail, key, payload)

    def _not_read(self, place: Place, error: OSError) -> ReadOutcome:
        if error.errno in _GONE:
            return ReadOutcome.MISS
        if error.errno in _NOT_A_FILE:
            self._log_once(error.errno, f"{place.path} is not a file. It counts as a miss.")
            self._files.quarantine(place)
            return ReadOutcome.CORRUPT
        self._log_error("read", error)
        return ReadOutcome.CORRUPT if self._is_at_fault(place, error) else ReadOutcome.FAILED

    def _is_at_fault(self, place: Place, error: OSError) -> bool:
        """Whether it is the file that can't be read and not the mount; it is moved away.

        A file's error comes again, and leaves its folder working: a mount in
        trouble must not cost the chunks in it.
        """
        again = place.path in self._files.stuck
        self._files.stuck.add(place.path)
        if error.errno in _FORBIDDEN or (again and error.errno in _UNREADABLE):
            return self._files.quarantine(place)
        return False

    # Writing --------------------------------------------------------------------

    def _already(self, key: ChunkKey, stamp: int) -> WriteOutcome | None:
        """What there is to say of a chunk before it is written, None if it should be."""
        place = self._layout.place(key)
        try:
            if not self._namespaces.accepts(key.namespace, create=True):
                return WriteOutcome.REFUSED
            place.refuse_links()
            if self._unreadable.must_leave(key) and os.access(place.path, os.F_OK):
                return WriteOutcome.TAKEN
            if self._unreadable.may_replace(key):
                self._files.stuck.add(place.path)
                self._unreadable.discard(key)
            if self._is_stored(place, stamp):
                if self._keeping is not None:
                    self._keeping.member.used([key])
                return WriteOutcome.EXISTS
        except OSError as error:
            return self._not_written(error)
        return None

    def _reserve(self, keys: Sequence[ChunkKey]) -> tuple[int, WriteOutcome]:
        """How many of the chunks there is room for, from the first; what the rest are told."""
        wanted, otherwise = len(keys), WriteOutcome.REFUSED
        if self._keeping is not None and keys:
            try:
                wanted = self._keeping.member.reserve(keys)
            except OSError as error:
                wanted, otherwise = 0, self._not_written(error)
        granted = 0
        while granted < wanted and self._ledger.reserve(self._file_bytes):
            granted += 1
        return granted, otherwise

    def _write(self, key: ChunkKey, payload: memoryview, stamp: int) -> WriteOutcome:
        """Write a chunk for which there is room set aside."""
        stored = there = False
        try:
            stored = self._store(key, payload, self._layout.place(key), stamp)
            there = True
            self._unreadable.discard(key)
        except OSError as error:
            return self._not_written(error)
        finally:
            if not stored:
                self._ledger.cancel(self._file_bytes)
            if self._keeping is not None:
                self._keeping.member.settle(key, there=there)
        return WriteOutcome.STORED if stored else WriteOutcome.EXISTS

    def _is_stored(self, place: Place, stamp: int) -> bool:
        """Whether the chunk is there; what can't be one is moved out of the way."""
        if place.path in self._files.stuck:
            return False
        try:
            found = os.lstat(place.path)
        except FileNotFoundError:
            return False
        if stat.S_ISREG(found.st_mode) and found.st_size in self._sizes:
            if self._keeping is None:
                _touch(place.path, stamp)
            return True
        self._files.quarantine(place, found)
        return False

    def _store(self, key: ChunkKey, payload: memoryview, place: Place, stamp: int) -> bool:
        """Write the file; False if somebody else was faster. Raises OSError."""
        if self._keeping is not None:
            temporary = self._keeping.member.temporary(place.name)
        else:
            temporary = self._layout.temporary(key.namespace.id, place.name)
        refuse_link(os.path.dirname(temporary))
        tail = self._tail_buffer()
        stored = self._packed(key, payload, tail)
        # A read may have left something there.
        tail[chunk_format.METADATA_BYTES :] = bytes(tail.nbytes - chunk_format.METADATA_BYTES)
        try:
            self._write_temporary(temporary, stored, tail, stamp)
            published = self._files.publish(temporary, place, self._file_bytes)
        except OSError:
            _unlink_quietly(temporary)
            raise
        if not published:
            _unlink_quietly(temporary)
        elif self.config.fsync:
            self._sync_folder(place.folder)
        return published

    def _write_temporary(
        self, temporary: str, payload: memoryview, tail: memoryview, stamp: int
    ) -> None:
        try:
            self._write_file(temporary, payload, tail, stamp)
        except FileNotFoundError:
            if self._keeping is not None:
                raise  # we were thought dead: what we store now would not be counted
            # The namespace's first chunk, or somebody emptied the root.
            private_folder(os.path.dirname(temporary))
            self._write_file(temporary, payload, tail, stamp)

    def _write_file(self, path: str, payload: memoryview, tail: memoryview, stamp: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with opened(path, flags, direct=self._direct) as descriptor:
            transfer_out(descriptor, payload, tail, self._buffer)
            if self.config.fsync:
                os.fsync(descriptor)
            _touch(descriptor, stamp)

    def _sync_folder(self, folder: str) -> None:
        """Make the name durable. The chunk is stored even if this fails."""
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._log_error("sync", error)

    def _not_written(self, error: OSError) -> WriteOutcome:
        self._log_error("write", error)
        if error.errno not in FULL:
            return WriteOutcome.FAILED
        if self._keeping is not None:
            self._keeping.member.short_of(self._file_bytes)
        return WriteOutcome.REFUSED

    # Removing -------------------------------------------------------------------

    def _remove(self, key: ChunkKey) -> bool:
        removed = self._files.remove(self._layout.place(key))
        if removed and self._keeping is not None:
            self._keeping.member.gone(key)
        return removed

    # Small things ---------------------------------------------------------------

    def _sweep(self) -> None:
        try:
            sweep(self._layout)
        except OSError as error:
            self._log_error("sweep after", error)

    def _bytes_a_call(self) -> int:
        if self.config.buffer != "auto":
            return self.config.buffer
        return self._file_bytes if self._direct else max(_BUFFER, self.config.block_size)

    def _accepts(self, namespace: Namespace) -> bool:
        try:
            return self._namespaces.accepts(namespace)
        except OSError as error:
            self._log_error("look up", error)
            return False

    def _log_error(self, doing: str, error: OSError) -> None:
        self._log_once((doing, error.errno), f"Could not {doing} a chunk: {error}")


def _stamps(keys: Sequence[ChunkKey]) -> list[int]:
    """Modification times for the files of a call, in nanoseconds, the head's youngest."""
    now = time.time_ns()
    positions = [key.position for key in keys]
    if any(position < 0 for position in positions):
        positions = list(range(len(keys)))
    return [now - position * _STAMP_STEP_NS for position in positions]


def _touch(file: int | str, stamp: int) -> None:
    """Record the use. Ours to set, since mounts differ in what they do to atime."""
    # A mount that became read-only still serves hits.
    with contextlib.suppress(OSError):
        os.utime(file, ns=(stamp, stamp))


def _unlink_quietly(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
