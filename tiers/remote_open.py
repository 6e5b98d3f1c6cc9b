"""Opens the filesystem behind a URL, and tries it once before it is used."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvtiers.tiers.base import TierConfigError
from kvtiers.tiers.remote_config import RemoteFsConfig
from kvtiers.tiers.remote_dialects import client_options, dialect_of
from kvtiers.tiers.remote_store import FileStore, ObjectStore, Store
from kvtiers.tiers.remote_url import protocol_of

# What a store says that is overloaded, or between a client and it.
_NOT_NOW = frozenset(
    {
        errno.EBUSY,
        errno.ECONNREFUSED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EREMOTEIO,
    }
)
# Requests of a trial at most, connecting included.
_REQUESTS = 6


class AwayError(OSError):
    """The store does not answer, or not now."""


def open_store(config: RemoteFsConfig, chunk_bytes: int) -> tuple[Store, str]:
    """The store behind ``config.path``, and its root there. Connects to nothing.

    Raises:
        TierConfigError: it can't hold a file of ``chunk_bytes``.

    """
    from fsspec import get_filesystem_class  # type: ignore[import-untyped]
    from fsspec.core import strip_protocol  # type: ignore[import-untyped]

    protocol = protocol_of(config.path)
    dialect = dialect_of(protocol, config.publish)
    if dialect.most_bytes is not None and chunk_bytes > dialect.most_bytes:
        raise TierConfigError(
            f"A chunk takes {chunk_bytes} bytes, and one request stores at most "
            f"{dialect.most_bytes} in {config.path!r}. Make chunks smaller with "
            "'blocks_per_chunk'."
        )

    def connect() -> Any:
        return _filesystem(config, protocol)

    clean = config.storage_options.without_secrets
    root = str(strip_protocol(config.path)).rstrip("/")
    if get_filesystem_class(protocol).async_impl:
        return ObjectStore(connect, dialect, clean, config.threads, config.timeout), root
    return FileStore(connect, dialect, clean), root


def try_out(store: Store, path: str, temporary: str, config: RemoteFsConfig) -> None:
    """Write, list, read and remove a small file, as the tier will.

    Args:
        store: what to try.
        path: of the file, in a folder that nothing else is in.
        temporary: see ``Store.publish``.
        config: for the texts.

    Raises:
        TierConfigError: one of these is refused, or has no effect.
        AwayError: the store does not answer.

    """
    trial = _Trial(store, path, temporary)
    error = _within(config.timeout * _REQUESTS, trial.run)
    if error is not None:
        raise _explained(error, trial.doing, config) from error


class _Trial:
    """The calls that a tier rests on, once each."""

    def __init__(self, store: Store, path: str, temporary: str) -> None:
        self.doing = "reach"
        self._store = store
        self._path = path
        self._temporary = temporary

    def run(self) -> None:
        """Raise OSError from the call that ``doing`` names."""
        content = b"kvtiers"
        self.doing = "write to"
        self._store.publish(self._path, self._temporary, content)
        self.doing = "list"
        listed = self._store.listing(self._path.rpartition("/")[0])
        self.doing = "read from"
        [read] = self._store.ranges([self._path], 0, len(content))
        self.doing = "delete from"
        self._store.unlink([self._path])
        self.doing = "use"
        if read != content or all(found.path != self._path for found in listed):
            raise OSError(errno.EIO, "what was written there is not there at once")


def _filesystem(config: RemoteFsConfig, protocol: str) -> Any:
    """The filesystem, fsspec's. Some connect when they are made."""
    from fsspec.core import url_to_fs

    options = _merged(client_options(protocol, config.threads, config.timeout), config)
    # Not one that another tier or the user's own code made with the same options: its
    # caches are switched off here.
    filesystem, _ = url_to_fs(config.path, **options, skip_instance_cache=True)
    # Others write too: what was listed a while ago is not so any more.
    filesystem.dircache.use_listings_cache = False
    return filesystem


def _merged(defaults: Mapping[str, Any], config: RemoteFsConfig) -> dict[str, Any]:
    options = dict(config.storage_options)
    for key, value in defaults.items():
        written = options.get(key)
        options[key] = {**value, **written} if isinstance(written, Mapping) else value
    return options


def _within(seconds: float, call: Callable[[], None]) -> Exception | None:
    """What ``call`` raised, if anything. Blocks no longer than ``seconds``.

    On a thread of its own, since some filesystems connect without a timeout.
    """
    errors: list[Exception | None] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a client raises is told
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=run, name="kvtiers-remote-start", daemon=True)
    thread.start()
    thread.join(seconds)
    return errors[0] if errors else TimeoutError(f"no answer within {seconds:g} seconds")


def _explained(error: Exception, doing: str, config: RemoteFsConfig) -> Exception:
    """What to tell of an error at the start."""
    known = error.strerror if isinstance(error, OSError) else None
    text = config.storage_options.without_secrets(known or str(error) or type(error).__name__)
    if isinstance(error, TimeoutError | ConnectionError) or (
        isinstance(error, OSError) and error.errno in _NOT_NOW
    ):
        return AwayError(f"{config.path} cannot be reached ({text})")
    if isinstance(error, PermissionError):
        remedy = (
            "Give these credentials the right to list, read, write and delete there, or name "
            "others in 'storage_options' or in the environment."
        )
    elif isinstance(error, FileNotFoundError):
        remedy = "Make the bucket or folder that it names, or correct it."
    else:
        remedy = "Correct 'path' or 'storage_options'."
    return TierConfigError(
        f"The filesystem tier cannot {doing} its 'path' {config.path!r} ({text}). {remedy}"
    )
