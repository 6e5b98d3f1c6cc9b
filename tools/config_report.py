"""``kvtiers config``: checks a configuration and shows where each value comes from."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from kvtiers.connector.config import Loaded, load, values
from kvtiers.connector.sizes import Capacity
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NOTES = (
    "Not checked here, but when the server starts: that each tier's folder or service can be "
    "reached and has room, that a capacity holds at least one chunk, that chunk_size is a multiple "
    "of vLLM's block size, and that prefix caching is on. A share is taken of the serving "
    "machine's free memory or file system."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers config``."""
    parser.add_argument("--check", metavar="FILE", help="a YAML or JSON file to check")


def run(arguments: argparse.Namespace) -> int:
    """Print the effective configuration.

    Raises:
        ConfigError: it cannot work.

    """
    extra = {} if arguments.check is None else {"config": str(Path(arguments.check).absolute())}
    loaded = load(extra, os.environ)
    for warning in loaded.warnings:
        print(f"kvtiers: {warning}", file=sys.stderr)
    show(loaded, Console())
    print(f"kvtiers: {_NOTES}", file=sys.stderr)
    return 0


def show(loaded: Loaded, console: Console) -> None:
    """Print every value: a table on a terminal, aligned columns elsewhere."""
    rows = [(path, _text(value), loaded.origins[path]) for path, value in values(loaded.config)]
    if not console.is_terminal:
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for path, value, origin in rows:
            print(f"{path:{widths[0]}}  {value:{widths[1]}}  {origin}")
        return
    table = Table("key", "value", "origin")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _text(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, Capacity | Path):
        return str(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)
