"""Files that a command is to write, looked at before the work that it writes there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from kvtiers.simulator.errors import SimulatorError

_Path = str | os.PathLike[str]


def check_output(option: str, path: _Path, reads: Iterable[_Path] = ()) -> None:
    """Refuse what could not be written, or would be written over what is read.

    Args:
        option: that names the file, as it is written.
        path: of the file, which need not be there.
        reads: files that the command reads.

    Raises:
        SimulatorError: the text says what is wrong with it.

    """
    if not os.fspath(path):
        raise SimulatorError(f"{option} has no name of a file.")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise SimulatorError(f"{option} {path}: there is no folder {folder}.")
    if os.path.isdir(path):
        raise SimulatorError(f"{option} {path}: that is a folder; name a file.")
    # By what it is and not by its name: it may be a link.
    if os.path.exists(path) and any(
        os.path.exists(each) and os.path.samefile(path, each) for each in reads
    ):
        raise SimulatorError(
            f"{option} {path}: that file is to be read, and would be written over. Name another."
        )
    if obstacle := why_unwritable(path):
        raise SimulatorError(f"{option} {path}: it can't be written: {obstacle}. Name another.")


def why_unwritable(path: _Path) -> str:
    """What is in the way of writing a file, "" if nothing is. What lies there stays as it is.

    Found by trying: rights say nothing of read-only mounts, of names that are too long, or to root.
    """
    try:
        if not os.path.exists(path):
            # Where a link leads that leads nowhere yet.
            place = os.path.realpath(path)
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(place)
        elif stat.S_ISREG(mode := os.stat(path).st_mode) or stat.S_ISDIR(mode):
            os.close(os.open(path, os.O_WRONLY))
        elif not os.access(path, os.W_OK):  # a pipe's reader would take the try for all there is
            return "it is not this user's to write"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_ending(option: str, path: _Path, *endings: str) -> None:
    """Refuse a name that says another format than what is written.

    Args:
        option: that names the file, as it is written.
        path: of the file.
        endings: that are right, with their dot; the first is told.

    Raises:
        SimulatorError: it has none of them.

    """
    if ending(path) not in endings:
        raise SimulatorError(f"{option} {path}: name a file that ends in {endings[0]}.")


def ending(path: _Path) -> str:
    """What a file's name ends in, with the dot, in lower case; "" for nothing."""
    return os.path.splitext(path)[1].lower()
