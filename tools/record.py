"""``kvtiers record``: runs a server and records what its cache sees, or sums up a recording."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kvtiers.connector.config_record import DEFAULT_MAX_BYTES
from kvtiers.connector.sizes import format_bytes
from kvtiers.tiers.recording_format import RecordingError, parts_of, recordings_in
from kvtiers.tiers.units import read_size
from kvtiers.tools.outputs import why_unwritable
from kvtiers.tools.recorded import Summary, merge, summarise

VARIABLE = "KVTIERS_RECORD"
_DEFAULT_OUTPUT = Path("recording.parquet")
_NOTHING = (
    "nothing was recorded. No request ended in an engine with kvtiers, or what the command gives "
    "that engine as kv_connector_extra_config has a 'record' of its own."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers record``."""
    add = parser.add_argument
    add(
        "command",
        metavar="-- COMMAND",
        nargs="*",
        help="what to run, such as: vllm serve MODEL --kv-transfer-config ...",
    )
    add(
        "--from",
        dest="source",
        metavar="PATH",
        type=Path,
        help="run nothing; take a recording, or a folder that an engine has recorded in",
    )
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"the file to write (default: {_DEFAULT_OUTPUT}; with --from, none)",
    )
    add(
        "--max-bytes",
        metavar="SIZE",
        type=_size,
        default=DEFAULT_MAX_BYTES,
        help="what a recording may take while it is made; beyond it its beginning is dropped "
        f"(default: {format_bytes(DEFAULT_MAX_BYTES)})",
    )
    add("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Record, or sum up. Returns the exit status of the command; 2 for what can't be done."""
    if bool(arguments.command) == bool(arguments.source):
        arguments.parser.error("name a command to run, after '--', or a recording with --from")
    try:
        if arguments.source is not None:
            return _take(arguments)
        return _record(arguments)
    except RecordingError as error:
        print(f"kvtiers: {error}", file=sys.stderr)
        return 2


def _take(arguments: argparse.Namespace) -> int:
    parts = parts_of(arguments.source)
    if arguments.output is not None:
        _refuse_existing(arguments.output)
        merge(parts, arguments.output)
    _show([(arguments.output or arguments.source, summarise(parts))], arguments.json, sys.stdout)
    return 0


def _record(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output or _DEFAULT_OUTPUT
    folder = output.with_name(f"{output.name}.parts")
    # The second where the command has several engines.
    for file in (output, _of_engine(output, 1)):
        _refuse_existing(file)
    if folder.exists():
        raise RecordingError(
            f"{folder} is there: an earlier run was not finished. Keep what it has with 'kvtiers "
            "record --from' and that path, or remove it."
        )
    status = _run_command(arguments.command, folder, arguments.max_bytes)
    found = recordings_in(folder) if folder.is_dir() else {}
    if not found:
        print(f"kvtiers: {_NOTHING}", file=sys.stderr)
        return status or 1
    written = list(_write(found, output))
    # The command may write to the standard output, too, for others to read.
    _show(written, arguments.json, sys.stdout if arguments.json else sys.stderr)
    # It was made for this run, and a killed engine leaves unfinished files there.
    shutil.rmtree(folder, ignore_errors=True)
    return status


def _write(found: Mapping[str, Sequence[Path]], output: Path) -> Iterator[tuple[Path, Summary]]:
    """A file for each engine, in the order in which they began."""
    for number, parts in enumerate(found.values(), start=1):
        file = _of_engine(output, number) if len(found) > 1 else output
        merge(parts, file)
        yield file, summarise(parts)


def _of_engine(output: Path, number: int) -> Path:
    """The file of one of several engines."""
    return output.with_stem(f"{output.stem}-{number}")


def _run_command(command: Sequence[str], folder: Path, max_bytes: int) -> int:
    """Run it to its end. Returns its status, as a shell would."""
    record = json.dumps({"path": os.path.abspath(folder), "max_bytes": max_bytes})
    try:
        process = subprocess.Popen(command, env={**os.environ, VARIABLE: record})  # noqa: S603
    except OSError as error:
        told = error.strerror or error
        raise RecordingError(f"'{shlex.join(command)}' can't be run: {told}.") from None
    with _passing_signals(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What ends this process ends the command instead, and this one after it.

    A terminal sends Ctrl-C to both by itself.
    """
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    term = signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, term)


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise RecordingError(f"{output} is there already. Name another file with -o, or remove it.")
    if not output.absolute().parent.is_dir():
        raise RecordingError(f"{output}: there is no folder {output.parent} to write it in.")
    if obstacle := why_unwritable(output):
        raise RecordingError(f"{output}: it can't be written: {obstacle}. Name another with -o.")


def _size(text: str) -> int:
    size = read_size(text)
    if not size:
        raise argparse.ArgumentTypeError(f"'{text}' is no size. Write for example 256MiB or 2GiB.")
    return size


def _show(written: Sequence[tuple[Path, Summary]], as_json: bool, out: TextIO) -> None:
    if as_json:
        told = [
            {
                "file": str(file),
                **dataclasses.asdict(found),
                "token_hit_ratio": found.token_hit_ratio,
            }
            for file, found in written
        ]
        print(json.dumps(told, indent=2), file=out)
        return
    for file, found in written:
        print("\n".join(_lines(file, found)), file=out)


def _lines(file: Path, found: Summary) -> Iterator[str]:
    engine = found.about
    hits = ", ".join(f"{tier} {found.ratio(tier):.1%}" for tier in found.hit_tokens)
    capacities = ", ".join(f"{tier.name} {_bytes(tier.capacity)}" for tier in engine.tiers)
    rows = {
        "began": found.started,
        "policy": engine.policy,
        "capacity": capacities,
        "input tokens": f"{found.input_tokens:,}",
        "output tokens": f"{found.output_tokens:,}",
        "token hit ratio": f"{found.token_hit_ratio:.1%} ({hits})",
        "distinct chunks": f"{found.chunks:,} of {engine.chunk_tokens} tokens, "
        + _bytes(found.chunks * engine.chunk_bytes),
        "sessions": f"{found.sessions:,}",
        "tenants": f"{found.tenants:,}",
    }
    yield f"kvtiers: {file}: {found.requests:,} requests in {found.seconds:,.0f} s"
    for name, value in rows.items():
        yield f"  {name:16}{value}"


def _bytes(nbytes: int | None) -> str:
    return "without bound" if nbytes is None else format_bytes(nbytes)
