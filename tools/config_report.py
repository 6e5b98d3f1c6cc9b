"""``kvtiers config``: checks a configuration and shows where each value comes from."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from kvtiers.connector.config import Loaded, load, values
from kvtiers.connector.config_errors import ConfigError, shown
from kvtiers.connector.config_sources import EXTRA
from kvtiers.connector.config_text import read_document
from kvtiers.tools.config_reference import reference
from kvtiers.tools.config_sections import as_text
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NOTE = "This can work. The server checks folders, keys, free room and block sizes when it starts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers config``."""
    what = (
        "a YAML or JSON file to check, which may be LMCache's; or, from a '{' on, the JSON text of "
        "--kv-transfer-config or of the kv_connector_extra_config in it"
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("file", metavar="FILE", nargs="?", help=what)
    given.add_argument("--check", metavar="FILE", help="the same")
    given.add_argument(
        "--reference", action="store_true", help="print what can be set, as a page in Markdown"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the effective configuration.

    Raises:
        ConfigError: it cannot work.

    """
    if arguments.reference:
        print(reference(), end="")
        return 0
    loaded = _load(arguments)
    for text in (*loaded.warnings, *loaded.notes):
        print(f"kvtiers: {text}", file=sys.stderr)
    show(loaded, Console())
    print(f"kvtiers: {_NOTE}", file=sys.stderr)
    return 0


def _load(arguments: argparse.Namespace) -> Loaded:
    by_option = arguments.check is not None
    named_by = "--check" if by_option else "the command line"
    given: str | None = arguments.check if by_option else arguments.file
    if given is None:
        return load({}, os.environ)
    if given.lstrip().startswith("{"):
        return load(_extra_config(given, named_by), os.environ)
    return load({"config": given}, os.environ, named_by)


def _extra_config(text: str, named_by: str) -> Mapping[str, Any]:
    """What the connector would get: all of ``text``, or that part of a whole transfer config."""
    values: dict[str, Any]  # as the text starts with a brace
    values, _ = read_document(text, True, f"The text from {named_by}")
    if "kv_connector" not in values and EXTRA not in values:
        return values
    extra = values.get(EXTRA, {})
    if not isinstance(extra, dict):
        raise ConfigError(
            [f"{EXTRA} is {shown(extra)} (from {named_by}): it must be a mapping of keys."]
        )
    return extra


def show(loaded: Loaded, console: Console) -> None:
    """Print every value, and what became of LMCache's words if there are any."""
    rows = [(path, as_text(value), loaded.origins[path]) for path, value in values(loaded.config)]
    _print(("key", "value", "origin"), rows, console)
    if loaded.lmcache:
        print()
        words = [
            (use.word, f"sets {use.sets}" if use.sets else f"nothing: {use.why_not}", use.origin)
            for use in loaded.lmcache
        ]
        _print(("LMCache's word", "what it does here", "origin"), words, console)


def _print(
    titles: tuple[str, str, str], rows: list[tuple[str, str, str]], console: Console
) -> None:
    """A table on a terminal, aligned columns elsewhere."""
    if not console.is_terminal:
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for first, second, third in rows:
            print(f"{first:{widths[0]}}  {second:{widths[1]}}  {third}")
        return
    table = Table(*titles)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
