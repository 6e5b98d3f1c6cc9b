"""The facts of each namespace, spelled out in a key beside its chunks.

As ``fs_namespace`` does for files, and for the same reasons: equal ids mean equal
facts, and where they don't, the bytes can't be trusted.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtiers.tiers.base import Namespace
from kvtiers.tiers.fs_namespace import explain_mismatch
from kvtiers.tiers.redis_keys import Keys
from kvtiers.tiers.redis_protocol import ReplyError

if TYPE_CHECKING:
    from kvtiers.tiers.redis_client import Session

logger = logging.getLogger(__name__)


class AboutBook:
    """Decides once per namespace whether its chunks may be used.

    A namespace without facts is one whose id is all that the caller knows (found by a
    scan): it is neither compared nor written.

    Args:
        keys: where each namespace's facts lie.
        lasting: what a ``SET`` ends with, such as the TTL.

    """

    def __init__(self, keys: Keys, lasting: tuple[bytes, ...]) -> None:
        self._keys = keys
        self._lasting = lasting
        self._lock = threading.Lock()
        self._seen: dict[str, Namespace] = {}
        self._accepted: dict[str, bool] = {}

    def seen(self, namespace_id: str) -> bool:
        """Whether callers gave the namespace."""
        return namespace_id in self._seen

    def known(self, namespace_id: str) -> Namespace:
        """The namespace as callers gave it, or a bare one if none did."""
        return self._seen.get(namespace_id) or Namespace(namespace_id)

    def accepts(self, session: Session, namespace: Namespace, *, create: bool = False) -> bool:
        """Whether the facts on the server are those of ``namespace``.

        Without facts there the answer is True, and with ``create`` they are written.
        What names no facts is written anew. Raises what ``session`` does.
        """
        accepted = self._accepted.get(namespace.id)
        if accepted is not None:
            return accepted
        with self._lock:
            self._seen[namespace.id] = namespace
        if not namespace.facts:
            self._accepted[namespace.id] = True
            return True
        return self._decide(session, namespace, create)

    def _decide(self, session: Session, namespace: Namespace, create: bool) -> bool:
        name = self._keys.about(namespace.id)
        facts = json.loads(json.dumps(dict(namespace.facts), default=str))
        [reply] = session.ask([[b"GET", name]])
        stored = facts_in(reply)
        if stored is None:
            if not create:
                # Left open: another engine may write its facts before we write ours.
                return True
            text = json.dumps(facts, indent=2, sort_keys=True).encode()
            session.ask([[b"SET", name, text, *self._lasting]])
        differences = "" if stored is None else explain_mismatch(stored, facts)
        self._accepted[namespace.id] = not differences
        if differences:
            logger.warning(
                "KV under %s is not used: its facts differ from this engine's though the "
                "namespace has the same id.\n%s\nDelete the namespace's keys to cache anew.",
                name.decode(),
                differences,
            )
        return not differences


def facts_in(reply: object) -> Mapping[str, Any] | None:
    """The facts in the reply to a ``GET``, None if it names none. Raises other errors."""
    if isinstance(reply, ReplyError) and reply.code != "WRONGTYPE":
        raise reply
    try:
        stored = json.loads(reply) if isinstance(reply, bytes) else None
    except (ValueError, RecursionError):
        return None
    return stored if isinstance(stored, dict) and stored else None
