"""The files at chunks' places: given their names, deleted, set aside.

Each is one step with its count, for this process: whoever else holds the folder's lock
finds the file and the ledger agreed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from kvtiers.tiers.fs_layout import Place, private_folder
from kvtiers.tiers.fs_ledger import Ledger
from kvtiers.tiers.fs_quarantine import Stuck, set_aside


class ChunkFiles:
    """What lies at the places of one root's chunks. Any thread may call.

    Attributes:
        stuck: paths where the next write replaces what lies there.

    Args:
        ledger: counts the files.
        log: told what could not be done, and why.

    """

    def __init__(self, ledger: Ledger, log: Callable[[str, OSError], None]) -> None:
        self._ledger = ledger
        self._log = log
        self.stuck = Stuck()

    def publish(self, temporary: str, place: Place, nbytes: int) -> bool:
        """Give a file its name and count it; False if another has it. Raises OSError.

        Asking first keeps the count exact, and a name that is free takes a rename
        1.4 times as fast as one that is taken. Only what is known to be no chunk
        is replaced.
        """
        folder = self._ledger.folder(place.folder)
        with folder.lock:
            found = _status(place.path)
            if found is not None and place.path not in self.stuck:
                return False
            try:
                os.rename(temporary, place.path)
            except FileNotFoundError:
                private_folder(place.folder)
                os.rename(temporary, place.path)
            self.stuck.discard(place.path)
            if found is not None:
                self._uncount(place, found)
            folder.added(place.name, nbytes)
        return True

    def remove(self, place: Place) -> bool:
        """Delete the chunk's file; False if there was none, or it can't be."""
        folder = self._ledger.folder(place.folder)
        with folder.lock:
            try:
                place.refuse_links()
                found = os.lstat(place.path)
                os.unlink(place.path)
            except FileNotFoundError:
                return False
            except OSError as error:
                self._log("remove", error)
                return False
            return self._uncount(place, found)

    def quarantine(self, place: Place, expected: os.stat_result | None = None) -> bool:
        """Move what lies at ``place`` to the bad ones, unlink it if that fails.

        If that fails too, the answer is False and the next write replaces it. Does
        nothing if it is no longer ``expected``: another thread may have dealt with it,
        and stored the chunk anew.
        """
        folder = self._ledger.folder(place.folder)
        try:
            with folder.lock:
                found = os.lstat(place.path)
                if expected is not None and not os.path.samestat(found, expected):
                    return True
                set_aside(place)
                self.stuck.discard(place.path)
                self._uncount(place, found)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.stuck.add(place.path)
            self._log("quarantine", error)
            return False
        return True

    def _uncount(self, place: Place, found: os.stat_result) -> bool:
        """Take a file off the ledger; False for what was never on it."""
        if not stat.S_ISREG(found.st_mode):
            return False
        self._ledger.folder(place.folder).removed(place.name, found.st_size)
        return True


def _status(path: str) -> os.stat_result | None:
    """None if nothing lies there, or the system does not say."""
    with contextlib.suppress(OSError):
        return os.lstat(path)
    return None
