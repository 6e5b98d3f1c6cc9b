"""Comparing a root with its index, folder by folder; and sweeping what writers left.

Done whole when there is nothing else to start from (a root of an earlier release, a
snapshot that was deleted), and slowly, once a day, against all that a log can't know:
files that were copied in or deleted by hand, or written by a release that keeps no log.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtiers.tiers.fs_layout import (
    TEMPORARY,
    Layout,
    hash_of,
    is_chunk_folder,
    is_namespace,
)
from kvtiers.tiers.fs_scan import sweep_orphans

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listed:
    """One folder of chunks.

    Attributes:
        namespace: whose.
        first_byte: of the hashes in it.
        path: where it lies.
        entries: hash and directory entry of every file that is named as a chunk.

    """

    namespace: str
    first_byte: int
    path: str
    entries: dict[bytes, os.DirEntry[str]] = field(default_factory=dict)

    def status(self, digest: bytes) -> tuple[int, float] | None:
        """Size and modification time of a chunk's file, None if it is none (any more)."""
        try:
            status = self.entries[digest].stat(follow_symlinks=False)
        except OSError:
            return None
        return (status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None


def namespaces(layout: Layout) -> list[str]:
    """Ids of the namespaces there are folders of. Raises OSError."""
    with os.scandir(layout.base) as entries:
        return sorted(
            entry.name
            for entry in entries
            if is_namespace(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def folders(layout: Layout) -> Iterator[Listed]:
    """Every folder of chunks, listed when it is its turn. Raises OSError.

    One that this user may not list is left out: its chunks can't be served, nor counted.
    """
    for namespace in namespaces(layout):
        root = f"{layout.base}/{namespace}"
        for folder in _entries(root):
            if is_chunk_folder(folder.name) and folder.is_dir(follow_symlinks=False):
                listed = Listed(namespace, int(folder.name, 16), folder.path)
                for entry in _entries(folder.path):
                    digest = hash_of(folder.name, entry.name)
                    if digest is not None:
                        listed.entries[digest] = entry
                yield listed


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        logger.warning("Cannot list %s, what it holds is not counted: %s", folder, error)
        return []


def sweep(layout: Layout) -> None:
    """Delete temporary files of writers that died, in every namespace. Raises OSError."""
    for namespace in namespaces(layout):
        folder = f"{layout.base}/{namespace}/{TEMPORARY}"
        if not os.path.islink(folder) and os.path.isdir(folder):
            sweep_orphans(folder)
