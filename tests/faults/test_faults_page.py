"""The list of cases, the tests that run them, and the page tell of the same faults."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fault_cases import CASES, case
from fault_page import cases_in_page
from fault_trial import Row

HERE = Path(__file__).parent


def cases_in_tests() -> list[str]:
    """The names that the tests of this folder give to ``case``."""
    names = []
    for file in sorted(HERE.glob("test_*.py")):
        if file.name == Path(__file__).name:
            continue
        tree = ast.parse(file.read_text())
        tables = {
            node.target.id: [key.value for key in node.value.keys]
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == case.__name__:
                for argument in node.args:
                    if isinstance(argument, ast.Starred):
                        names += tables[argument.value.id]
                    else:
                        names.append(argument.value)
    return names


def test_every_case_is_run_once() -> None:
    assert sorted(cases_in_tests()) == sorted(CASES)


def test_the_page_tells_of_every_case_and_of_no_other(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-reliability", default=False):
        pytest.skip("the page is being written")
    assert cases_in_page() == list(CASES), "run: make faults"


def test_a_row_refuses_a_wait_beyond_its_bound_and_figures_that_stood_still() -> None:
    row = Row(next(iter(CASES.values())))
    with pytest.raises(AssertionError, match="not within"):
        row.waited(1e6)
    with pytest.raises(AssertionError, match="did not go up"):
        row.counted({}, {})
    assert not row.complete()
