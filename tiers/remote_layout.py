"""Where things lie below the root of a remote filesystem tier: as in ``fs_layout``.

So a root can be copied between a disk and a bucket, and is used there.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from kvtiers.tiers.base import ChunkKey
from kvtiers.tiers.fs_layout import TEMPORARY, Layout


class RemoteLayout(Layout):
    """Paths under one root.

    Args:
        root: in the filesystem.

    """

    def __init__(self, root: str) -> None:
        super().__init__(Path(root))

    def temporary_for(self, path: str) -> str:
        """A path that nobody else uses, for what will lie at ``path`` in a namespace."""
        namespace_id = path.removeprefix(f"{self.base}/").partition("/")[0]
        return f"{self.base}/{namespace_id}/{TEMPORARY}/{_dated(path.rpartition('/')[2])}"

    def trial(self) -> str:
        """A file to try the store with, beside no other; swept like a temporary one."""
        return f"{self.base}/{TEMPORARY}/{_dated('trial')}"


def begun_at(name: str) -> float | None:
    """Seconds since the epoch at which a temporary file was begun, None for another one."""
    parts = name.rsplit(".", 2)
    return float(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else None


def name_of(key: ChunkKey) -> bytes:
    """What the ledger calls a chunk."""
    return key.namespace.id.encode() + b"/" + key.hash


def _dated(name: str) -> str:
    return f"{name}.{int(time.time())}.{secrets.token_hex(8)}"
