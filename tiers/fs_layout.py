"""Where things lie in a filesystem tier, and what a name means.

    ROOT/v1/<namespace id>/namespace.json      the namespace's facts, for humans
                           ab/ab12….kv         chunks, by the hash's first byte
                           tmp/                files being written
                           bad/                the last few damaged files
            .keeping/                          who keeps the root's bound, and what for

256 folders a namespace: a million chunks are 4,000 a folder, which file systems
still list fast, and a scan never holds more than one folder in memory. Paths are
strings and not ``Path`` objects: a lookup builds thousands a second.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from kvtiers.tiers.base import ALIGNMENT, ChunkKey
from kvtiers.tiers.format import MAX_HASH_BYTES, MAX_NAMESPACE_BYTES

FACTS = "namespace.json"
KEEPING = ".keeping"
TEMPORARY = "tmp"
BAD = "bad"

_SUFFIX = ".kv"


class Place(NamedTuple):
    """The file of one chunk."""

    folder: str
    name: str

    @property
    def path(self) -> str:
        """The whole path."""
        return f"{self.folder}/{self.name}"

    @property
    def bad(self) -> str:
        """Where its namespace's damaged files go."""
        return f"{os.path.dirname(self.folder)}/{BAD}"

    def refuse_links(self) -> None:
        """See ``refuse_link``; for the folder and its namespace's."""
        refuse_link(os.path.dirname(self.folder))
        refuse_link(self.folder)


class Layout:
    """Paths under one root."""

    def __init__(self, root: Path) -> None:
        self.base = os.fspath(root / "v1")
        # No namespace has such an id.
        self.keeping = f"{self.base}/{KEEPING}"

    def place(self, key: ChunkKey) -> Place:
        """Where the chunk lies."""
        name = key.hash.hex()
        return Place(f"{self.base}/{key.namespace.id}/{name[:2]}", name + _SUFFIX)

    def facts(self, namespace_id: str) -> Path:
        """Where the namespace's facts lie."""
        return Path(self.base, namespace_id, FACTS)

    def temporary(self, namespace_id: str, name: str) -> str:
        """A path that nobody else uses, on any host that mounts the same root."""
        unique = f"{name}.{os.getpid()}.{secrets.token_hex(8)}"
        return f"{self.base}/{namespace_id}/{TEMPORARY}/{unique}"


def padded(nbytes: int, block_size: int) -> int:
    """The next multiple of the block size."""
    return -(-nbytes // block_size) * block_size


def sizes_of_files(whole_bytes: int, max_block_size: int) -> frozenset[int]:
    """How long the file of a chunk may be, padded with whatever block size."""
    powers = range(ALIGNMENT.bit_length() - 1, max_block_size.bit_length())
    return frozenset(padded(whole_bytes, 1 << power) for power in powers)


def is_chunk_folder(name: str) -> bool:
    """Whether a folder of that name in a namespace holds chunks."""
    return len(name) == 2 and _hash(name) is not None


def hash_of(folder_name: str, name: str) -> bytes | None:
    """The hash that a file's name spells, None if it is no chunk's name."""
    stem = name.removesuffix(_SUFFIX)
    digest = _hash(stem)
    if stem == name or digest is None or not stem.startswith(folder_name):
        return None
    return digest if len(digest) <= MAX_HASH_BYTES else None


def _hash(text: str) -> bytes | None:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    # ``fromhex`` takes capitals and spaces too; we never write them.
    return digest if digest.hex() == text else None


def is_namespace(name: object) -> bool:
    """Whether it can be a namespace's id: the name of one folder, and of none of our own."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAMESPACE_BYTES
        and name.isascii()
        and name.isprintable()
        and "/" not in name
        and name not in (".", "..", KEEPING)
    )


def refuse_link(folder: str) -> None:
    """Raise NotADirectoryError if a link lies in the place of a folder of ours.

    What is behind it is not ours: nothing may be written, moved or deleted there.
    The root itself may be a link, as its user chose it.
    """
    if os.path.islink(folder):
        raise NotADirectoryError(errno.ENOTDIR, "A link lies in a folder's place", folder)


def private_folder(path: str) -> None:
    """Make a folder and what is missing above it, for the owner only.

    The mode is given to every folder made: ``os.makedirs`` gives it to the last
    one only, and KV is its user's text.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent not in ("", path):
        private_folder(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        # Another thread or engine was faster, or it is no folder.
        if not os.path.isdir(path):
            raise
