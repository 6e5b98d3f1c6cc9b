"""The options of the filesystem tier where its path is a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.encryption import AtRestConfig
from kvtiers.tiers.file_option import at_home
from kvtiers.tiers.remote_url import is_remote, without_local_scheme
from kvtiers.tiers.units import Size, SizeOrAuto
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

# A scratch buffer of that size is kept by each thread.
MAX_BLOCK_SIZE = 16 << 20

# What other programs call our options, for who types it by habit.
_CALLED_HERE = {
    **dict.fromkeys(("url", "uri", "bucket", "root", "folder", "directory"), "path"),
    **dict.fromkeys(("size", "max_size"), "capacity"),
}


def _default_root() -> Path:
    """``kvtiers`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "kvtiers"


def _local_path(value: object) -> object:
    """``value`` without ``file://``; raises ValueError if it names no folder of this machine."""
    if value == "":
        raise ValueError("it is empty. Name a folder, or leave 'path' out for the default")
    if is_remote(value):
        raise ValueError("it is a URL, which RemoteFsTier takes: see FsTier.variant")
    return without_local_scheme(value) if isinstance(value, str) else value


class FsConfig(AtRestConfig):
    """Options of the filesystem tier.

    Attributes:
        path: root folder, shared by all models and engines that name it.
        capacity: bytes that chunks may take under ``path``, metadata
            included, for all engines that use it together: give all of them the
            same. The last four damaged files of a namespace lie outside of it.
        direct: O_DIRECT; "auto" uses it where a trial in ``path`` succeeds.
        fsync: wait for the device on every write. Without it a crash of the
            machine (not of the engine) may lose chunks written in the last
            seconds, or leave torn ones, which the checksum finds.
        block_size: bytes, a power of two from 4 KiB to 16 MiB: each call reads or
            writes from a multiple of it on, and files are padded to one, such as
            a parallel file system's stripe. At most a chunk's size. Files
            written with another block size are read all the same.
        buffer: bytes that one call moves at most, a multiple of ``block_size``;
            the last call of a chunk takes the metadata along. "auto" is 1 MiB (or
            ``block_size`` if that is more) through the page cache, and all of a
            chunk with O_DIRECT.

    """

    type: str = "fs"
    # Two threads read 1.15 times as fast as one from a local disk, four 1.25
    # times, eight no faster; on a mount, where a call waits longer, more
    # threads overlap more.
    threads: int = 4
    path: Annotated[Path, BeforeValidator(_local_path), AfterValidator(at_home)] = Field(
        default_factory=_default_root
    )
    capacity: int | None = None
    # From a local disk with nothing cached, O_DIRECT read 1.0 to 1.8 times as
    # fast as buffered reads, for half the CPU time. Buffered is 5 times as fast
    # for what is still in the page cache, and 2 times for writes, until the
    # device has to catch up; but that takes memory the CPU tier would use
    # better, as it holds each chunk once and knows what to evict.
    direct: Literal["auto", True, False] = "auto"
    fsync: bool = False
    block_size: Size = ALIGNMENT
    # In calls of 1 MiB, the page cache took chunks of 3 and 12 MiB 1.1 to 3 times as
    # fast as in one call each, and gave them up to 1.4 times as fast: it works ahead
    # while we copy. O_DIRECT lost 9 to 13 % by it, as the device had less to do at
    # once and each call takes Python's lock.
    buffer: SizeOrAuto = "auto"

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, given: Any) -> Any:
        if isinstance(given, dict):
            _refuse_habits(given)
        return given

    @field_validator("block_size")
    @classmethod
    def _is_a_block(cls, value: int) -> int:
        if ALIGNMENT <= value <= MAX_BLOCK_SIZE and value.bit_count() == 1:
            return value
        raise ValueError("it must be a power of two from 4KiB to 16MiB")

    @model_validator(mode="after")
    def _whole_blocks(self) -> Self:
        if self.buffer != "auto" and self.buffer % self.block_size:
            fitting = -(-self.buffer // self.block_size) * self.block_size
            raise ValueError(
                f"buffer is {self.buffer}, which is no multiple of block_size, which is "
                f"{self.block_size}. Set buffer to {fitting}, or block_size to less"
            )
        return self


def _refuse_habits(given: Mapping[str, object]) -> None:
    """Raise ValueError for a word of other programs, and say which is ours."""
    for key in given:
        if key in _CALLED_HERE:
            raise ValueError(f"'{key}' is not an option here. Set '{_CALLED_HERE[key]}'")
        if key == "storage_options":
            raise ValueError(
                "'storage_options' is for a 'path' that is a URL, such as s3://bucket/prefix"
            )
