"""The options of the filesystem tier where its path is a URL."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from kvtiers.tiers.encryption import AtRestConfig
from kvtiers.tiers.remote_dialects import dialect_of
from kvtiers.tiers.remote_url import (
    check_option_names,
    checked_url,
    protocol_of,
    without_password,
)
from kvtiers.tiers.units import seconds
from pydantic import ConfigDict, StrictBool, field_validator, model_validator

# What other programs call our options, for who types it by habit.
_CALLED_HERE = {
    **dict.fromkeys(("url", "uri", "bucket"), "path"),
    **dict.fromkeys(("size", "max_size"), "capacity"),
    **dict.fromkeys(("connect_timeout", "read_timeout"), "timeout"),
}
_IN_STORAGE_OPTIONS = (
    *("endpoint_url", "key", "secret", "token", "anon", "profile", "client_kwargs"),
    *("config_kwargs", "host", "port", "user", "username", "password", "project"),
)
_OF_FOLDERS = ("direct", "fsync", "block_size", "buffer")
# Values that are no secrets, and tell an operator which store it is.
_SHOWN = frozenset({"endpoint_url", "anon", "host", "port", "profile", "project", "use_ssl"})
_HIDDEN = "***"
_PASSWORD = re.compile(r"(://[^/\s@]*):[^/\s]*@")


class StorageOptions(Mapping[str, Any]):
    """Options for fsspec, whose values are secrets until known not to be.

    Args:
        options: as written.

    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = copy.deepcopy(dict(options))

    def __getitem__(self, key: str) -> Any:
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        parts = (f"{key}: {_shown(key, value)}" for key, value in self._options.items())
        return f"{{{', '.join(parts)}}}"

    def without_secrets(self, text: str) -> str:
        """``text``, somebody else's, with every hidden value cut out of it."""
        for key, value in self._options.items():
            for secret in _texts(value) if key not in _SHOWN else ():
                text = text.replace(secret, _HIDDEN)
        return _PASSWORD.sub(rf"\1:{_HIDDEN}@", text)


def _shown(key: str, value: object) -> str:
    return _PASSWORD.sub(rf"\1:{_HIDDEN}@", str(value)) if key in _SHOWN else _HIDDEN


def _texts(value: object) -> Iterator[str]:
    """The texts in a value that are long enough to be a secret and not a word."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, str) and len(value) > 3:
        yield value


class RemoteFsConfig(AtRestConfig):
    """Options of the filesystem tier on a URL.

    Attributes:
        path: a URL that fsspec knows: ``s3://bucket/prefix``, ``sftp://host/folder``. A
            password in it becomes ``password`` in ``storage_options``.
        storage_options: what fsspec's filesystem takes, such as ``endpoint_url``, ``key``
            and ``secret`` for S3. Never shown again.
        capacity: bytes that chunks may take below ``path``, metadata included.
        timeout: seconds for one request to an object store. Other filesystems have
            timeouts of their own, if any.
        publish: how a file comes to be seen as a whole: "put" where the store shows an
            object only when all of it has arrived, "rename" where moving a file is one
            step; "auto" knows S3, Google and Azure, SFTP, FTP, SMB and HDFS, see
            ``remote_dialects``.
        required: whether the engine must not start while the store is away.

    """

    # An error's text would show all that was given, secrets too.
    model_config = ConfigDict(hide_input_in_errors=True, arbitrary_types_allowed=True)

    type: str = "fs"
    # As many connections to the store. From a server that takes 30 ms to begin and sends
    # 80 MB/s to each, 1, 4, 8, 16 and 32 of them brought 33, 136, 320, 357 and 165 MB/s
    # on two busy cores: one thread of Python drives them all, at some 5 ms for 4 MiB.
    threads: int = 16
    path: str
    storage_options: StorageOptions = StorageOptions({})
    # As much as of a local disk. Some bound there must be: a bucket has none, and costs.
    capacity: int | None = 100 << 30
    timeout: Annotated[float, seconds("10")] = 10.0
    publish: Literal["auto", "put", "rename"] = "auto"
    required: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key in given:
            _refuse_habits(str(key))
        options = without_password(given)
        written = options.get("storage_options", {})
        if not isinstance(written, Mapping):
            # Here and not at the field, where the text would show what was written.
            raise ValueError(  # noqa: TRY004 - pydantic takes in no other error
                "'storage_options' must be a mapping of options for fsspec, such as "
                "{endpoint_url: 'http://minio:9000'}"
            )
        return {**options, "storage_options": StorageOptions(written)}

    @field_validator("path")
    @classmethod
    def _names_a_store(cls, path: str) -> str:
        return checked_url(path)

    @model_validator(mode="after")
    def _shows_whole_files(self) -> Self:
        dialect_of(protocol_of(self.path), self.publish)
        return self

    @model_validator(mode="after")
    def _names_options_of_the_store(self) -> Self:
        check_option_names(self.path, self.storage_options)
        return self


def _refuse_habits(key: str) -> None:
    if key in _CALLED_HERE:
        raise ValueError(f"'{key}' is not an option here. Set '{_CALLED_HERE[key]}'")
    if key in _IN_STORAGE_OPTIONS:
        raise ValueError(
            f"'{key}' is an option of fsspec's filesystem. Write it into 'storage_options'"
        )
    if key in _OF_FOLDERS:
        raise ValueError(f"'{key}' is for a 'path' on this machine, and this one is a URL")
