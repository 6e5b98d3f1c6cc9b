"""``kvtiers keygen``: makes a key for ``encryption``."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtiers.tiers.fs_files import made
from kvtiers.tiers.keyring import KeyringError, new_key, parse, read_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers keygen``."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        help="add the key to the end of this key file, which is made if it is not there, for this "
        "user only; without it the key is printed",
    )
    parser.add_argument(
        "--id", metavar="ID", help="what to call the key, in place of the date and four digits"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make a key. Returns 1 if it can't be written."""
    try:
        line = new_key(arguments.id)
        if arguments.file is None:
            print(line)
            return 0
        active = _add(arguments.file, line)
    except (KeyringError, OSError) as error:
        print(f"kvtiers: {error}", file=sys.stderr)
        return 1
    name = line.partition(":")[0]
    told = (
        "It encrypts."
        if active == name
        else f"It decrypts; '{active}', which stands first, encrypts. Give the file to all "
        "engines, and then move the new line to the top."
    )
    print(f"kvtiers: added the key '{name}' to {arguments.file}. {told}", file=sys.stderr)
    return 0


def _add(file: Path, line: str) -> str:
    """Write the line; returns the id of the key that is in use. Raises KeyringError, OSError."""
    file = file.resolve()  # a link stays one, and what it names gets the key
    with _alone(file.parent):
        status, text = None, ""
        if file.exists():
            read_file(file)
            status, text = file.stat(), file.read_text()
        content = text + ("\n" if text and not text.endswith("\n") else "") + line + "\n"
        # An id may be there already.
        active = parse(content, f"the key file {file}").active
        _replace(file, content, status)
    return active


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of two that add a key at once, one waits: neither loses the other's. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(file: Path, content: str, status: os.stat_result | None) -> None:
    """Write the file anew as one step, for whom it was before. Raises OSError."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    target = made(str(new))
    try:
        with target:
            target.write(content.encode())
            target.flush()
            os.fsync(target.fileno())
            if status is not None:
                os.fchown(target.fileno(), status.st_uid, status.st_gid)
                os.fchmod(target.fileno(), stat.S_IMODE(status.st_mode))
        os.replace(new, file)
    except BaseException:
        os.unlink(new)
        raise
