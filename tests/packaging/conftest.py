"""A clean environment with the built wheel, and then with what authors need."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from environment import ROOT, Environment
from example_packages import PACKAGES, copied


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
    examples = [copied(package, sources) for package in PACKAGES]
    bare.install(f"{wheel}[testing]", *examples)
    return bare
