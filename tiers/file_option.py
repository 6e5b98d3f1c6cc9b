"""An option that names a file of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator


def _named(value: object) -> object:
    if value == "":
        raise ValueError("it is empty. Name a file, or leave it out")
    return value


def at_home(path: Path) -> Path:
    """The path with ``~`` expanded. Raises ValueError if there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError("there is no such user. Write the path in full") from error


FileOption = Annotated[Path, BeforeValidator(_named), AfterValidator(at_home)]
"""A path; ``~`` is the user's home."""
