"""Models, made once for the whole run. Engines are made by the tests' own fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
from passage import Passage, pass_through
from redis_server import RedisServer

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
    for name in [name for name in os.environ if name.startswith(("KVTIERS_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """An empty Redis."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


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


@pytest.fixture(scope="session")
def smollm2_passage(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Passage:
    """Twenty texts through every tier, on a model with real weights."""
    return pass_through(
        smollm2,
        models.texts(smollm2, 20),
        tmp_path_factory.mktemp("smollm2") / "fs",
        # All of them at once: 6 MiB a chunk, up to four chunks a prompt.
        arena="512MiB",
        blocks=32,
        max_tokens=8,
    )


@pytest.fixture(scope="session")
def gemma3_passage(gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Passage:
    """Through every tier on a model with sliding-window layers, prompts well beyond the window."""
    root = tmp_path_factory.mktemp("gemma3") / "fs"
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        return pass_through(gemma3, models.prompts(4, 700), root, redis=redis.url)
