"""Suites that ship in the wheel show the values they compare, as tests here do."""

import pytest

# Before any test module imports them, or they stay as they are.
pytest.register_assert_rewrite(
    "kvtiers.tiers.conformance", "kvtiers.policies.conformance", "test_kvtiers_sqlite"
)
