"""A tier that keeps chunks in one SQLite database: the example to copy for your own.

Several threads and several engines of one host may use the database at once. SQLite
gives what a tier must have and most stores lack: a reader sees a whole chunk or none,
also when the writer is killed, and the bound is exact among processes.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, ClassVar

from kvtiers.tiers import (
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    Tier,
    TierConfig,
    TierConfigError,
    Usage,
    WriteOutcome,
)
from kvtiers.tiers.format import METADATA_BYTES, Defect, pack, unpack, verify
from pydantic import AfterValidator

# Read 1.5 to 2.3 times as fast as SQLite's default of 4 KiB, with chunks of 4 MiB.
_PAGE_BYTES = 65536
# SQLite can't read into the caller's memory, only hand over bytes to copy. Pieces of
# this size are still in the processor's cache when they are copied.
_PIECE_BYTES = 1 << 20
_SCAN_ROWS = 1000
# Uses that are not in the database yet; beyond that the oldest are forgotten.
_PENDING_USES = 100_000

# Payloads have a table of their own, since SQLite rewrites a whole row to change one
# column of it. The triggers make ``usage`` exact, for every process, without counting.
# AUTOINCREMENT: an id is never used again, so who found a chunk damaged removes that
# one, and not what was stored in its place meanwhile.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, hash BLOB NOT NULL,
    nbytes INTEGER NOT NULL, last_used REAL NOT NULL, UNIQUE (namespace, hash));
CREATE TABLE IF NOT EXISTS contents (
    id INTEGER PRIMARY KEY, metadata BLOB NOT NULL, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS total (nbytes INTEGER NOT NULL, chunks INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON chunks BEGIN
    UPDATE total SET nbytes = nbytes + new.nbytes, chunks = chunks + 1;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON chunks BEGIN
    UPDATE total SET nbytes = nbytes - old.nbytes, chunks = chunks - 1;
    DELETE FROM contents WHERE id = old.id;
END;
COMMIT;
"""


class SqliteTier(Tier):
    """Chunks in the database at ``path``, each beside the metadata that vouches for it.

    Args:
        config: see ``Config``.
        payload_bytes: size of each chunk.

    Raises:
        TierConfigError: the database can't be opened or written, ``capacity`` is below
            one chunk, or a chunk is larger than SQLite's values may be.

    """

    class Config(TierConfig):
        """Options of the tier.

        Attributes:
            path: the database's file, on a disk of this host: SQLite's log of changes
                needs memory that all its users share.
            capacity: bytes that chunks may take, metadata included; None is no bound
                but the disk. The file is up to one page a chunk larger and keeps its
                greatest size; its log of changes comes on top.

        """

        type: str = "sqlite"
        path: Annotated[Path, AfterValidator(Path.expanduser)]
        capacity: int | None = None

    shared: ClassVar[bool] = True
    persistent: ClassVar[bool] = True
    on_disk: ClassVar[bool] = True
    config: Config

    def __init__(self, config: Config, payload_bytes: int) -> None:
        super().__init__(config, payload_bytes)
        if config.capacity is not None and config.capacity < self.chunk_bytes:
            raise TierConfigError(
                f"The sqlite tier's `capacity` of {config.capacity} bytes is below one chunk, "
                f"which takes {self.chunk_bytes} bytes here. Give it a good multiple of that."
            )
        # Used by one thread at a time: a tier's calls come from any of several.
        self._idle: deque[sqlite3.Connection] = deque()
        # SQLite lets one connection write at a time and has the others poll; those of
        # this process queue here instead.
        self._writing = threading.Lock()
        self._uses: deque[tuple[float, str, bytes]] = deque(maxlen=_PENDING_USES)
        self._prepare()

    @property
    def chunk_bytes(self) -> int:
        """See ``Tier.chunk_bytes``."""
        return self.payload_bytes + METADATA_BYTES

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``."""
        with self._transaction("BEGIN") as db:
            return [_is_stored(db, key) for key in keys]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``. Takes no lock: a use is noted, and stored with the next write."""
        damaged: list[tuple[int]] = []
        with self._transaction("BEGIN") as db:
            work = zip(keys, buffers, strict=True)
            outcomes = [self._read(db, key, buffer, damaged) for key, buffer in work]
        if damaged:
            with self._changes() as db:
                db.executemany("DELETE FROM chunks WHERE id = ?", damaged)
        return outcomes

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``. One transaction: a call's chunks become readable together."""
        try:
            with self._changes() as db:
                work = zip(keys, buffers, strict=True)
                return [self._write(db, key, buffer) for key, buffer in work]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return [WriteOutcome.REFUSED] * len(keys)

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``."""
        with self._changes() as db:
            delete = "DELETE FROM chunks" + _NAMED
            return sum(db.execute(delete, _name(key)).rowcount for key in keys)

    def scan(self) -> Iterator[Entry]:
        """See ``Tier.scan``. In portions: a reader that stays keeps the log from shrinking."""
        with self._changes():
            pass  # the uses noted so far
        last = 0
        while rows := self._rows_after(last):
            for last, namespace, digest, nbytes, last_used in rows:
                key = ChunkKey(Namespace(namespace), digest)
                yield Entry(key, nbytes, last_used, f"{self.config.path}: chunk {last}")

    def usage(self) -> Usage:
        """See ``Tier.usage``. Exact, whoever wrote."""
        with self._transaction("BEGIN") as db:
            nbytes, chunks = db.execute("SELECT nbytes, chunks FROM total").fetchone()
        return Usage(nbytes, chunks, self.config.capacity)

    def close(self) -> None:
        """See ``Tier.close``."""
        # What it stores is the uses that were noted, and a cache can do without.
        with suppress(OSError), self._changes():
            pass
        while self._idle:
            self._idle.pop().close()

    # One chunk ------------------------------------------------------------------

    def _read(
        self, db: sqlite3.Connection, key: ChunkKey, buffer: memoryview, damaged: list[tuple[int]]
    ) -> ReadOutcome:
        query = "SELECT id, metadata FROM chunks JOIN contents USING (id)" + _NAMED
        row = db.execute(query, _name(key)).fetchone()
        if row is None:
            return ReadOutcome.MISS
        number, metadata = row
        if _fill(db, number, metadata, key, buffer) is not None:
            damaged.append((number,))
            return ReadOutcome.CORRUPT
        self._uses.append((_stamp(key), *_name(key)))
        return ReadOutcome.HIT

    def _write(self, db: sqlite3.Connection, key: ChunkKey, buffer: memoryview) -> WriteOutcome:
        if _is_stored(db, key):
            return WriteOutcome.EXISTS
        if self.config.capacity is not None:
            (used,) = db.execute("SELECT nbytes FROM total").fetchone()
            if used + self.chunk_bytes > self.config.capacity:
                return WriteOutcome.REFUSED
        metadata = memoryview(bytearray(METADATA_BYTES))
        pack(key, buffer, time.time(), metadata)
        added = db.execute(
            "INSERT INTO chunks (namespace, hash, nbytes, last_used) VALUES (?, ?, ?, ?)",
            (*_name(key), self.chunk_bytes, _stamp(key)),
        )
        db.execute("INSERT INTO contents VALUES (?, ?, ?)", (added.lastrowid, metadata, buffer))
        return WriteOutcome.STORED

    def _rows_after(self, last: int) -> list[tuple[int, str, bytes, int, float]]:
        with self._transaction("BEGIN") as db:
            return db.execute(
                "SELECT id, namespace, hash, nbytes, last_used FROM chunks "
                "WHERE id > ? ORDER BY id LIMIT ?",
                (last, _SCAN_ROWS),
            ).fetchall()

    # The database ---------------------------------------------------------------

    def _prepare(self) -> None:
        path = self.config.path
        try:
            # KV is the user's text: for nobody else. SQLite's own files follow this one's mode.
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = self._connect()
            try:
                # In this order: neither the size of pages nor the log can be chosen later.
                db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(_SCHEMA)
                most = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
            finally:
                db.close()
        except (OSError, sqlite3.Error) as error:
            raise TierConfigError(
                f"The sqlite tier can't use its `path` {path}: {error}. It must be a file, new "
                "or written by this tier, on a local disk that this user may write to."
            ) from error
        if self.chunk_bytes > most:
            raise TierConfigError(
                f"A chunk takes {self.chunk_bytes} bytes here, and SQLite stores values of "
                f"{most} at most. Make chunks smaller with blocks_per_chunk."
            )

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.config.path,
            timeout=self.config.deadline,
            isolation_level=None,
            check_same_thread=False,
        )
        # After a crash of the machine the last writes may be missing, and none is torn.
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    @contextmanager
    def _changes(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes, first of all the uses that readers have noted."""
        with self._writing, self._transaction("BEGIN IMMEDIATE") as db:
            uses = [self._uses.popleft() for _ in range(len(self._uses))]
            db.executemany("UPDATE chunks SET last_used = ?" + _NAMED, uses)
            yield db

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction. What SQLite raises comes out as an OSError."""
        try:
            with self._connection() as db, db:  # commits, or rolls back
                db.execute(begin)
                yield db
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            code = errno.ENOSPC if full else errno.EIO
            raise OSError(code, str(error), str(self.config.path)) from error

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """An idle connection, or a new one, for this thread alone."""
        try:
            db = self._idle.pop()
        except IndexError:
            db = self._connect()
        try:
            yield db
        finally:
            if db.in_transaction:  # even the rollback failed
                db.close()
            else:
                self._idle.append(db)


_NAMED = " WHERE namespace = ? AND hash = ?"


def _name(key: ChunkKey) -> tuple[str, bytes]:
    return key.namespace.id, key.hash


def _is_stored(db: sqlite3.Connection, key: ChunkKey) -> bool:
    found = db.execute("SELECT 1 FROM chunks" + _NAMED, _name(key))
    return found.fetchone() is not None


def _stamp(key: ChunkKey) -> float:
    """When ``key`` was last used: now, and a little earlier the farther from its prefix's head.

    After a restart these times are all that is known, and a prefix must go tail first.
    """
    return time.time() - 1e-3 * max(key.position, 0)


def _fill(
    db: sqlite3.Connection, number: int, metadata: bytes, key: ChunkKey, buffer: memoryview
) -> Defect | None:
    """Read a chunk into ``buffer``. Returns why it is not ``key``, None if it is."""
    said = unpack(memoryview(metadata))
    if isinstance(said, Defect):
        return said
    with db.blobopen("contents", "payload", number, readonly=True) as blob:
        if len(blob) != len(buffer):
            return Defect.WRONG_LENGTH
        for start in range(0, len(buffer), _PIECE_BYTES):
            buffer[start : start + _PIECE_BYTES] = blob.read(_PIECE_BYTES)
    return verify(said, key, buffer)
