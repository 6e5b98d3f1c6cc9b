"""The facts of each namespace, spelled out beside its chunks.

A namespace's id is a digest of its facts, so equal ids mean equal facts unless
something went wrong: a fact that was forgotten in the digest, a folder copied
under another name, an edited file. Then the bytes can't be trusted, and the
namespace is refused with a text that names each difference.

Where the file names no facts at all (damaged, no file, unreadable) the id still
vouches for them, and each chunk's own metadata is bound to the id: the file is
written anew, for humans, and the chunks are used.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtiers.tiers.base import Namespace
from kvtiers.tiers.fs_layout import Layout, private_folder, refuse_link

logger = logging.getLogger(__name__)

# Real ones take a few KiB.
_MOST_BYTES = 1 << 20


def explain_mismatch(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Name each fact that differs, one a line; "" if none does."""
    lines = []
    for name in sorted(stored.keys() | current.keys()):
        if name not in current:
            lines.append(f"  {name}: stored {stored[name]!r}, unknown here")
        elif name not in stored:
            lines.append(f"  {name}: not stored, here {current[name]!r}")
        elif stored[name] != current[name]:
            lines.append(f"  {name}: stored {stored[name]!r}, here {current[name]!r}")
    return "\n".join(lines)


class NamespaceBook:
    """Decides once per namespace whether its folder may be used.

    A namespace without facts is one whose id is all that the caller knows (found
    by a scan): it is neither compared nor written.

    Args:
        layout: where each namespace's facts lie.

    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._seen: dict[str, Namespace] = {}
        self._accepted: dict[str, bool] = {}

    def known(self, namespace_id: str) -> Namespace:
        """The namespace as callers gave it, or a bare one if none did."""
        return self._seen.get(namespace_id) or Namespace(namespace_id)

    def accepts(self, namespace: Namespace, *, create: bool = False) -> bool:
        """Whether the facts on disk are those of ``namespace``.

        Without facts on disk the answer is True, and with ``create`` they are
        written. Damaged ones are written anew. Raises OSError if they can be
        neither read nor written.
        """
        accepted = self._accepted.get(namespace.id)
        if accepted is not None:
            return accepted
        with self._lock:
            self._seen[namespace.id] = namespace
            return self._decide(namespace, create)

    def _decide(self, namespace: Namespace, create: bool) -> bool:
        path = self._layout.facts(namespace.id)
        temporary = self._layout.temporary(namespace.id, path.name)
        facts = _plain(namespace.facts)
        differences = ""
        refuse_link(str(path.parent))
        try:
            if facts:
                differences = explain_mismatch(_load(path), facts)
        except FileNotFoundError:
            if not create:
                # Left open: another engine may write its facts before we write ours.
                return True
            _store(path, temporary, facts)
        except (OSError, ValueError, RecursionError) as reason:
            _renew(path, temporary, facts, reason)
        self._accepted[namespace.id] = not differences
        if differences:
            logger.warning(
                "KV under %s is not used: its facts differ from this engine's though the "
                "namespace has the same id.\n%s\nMove the folder away to cache anew.",
                path.parent,
                differences,
            )
        return not differences


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they look after a round through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(facts), default=str))
    return plain


def _load(path: Path) -> dict[str, Any]:
    """The facts on disk.

    Never waits and never follows a link, whatever lies there. Raises OSError if it
    can't be read, ValueError or RecursionError if it names no facts.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    # Not ``fdopen`` at once: it raises what an unreadable file would, for a folder.
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            stored = json.loads(file.read(_MOST_BYTES))
    finally:
        os.close(descriptor)
    if not isinstance(stored, dict) or not stored:
        raise ValueError("it names no facts")
    return stored


def _renew(path: Path, temporary: str, facts: Mapping[str, Any], reason: Exception) -> None:
    """Replace what lies at ``path``, and say why.

    Raises ``reason`` if that fails too and it is an OSError: then the mount may be
    at fault, and the facts may be there to compare once it is back.
    """
    try:
        _store(path, temporary, facts)
    except OSError as failure:
        if isinstance(reason, OSError):
            raise reason from failure
        logger.warning(
            "%s is damaged (%s) and cannot be written anew (%s). The chunks beside it are "
            "used, as each names its namespace itself.",
            path,
            reason,
            failure,
        )
    else:
        logger.warning("%s was damaged (%s) and has been written anew.", path, reason)


def _store(path: Path, temporary: str, facts: Mapping[str, Any]) -> None:
    folder = os.path.dirname(temporary)
    refuse_link(folder)
    private_folder(folder)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
