"""The facts of each namespace, spelled out beside its chunks.

A namespace's id is a digest of its facts, so equal ids mean equal facts unless
something went wrong: a fact that was forgotten in the digest, a folder copied
under another name, an edited file. Then the bytes can't be trusted, and the
namespace is refused with a text that names each difference.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtiers.tiers.base import Namespace
from kvtiers.tiers.fs_layout import Layout, private_folder

logger = logging.getLogger(__name__)


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
        written. Raises OSError if they can't be read or written.
        """
        accepted = self._accepted.get(namespace.id)
        if accepted is not None:
            return accepted
        with self._lock:
            self._seen[namespace.id] = namespace
            return self._decide(namespace, create)

    def _decide(self, namespace: Namespace, create: bool) -> bool:
        path = self._layout.facts(namespace.id)
        facts = _plain(namespace.facts)
        stored = _load(path) if facts else facts
        if stored is None:
            if not create and not path.exists():
                # Left open: another engine may write its facts before we write ours.
                return True
            _store(path, self._layout.temporary(namespace.id, path.name), facts)
            stored = facts
        differences = explain_mismatch(stored, facts)
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


def _load(path: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        # The id still vouches for the facts; the file is for humans.
        logger.warning("%s is damaged and will be written anew.", path)
        return None
    return stored


def _store(path: Path, temporary: str, facts: Mapping[str, Any]) -> None:
    private_folder(os.path.dirname(temporary))
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
