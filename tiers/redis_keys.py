"""The names under which a Redis tier keeps things, readable for who looks with redis-cli.

- ``{prefix}v1:{namespace}:{hash in hex}``: a chunk;
- ``{prefix}v1:{namespace}:about``: what the namespace stands for, as JSON;
- ``{prefix}probe``: written at start for a second, to see that it works.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvtiers.tiers.base import ChunkKey
from kvtiers.tiers.format import MAX_HASH_BYTES

ABOUT = b"about"

_VERSION = b"v1:"
_SPECIAL = re.compile(rb"([\\*?\[\]^-])")
_HASH = re.compile(rb"(?:[0-9a-f]{2}){1,%d}" % MAX_HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Found:
    """What a key of ours is about.

    Attributes:
        namespace: id of the namespace.
        hash: of the chunk; None for what is neither a chunk nor ``ABOUT``.
        about: whether it holds the namespace's facts.

    """

    namespace: str
    hash: bytes | None
    about: bool = False


class Keys:
    """Names for the chunks below one prefix."""

    def __init__(self, prefix: str) -> None:
        self._base = prefix.encode() + _VERSION
        self.probe = prefix.encode() + b"probe"

    @property
    def pattern(self) -> bytes:
        """For ``SCAN``: everything below the prefix, and nothing that a '*' in it would match."""
        return _SPECIAL.sub(rb"\\\1", self._base) + b"*"

    @property
    def abouts(self) -> bytes:
        """For ``SCAN``: the facts of namespaces alone."""
        return self.pattern + b":" + ABOUT

    def chunk(self, key: ChunkKey) -> bytes:
        """Where a chunk lies."""
        return self._base + key.namespace.id.encode() + b":" + key.hash.hex().encode()

    def about(self, namespace_id: str) -> bytes:
        """Where the facts of a namespace lie. No hash in hex reads like that."""
        return self._base + namespace_id.encode() + b":" + ABOUT

    def parse(self, name: bytes) -> Found:
        """What lies under ``name``, which matches ``pattern``."""
        namespace, _, last = name.removeprefix(self._base).rpartition(b":")
        # An id that is no ASCII is none of ours, and its key could not be written again.
        ours = bool(namespace) and namespace.isascii()
        digest = bytes.fromhex(last.decode()) if ours and _HASH.fullmatch(last) else None
        return Found(namespace.decode(errors="replace"), digest, last == ABOUT)
