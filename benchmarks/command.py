"""What the benchmarks of real servers have in common on the command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from kvtiers.tools.model import ModelError, smollm2_path
from kvtiers.tools.redis_server import RedisServerError
from kvtiers.tools.server import ServerError
from rich.console import Console


def parser(name: str, description: str | None, log: str = "FOLDER") -> argparse.ArgumentParser:
    """The options that each of them takes.

    Args:
        name: of the module.
        description: its text.
        log: whether the servers' output goes into a "FOLDER" or a "FILE".

    """
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--json", metavar="FILE", type=Path, help="write what was measured there")
    made.add_argument(
        "--model", metavar="PATH", type=Path, help="a model folder (default: SmolLM2-135M)"
    )
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--log", metavar=log, type=Path, help="keep the servers' output there")
    return made


def run(benchmark: Callable[[argparse.Namespace, Console], None], given: argparse.Namespace) -> int:
    """Run a benchmark. 1 if a server failed.

    Args:
        benchmark: is told the options, of which ``model`` is always set, and where to say
            how far it is.
        given: the options.

    """
    progress = Console(stderr=True, highlight=False)
    # By default the signal ends Python at once, and leaves the servers running.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    try:
        given.model = given.model or smollm2_path()
        benchmark(given, progress)
    except (ModelError, RedisServerError, ServerError) as error:
        progress.print(str(error), markup=False)
        return 1
    return 0
