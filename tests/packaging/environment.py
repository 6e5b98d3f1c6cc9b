"""A virtual environment that tests install into and run commands in."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that knows nothing of this one."""

    folder: Path

    def run(self, *command: str | Path, cwd: Path) -> str:
        """What the command prints. Fails the test if the command fails."""
        # Without this interpreter's path: only what is installed there may be found. And
        # without options for pytest, which were meant for this run.
        foreign = ("PYTHON", "PYTEST")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        variables["PATH"] = f"{self.folder / 'bin'}:{variables['PATH']}"
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def install(self, *what: str | Path) -> None:
        """With pip, from the package index."""
        self.run("python", "-m", "pip", "install", "--quiet", *what, cwd=self.folder)
