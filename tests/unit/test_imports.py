"""Imports go one way: connector -> tiers -> policies; and only connector knows an engine."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_NOT_IMPORT = {
    "policies": (
        "kvtiers.tiers",
        "kvtiers.simulator",
        "kvtiers.connector",
        "kvtiers.tools",
        "vllm",
        "torch",
    ),
    "tiers": ("kvtiers.simulator", "kvtiers.connector", "kvtiers.tools", "vllm", "torch"),
    "simulator": ("kvtiers.connector", "kvtiers.tools", "vllm", "torch"),
    "connector": ("kvtiers.simulator", "kvtiers.tools"),
    "tools": ("vllm",),
}

CHANGES_ENGINES = ("benchmarks.slowed", "benchmarks.unverified")
"""Change every engine of the process that imports them: for vLLM's own processes only."""


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(folder: Path, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.name} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in imported(path)
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]


@pytest.mark.parametrize("package", MAY_NOT_IMPORT)
def test_a_layer_imports_nothing_above_it(package: str) -> None:
    assert offences(ROOT / package, MAY_NOT_IMPORT[package]) == []


def test_the_check_sees_all_forms_of_import(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch.nn\ndef f():\n    from vllm import config\n")
    (tmp_path / "b.py").write_text("from kvtiers.tiers.base import Tier\nimport torchmetrics\n")
    assert offences(tmp_path, ("torch", "vllm", "kvtiers.tiers")) == [
        "a.py imports torch.nn",
        "a.py imports vllm.config",
        "b.py imports kvtiers.tiers.base.Tier",
    ]


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_what_changes_every_engine_is_imported_by_none_but_the_engine(folder: str) -> None:
    assert offences(ROOT / folder, CHANGES_ENGINES) == []


def test_no_two_modules_of_the_tests_have_the_same_name() -> None:
    """All of them are imported when the end-to-end tests are collected, by name alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    del names["conftest.py"]
    assert [name for name, times in names.items() if times > 1] == []


def test_no_function_stands_in_two_modules() -> None:
    """One that two layers need has its home in the one below them."""
    homes = defaultdict[str, list[str]](list)
    for package in MAY_NOT_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    told = ast.get_docstring(node, clean=False) is not None
                    work = ast.Module(node.body[told:], [])
                    homes[ast.dump(node.args) + ast.dump(work)].append(f"{path.name}: {node.name}")
    assert [places for places in homes.values() if len(places) > 1] == []
