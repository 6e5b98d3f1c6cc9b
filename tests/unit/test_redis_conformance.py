"""The Redis tier keeps the promises that strangers' tiers are held to, over every transport."""

import pytest

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

from redis_tiers import RedisConformance  # noqa: E402 - rewritten before its import


class TestRedisTier(RedisConformance):
    pass


class TestRedisTierOnAUnixSocket(RedisConformance):
    def url(self):
        return self.server.unix_url


class TestRedisTierWithTtlAndOneConnection(RedisConformance):
    payload_bytes = 5 * 4096
    options = {"ttl": 600, "pool_size": 1}  # noqa: RUF012 - as in the suite
