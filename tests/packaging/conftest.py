"""A clean environment with the built wheel, and then with what authors need."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from environment import ROOT, Environment


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of this folder."""
    config.addinivalue_line("markers", "packaging: installs into an environment of its own")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder asks the package index."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.packaging)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvtiers' wheel, built by way of its source archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel and its own dependencies."""
    folder = tmp_path_factory.mktemp("environments") / "clean"
    venv.create(folder, with_pip=True)
    environment = Environment(folder)
    environment.install(wheel)
    return environment


@pytest.fixture(scope="session")
def authors(
    bare: Environment, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """The same, with the conformance suites' dependencies and both example packages."""
    sources = tmp_path_factory.mktemp("sources")
    examples = [copied(name, sources) for name in ("custom_tier", "custom_policy")]
    bare.install(f"{wheel}[testing]", *examples)
    return bare


def copied(example: str, into: Path) -> Path:
    """An example's folder elsewhere, since building leaves files beside the sources."""
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
    return Path(shutil.copytree(ROOT / "examples" / example, into / example, ignore=ignored))
