"""Chunks that lie in a tier and are none of this engine's to read.

They are encrypted with a key that it lacks, or are not encrypted where it must be. Other
engines may read them well: while a fleet is being switched to encryption or to another
key, both kinds run. So they are left alone at first. After a while, who made them has
either gone or is a fleet of its own, and this engine stores its own chunks in their
place. Two fleets that should not share a tier then take each other's chunks away, but each
no more often than that; and the log of both says so.
"""

from __future__ import annotations

import threading
import time

from kvtiers.tiers.base import ChunkKey

GRACE_SECONDS = 600.0
"""How long after it was made a chunk is left alone."""

# A lookup that says no for so long, so that its chunk is not read in vain by each request.
_AGAIN_SECONDS = 60.0
_MOST_REMEMBERED = 65536


class Unreadable:
    """What this engine found and could not read, the last so many. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Until when lookups say no, and since when a write may take the place.
        self._found: dict[ChunkKey, tuple[float, float]] = {}

    def add(self, key: ChunkKey, created: float) -> None:
        """A chunk of that name, made at ``created`` by its own words, can't be read."""
        now = time.time()
        # A clock that is ahead, or a lie, must not keep the place for ever.
        free = min(created, now) + GRACE_SECONDS
        with self._lock:
            self._found[key] = (max(free, now + _AGAIN_SECONDS), free)
            if len(self._found) > _MOST_REMEMBERED:
                del self._found[next(iter(self._found))]

    def discard(self, key: ChunkKey) -> None:
        """The place has another chunk now, or none."""
        if key in self._found:
            with self._lock:
                self._found.pop(key, None)

    def hides(self, key: ChunkKey) -> bool:
        """Whether a lookup should say no without asking."""
        found = self._found.get(key)
        return found is not None and time.time() < found[0]

    def may_replace(self, key: ChunkKey) -> bool:
        """Whether a write must take the place of what lies there."""
        found = self._found.get(key)
        return found is not None and time.time() >= found[1]

    def must_leave(self, key: ChunkKey) -> bool:
        """Whether a write must leave what lies there."""
        found = self._found.get(key)
        return found is not None and time.time() < found[1]
