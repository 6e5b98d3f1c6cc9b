"""What holds for all tests."""

import pytest
from hypothesis import HealthCheck, settings

# By default an example that takes 0.2 s fails, which on a busy machine any may do.
settings.register_profile("kvtiers", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtiers")

# Suites that ship in the wheel show the values they compare, as tests here do. Before any
# test module imports them, or they stay as they are.
pytest.register_assert_rewrite(
    "kvtiers.tiers.conformance", "kvtiers.policies.conformance", "test_kvtiers_sqlite"
)
