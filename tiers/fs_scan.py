"""Lists what lies in a filesystem tier, and brings its accounting up to date.

Names and sizes only: no file is opened, so whether a chunk is whole is found out
when it is read. One folder is in memory at a time, and its count is settled
before its entries are given out, so that a scan may be abandoned anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator

from kvtiers.tiers.base import ChunkKey, Entry
from kvtiers.tiers.fs_layout import (
    BAD,
    FACTS,
    KEEPING,
    TEMPORARY,
    Layout,
    hash_of,
    is_chunk_folder,
)
from kvtiers.tiers.fs_ledger import Ledger
from kvtiers.tiers.fs_namespace import NamespaceBook

logger = logging.getLogger(__name__)

# No write takes as long; what is older was left by a writer that died.
_ORPHAN_SECONDS = 3600


class Scanner:
    """Walks the root of one tier; see ``Tier.scan``."""

    def __init__(self, layout: Layout, ledger: Ledger, namespaces: NamespaceBook) -> None:
        self._layout = layout
        self._ledger = ledger
        self._namespaces = namespaces

    def scan(self) -> Iterator[Entry]:
        """Every chunk of every namespace, and what is no chunk with key None."""
        listed = set()
        for namespace in _list_or_warn(self._layout.base):
            if namespace.name == KEEPING:
                continue
            if not namespace.is_dir(follow_symlinks=False):
                yield from _strangers([namespace])
                continue
            for found in _list_or_warn(namespace.path):
                if is_chunk_folder(found.name) and found.is_dir(follow_symlinks=False):
                    listed.add(found.path)
                    yield from self._chunks(found.path)
                else:
                    yield from _other(found)
        # Folders that appeared since, and folders that somebody deleted.
        for folder in self._ledger.folders():
            if folder not in listed:
                yield from self._chunks(folder)

    def _chunks(self, folder: str) -> list[Entry]:
        """The entries of one folder of chunks; settles its count first."""
        parent, folder_name = os.path.split(folder)
        namespace = self._namespaces.known(os.path.basename(parent))
        entries = []
        try:
            with self._ledger.folder(folder).listing() as counted:
                # What is behind a link is not ours: nothing of ours is left here.
                linked = os.path.islink(parent) or os.path.islink(folder)
                for found in [] if linked else _list(folder):
                    status = _status(found)
                    if status is None:
                        continue
                    regular = stat.S_ISREG(status.st_mode)
                    digest = hash_of(folder_name, found.name) if regular else None
                    key = None if digest is None else ChunkKey(namespace, digest)
                    entries.append(_entry(key, found, status))
                    if key is not None:
                        counted[found.name] = status.st_size
        except OSError as error:
            logger.warning("Cannot list %s, its chunks stay unknown: %s", folder, error)
            return []
        return entries


def _other(found: os.DirEntry[str]) -> Iterator[Entry]:
    """What a namespace's folder holds beside chunks."""
    folder = found.is_dir(follow_symlinks=False)
    if folder and found.name == TEMPORARY:
        sweep_orphans(found.path)
    elif folder and found.name == BAD:
        yield from _strangers(_list_or_warn(found.path))
    elif found.name != FACTS:
        yield from _strangers([found])


def _strangers(entries: list[os.DirEntry[str]]) -> Iterator[Entry]:
    for found in entries:
        status = _status(found)
        if status is not None:
            yield _entry(None, found, status)


def _entry(key: ChunkKey | None, found: os.DirEntry[str], status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, status.st_mtime, found.path)


def sweep_orphans(folder: str) -> None:
    """Delete temporary files that no writer works on any more."""
    oldest = time.time() - _ORPHAN_SECONDS
    for found in _list_or_warn(folder):
        status = _status(found)
        if status is not None and status.st_mtime < oldest:
            with contextlib.suppress(OSError):
                os.unlink(found.path)


def _status(found: os.DirEntry[str]) -> os.stat_result | None:
    """None if it is gone since it was listed."""
    try:
        return found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _list(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, none if it is gone. Raises OSError otherwise."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _list_or_warn(folder: str) -> list[os.DirEntry[str]]:
    try:
        return _list(folder)
    except OSError as error:
        logger.warning("Cannot list %s, what it holds stays unknown: %s", folder, error)
        return []
