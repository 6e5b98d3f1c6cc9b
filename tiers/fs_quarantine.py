"""What becomes of damaged files.

They go aside, a few of them, for whoever asks what happened. Those that can
neither be read nor moved are remembered, so that a write replaces them and does
not take them for the chunk.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading

from kvtiers.tiers.fs_layout import Place, private_folder, refuse_link

# A namespace's. They lie outside of the tier's capacity, so they must be few.
_KEPT = 4
# A mount that fails as a whole makes every chunk of it one of these.
_MOST_REMEMBERED = 4096


class Stuck:
    """Paths whose file is of no use and could not be moved away; the last so many.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[str, None] = {}

    def __contains__(self, path: str) -> bool:
        """Whether a write has to replace what lies there."""
        return path in self._paths

    def add(self, path: str) -> None:
        """Remember it, and forget the oldest if there are too many."""
        with self._lock:
            self._paths[path] = None
            if len(self._paths) > _MOST_REMEMBERED:
                del self._paths[next(iter(self._paths))]

    def discard(self, path: str) -> None:
        """It was replaced, moved, or read after all."""
        if path in self._paths:
            with self._lock:
                self._paths.pop(path, None)


def set_aside(place: Place) -> None:
    """Move what lies there to its namespace's bad ones, or unlink it.

    Raises OSError if neither works.
    """
    place.refuse_links()
    bad = place.bad
    try:
        refuse_link(bad)
        private_folder(bad)
        os.rename(place.path, f"{bad}/{place.name}")
    except OSError:
        os.unlink(place.path)
        return
    with contextlib.suppress(OSError):
        _keep_newest(bad)


def _keep_newest(bad: str) -> None:
    """Remove all but the last few. Folders with something in them stay: that is not ours."""
    with os.scandir(bad) as entries:
        found = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
    # Renaming sets the change time, and leaves the modification time alone.
    found.sort(key=lambda one: one[0].st_ctime_ns)
    for status, path in found[:-_KEPT]:
        # Another engine may have removed it meanwhile.
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(path)
            else:
                os.unlink(path)
