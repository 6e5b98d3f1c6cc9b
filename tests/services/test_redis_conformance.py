"""The Redis tier keeps the promises that strangers' tiers are held to, over every transport."""

from pathlib import Path

from redis_tiers import RedisConformance
from redis_tls import Certificates, TlsRedisServer


class TestRedisTier(RedisConformance):
    pass


class TestRedisTierOnAUnixSocket(RedisConformance):
    def url(self):
        return self.server.unix_url


class TestRedisTierWithTtlAndOneConnection(RedisConformance):
    payload_bytes = 5 * 4096
    options = {"ttl": 600, "pool_size": 1}  # noqa: RUF012 - as in the suite


class TestRedisTierOverTlsWithAPassword(RedisConformance):
    @classmethod
    def start_server(cls, folder: Path) -> TlsRedisServer:
        certificates = Certificates(folder / "tls")
        return TlsRedisServer(folder, certificates, ask_clients=True, password="s3cret/@")

    def url(self):
        return self.server.tls_url.replace("//", "//:s3cret%2F%40@")

    @property
    def options(self):
        certificates = self.server.certificates
        return {
            "ssl_ca_certs": certificates.ca,
            "ssl_certfile": certificates.client,
            "ssl_keyfile": certificates.key_of(certificates.client),
        }
