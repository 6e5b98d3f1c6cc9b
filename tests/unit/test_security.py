"""What docs/security.md says of the code, as far as no other test holds the code to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtiers.connector.metrics import definitions
from kvtiers.tiers.fs import FsTier

ROOT = Path(__file__).parents[2]
PACKAGES = ("connector", "tiers", "policies", "tools")
# What runs code that it reads, or might.
EXECUTING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# What vLLM's own processes tell each other, which vLLM pickles too: no tier's and no file's.
BETWEEN_PROCESSES = [("connector/heat_post.py", ["pickle"])]
UNSAFE_CALLS = {"eval", "exec", "unsafe_load", "full_load", "load_all"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def executing(tree: ast.Module) -> list[str]:
    """What a module imports or calls that could run what it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in EXECUTING]
        elif isinstance(node, ast.ImportFrom) and node.module in EXECUTING:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and called(node) in UNSAFE_CALLS:
            found.append(called(node))
    return found


def test_nothing_that_is_read_from_a_tier_or_a_file_is_ever_run() -> None:
    found = [(path, named) for path, tree in trees() if (named := executing(tree))]
    assert found == BETWEEN_PROCESSES


def test_the_check_above_sees_what_it_looks_for() -> None:
    text = "import pickle\nfrom marshal import loads\nyaml.unsafe_load(x)\neval('1')\n"
    assert executing(ast.parse(text)) == ["pickle", "marshal", "unsafe_load", "eval"]


def test_a_metric_names_tiers_and_nothing_of_a_request() -> None:
    """A tenant's name, a hash or a prompt in a label would be read by all who scrape."""
    assert {tuple(made.labelnames) for made in definitions().values()} <= {("tier",), ()}


@pytest.mark.parametrize(("mode", "told"), [(0o777, True), (0o1777, False), (0o770, False)])
def test_a_root_where_everybody_may_write_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, told: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    FsTier(FsTier.Config(path=root), 8192)
    assert ("everybody may write" in caplog.text) is told


def test_the_page_names_tests_and_files_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`((?:connector|tiers|tests|tools|docs)/[\w/.]+)`", page)
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).exists()] == []
