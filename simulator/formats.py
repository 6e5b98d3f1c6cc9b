"""Finds and reads traces, whatever their format."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from kvtiers.simulator import format_events, format_lmcache, format_mooncake, format_parquet
from kvtiers.simulator.errors import TraceError
from kvtiers.simulator.rows import Source, make_trace
from kvtiers.simulator.trace import Trace
from kvtiers.tiers.recording_format import is_recording, recordings_in

FOLDER_VARIABLE = "KVTIERS_TRACES"
DEFAULT_FOLDER = "../shared/traces"
ENDINGS = (".parquet", ".jsonl", ".msgpack")
"""What names of traces end in."""
# Each has ``recognises(head)`` and ``open_source(path)``; the first that
# recognises a file's beginning reads it.
_FORMATS: Sequence[ModuleType] = (format_parquet, format_mooncake, format_lmcache, format_events)
_HEAD_BYTES = 65536


def read_trace(
    *places: str | os.PathLike[str], chunk_tokens: int | None = None, name: str = ""
) -> Trace:
    """Read one trace, from one file or from several that are its parts.

    Args:
        places: paths, or names of files in the folder that ``KVTIERS_TRACES`` says,
            by default ``../shared/traces``; then without their ending, if you like. A
            folder that an engine has recorded in, or ``FOLDER/RECORDING``, is one file; a folder of
            JSONL logs is those one after the other.
        chunk_tokens: tokens of a chunk, a multiple of the file's block. By default
            what was recorded, or the smallest multiple of at least 256 tokens.
        name: what to call it. By default the files' names.

    Raises:
        TraceError: there is no such file, it is damaged, or nothing here reads it.
        SimulatorError: reading it needs a package that is not installed.

    """
    paths = [find(os.fspath(place)) for place in places]
    sources = [source for path in paths for source in _open(path)]
    return make_trace(name or "+".join(map(_name, paths)), sources, chunk_tokens)


def _name(path: Path) -> str:
    """What to call it; the folder at hand too, whose path has no name in it."""
    return path.stem or path.resolve().stem


def find(place: str) -> Path:
    """The file that ``place`` names.

    Raises:
        TraceError: there is none.

    """
    folder = Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER))
    # Nothing names nothing, though a path of nothing is the folder at hand.
    tried = [Path(place)] if place else []
    if place and os.sep not in place:
        tried += [folder / f"{place}{ending}" for ending in ("", *ENDINGS)]
    for path in tried:
        # Where ``Path.exists`` raises for a name that no file can have, this says no.
        if os.path.exists(path) or is_recording(path):
            return path
    known, beside = _traces_in(folder), _traces_in(Path(place).parent)
    written = dict(zip(known, known, strict=True)) | {
        stem: path.name for stem, path in beside.items()
    }
    close = difflib.get_close_matches(Path(place).stem, written, n=1)
    raise TraceError(
        f"no trace at '{place}'{f' nor in {folder}' if os.sep not in place else ''}."
        + (f" Did you mean '{written[close[0]]}'?" if close else "")
        + f" A trace is a file, or the name of one in the folder that {FOLDER_VARIABLE} names."
        + (f" There: {', '.join(known)}." if known else "")
    )


def files_of(place: str) -> list[Path]:
    """The files of what ``place`` names: itself, those of a folder, the parts of a recording.

    Raises:
        TraceError: there is none.

    """
    path = find(place)
    if path.is_dir():
        return list(path.glob("*"))
    return [path] if os.path.exists(path) else recordings_in(path.parent)[path.name]


def _traces_in(folder: Path) -> dict[str, Path]:
    """What looks like a trace there, by its name without the ending."""
    return {path.stem: path for path in sorted(folder.glob("*")) if path.suffix in ENDINGS}


def _open(path: Path) -> list[Source]:
    """The files that are one trace: one, a recording's parts, or a folder of logs by name."""
    if path.is_dir() and (logs := sorted(path.glob("*.jsonl"))):
        return [_open_file(log) for log in logs]
    if path.is_dir() and (there := _traces_in(path)) and not recordings_in(path):
        names = ", ".join(str(each) for each in there.values())
        raise TraceError(f"{path} is a folder without a recording. Name a trace in it: {names}.")
    if not path.is_file():
        return [format_parquet.open_source(str(path))]
    return [_open_file(path)]


def _open_file(path: Path) -> Source:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: it can't be read: {error.strerror or error}") from None
    if not head:
        raise TraceError(f"{path} is empty.")
    for module in _FORMATS:
        if module.recognises(head):
            source: Source = module.open_source(str(path))
            return source
    raise TraceError(
        f"{path}: not a trace in a known format. Known: Parquet (recorded by kvtiers, or runs of "
        "block ids), Mooncake's JSONL, LMCache's lookup-hash log, vLLM's KV events (JSONL or "
        "msgpack)."
    )
