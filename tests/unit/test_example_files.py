"""The examples work: the configuration, and the policy.

All of the packages' own tests run where they are installed, in tests/packaging; the
suite on the example tier is in test_tiers_behind_wrappers.py.
"""

from __future__ import annotations

import example_packages
from kvtiers.connector.config import load, resolve_blocks_per_chunk

example_packages.importable()

# Found since the line above, and run here too.
from test_kvtiers_gdsf import (  # noqa: E402
    TestGdsf,  # noqa: F401
    test_chunks_without_prefixes_are_evicted_as_the_paper_says,  # noqa: F401
)


def test_the_example_configuration_is_valid() -> None:
    loaded = load({"config": str(example_packages.EXAMPLES / "kvtiers.yaml")}, {})
    assert loaded.warnings == ()
    assert [tier.type for tier in loaded.config.tiers] == ["cpu", "fs"]
    assert resolve_blocks_per_chunk(loaded.config, [16]) == 16
    assert resolve_blocks_per_chunk(loaded.config, [128]) == 2
