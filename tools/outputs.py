"""Files that a command is to write, looked at before the work that it writes there."""

from __future__ import annotations

import os
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
