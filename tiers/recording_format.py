"""What a recording looks like on disk: files, columns, metadata. Version 1.

A recording is what one engine's cache saw from its start to its end. While it is written it is
a folder of parts, ``RECORDING-000000.parquet`` and so on, each a whole Parquet file; ``kvtiers
record`` makes one file of them. The parts of a recording share their ids, and a folder may
hold the recordings of several engines, which do not.

A row is a request. Rows are written as requests end, and ``req`` counts them as the engine
admitted them: sort by it.

    req               int64         from 0; some are missing where an engine was killed
    t_s               double        admission, seconds since the recording began
    queued_s          float         how long the request had waited by then
    busy_s            float         from admission to its end
    input_len         int32         tokens of the prompt
    output_len        int32         tokens generated
    run_start         list<int64>   ids of the prompt's full chunks, head first, as runs: start,
    run_len           list<int32>   start + 1, ..., start + length - 1, one run after the other
    output_run_start  list<int64>   the same for the full chunks that follow, up to the output's
    output_run_len    list<int32>   last; they are what the next turn of a conversation asks for
    hit_TIER          int32         tokens that the tier served when the request was admitted
    session           string        the same text for the same session, "" if there is none
    agent             string        the same for the client's hint of that name
    turn              int32         the client's hint of that name, null without
    tenant            string        the same for the request's ``cache_salt``
    finish            string        why it ended, "" if the engine did first

Equal ids mean an equal prefix up to and including the chunk, so an id always follows the same
id. They are numbers given in the order in which chunks came, and sessions, agents and tenants are
hashed with a salt that nobody keeps: a file says nothing of any text, and two recordings can't
be compared chunk by chunk. The metadata names no folder, host or user either.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = "1"
EXTRA = "pip install 'kvtiers[simulate]'"
"""What brings pyarrow."""

HIT = "hit_"
"""What the column of a tier's hits is called, before the tier's name."""

# By time, so that names sort as recordings began, and by chance.
_PART = re.compile(r"(\d{8}T\d{9}Z-[0-9a-f]{8})-(\d{6,})\.parquet")


class RecordingError(ValueError):
    """There is no recording there, or more than one; the text says what to name instead."""


@dataclass(frozen=True, slots=True)
class RecordedTier:
    """A tier of the engine that was recorded; ``capacity`` in bytes, None without bound."""

    name: str
    capacity: int | None


@dataclass(frozen=True, slots=True)
class About:
    """What a recording says of its engine.

    Attributes:
        chunk_tokens: tokens of a chunk.
        chunk_bytes: bytes of a chunk.
        namespace: id of what the bytes of the engine mean.
        policy: the policy that placed chunks.
        tiers: from nearest to the GPU to farthest, the GPU's first.
        stores_output: whether the tiers were given the chunks of outputs, too.
        vllm: its version.

    """

    chunk_tokens: int
    chunk_bytes: int
    namespace: str
    policy: str
    tiers: Sequence[RecordedTier]
    stores_output: bool
    vllm: str

    def metadata(self, recording: str, started: str) -> dict[str, str]:
        """The metadata of a file: simple values as texts, the rest as JSON.

        Args:
            recording: its name.
            started: when, as ISO 8601 in UTC.

        """
        said = {"kvtiers_trace": VERSION, "recording": recording, "started": started}
        return said | {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in asdict(self).items()
        }


def about(metadata: Mapping[str, str]) -> About:
    """The engine that a file's metadata describes. Raises ValueError if it describes none."""
    try:
        values: dict[str, Any] = {
            key: metadata[key] if key in ("namespace", "policy", "vllm") else json.loads(value)
            for key, value in metadata.items()
            if key in About.__dataclass_fields__
        }
        values["tiers"] = tuple(RecordedTier(**tier) for tier in values["tiers"])
        found = About(**values)
        if (
            not all(map(_is_possible, found.tiers))
            or min(found.chunk_tokens, found.chunk_bytes) < 0
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError("its metadata describes no engine that was recorded") from error
    return found


def _is_possible(tier: RecordedTier) -> bool:
    return isinstance(tier.name, str) and (tier.capacity is None or tier.capacity >= 0)


def part_name(recording: str, number: int) -> str:
    """What the file of a part is called."""
    return f"{recording}-{number:06d}.parquet"


def recordings_in(folder: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """The recordings in a folder and their parts, oldest first. Raises OSError."""
    found: dict[str, list[Path]] = {}
    for name in sorted(os.listdir(folder)):
        if match := _PART.fullmatch(name):
            found.setdefault(match[1], []).append(Path(folder, name))
    return found


def is_recording(path: Path) -> bool:
    """Whether it names one of the recordings in a folder, as ``FOLDER/RECORDING``."""
    return path.parent.is_dir() and path.name in recordings_in(path.parent)


def parts_of(path: str | os.PathLike[str]) -> list[Path]:
    """The files of one recording: ``path`` itself, or the parts in that folder.

    ``FOLDER/RECORDING`` names one of several recordings in a folder.

    Raises:
        RecordingError: the folder holds none, or more than one.
        OSError: the folder can't be read.

    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        if not is_recording(path):
            raise RecordingError(f"{path}: there is no such file, folder or recording.")
        return recordings_in(path.parent)[path.name]
    found = recordings_in(path)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise RecordingError(f"{path}: no recording lies in this folder.")
    names = ", ".join(str(path / name) for name in found)
    raise RecordingError(f"{path}: {len(found)} recordings lie in this folder. Name one: {names}.")


def total_bytes(paths: Iterable[Path]) -> int:
    """What the files take together; those that are gone by now take nothing. Raises OSError."""
    nbytes = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.stat().st_size
    return nbytes
