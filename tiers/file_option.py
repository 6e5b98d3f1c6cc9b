"""An option that names a file of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator


def _named(value: object) -> object:
    if value == "":
        raise ValueError("it is empty. Name a file, or leave it out")
    return value


def with_variables(text: str) -> str:
    """A path with the variables of the environment in it expanded.

    Raises:
        ValueError: a variable is not set, or no path can be called so.

    """
    if "\0" in text:
        raise ValueError("no path holds a null character")
    expanded = os.path.expandvars(text)
    if unset := re.search(r"\$\{?\w+\}?", expanded):
        raise ValueError(f"the variable {unset[0]} is not set. Set it, or write the path in full")
    return expanded


def at_home(path: Path) -> Path:
    """The path with ``~`` expanded. Raises ValueError if there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError("there is no such user. Write the path in full") from error


FileOption = Annotated[Path, BeforeValidator(_named), AfterValidator(at_home)]
"""A path; ``~`` is the user's home."""
