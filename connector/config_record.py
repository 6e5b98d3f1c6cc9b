"""The key ``record``: where what the cache sees is written to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from kvtiers.connector.sizes import format_bytes
from kvtiers.tiers.file_option import at_home, with_variables
from kvtiers.tiers.units import Size
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

DEFAULT_MAX_BYTES = 1 << 30
_MUST_BE = (
    "it must be a folder, such as /var/lib/kvtiers/recordings, or a mapping with 'path' and "
    "'max_bytes'"
)


def _is_named(value: object) -> object:
    if isinstance(value, str | Path) and os.fspath(value) not in ("", "."):
        return value
    raise ValueError("it must be the path of a folder, in quotes")


class Record(BaseModel):
    """What is recorded where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, BeforeValidator(_is_named)] = Field(
        description="the folder that recordings are written to"
    )
    max_bytes: Size = Field(
        default=DEFAULT_MAX_BYTES, description="the most that all recordings in the folder may take"
    )

    def __str__(self) -> str:
        return f"{self.path}, at most {format_bytes(self.max_bytes)}"

    def below(self, folder: Path) -> Record:
        """With ``~`` and variables expanded, and a relative path starting at ``folder``.

        Raises:
            ValueError: there is no such user or variable, or no folder can have that name.

        """
        expanded = Path(with_variables(os.fspath(self.path)))
        path = os.path.normpath(folder / at_home(expanded))
        return self.model_copy(update={"path": Path(path)})


def _mapping(written: Any) -> Any:
    """A path alone is short for a mapping with nothing else."""
    if isinstance(written, str | Path):
        return {"path": written}
    if written is None or isinstance(written, Mapping | Record):
        return written
    # pydantic collects ValueErrors only.
    raise ValueError(_MUST_BE)


RecordOption = Annotated[Record | None, BeforeValidator(_mapping)]
"""A folder, or a mapping of it and its bound; None records nothing."""
