"""The example configuration is one that works."""

from __future__ import annotations

from pathlib import Path

from kvtiers.connector.config import load, resolve_blocks_per_chunk

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_configuration_is_valid() -> None:
    loaded = load({"config": str(EXAMPLES / "kvtiers.yaml")}, {})
    assert loaded.warnings == ()
    assert [tier.type for tier in loaded.config.tiers] == ["cpu", "fs"]
    assert resolve_blocks_per_chunk(loaded.config, [16]) == 16
    assert resolve_blocks_per_chunk(loaded.config, [128]) == 2
