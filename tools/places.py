"""Where chunks lie at rest, for commands that look at them: a folder, a URL, or a Redis.

A place is not a tier: it takes chunks of any size, writes nothing unless it is told to remove
something, renews nobody's last use, and can be looked at beside running engines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.tiers.base import ChunkKey, Namespace
from kvtiers.tiers.encryption import AtRestConfig
from kvtiers.tiers.examine import Content
from kvtiers.tiers.fs_files import reading
from kvtiers.tiers.fs_layout import KEEPING, Layout, hash_of, is_chunk_folder
from kvtiers.tiers.fs_namespace import MOST_BYTES, LocalFacts, facts_of
from kvtiers.tiers.remote_config import RemoteFsConfig
from kvtiers.tiers.remote_layout import RemoteLayout
from kvtiers.tiers.remote_open import open_store
from kvtiers.tiers.remote_store import Found, Store

_NO_BYTES = 1
NOTHING = " If there should be some, check that this is the tier's own 'path' or 'url'."
"""A bucket or prefix that was misspelt looks as if it were empty."""


class PlaceError(Exception):
    """The place can't be looked at; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Lying:
    """Something under a chunk's name.

    Attributes:
        key: what the name says.
        where: a path, or a key of Redis.
        nbytes: space it takes.
        used: when it was last used, in seconds since the epoch; 0 if nobody knows.

    """

    key: ChunkKey
    where: str
    nbytes: int
    used: float


class Place(ABC):
    """Chunks of any namespace and size. Every call raises OSError where it can't be answered.

    Attributes:
        name: what to call it.
        config: of the tier that it belongs to, with its keys if it has any.

    """

    name: str
    config: AtRestConfig

    @abstractmethod
    def chunks(self) -> Iterator[Lying]:
        """What lies under names of chunks, in any order."""

    @abstractmethod
    def facts(self, namespace_id: str) -> Mapping[str, Any]:
        """What a namespace stands for; nothing if that does not lie there."""

    @abstractmethod
    def opened(self, lying: Lying) -> contextlib.AbstractContextManager[Content]:
        """The bytes of a chunk. Raises FileNotFoundError if it is gone meanwhile."""

    @abstractmethod
    def remove(self, lying: Lying) -> None:
        """Take a chunk away; that it is gone already is no error."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of connections."""


def layout_of(root: Path) -> Layout:
    """What lies in a folder that an fs tier uses. Raises PlaceError if none does."""
    layout = Layout(root)
    try:
        if not root.is_dir():
            raise PlaceError(f"{root} is no folder. Name the 'path' of an fs tier.")
        os.stat(f"{layout.base}/")
    except (FileNotFoundError, NotADirectoryError):
        raise PlaceError(
            f"{root} has no folder 'v1', so no fs tier has stored anything there. Name the "
            "tier's 'path' itself."
        ) from None
    except OSError as error:
        raise PlaceError(f"{root} can't be looked at: {what_to_do(error)}") from None
    return layout


def printable(text: str) -> str:
    """What somebody may have written to play tricks on a terminal, or that can't be printed."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def what_to_do(error: OSError) -> str:
    """The error, for humans."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error}. Run this as the user of the engines that use it."
    if isinstance(error, PermissionError):  # not the system's own, but a store's
        return f"{error}. Give credentials in the environment, or name a file with --config."
    return f"{error}."


class Folder(Place):
    """A local or mounted path.

    Args:
        root: as an fs tier's ``path``.
        config: of the tier.

    """

    def __init__(self, root: Path, config: AtRestConfig) -> None:
        self.name, self.config = str(root), config
        self._layout = layout_of(root)

    def chunks(self) -> Iterator[Lying]:
        """See ``Place.chunks``. A folder at a time is in memory."""
        for namespace in _folders(self._layout.base):
            if namespace.name == KEEPING:
                continue
            for folder in _folders(namespace.path):
                if is_chunk_folder(folder.name):
                    yield from self._chunks(Namespace(namespace.name), folder)

    def _chunks(self, namespace: Namespace, folder: os.DirEntry[str]) -> Iterator[Lying]:
        with os.scandir(folder.path) as entries:
            listed = list(entries)
        for found in listed:
            digest = hash_of(folder.name, found.name)
            if digest is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = found.stat(follow_symlinks=False)
                key = ChunkKey(namespace, digest)
                yield Lying(key, found.path, status.st_size, status.st_mtime)

    def facts(self, namespace_id: str) -> Mapping[str, Any]:
        """See ``Place.facts``."""
        with contextlib.suppress(ValueError, FileNotFoundError):
            return facts_of(LocalFacts(self._layout).load(namespace_id))
        return {}

    @contextlib.contextmanager
    def opened(self, lying: Lying) -> Iterator[Content]:
        """See ``Place.opened``."""
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(reading(lying.where)).fileno()
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error), lying.where) from None
            yield _FileContent(descriptor, os.fstat(descriptor).st_size)

    def remove(self, lying: Lying) -> None:
        """See ``Place.remove``. A folder in a chunk's place goes only if it is empty."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(lying.where).st_mode):
                os.rmdir(lying.where)
            else:
                os.unlink(lying.where)


@dataclass(frozen=True)
class _FileContent:
    descriptor: int
    nbytes: int

    def read(self, start: int, end: int) -> bytes:
        """See ``Content``."""
        return os.pread(self.descriptor, end - start, start)


def _folders(path: str) -> list[os.DirEntry[str]]:
    """Folders in a folder, and no links: what is behind them is not ours."""
    with os.scandir(path) as entries:
        found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(found, key=lambda entry: entry.name)


class Url(Place):
    """A filesystem of fsspec.

    Args:
        config: of a tier there.

    """

    def __init__(self, config: RemoteFsConfig) -> None:
        self.name, self.config = config.path, config
        self._store: Store
        # No chunk is stored, so none is too large.
        self._store, root = open_store(config, _NO_BYTES)
        self._layout = RemoteLayout(root)

    def chunks(self) -> Iterator[Lying]:
        """See ``Place.chunks``."""
        for namespace in self._folders(self._layout.base):
            folders = [each for each in self._folders(namespace.path) if is_chunk_folder(each.name)]
            for files in self._store.below(folders):
                for found in files:
                    digest = hash_of(found.parent.rpartition("/")[2], found.name)
                    if digest is not None:
                        key = ChunkKey(Namespace(namespace.name), digest)
                        yield Lying(key, found.path, found.nbytes, found.modified)

    def _folders(self, path: str) -> list[Found]:
        return [found for found in self._store.listing(path) if found.folder]

    def facts(self, namespace_id: str) -> Mapping[str, Any]:
        """See ``Place.facts``."""
        path = str(self._layout.facts(namespace_id))
        [content] = self._store.ranges([path], 0, MOST_BYTES + 1)
        with contextlib.suppress(ValueError):
            return facts_of(content or b"")
        return {}

    @contextlib.contextmanager
    def opened(self, lying: Lying) -> Iterator[Content]:
        """See ``Place.opened``."""
        yield _ObjectContent(self._store, lying.where, lying.nbytes)

    def remove(self, lying: Lying) -> None:
        """See ``Place.remove``."""
        self._store.unlink([lying.where])


@dataclass(frozen=True)
class _ObjectContent:
    store: Store
    path: str
    nbytes: int

    def read(self, start: int, end: int) -> bytes:
        """See ``Content``."""
        [data] = self.store.ranges([self.path], start, end)
        if data is None:
            raise FileNotFoundError(self.path)
        return data
