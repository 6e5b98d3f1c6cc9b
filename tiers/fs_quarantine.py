"""Where damaged files go: aside, a few of them, for whoever asks what happened."""

from __future__ import annotations

import contextlib
import os
import stat

from kvtiers.tiers.fs_layout import Place, private_folder

# A namespace's. They lie outside of the tier's capacity, so they must be few.
_KEPT = 4


def set_aside(place: Place) -> None:
    """Move what lies there to its namespace's bad ones, or unlink it.

    Raises OSError if neither works.
    """
    bad = place.bad
    try:
        private_folder(bad)
        os.rename(place.path, f"{bad}/{place.name}")
    except OSError:
        os.unlink(place.path)
    with contextlib.suppress(OSError):
        _keep_newest(bad)


def _keep_newest(bad: str) -> None:
    """Unlink all but the last few. Folders stay: what is in them is not ours."""
    with os.scandir(bad) as entries:
        found = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
    # Renaming sets the change time, and leaves the modification time alone.
    files = sorted(
        (status.st_ctime_ns, path) for status, path in found if not stat.S_ISDIR(status.st_mode)
    )
    for _, path in files[:-_KEPT]:
        os.unlink(path)
