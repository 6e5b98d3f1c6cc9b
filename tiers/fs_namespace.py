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

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from itertools import islice
from typing import Any, Protocol

from kvtiers.tiers.base import Namespace
from kvtiers.tiers.fs_files import reading
from kvtiers.tiers.fs_layout import Layout, is_namespace, private_folder, refuse_link

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
"""Of a file of facts that is read. Real ones take a few KiB."""

# Characters of a fact in the log.
_MOST_TOLD = 200
# Namespaces that are looked at for the newest: a ``stat`` each.
_MOST_DATED = 1000


def explain_mismatch(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Name each fact that differs, one a line; "" if none does."""
    lines = []
    for name in sorted(stored.keys() | current.keys()):
        if name not in current:
            lines.append(f"  {_named(name)}: stored {_told(stored[name])}, unknown here")
        elif name not in stored:
            lines.append(f"  {name}: not stored, here {_told(current[name])}")
        elif stored[name] != current[name]:
            lines.append(f"  {name}: stored {_told(stored[name])}, here {_told(current[name])}")
    return "\n".join(lines)


def _told(value: object) -> str:
    """A fact for the log. Who wrote it may mean harm: it is one line, and a short one."""
    try:
        text = repr(value)
    except RecursionError:
        text = "(nested too deeply)"
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."


def _named(name: str) -> str:
    return name if name.isprintable() and len(name) <= _MOST_TOLD else _told(name)


class FactsFiles(Protocol):
    """Where the facts of namespaces lie: one small file each."""

    def guard(self, namespace_id: str) -> None:
        """Raise OSError if the namespace's folder is none that may be used."""

    def where(self, namespace_id: str) -> str:
        """The file, for humans."""

    def load(self, namespace_id: str) -> bytes:
        """The file's content, or its first ``MOST_BYTES`` and one more.

        Raises FileNotFoundError if there is none, OSError if it can't be read, ValueError
        if what lies there is no file.
        """

    def store(self, namespace_id: str, content: bytes) -> None:
        """Make or replace the file, as one step. Raises OSError."""

    def newest(self, most: int) -> list[str]:
        """Ids of so many namespaces at most, the last made first as far as that can be told.

        Raises OSError.
        """


class NamespaceBook:
    """Decides once per namespace whether its folder may be used.

    A namespace without facts is one whose id is all that the caller knows (found
    by a scan): it is neither compared nor written.

    Args:
        files: where each namespace's facts lie.

    """

    def __init__(self, files: FactsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._seen: dict[str, Namespace] = {}
        self._accepted: dict[str, bool] = {}

    def known(self, namespace_id: str) -> Namespace:
        """The namespace as callers gave it, or a bare one if none did."""
        return self._seen.get(namespace_id) or Namespace(namespace_id)

    def newest(self, most: int) -> list[Namespace]:
        """See ``Tier.namespaces``. Leaves out whose facts can't be read. Raises OSError."""
        found = []
        for namespace_id in self._files.newest(most):
            with contextlib.suppress(OSError, ValueError):
                facts = facts_of(self._files.load(namespace_id))
                found.append(Namespace(namespace_id, facts))
        return found

    def accepts(self, namespace: Namespace, *, create: bool = False) -> bool:
        """Whether the facts that are stored are those of ``namespace``.

        Where none are stored the answer is True, and with ``create`` they are
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
        facts = _plain(namespace.facts)
        differences = ""
        self._files.guard(namespace.id)
        try:
            if facts:
                differences = explain_mismatch(facts_of(self._files.load(namespace.id)), facts)
        except FileNotFoundError:
            if not create:
                # Left open: another engine may write its facts before we write ours.
                return True
            self._files.store(namespace.id, _written(facts))
        except (OSError, ValueError) as reason:
            self._renew(namespace.id, facts, reason)
        self._accepted[namespace.id] = not differences
        if differences:
            logger.warning(
                "KV under %s is not used: its facts differ from this engine's though the "
                "namespace has the same id.\n%s\nMove the folder away to cache anew.",
                os.path.dirname(self._files.where(namespace.id)),
                differences,
            )
        return not differences

    def _renew(self, namespace_id: str, facts: Mapping[str, Any], reason: Exception) -> None:
        """Replace what lies there, and say why.

        Raises ``reason`` if that fails too and it is an OSError: then the mount may be
        at fault, and the facts may be there to compare once it is back.
        """
        path = self._files.where(namespace_id)
        try:
            self._files.store(namespace_id, _written(facts))
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


class LocalFacts:
    """``FactsFiles`` on a local or mounted path."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def guard(self, namespace_id: str) -> None:
        """See ``FactsFiles.guard``."""
        refuse_link(os.path.dirname(self.where(namespace_id)))

    def where(self, namespace_id: str) -> str:
        """See ``FactsFiles.where``."""
        return os.fspath(self._layout.facts(namespace_id))

    def load(self, namespace_id: str) -> bytes:
        """See ``FactsFiles.load``. Never waits and never follows a link, whatever lies there."""
        with reading(self.where(namespace_id)) as file:
            return file.read(MOST_BYTES + 1)

    def newest(self, most: int) -> list[str]:
        """See ``FactsFiles.newest``. A file of facts is as old as its namespace."""
        dated = []
        with os.scandir(self._layout.base) as entries:
            for entry in islice(entries, _MOST_DATED):
                if not is_namespace(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    dated.append((os.stat(self.where(entry.name)).st_mtime, entry.name))
        return [namespace_id for _, namespace_id in sorted(dated, reverse=True)[:most]]

    def store(self, namespace_id: str, content: bytes) -> None:
        """See ``FactsFiles.store``."""
        path = self.where(namespace_id)
        temporary = self._layout.temporary(namespace_id, os.path.basename(path))
        folder = os.path.dirname(temporary)
        refuse_link(folder)
        private_folder(folder)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they look after a round through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(facts), default=str))
    return plain


def facts_of(content: bytes) -> dict[str, Any]:
    """The facts in a file. Raises ValueError if it names none."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        stored = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(stored, dict) or not stored:
        raise ValueError("it names no facts")
    return stored


def _written(facts: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(facts, indent=2, sort_keys=True)}\n".encode()
