"""How many bytes and chunks lie under a root, kept exact beside threads and scans.

Nothing is known at the start: what earlier engines left is counted folder by
folder as a scan lists it. The difficulty is a file that comes or goes while its
folder is being listed: the listing may or may not show it. So every change is
made under its folder's lock, and while a listing runs the folder also writes
down what each change left behind; at the end that overrides what was listed.
Changes before the listing are in it, changes after it add to it, and none is
lost or counted twice. A lock is held over one rename or unlink, never over a
listing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvtiers.tiers.base import Usage


class Ledger:
    """Bytes and chunks in files, against a limit.

    Args:
        limit: bytes that files and reservations may take together, None if any.

    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._nbytes = 0
        self._chunks = 0
        self._reserved = 0
        self._folders: dict[str, Folder] = {}

    def folder(self, path: str) -> Folder:
        """The part of the ledger for the files of one folder."""
        with self._lock:
            folder = self._folders.get(path)
            if folder is None:
                folder = self._folders[path] = Folder(self)
            return folder

    def folders(self) -> list[str]:
        """Folders that anything was ever counted in."""
        with self._lock:
            return list(self._folders)

    def reserve(self, nbytes: int) -> bool:
        """Set room aside for a file to come, False if there is none.

        Give it back with ``cancel``, or let ``Folder.added`` turn it into a file.
        """
        with self._lock:
            wanted = self._nbytes + self._reserved + nbytes
            if self._limit is not None and wanted > self._limit:
                return False
            self._reserved += nbytes
            return True

    def lift(self) -> None:
        """Refuse nothing from now on: somebody else keeps the bound."""
        with self._lock:
            self._limit = None

    def cancel(self, nbytes: int) -> None:
        """Give a reservation back."""
        with self._lock:
            self._reserved -= nbytes

    def usage(self) -> Usage:
        """What is known. Never negative, though before a scan the sums can be:
        files that were never counted may have been removed.
        """
        with self._lock:
            return Usage(max(0, self._nbytes), max(0, self._chunks), self._limit)

    def shift(self, nbytes: int, chunks: int, reserved: int = 0) -> None:
        """Move the sums by so much, in one step as others see it."""
        with self._lock:
            self._nbytes += nbytes
            self._chunks += chunks
            self._reserved += reserved


class Folder:
    """Counts the files of one folder. Made by ``Ledger.folder``.

    ``added`` and ``removed`` are called with ``lock`` held, together with the
    rename or unlink that they report.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.lock = threading.Lock()
        self._ledger = ledger
        self._nbytes = 0
        self._chunks = 0
        # Name to size, None for gone: changes since the running listing began.
        self._changed: dict[str, int | None] | None = None
        self._listing = threading.Lock()

    def added(self, name: str, nbytes: int) -> None:
        """A file of a reserved size came into being."""
        self._note(name, nbytes)
        self._count(nbytes, 1, reserved=-nbytes)

    def removed(self, name: str, nbytes: int) -> None:
        """A file went."""
        self._note(name, None)
        self._count(-nbytes, -1)

    @contextlib.contextmanager
    def listing(self) -> Iterator[dict[str, int]]:
        """Replace the counts by what the caller puts into the dict, name to size.

        Leave it with an exception and the counts stay as they are.
        """
        listed: dict[str, int] = {}
        with self._listing:
            with self.lock:
                self._changed = {}
            try:
                yield listed
                with self.lock:
                    self._settle(listed, self._changed)
            finally:
                with self.lock:
                    self._changed = None

    def _settle(self, listed: dict[str, int], changed: dict[str, int | None]) -> None:
        for name, nbytes in changed.items():
            if nbytes is None:
                listed.pop(name, None)
            else:
                listed[name] = nbytes
        self._count(sum(listed.values()) - self._nbytes, len(listed) - self._chunks)

    def _note(self, name: str, nbytes: int | None) -> None:
        if self._changed is not None:
            self._changed[name] = nbytes

    def _count(self, nbytes: int, chunks: int, reserved: int = 0) -> None:
        self._nbytes += nbytes
        self._chunks += chunks
        self._ledger.shift(nbytes, chunks, reserved)
