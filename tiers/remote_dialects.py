"""What kvtiers knows of each protocol, declared: guessing would cost somebody's data.

The question that matters is when others see a file. An object store shows an object
when all of it has arrived, so a chunk is put under its own name. A filesystem shows a
file from its first byte on, so a chunk is written under another name and moved.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Publish(enum.Enum):
    """How a file comes to be seen as a whole."""

    PUT = "put"
    """The store shows nothing of it until all has arrived."""
    RENAME = "rename"
    """It is written under another name; moving it is one step."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs from protocol to protocol.

    Attributes:
        publish: how a file comes to be seen as a whole.
        most_bytes: of a file, None without limit.
        put_options: of fsspec's ``pipe_file``.
        shared_files: opening a file gives all readers the same one, with one position.
        serial: calls may not overlap, since there is one connection for all of them.

    """

    publish: Publish
    most_bytes: int | None = None
    put_options: Mapping[str, Any] = field(default_factory=dict)
    shared_files: bool = False
    serial: bool = True


# One PUT, however large: it is atomic and leaves nothing behind when the writer is
# killed. An upload in parts would leave those, invisible and billed.
_S3_MOST = 5 << 30
_S3 = Dialect(Publish.PUT, most_bytes=_S3_MOST, put_options={"chunksize": _S3_MOST}, serial=False)
_OBJECTS = Dialect(Publish.PUT, serial=False)
_FILES = Dialect(Publish.RENAME)

_DIALECTS: Mapping[str, Dialect] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs", "abfs", "abfss", "az"), _OBJECTS),
    **dict.fromkeys(("sftp", "ssh", "ftp", "smb", "webhdfs"), _FILES),
    **dict.fromkeys(("hdfs", "arrow_hdfs"), Dialect(Publish.RENAME, serial=False)),
    "memory": Dialect(Publish.PUT, shared_files=True, serial=False),
}


def dialect_of(protocol: str, publish: str) -> Dialect:
    """How to speak to the filesystem of a protocol.

    Args:
        protocol: of a URL, known to fsspec and installed.
        publish: "auto", or what the user knows of it.

    Raises:
        ValueError: nobody knows how a file becomes visible there, or it can't be moved
            in one step; the text says what to do.

    """
    known = _DIALECTS.get(protocol)
    if publish == "auto" and known is None:
        raise ValueError(
            f"kvtiers does not know when others see a file on '{protocol}', and so cannot promise "
            "that nobody reads half a chunk. Set 'publish' to 'put' if a new file is seen only "
            "when all of it has arrived, or to 'rename' if moving a file is one step"
        )
    if known is None or publish not in ("auto", known.publish.value):
        known = Dialect(Publish(publish))
    if known.publish is Publish.RENAME and not _moves(protocol):
        raise ValueError(
            f"'publish' is 'rename', but fsspec moves a file on '{protocol}' by copying and "
            "deleting it, so that others see a part of the copy. Set it to 'put' if a new file "
            "is seen only when all of it has arrived, or mount the store and name the folder"
        )
    return known


def _moves(protocol: str) -> bool:
    """Whether the filesystem has a move of its own, that can be called without a loop."""
    from fsspec import AbstractFileSystem, get_filesystem_class  # type: ignore[import-untyped]

    kind = get_filesystem_class(protocol)
    return not kind.async_impl and any(
        inspect.getattr_static(kind, name, None)
        is not inspect.getattr_static(AbstractFileSystem, name, None)
        for name in ("mv", "mv_file")
    )


def client_options(protocol: str, threads: int, timeout: float) -> dict[str, Any]:
    """What a protocol's client should do by default, as ``storage_options``."""
    if protocol not in ("s3", "s3a"):
        return {}
    from botocore.config import Config  # type: ignore[import-untyped]

    wanted = {
        # botocore's own default is 10, whatever we ask of it at once.
        "max_pool_connections": threads,
        "connect_timeout": timeout,
        "read_timeout": timeout,
        # s3fs tries again by itself where that can help, and the breaker after it.
        "retries": {"total_max_attempts": 1},
        # Each chunk carries a checksum that is verified when it is read. A second one
        # costs time, and older S3-compatible servers do not know it.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    # The last two came with botocore 1.36; before it made no checksums of its own.
    known = Config.OPTION_DEFAULTS
    return {"config_kwargs": {key: value for key, value in wanted.items() if key in known}}
