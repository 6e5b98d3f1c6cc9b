"""The files that a page of the docs has its reader write, as they stand in the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def files(page: str) -> dict[str, str]:
    """Code blocks of ``page`` by the file name in their first line."""
    found = re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def module(page: str, name: str) -> ModuleType:
    """A Python file of ``page``, imported under its name; those it imports must be already."""
    code = files(page)[f"{name}.py"]
    made = sys.modules[name] = ModuleType(name)
    exec(compile(code, f"docs/{page}: {name}.py", "exec"), made.__dict__)
    return made
