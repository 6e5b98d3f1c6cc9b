"""What the Redis tier makes of the server that it meets at start."""

import contextlib
import logging
import socket
import subprocess
import time

import pytest
from kvtiers.tiers import TierConfigError
from kvtiers.tiers.redis import RedisTier
from redis_server import RedisServer
from redis_tiers import ALLOWED
from redis_tls import Certificates, TlsRedisServer, clustered

SIZE = 4096
SECRET = "s3cret-and-long"


def probe(**options) -> str | None:
    tier = RedisTier(RedisTier.Config(**{"deadline": 5.0, **options}), SIZE)
    try:
        return tier.probe()
    finally:
        tier.close()


def refusal(**options) -> str:
    with pytest.raises(TierConfigError) as raised:
        probe(**options)
    return str(raised.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, certificates):
    """Speaks TLS too, and asks for a password and for certificates."""
    folder = tmp_path_factory.mktemp("redis")
    with TlsRedisServer(folder, certificates, ask_clients=True, password=SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def trust(certificates):
    """What a client needs for TLS."""
    return {
        "password": SECRET,
        "ssl_ca_certs": certificates.ca,
        "ssl_certfile": certificates.client,
        "ssl_keyfile": certificates.key_of(certificates.client),
    }


def test_a_server_that_does_all_that_is_needed_passes(server, trust):
    assert probe(url=server.url, password=SECRET) is None
    assert probe(url=server.unix_url, password=SECRET) is None
    assert probe(url=server.tls_url, **trust) is None


def test_the_trial_leaves_nothing_behind(server):
    probe(url=server.url, password=SECRET, key_prefix="trial:")
    with server.client() as client:
        assert client.keys("trial:*") == []


# Away -------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_away_and_the_address_is_told(tmp_path):
    with RedisServer(tmp_path) as server:
        gone = (server.url, f"unix://{tmp_path}/nothing.sock")
    for url in gone:
        assert f"the Redis server at {url} does not answer" in probe(url=url)


def test_where_it_is_required_an_absent_server_refuses_the_start(tmp_path):
    with RedisServer(tmp_path) as server:
        assert probe(url=server.url, required=True) is None
    text = refusal(url=server.url, required=True)
    assert text.startswith(f"The redis tier is required, but the Redis server at {server.url}")
    assert "set 'required' to false" in text


def test_a_server_that_hangs_is_away(tmp_path):
    with RedisServer(tmp_path) as server:
        server.pause()
        assert "does not answer" in probe(url=server.url, deadline=0.3)
        server.resume()


def test_a_server_that_is_still_loading_is_away(tmp_path):
    with RedisServer(tmp_path) as server, server.client() as client:
        client.mset({f"k{n}": "v" * 200 for n in range(500)})
        client.save()
    slowly = ["--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024"]
    with RedisServer(tmp_path, [*slowly, "--dbfilename", "dump.rdb"]) as server:
        assert "loading the dataset" in probe(url=server.url)


# Answering, and not having us ----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "wants a password. Set 'password'"),
        ({"password": "wrong-guess"}, "refuses 'username' and 'password'"),
        ({"username": "nobody", "password": SECRET}, "refuses 'username' and 'password'"),
        ({"password": SECRET, "database": 99}, "DB index is out of range"),
    ],
)
def test_wrong_credentials_and_databases_refuse_the_start_and_are_not_shown(
    server, options, says, caplog
):
    caplog.set_level(logging.DEBUG)
    url = server.url.removesuffix("/0")
    text = refusal(url=url, **options)
    assert text.startswith(f"The redis tier can't be used: the Redis server at {url}")
    assert says in text
    for secret in (SECRET, "wrong-guess"):
        assert secret not in text + caplog.text


def test_a_password_for_a_server_that_has_none_is_told(tmp_path):
    with RedisServer(tmp_path) as server:
        assert "without any password configured" in refusal(url=server.url, password="x")


@pytest.mark.parametrize("missing", [name for name in ALLOWED if name != "+strlen"])
def test_a_user_without_a_right_is_told_which_one(server, missing):
    rights = [name for name in ALLOWED if name != missing]
    user = {"username": "ann", "password": "pw"}
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">pw", "~*", *ALLOWED)
        assert probe(url=server.url, **user) is None
        client.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">pw", "~*", *rights)
    assert f"refuses {missing[1:].upper()} to this user" in refusal(url=server.url, **user)


def test_a_user_for_other_keys_is_told(server):
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "reset", "on", ">pw", "~x:*", "+@all")
    assert probe(url=server.url, username="bob", password="pw", key_prefix="x:") is None
    text = refusal(url=server.url, username="bob", password="pw")
    assert "refuses SET to this user" in text


def test_a_read_only_replica_is_refused(tmp_path):
    with RedisServer(tmp_path / "a") as primary:
        link = ["--replicaof", "127.0.0.1", str(primary.port)]
        with RedisServer(tmp_path / "b", link) as replica:
            assert "is a read-only replica. Name the primary" in refusal(url=replica.url)


def test_a_cluster_is_refused(tmp_path):
    with RedisServer(tmp_path, clustered()) as server:
        assert "is a Redis Cluster, which this release" in refusal(url=server.url)


def wait_for(port):
    end = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < end, "nobody listens"
        time.sleep(0.02)


def test_a_sentinel_is_refused(tmp_path):
    """It needs a file that it can write to, and takes few options."""
    with RedisServer(tmp_path / "never-mind") as server:
        url, port = server.url, server.port
    (tmp_path / "sentinel.conf").write_text(f"port {port}\nlogfile {tmp_path}/log\n")
    command = ["redis-server", str(tmp_path / "sentinel.conf"), "--sentinel"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            assert "is a Redis Sentinel, which this release" in refusal(url=url)
        finally:
            process.kill()


# TLS --------------------------------------------------------------------------


def test_tls_that_does_not_fit_refuses_the_start(server, trust, certificates, tmp_path):
    strange = Certificates(tmp_path / "strange")
    anonymous = {key: trust[key] for key in ("password", "ssl_ca_certs")}
    unknown = {
        **anonymous,
        "ssl_certfile": strange.client,
        "ssl_keyfile": strange.key_of(strange.client),
    }
    for options in (
        {**trust, "ssl_ca_certs": strange.ca},
        {key: value for key, value in trust.items() if key != "ssl_ca_certs"},
        anonymous,
        unknown,
    ):
        assert "trust" in refusal(url=server.tls_url, **options)


def test_tls_where_none_is_spoken_and_the_other_way_round(server, trust):
    plain_at_tls = server.tls_url.replace("rediss", "redis")
    text = refusal(url=plain_at_tls, password=SECRET)
    assert "expects TLS. Begin 'url' with rediss://" in text
    tls_at_plain = server.url.replace("redis", "rediss")
    text = refusal(url=tls_at_plain, deadline=0.5, **trust)
    assert "does not speak TLS. Begin 'url' with redis://" in text


def test_the_host_name_is_checked_unless_told_otherwise(tmp_path):
    elsewhere = Certificates(tmp_path / "tls", host="DNS:cache.example")
    with TlsRedisServer(tmp_path / "redis", elsewhere) as server:
        options = {"url": server.tls_url, "ssl_ca_certs": elsewhere.ca}
        assert "can't be trusted" in refusal(**options)
        assert probe(**options, ssl_check_hostname=False) is None
