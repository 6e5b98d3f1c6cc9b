"""``kvtiers keygen``: makes a key for ``encryption``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

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
    text = ""
    if file.exists():
        read_file(file)
        text = file.read_text()
    content = text + ("\n" if text and not text.endswith("\n") else "") + line + "\n"
    # An id may be there already.
    active = parse(content, f"the key file {file}").active
    new = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as target:
            target.write(content)
            target.flush()
            os.fsync(target.fileno())
        if file.exists():
            os.chmod(new, file.stat().st_mode & 0o777)
        os.replace(new, file)
    except OSError:
        os.unlink(new)
        raise
    return active
