"""``kvtiers verify``: reads every chunk that lies in a place, and names the damaged ones."""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections import Counter
from dataclasses import dataclass, field

from kvtiers.connector.sizes import format_bytes
from kvtiers.tiers.examine import Verdict, examine
from kvtiers.tiers.format import CODEC_NONE
from kvtiers.tiers.sealing import Sealing
from kvtiers.tools import opening
from kvtiers.tools.places import NOTHING, Lying, Place, printable, what_to_do
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers verify``."""
    opening.add_arguments(parser)
    parser.add_argument(
        "--remove",
        action="store_true",
        help="take damaged chunks away, and leave those that can't be read",
    )
    parser.add_argument(
        "--renew-use",
        action="store_true",
        help="read chunks although a Redis older than 7.2 takes that for a use of them",
    )


@dataclass
class Report:
    """What was found in one place.

    Attributes:
        place: its name.
        chunks, nbytes: what was looked at.
        clear, encrypted: chunks of each kind, by their metadata.
        sound: chunks that are what they claim to be.
        unjudged: encrypted chunks by the id of the key that is missing; only their metadata
            was checked.
        bad: where each damaged or unreadable one lies, and why it is that.
        removed: how many of these were taken away.
        failed: why the place could not be looked at to its end, if so.

    """

    place: str
    chunks: int = 0
    nbytes: int = 0
    clear: int = 0
    encrypted: int = 0
    sound: int = 0
    unjudged: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[str, str]] = field(default_factory=list)
    removed: int = 0
    failed: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Verify, and say what was found. Returns 1 if anything is damaged or can't be read.

    Raises:
        ConfigError: what was written can't work.
        PlaceError: a place can't be looked at.

    """
    reports = []
    for place, sealing in opening.places(arguments):
        report = Report(place.name)
        reports.append(report)
        _verify(place, sealing, report, arguments)
        if not arguments.json:
            _tell(report)
    if arguments.json:
        print(json.dumps([_as_json(report) for report in reports], indent=2))
    return int(any(report.bad or report.failed for report in reports))


def _verify(
    place: Place, sealing: Sealing | None, report: Report, arguments: argparse.Namespace
) -> None:
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}")
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("")
        try:
            for lying in place.chunks():
                _one(place, sealing, lying, report, arguments)
                told = f"{report.place}: {report.chunks} chunks, {len(report.bad)} damaged"
                bar.update(task, description=told)
        except BrokenPipeError:
            raise  # whoever read it has seen enough
        except OSError as error:
            report.failed = what_to_do(error)


def _one(
    place: Place,
    sealing: Sealing | None,
    lying: Lying,
    report: Report,
    arguments: argparse.Namespace,
) -> None:
    try:
        with place.opened(lying) as content:
            verdict = examine(content, lying.key, sealing)
            nbytes = content.nbytes
    except FileNotFoundError:
        return  # evicted since it was listed
    except OSError as error:
        report.chunks += 1
        # It is no file. A store in trouble must not cost what is sound in it.
        remove = arguments.remove and error.errno == errno.EINVAL
        _bad(place, lying, f"can't be read: {error.strerror or error}", report, arguments, remove)
        return
    report.chunks += 1
    report.nbytes += nbytes
    _count(verdict, report)
    if verdict.defect is not None and not verdict.defect.foreign:
        _bad(place, lying, verdict.defect.value, report, arguments, arguments.remove)


def _count(verdict: Verdict, report: Report) -> None:
    metadata, defect = verdict.metadata, verdict.defect
    if metadata is not None:
        is_clear = metadata.codec == CODEC_NONE
        report.clear += is_clear
        report.encrypted += not is_clear
    if defect is None:
        report.sound += 1
    elif defect.foreign and metadata is not None:
        report.unjudged[metadata.key_id] += 1


def _bad(
    place: Place,
    lying: Lying,
    why: str,
    report: Report,
    arguments: argparse.Namespace,
    remove: bool,
) -> None:
    report.bad.append((lying.where, why))
    if not arguments.json:
        print(f"{printable(lying.where)}: {why}")
    if remove:
        try:
            place.remove(lying)
            report.removed += 1
        except OSError as error:
            told = f"{printable(lying.where)} could not be removed: {error.strerror or error}"
            print(f"kvtiers: {told}", file=sys.stderr)


def _tell(report: Report) -> None:
    """A summary, on the stream for humans: what is printed can be piped into another command."""
    parts = [f"{report.chunks} chunks, {format_bytes(report.nbytes)}"]
    if report.encrypted:
        parts += [f"{report.encrypted} encrypted", f"{report.clear} in clear"]
    parts += [f"{report.sound} sound", f"{len(report.bad)} damaged"]
    parts += [f"{report.removed} removed"] if report.removed else []
    hint = "" if report.chunks or report.failed else NOTHING
    print(f"kvtiers: {report.place}: {', '.join(parts)}.{hint}", file=sys.stderr)
    for key_id, count in report.unjudged.items():
        print(
            f"kvtiers: {report.place}: {count} chunks are encrypted with the key '{key_id}', which "
            "is not here: only their metadata was checked. Give the keys with --keys.",
            file=sys.stderr,
        )
    if report.failed:
        print(f"kvtiers: {report.place} was not read to its end: {report.failed}", file=sys.stderr)


def _as_json(report: Report) -> dict[str, object]:
    return {
        "place": report.place,
        "chunks": report.chunks,
        "bytes": report.nbytes,
        "sound": report.sound,
        "clear": report.clear,
        "encrypted": report.encrypted,
        "missing_keys": dict(report.unjudged),
        "damaged": [{"where": where, "why": why} for where, why in report.bad],
        "removed": report.removed,
        "failed": report.failed or None,
    }
