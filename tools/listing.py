"""``kvtiers ls``: what lies in a place, by namespace or chunk by chunk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kvtiers.connector.sizes import format_bytes
from kvtiers.tiers.examine import find_metadata
from kvtiers.tiers.format import CODEC_NONE, Metadata
from kvtiers.tools import opening
from kvtiers.tools.places import NOTHING, Lying, Place, PlaceError, printable, what_to_do
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Chunks of a namespace that are asked whether they are encrypted.
_SAMPLE = 8
# Of a model's name. Who wrote it may mean harm.
_MOST_CHARACTERS = 200
_CLEAR = "in clear"
_UNKNOWN = "unknown"
_TITLES = ("namespace", "model", "chunks", "size", "oldest use", "newest use", "encryption")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers ls``."""
    opening.add_arguments(parser)
    parser.add_argument("--chunks", action="store_true", help="list single chunks")


@dataclass
class Summary:
    """One namespace of one place.

    Attributes:
        id: of the namespace.
        facts: what it stands for, as far as that lies beside it.
        chunks, nbytes: how much there is of it.
        oldest, newest: when one was last used, in seconds since the epoch, 0 if unknown.
        keys: what a few of its chunks are encrypted with.

    """

    id: str
    facts: Mapping[str, Any]
    chunks: int = 0
    nbytes: int = 0
    oldest: float = 0.0
    newest: float = 0.0
    keys: dict[str, None] = field(default_factory=dict)

    def add(self, lying: Lying) -> None:
        """Count a chunk."""
        self.chunks += 1
        self.nbytes += lying.nbytes
        if lying.used:
            self.oldest = min(self.oldest or lying.used, lying.used)
            self.newest = max(self.newest, lying.used)


def run(arguments: argparse.Namespace) -> int:
    """List what lies there. Returns 1 where a place can't be looked at.

    Raises:
        ConfigError: what was written can't work.
        PlaceError: a place can't be looked at.

    """
    shown: list[dict[str, Any]] = []
    try:
        for place, _ in opening.places(arguments):
            if arguments.chunks:
                _list_chunks(place, arguments.json)
                continue
            summaries = list(summarise(place))
            shown.append({"place": place.name, "namespaces": [_as_json(s) for s in summaries]})
            if not arguments.json:
                _show(place, summaries)
    except BrokenPipeError:
        raise  # whoever read it has seen enough
    except OSError as error:
        print(f"kvtiers: {what_to_do(error)}", file=sys.stderr)
        return 1
    if arguments.json and not arguments.chunks:
        print(json.dumps(shown, indent=2))
    return 0


def summarise(place: Place) -> Iterator[Summary]:
    """Every namespace, largest first. Raises OSError."""
    found: dict[str, Summary] = {}
    for lying in place.chunks():
        name = lying.key.namespace.id
        if name not in found:
            found[name] = Summary(name, place.facts(name))
        summary = found[name]
        if summary.chunks < _SAMPLE:
            summary.keys[_encryption(place, lying)] = None
        summary.add(lying)
    yield from sorted(found.values(), key=lambda summary: -summary.nbytes)


def _encryption(place: Place, lying: Lying) -> str:
    """What a chunk is encrypted with. A few bytes are read."""
    try:
        with place.opened(lying) as content:
            _, metadata = find_metadata(content)
    except (OSError, PlaceError):
        return _UNKNOWN
    if not isinstance(metadata, Metadata):
        return _UNKNOWN
    return _CLEAR if metadata.codec == CODEC_NONE else f"key {metadata.key_id}"


def _list_chunks(place: Place, as_json: bool) -> None:
    """One line each, as they are found: there may be millions."""
    for lying in place.chunks():
        if as_json:
            print(
                json.dumps(
                    {
                        "where": lying.where,
                        "namespace": lying.key.namespace.id,
                        "hash": lying.key.hash.hex(),
                        "bytes": lying.nbytes,
                        "last_used": lying.used or None,
                    }
                )
            )
        else:
            print(f"{_time(lying.used):19}  {lying.nbytes:>12}  {printable(lying.where)}")


def _show(place: Place, summaries: list[Summary]) -> None:
    console = Console()
    chunks, nbytes = sum(s.chunks for s in summaries), sum(s.nbytes for s in summaries)
    told = f"{chunks} chunks, {format_bytes(nbytes)}, namespaces: {len(summaries)}"
    print(f"kvtiers: {place.name}: {told}.{'' if chunks else NOTHING}", file=sys.stderr)
    rows = [_row(summary) for summary in summaries]
    if not console.is_terminal:
        for row in rows:
            print("  ".join(row))
        return
    table = Table(*_TITLES)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _row(summary: Summary) -> tuple[str, ...]:
    model = summary.facts.get("model") or summary.facts.get("engine") or _UNKNOWN
    cells = (
        summary.id,
        str(model)[:_MOST_CHARACTERS],
        str(summary.chunks),
        format_bytes(summary.nbytes),
        _time(summary.oldest),
        _time(summary.newest),
        ", ".join(summary.keys),
    )
    return tuple(map(printable, cells))


def _time(seconds: float) -> str:
    if not seconds:
        return _UNKNOWN
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")[:19]


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "namespace": summary.id,
        "facts": dict(summary.facts),
        "chunks": summary.chunks,
        "bytes": summary.nbytes,
        "oldest_use": summary.oldest or None,
        "newest_use": summary.newest or None,
        "encryption": list(summary.keys),
    }
