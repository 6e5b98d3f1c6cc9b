"""Real services, one of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """An empty Redis."""
    with RedisServer(tmp_path / "redis") as server:
        yield server
