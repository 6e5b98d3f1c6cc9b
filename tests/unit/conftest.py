"""Suites that ship in the wheel show the values they compare, as tests here do."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redis_server import RedisServer

# Before any test module imports them, or they stay as they are.
pytest.register_assert_rewrite(
    "kvtiers.tiers.conformance", "kvtiers.policies.conformance", "test_kvtiers_sqlite"
)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator["RedisServer"]:
    """An empty Redis."""
    from redis_server import RedisServer

    with RedisServer(tmp_path / "redis") as server:
        yield server
