"""What one engine tells of its use of a root, and what it may store there.

    <root>/v1/.keeping/w-<random>/      its folder: log and files being written
                       salt             what tenants' tags are made with

An engine that never stores has no folder until it reads something. One that was fenced
(it was silent for long, or stopped) finds its folder gone at its next store, and begins
anew under another name, with nothing granted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvtiers.tiers.access_log import Kind, Record, records_of
from kvtiers.tiers.base import ChunkKey, Usage
from kvtiers.tiers.fs_files import made, reading
from kvtiers.tiers.fs_layout import private_folder, refuse_link
from kvtiers.tiers.keeper import Keeper
from kvtiers.tiers.lease import LeaseLostError, Seen
from kvtiers.tiers.log_files import WRITER, LogWriter, fence
from kvtiers.tiers.owner import Owner

logger = logging.getLogger(__name__)

# What a store waits for a grant before it is refused: a holder hears of a new writer, or
# of one that waits, within two, and evicts within one. Only threads for stores wait.
WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.05
# Uses that can't be written down are forgotten beyond so many.
_MOST_NOTES = 65_536
_SALT_BYTES = 16


class Member:
    """One engine's part in keeping a root. Any thread may call.

    Attributes:
        refused: the last store was refused for want of a grant.

    Args:
        folder: ``.keeping`` of the root.
        owner: this process.
        unit: bytes of one chunk.
        stores: False for one that only reads: it asks for no grant.
        look: reads what the holder published last. Raises OSError.
        wake: called when there is something for the background to do.

    """

    def __init__(
        self,
        folder: str,
        owner: Owner,
        unit: int,
        stores: bool,
        look: Callable[[], Seen],
        wake: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._unit = unit
        self._stores = stores
        self._look = look
        self._wake = wake
        # Held while the log is written; a mount that hangs must not hold up reads.
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._closing = threading.Event()
        self._id = ""
        self._log: LogWriter | None = None
        self._limit = 0
        self._keeper: Keeper | None = None
        self._seen = Seen()
        self._notes: list[tuple[Kind, ChunkKey]] = []
        self._short = 0
        self._waiting = 0
        self._salt = b""
        self._patient = True

    # The tier's threads ---------------------------------------------------------------

    def reserve(self, keys: Sequence[ChunkKey]) -> int:
        """Announce that files of these may appear. Returns how many may, from the first.

        Waits a while for a grant. Raises OSError if it could not be written down.
        """
        end = time.monotonic() + (WAIT_SECONDS if self._patient else 0.0)
        with self._asking(keys) as ask:
            return self._granted_by(end, keys, ask)

    def _granted_by(self, end: float, keys: Sequence[ChunkKey], ask: Callable[[], None]) -> int:
        while True:
            with self._lock:
                granted = self._announce(keys)
            if granted or not keys:
                self._patient = True
                return granted
            ask()
            self._wake()
            if time.monotonic() >= end or self._closing.wait(_POLL_SECONDS):
                # Not again and again, if nobody is there to grant anything.
                self._patient = False
                return 0
            if self._keeper is None:
                self.learn(self._look())

    @contextlib.contextmanager
    def _asking(self, keys: Sequence[ChunkKey]) -> Iterator[Callable[[], None]]:
        """Gives a function that says, once, that these wait for a grant, with what others do."""
        waiting = 0

        def ask() -> None:
            nonlocal waiting
            with self._lock:
                if waiting or self._keeper is not None or not self._patient:
                    return
                waiting = len(keys) * self._unit
                self._waiting += waiting
                # A writer that was fenced begins anew, which asks for a chunk.
                with contextlib.suppress(FileNotFoundError):
                    self._append([Record(Kind.WANTED, nbytes=self._waiting)])

        try:
            yield ask
        finally:
            with self._lock:
                self._waiting -= waiting

    def settle(self, key: ChunkKey, *, there: bool) -> None:
        """An announced chunk is there now, or is not and will not be."""
        self._note([(Kind.THERE if there else Kind.GONE, key)])

    def used(self, keys: Sequence[ChunkKey]) -> None:
        """These were read, or stored once more."""
        self._note([(Kind.USED, key) for key in keys])

    def gone(self, key: ChunkKey) -> None:
        """It was removed, or was found damaged or missing."""
        self._note([(Kind.GONE, key)])

    def short_of(self, nbytes: int) -> None:
        """The file system lacked room for so many bytes."""
        keeper = self._keeper
        if keeper is not None:
            keeper.short_of(nbytes)
        else:
            with self._noting:
                self._short += nbytes
        self._wake()

    def temporary(self, name: str) -> str:
        """A path for a file being written: it can't be renamed once its writer is fenced."""
        return f"{self._folder}/{self._id}/{name}.{secrets.token_hex(8)}"

    def usage(self, limit: int | None) -> Usage:
        """How full the root is, by what the holder published. No call of the file system."""
        keeper = self._keeper
        if keeper is not None:
            return keeper.usage()
        beat = self._seen.beat
        return Usage(0, 0, limit) if beat is None else Usage(beat.nbytes, beat.chunks, limit)

    # The background -------------------------------------------------------------------

    def learn(self, seen: Seen) -> None:
        """What the holder published."""
        with self._lock:
            self._seen = seen
            if seen.beat is not None and self._log is not None:
                limit = seen.beat.limits.get(self._id, 0)
                # Somebody is there who grants.
                self._patient |= limit > self._limit
                self._limit = max(self._limit, limit)

    def serve(self, keeper: Keeper | None) -> None:
        """Whether this process holds the lease now, and with what."""
        with self._lock:
            self._keeper = keeper
            if keeper is not None and self._log is not None:
                keeper.owns(self._id)
            if keeper is None and self._log is not None:
                # The rest of what was granted is in what the former holder published.
                self._limit = max(self._limit, self._log.announced)

    def join(self) -> None:
        """Ask for a grant before it is needed. Raises OSError."""
        with self._lock:
            if self._log is None:
                self._join()

    def has_news(self) -> bool:
        """Whether there is something to write down."""
        return bool(self._notes or self._short)

    def flush(self) -> None:
        """Write down what was used and became of stores. Raises OSError."""
        with self._lock:
            with contextlib.suppress(FileNotFoundError):
                if self.has_news():
                    self._append([])
                return
            # It was fenced. What it used is told as another writer, at once.
            if self.has_news():
                self._append([])

    def leave(self) -> None:
        """Say the last, and give up what was granted."""
        self._closing.set()
        with self._lock:
            if self._log is None:
                return
            with contextlib.suppress(OSError):
                if self.has_news():
                    self._append([])
                fence(self._log.folder)
            self._log = None

    # Parts, with the lock held ---------------------------------------------------------

    def _announce(self, keys: Sequence[ChunkKey]) -> int:
        if self._log is None:
            self._join()
        assert self._log is not None
        granted = self._granted(self._log, len(keys))
        if not granted:
            return 0
        coming = self._records(Kind.COMING, keys[:granted])
        try:
            self._append(coming)
        except FileNotFoundError:
            self._log = None
            return 0
        except OSError:
            # A keeper may have read it all the same.
            self._note([(Kind.GONE, key) for key in keys[:granted]])
            raise
        return granted

    def _granted(self, log: LogWriter, chunks: int) -> int:
        if self._keeper is None:
            return min(chunks, max(0, self._limit - log.announced) // self._unit)
        try:
            granted = self._keeper.grant(self._id, log.announced, chunks, self._unit)
        except LeaseLostError:
            return 0
        if self._keeper.is_crowded():
            self._wake()
        return granted

    def _join(self) -> None:
        """Begin a log, which asks for a grant."""
        writer_id = WRITER + secrets.token_hex(8)
        folder = f"{self._folder}/{writer_id}"
        refuse_link(self._folder)
        private_folder(self._folder)
        os.mkdir(folder, 0o700)
        log = LogWriter(folder, self._owner.facts(), self._unit if self._stores else 0)
        log.append([])
        self._id, self._log, self._limit = writer_id, log, 0
        if self._keeper is not None:
            self._keeper.owns(writer_id)
        self._wake()

    def _append(self, records: list[Record]) -> None:
        if self._log is None:
            self._join()
        assert self._log is not None
        with self._noting:
            notes, self._notes = self._notes, []
            short, self._short = self._short, 0
        told = self._told(notes)
        if short:
            told.append(Record(Kind.SHORT, nbytes=short))
        try:
            self._log.append(told + records)
        except FileNotFoundError:
            # Fenced: what became of its stores is looked at by the keeper.
            self._note([note for note in notes if note[0] is Kind.USED])
            self._log = None
            raise
        except OSError:
            self._note(notes)
            raise

    def _told(self, notes: Sequence[tuple[Kind, ChunkKey]]) -> list[Record]:
        """Notes as records, in their order."""
        records: list[Record] = []
        begin = 0
        for end in range(1, len(notes) + 1):
            if end == len(notes) or notes[end][0] is not notes[begin][0]:
                records += self._records(notes[begin][0], [key for _, key in notes[begin:end]])
                begin = end
        return records

    def _records(self, kind: Kind, keys: Sequence[ChunkKey]) -> list[Record]:
        tags = {tenant: self._tag(tenant) for tenant in {key.tenant for key in keys} if tenant}
        return records_of(kind, keys, self._unit, tags)

    def _tag(self, tenant: str) -> bytes:
        """Stands for the tenant: who can read the logs finds no list of users there."""
        if not self._salt:
            self._salt = _shared_salt(self._folder)
        return hashlib.blake2b(tenant.encode(), digest_size=8, key=self._salt).digest()

    def _note(self, notes: list[tuple[Kind, ChunkKey]]) -> None:
        with self._noting:
            self._notes += notes
            if len(self._notes) > _MOST_NOTES:
                del self._notes[:-_MOST_NOTES]


def _shared_salt(folder: str) -> bytes:
    """Sixteen random bytes that all engines of a root share. Raises OSError."""
    path = f"{folder}/salt"
    salt = _salt_in(path)
    if len(salt) == _SALT_BYTES:
        return salt
    new, salt = f"{path}.{secrets.token_hex(8)}", secrets.token_bytes(_SALT_BYTES)
    with made(new) as file:
        file.write(salt)
    # Of two that do so at once the second wins: one engine's tags are its own then.
    try:
        os.rename(new, path)
    except IsADirectoryError:  # not ours, and not ours to empty
        os.unlink(new)
        return salt
    return _salt_in(path)


def _salt_in(path: str) -> bytes:
    """What lies there in the salt's place, b"" if that is no file."""
    try:
        with reading(path) as file:
            return file.read(_SALT_BYTES + 1)
    except (FileNotFoundError, ValueError):
        return b""
