"""Which chunks of ours a server holds, as far as this process knows: a Redis, a bucket.

What it stored itself, and what the last scan found. A Redis drops keys by itself (TTL,
eviction, a restart), and others store beside us: the next scan brings that up to date.

The difficulty is what changes while a scan runs, which may or may not show it. So each
change is made and written down as one step with respect to other changes of the same
key (``changing``), and what changed during a scan overrides what the scan saw. Names
are a set, so nothing is counted twice, however its news arrive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from kvtiers.policies.sharded import ShardedDict
from kvtiers.tiers.base import Usage


class Ledger:
    """Names and sizes of chunks, against a limit. Thread-safe.

    Args:
        limit: bytes that chunks and reservations may take together, None if any.

    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._scanning = threading.Lock()
        # In the scheduler's process a dict of a million names would stop it as it grows.
        self._sizes: ShardedDict[bytes, int] = ShardedDict()
        self._nbytes = 0
        self._reserved = 0
        self._busy: set[bytes] = set()
        # Name to size, None for gone: what changed since the running scan began.
        self._since: dict[bytes, int | None] | None = None

    def usage(self) -> Usage:
        """What is known."""
        with self._changed:
            return Usage(self._nbytes, len(self._sizes), self._limit)

    def knows(self, name: bytes) -> bool:
        """Whether the chunk counts."""
        return name in self._sizes

    @contextlib.contextmanager
    def changing(self, names: Sequence[bytes], until: float) -> Iterator[None]:
        """Keep other threads from changing these on the server meanwhile.

        All names are taken at once, so two callers can't wait for each other. Raises
        TimeoutError if another one still has some at ``until`` (``time.monotonic``).
        """
        wanted = set(names)
        with self._changed:
            while not self._busy.isdisjoint(wanted):
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    raise TimeoutError("another call still waits for the server's answer")
            self._busy |= wanted
        try:
            yield
        finally:
            with self._changed:
                self._busy -= wanted
                self._changed.notify_all()

    def reserve(self, nbytes: int) -> bool:
        """Set room aside for a chunk to come, False if there is none."""
        with self._changed:
            if self._limit is not None and self._nbytes + self._reserved + nbytes > self._limit:
                return False
            self._reserved += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give a reservation back; ``present`` counts what became of it."""
        with self._changed:
            self._reserved -= nbytes

    def present(self, name: bytes, nbytes: int, reserved: int = 0) -> None:
        """The server holds it. Called inside ``changing``.

        ``reserved`` is given back in the same step, so that no byte counts twice.
        """
        with self._changed:
            self._reserved -= reserved
            self._note(name, nbytes)

    def absent(self, name: bytes) -> None:
        """The server does not hold it (any more). Called inside ``changing``."""
        with self._changed:
            self._note(name, None)

    @contextlib.contextmanager
    def scanning(self) -> Iterator[ShardedDict[bytes, int]]:
        """Replace what is known by what the caller puts into the map, name to size.

        Leave it with an exception and all stays as it is.
        """
        found: ShardedDict[bytes, int] = ShardedDict()
        with self._scanning:
            with self._changed:
                self._since = {}
            try:
                yield found
                with self._changed:
                    before = self._sizes
                    self._settle(found, self._since)
                # Step by step, as other threads wait for the interpreter while it frees.
                for _ in before.give_back():
                    pass
            finally:
                with self._changed:
                    self._since = None

    def _settle(self, found: ShardedDict[bytes, int], since: dict[bytes, int | None]) -> None:
        for name, nbytes in since.items():
            if nbytes is None:
                found.pop(name, 0)
            else:
                found[name] = nbytes
        self._sizes = found
        self._nbytes = sum(sum(piece.values()) for piece in found.pieces())

    def _note(self, name: bytes, nbytes: int | None) -> None:
        if self._since is not None:
            self._since[name] = nbytes
        self._nbytes -= self._sizes.pop(name, 0)
        if nbytes is not None:
            self._sizes[name] = nbytes
            self._nbytes += nbytes
