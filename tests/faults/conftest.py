"""Models, rows, and the page that is written from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Its engines, models and faulty copies are what these tests are made of.
sys.path.append(str(HERE.parent / "e2e"))

import fault_page  # noqa: E402 - found by the line above, or beside this file
import models  # noqa: E402
from fault_trial import Row  # noqa: E402

# Before anything imports torch or vLLM, which read them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

ROWS = pytest.StashKey[dict[str, Row]]()
PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-mounts",
        action="store_true",
        help="put faults of file systems in at the tier's system calls, as where none can mount",
    )
    parser.addoption(
        "--write-reliability",
        action="store_true",
        help="write the lines of docs/reliability.md of the cases that pass in this run",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nearly everything in this folder starts an engine."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Unknown to a run that was not given this folder.
    if session.config.getoption("--write-reliability", default=False):
        print(f"\ndocs/reliability.md: {fault_page.write(session.config.stash[ROWS])}")


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """What the case's line in the table will say. A test that fills it in halfway fails."""
    made = Row(request.param)
    yield made
    if request.node.stash.get(PASSED, False):
        assert made.complete(), f"it was not seen through: {made}"
        request.config.stash[ROWS][made.case.id] = made


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("KVTIERS_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights: one KV-cache group."""
    return models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with random weights: several KV-cache groups."""
    return models.make_gemma3(tmp_path_factory.mktemp("models") / "gemma3")
