"""The packages of ``examples/``: their modules and tests, and what pip makes of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = ("custom_tier", "custom_policy")


def importable() -> None:
    """From now on their modules and those of their tests can be imported, uninstalled."""
    for package in PACKAGES:
        for folder in ("src", "tests"):
            path = str(EXAMPLES / package / folder)
            if path not in sys.path:
                sys.path.append(path)


def copied(package: str, into: Path) -> Path:
    """An example's folder elsewhere, since building leaves files beside the sources."""
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
    return Path(shutil.copytree(EXAMPLES / package, into / package, ignore=ignored))


def install(sources: Path, target: Path) -> None:
    """Install all of them into the folder ``target``, entry points included, by way of a copy."""
    folders = [copied(package, sources) for package in PACKAGES]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--target", target, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
