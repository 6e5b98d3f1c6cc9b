"""Blocking calls on one filesystem of fsspec; whatever goes wrong is an OSError.

Two kinds: ``ObjectStore`` over fsspec's asynchronous filesystems (S3, Google, Azure),
``FileStore`` over its blocking ones (SFTP, FTP, SMB, HDFS, memory).
"""

# ruff: noqa: SLF001 - fsspec's coroutines are public, whatever their names begin with

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvtiers.tiers.remote_dialects import Dialect, Publish

T = TypeVar("T")
Request = Callable[[Any, str], Awaitable[T]]
"""A coroutine of a filesystem, for one path."""

# Errors that say that the store can't be reached, by name: they come from packages that
# are not ours to import (botocore, aiohttp, paramiko).
_AWAY = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "EndpointConnectionError",
        "ProxyConnectionError",
        "ReadTimeoutError",
        "ResponseStreamingError",
        "SSHException",
    }
)
# And that it will not have us. One of these is a kind of SSHException.
_NOT_US = frozenset(
    {
        "AuthenticationException",
        "BadHostKeyException",
        "NoCredentialsError",
        "PartialCredentialsError",
    }
)

# Requests that one listing may take: pages of a thousand names.
_PAGES = 100


class Found(NamedTuple):
    """What a listing shows.

    Attributes:
        path: of the file or folder.
        nbytes: its size, 0 for a folder.
        modified: seconds since the epoch, 0 if the store does not say.
        folder: whether it is one.

    """

    path: str
    nbytes: int
    modified: float
    folder: bool

    @property
    def parent(self) -> str:
        """The folder that it lies in."""
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


class Store(ABC):
    """Files on one filesystem. Every call blocks, raises OSError, and may run on any thread.

    Args:
        connect: makes the filesystem, in this process and at the first call, since some
            connect at once.
        dialect: what is known of its protocol.
        clean: cuts secrets out of an error's text.

    """

    def __init__(
        self, connect: Callable[[], Any], dialect: Dialect, clean: Callable[[str], str]
    ) -> None:
        self._connect = connect
        self._dialect = dialect
        self._clean = clean
        self._connecting = threading.Lock()
        self._connected: Any = None

    def _filesystem(self) -> Any:
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    @abstractmethod
    def ranges(self, paths: Sequence[str], start: int, end: int) -> list[bytes | None]:
        """Bytes ``start`` to ``end`` of each file: fewer if it is shorter, None if it is gone.

        Raises the first error that is none of these.
        """

    @abstractmethod
    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """Fill the buffers from the start of a file; bytes read, None if it is gone."""

    @abstractmethod
    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Size of each file, None where there is none."""

    @abstractmethod
    def publish(self, path: str, temporary: str, data: bytes) -> None:
        """Make or replace a file, so that whoever looks sees the old or all of the new one.

        Args:
            path: of the file.
            temporary: a path that nobody else uses; a killed writer may leave it.
            data: what to write.

        """

    @abstractmethod
    def unlink(self, paths: Sequence[str]) -> None:
        """Remove files; those that are gone are no error."""

    @abstractmethod
    def listing(self, folder: str) -> list[Found]:
        """What lies in a folder; nothing if there is none."""

    @abstractmethod
    def below(self, folders: Sequence[Found]) -> Iterator[list[Found]]:
        """The files of folders that lie side by side, a manageable number at a time."""


class ObjectStore(Store):
    """Over an asynchronous filesystem of fsspec, which runs on fsspec's own thread.

    Args:
        connect: makes a ``fsspec.asyn.AsyncFileSystem``.
        dialect: what is known of its protocol.
        clean: cuts secrets out of an error's text.
        connections: requests that may be under way at once.
        timeout: seconds for a request.

    """

    def __init__(
        self,
        connect: Callable[[], Any],
        dialect: Dialect,
        clean: Callable[[str], str],
        connections: int,
        timeout: float,
    ) -> None:
        super().__init__(connect, dialect, clean)
        self._timeout = timeout
        self._most = connections
        self._connections = asyncio.Semaphore(connections)

    def ranges(self, paths: Sequence[str], start: int, end: int) -> list[bytes | None]:
        """See ``Store.ranges``. As many requests at once as there are connections."""
        return self._each(lambda fs, path: _range(fs, path, start, end), paths)

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """See ``Store.read_into``.

        One request for the known range, and a copy. ``open().readinto()`` copies as
        often inside fsspec and asks for the size before: 8.8 ms of processor time for
        4 MiB from S3, against 6.0.
        """
        [data] = self.ranges([path], 0, sum(buffer.nbytes for buffer in buffers))
        return None if data is None else _spread(data, buffers)

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """See ``Store.sizes``."""
        return self._each(_size, paths)

    def publish(self, path: str, temporary: str, data: bytes) -> None:  # noqa: ARG002
        """See ``Store.publish``. The store does all of it."""
        options = self._dialect.put_options
        self._each(lambda fs, path: fs._pipe_file(path, data, **options), [path])

    def unlink(self, paths: Sequence[str]) -> None:
        """See ``Store.unlink``. One by one: s3fs keeps quiet about what a bulk delete refused."""
        self._each(_unlink, paths)

    def listing(self, folder: str) -> list[Found]:
        """See ``Store.listing``."""
        try:
            [listed] = self._each(lambda fs, path: fs._ls(path, detail=True), [folder], _PAGES)
        except FileNotFoundError:
            return []
        found = [_found(info) for info in listed]
        # Some tools make an empty object in a folder's name.
        return [each for each in found if each.path != folder]

    def below(self, folders: Sequence[Found]) -> Iterator[list[Found]]:
        """See ``Store.below``. In pages over all folders whose names begin alike.

        A folder at a time would be 256 requests for a namespace, however empty, and a
        listing costs what twelve reads do; all at once is a gigabyte for a million files.
        """
        alike: dict[tuple[str, str], set[str]] = {}
        for folder in folders:
            parent, _, name = folder.path.rpartition("/")
            alike.setdefault((parent, name[:1]), set()).add(folder.path)
        for (parent, first), chosen in alike.items():
            yield [found for found in self._find(parent, first) if found.parent in chosen]

    def _find(self, folder: str, prefix: str) -> list[Found]:
        """All files below a folder whose names in it begin with ``prefix``."""
        [found] = self._each(
            lambda fs, path: fs._find(path, detail=True, prefix=prefix), [folder], _PAGES
        )
        return [_found(info) for info in found.values()]

    def _each(self, call: Request[T], paths: Iterable[str], requests: int = 1) -> list[T]:
        """The answers for all paths. The first error ends the rest and is raised.

        Args:
            call: a coroutine of the filesystem.
            paths: what to call it for.
            requests: how many one call may consist of.

        """
        with _only_os_errors(self._clean):
            filesystem = self._filesystem()
            answers = self._all(partial(call, filesystem), paths, self._timeout * requests)
            return asyncio.run_coroutine_threadsafe(answers, filesystem.loop).result()

    async def _all(
        self, call: Callable[[str], Awaitable[T]], paths: Iterable[str], seconds: float
    ) -> list[T]:
        # Without a queue of its own, a long lookup would fill the one for the connections,
        # and a load would wait for all of it.
        turns = asyncio.Semaphore(self._most)

        async def in_turn(path: str) -> T:
            async with turns:
                return await self._bounded(call, path, seconds)

        tasks = [asyncio.ensure_future(in_turn(path)) for path in paths]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _bounded(self, call: Callable[[str], Awaitable[T]], path: str, seconds: float) -> T:
        async with self._connections:
            try:
                async with asyncio.timeout(seconds):
                    return await call(path)
            except TimeoutError as error:
                raise TimeoutError(f"no answer within {seconds:g} seconds") from error


async def _range(filesystem: Any, path: str, start: int, end: int) -> bytes | None:
    try:
        data: bytes = await filesystem._cat_file(path, start=start, end=end)
    except FileNotFoundError:
        return None
    except (PermissionError, TimeoutError):
        raise
    except Exception:
        # Stores refuse a range that begins beyond the end, each with its own error.
        size = await _size(filesystem, path)
        if size is not None and size > start:
            raise
        return None if size is None else b""
    return data


async def _size(filesystem: Any, path: str) -> int | None:
    try:
        return _size_in(await filesystem._info(path))
    except FileNotFoundError:
        return None


async def _unlink(filesystem: Any, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        await filesystem._rm_file(path)


class FileStore(Store):
    """Over a blocking filesystem of fsspec, one call after the other on the caller's thread.

    A connection that broke is made anew at the next call.

    Args:
        connect: makes a ``fsspec.AbstractFileSystem``.
        dialect: what is known of its protocol.
        clean: cuts secrets out of an error's text.

    """

    def __init__(
        self, connect: Callable[[], Any], dialect: Dialect, clean: Callable[[str], str]
    ) -> None:
        super().__init__(connect, dialect, clean)
        self._turn = threading.RLock() if dialect.serial else contextlib.nullcontext()
        self._folders: set[str] = set()

    def ranges(self, paths: Sequence[str], start: int, end: int) -> list[bytes | None]:
        """See ``Store.ranges``."""
        return [self._range(path, start, end) for path in paths]

    def read_into(self, path: str, buffers: Sequence[memoryview]) -> int | None:
        """See ``Store.read_into``. Straight into the buffers, where files have positions."""
        if self._dialect.shared_files:
            data = self._range(path, 0, sum(buffer.nbytes for buffer in buffers))
            return None if data is None else _spread(data, buffers)
        with self._call() as filesystem:
            try:
                with filesystem.open(path, "rb") as file:
                    return sum(_fill(file, buffer) for buffer in buffers)
            except FileNotFoundError:
                return None

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """See ``Store.sizes``."""
        return [self._size(path) for path in paths]

    def publish(self, path: str, temporary: str, data: bytes) -> None:
        """See ``Store.publish``."""
        if self._dialect.publish is Publish.PUT:
            self._put(path, data)
            return
        try:
            self._put(temporary, data)
            self._make_folder(path)
            self._move(temporary, path)
        except OSError:
            # Somebody may have removed folders that we made.
            self._folders.clear()
            with contextlib.suppress(OSError):
                self.unlink([temporary])
            raise

    def unlink(self, paths: Sequence[str]) -> None:
        """See ``Store.unlink``."""
        for path in paths:
            with self._call() as filesystem, contextlib.suppress(FileNotFoundError):
                filesystem.rm_file(path)

    def listing(self, folder: str) -> list[Found]:
        """See ``Store.listing``."""
        with self._call() as filesystem:
            try:
                return [_found(info) for info in filesystem.ls(folder, detail=True)]
            except FileNotFoundError:
                return []

    def below(self, folders: Sequence[Found]) -> Iterator[list[Found]]:
        """See ``Store.below``. A folder at a time."""
        for folder in folders:
            yield [found for found in self.listing(folder.path) if not found.folder]

    def _range(self, path: str, start: int, end: int) -> bytes | None:
        with self._call() as filesystem:
            try:
                data: bytes = filesystem.cat_file(path, start=start, end=end)
            except FileNotFoundError:
                return None
            return data

    def _size(self, path: str) -> int | None:
        with self._call() as filesystem:
            try:
                return _size_in(filesystem.info(path))
            except FileNotFoundError:
                return None

    def _put(self, path: str, data: bytes) -> None:
        self._make_folder(path)
        with self._call() as filesystem:
            filesystem.pipe_file(path, data, **self._dialect.put_options)

    def _move(self, temporary: str, path: str) -> None:
        with self._call() as filesystem:
            try:
                filesystem.mv(temporary, path)
            except Exception:
                # SMB and HDFS do not move onto a file. Whoever looks now sees none.
                if not filesystem.exists(path):
                    raise
                filesystem.rm_file(path)
                filesystem.mv(temporary, path)

    def _make_folder(self, path: str) -> None:
        folder = os.path.dirname(path)
        if folder not in self._folders:
            with self._call() as filesystem:
                filesystem.makedirs(folder, exist_ok=True)
            self._folders.add(folder)

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        """The filesystem, for one call of it."""
        try:
            with self._turn, _only_os_errors(self._clean):
                yield self._filesystem()
        except ConnectionError:
            self._connected = None
            raise


def _fill(file: Any, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends."""
    done = 0
    while done < buffer.nbytes:
        read = file.readinto(buffer[done:])
        if not read:
            break
        done += read
    return done


def _spread(data: bytes, buffers: Sequence[memoryview]) -> int:
    """Copy into the buffers, one after the other; bytes copied."""
    view, done = memoryview(data), 0
    for buffer in buffers:
        part = view[done : done + buffer.nbytes]
        buffer[: part.nbytes] = part
        done += part.nbytes
    return done


@contextlib.contextmanager
def _only_os_errors(clean: Callable[[str], str]) -> Iterator[None]:
    """Raise as OSError what is none: filesystems raise what their clients do.

    Without the cause: its text may show what ``clean`` cut out.
    """
    try:
        yield
    except OSError as error:
        raise _cleaned(error, clean) from None
    except Exception as error:  # noqa: BLE001 - clients have no base class in common
        kinds = {kind.__name__ for kind in type(error).__mro__}
        text = clean(f"{type(error).__name__}: {error}")
        if kinds & _NOT_US:
            raise PermissionError(errno.EACCES, text) from None
        if kinds & _AWAY or isinstance(error, EOFError):
            raise ConnectionError(text) from None
        raise OSError(errno.EIO, text) from None


def _cleaned(error: OSError, clean: Callable[[str], str]) -> OSError:
    """The error itself, or if a store repeats in it what nobody may see, one without that."""
    if clean(str(error)) == str(error):
        return error
    text = clean(error.strerror or str(error))
    if error.errno is not None:
        # Python's own choice of a class: the client's may take other arguments.
        return OSError(error.errno, text)
    kinds = (TimeoutError, ConnectionError, PermissionError, FileNotFoundError)
    return next((kind(text) for kind in kinds if isinstance(error, kind)), OSError(text))


def _found(info: Mapping[str, Any]) -> Found:
    folder = info.get("type") == "directory"
    path = str(info["name"]).rstrip("/")
    return Found(path, 0 if folder else int(info.get("size") or 0), _modified(info), folder)


def _size_in(info: Mapping[str, Any]) -> int | None:
    return None if info.get("type") == "directory" else int(info.get("size") or 0)


def _modified(info: Mapping[str, Any]) -> float:
    """When a file was written. Each filesystem has its own word and type for it."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "modify", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return aware.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
