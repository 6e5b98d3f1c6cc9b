"""What is checked once, before a filesystem tier is used."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvtiers.tiers.base import TierConfigError
from kvtiers.tiers.direct_io import direct_works
from kvtiers.tiers.fs_files import FULL
from kvtiers.tiers.fs_layout import hash_of, is_chunk_folder, private_folder

logger = logging.getLogger(__name__)


def check_block_size(block_size: int, payload_bytes: int) -> None:
    """Raise TierConfigError if a file would be more padding than KV."""
    if block_size > payload_bytes:
        raise TierConfigError(
            f"The filesystem tier's 'block_size' of {block_size} bytes is more than a chunk has, "
            f"which is {payload_bytes}. Set it to at most that, or make chunks larger with "
            f"'blocks_per_chunk'."
        )


def prepare_root(root: Path, base: str, chunk_bytes: int) -> None:
    """Make ``base`` under ``root``, and raise TierConfigError if it can't hold a chunk.

    A full disk is no error where chunks of ours fill it: they serve hits, and
    evicting them makes room.
    """
    try:
        free = _free_after_trial(root, base)
    except (FileExistsError, NotADirectoryError) as error:
        raise TierConfigError(
            f"The filesystem tier's 'path' {str(root)!r} is not a folder, or lies below "
            f"something that is none ({error}). Name a folder, or a path where one can be "
            f"made."
        ) from error
    except OSError as error:
        raise TierConfigError(
            f"The filesystem tier cannot write in its 'path' {str(root)!r} ({error}). Give "
            f"this user the right to write there, or name another folder."
        ) from error
    _warn_if_exposed(root)
    if free is None or free >= chunk_bytes:
        return
    if _holds_a_chunk(base):
        logger.warning(
            "The file system of the filesystem tier's 'path' %r has %d bytes free, and one "
            "chunk takes %d. The chunks in it serve hits; new ones have to wait until some "
            "are evicted, or something else on that disk is deleted.",
            str(root),
            free,
            chunk_bytes,
        )
    else:
        raise TierConfigError(
            f"The file system of the filesystem tier's 'path' {str(root)!r} has {free} bytes "
            f"free, and one chunk takes {chunk_bytes}. Free some space (what lies in {base} "
            f"may be deleted while no engine uses it), or name a folder on another disk."
        )


def choose_direct(wanted: bool | Literal["auto"], base: str) -> bool:
    """Whether to use O_DIRECT. Raises TierConfigError if demanded and impossible."""
    if wanted is False:
        return False
    try:
        works = direct_works(Path(base))
    except OSError as error:
        if error.errno not in FULL:
            raise
        # No inode for a trial. Each file that refuses O_DIRECT later is done without.
        works = True
    if wanted is True and not works:
        raise TierConfigError(
            f"The filesystem tier's 'direct' is true, but the file system of {base} does not "
            f"take O_DIRECT. Set it to 'auto' or false, or name a 'path' on another disk."
        )
    return works


def _free_after_trial(root: Path, base: str) -> int | None:
    """``_free_bytes`` once a file could be made; 0 where it was room that lacked."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        private_folder(base)
        with tempfile.NamedTemporaryFile(dir=base, prefix="probe-"):
            pass
    except OSError as error:
        # Out of inodes or quota, which the free bytes do not show.
        if error.errno in FULL:
            return 0
        raise
    return _free_bytes(base)


def _warn_if_exposed(root: Path) -> None:
    """Tell of a root in which anybody could put another folder in place of ours."""
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        logger.warning(
            "In the filesystem tier's 'path' %r everybody may write, so anybody on this machine "
            "can plant KV there. Set its mode to 0700, or set 'encryption'.",
            str(root),
        )


def _holds_a_chunk(base: str) -> bool:
    """Whether any namespace has a chunk's file; looks no further than the first."""
    return any(
        hash_of(folder.name, found.name) is not None
        for namespace in _entries(base)
        if namespace.is_dir(follow_symlinks=False)
        for folder in _entries(namespace.path)
        if is_chunk_folder(folder.name) and folder.is_dir(follow_symlinks=False)
        for found in _entries(folder.path)
    )


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """What lies in ``folder``; nothing if it can't be listed."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _free_bytes(folder: str) -> int | None:
    """Bytes this user may still write, None where the file system does not say."""
    status = os.statvfs(folder)
    # Some FUSE file systems know no sizes and answer zero for all.
    return status.f_bavail * status.f_frsize if status.f_blocks else None
