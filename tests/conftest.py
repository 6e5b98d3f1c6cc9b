"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# By default an example that takes 0.2 s fails, which on a busy machine any may do.
settings.register_profile("kvtiers", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtiers")
