"""Models, made once for the whole run. Engines are made by the tests' own fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import models
import pytest

# Before anything imports torch or vLLM, which read them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts an engine."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVTIERS_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    return models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with random weights: sliding-window and full attention."""
    return models.make_gemma3(tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M, converted once into the user's cache."""
    from kvtiers.tools.model import smollm2_path

    return smollm2_path()
