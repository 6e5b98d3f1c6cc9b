"""What the filesystem tier does on URLs beyond what every tier does; see also the conformance."""

import asyncio
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import botocore.config
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.tiers.base import ChunkKey, Namespace, ReadOutcome, TierConfigError, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.remote_config import StorageOptions
from kvtiers.tiers.remote_dialects import client_options
from kvtiers.tiers.remote_fs import RemoteFsTier
from kvtiers.tools import cli
from remote_recipes import PlainFileSystem, name_of, open_remote_tier
from s3_server import S3Server

registry = sys.modules["fsspec.registry"]

SIZE = 8192
CHUNK = SIZE + METADATA_BYTES
FACTS = {"model": "tiny", "dtype": "float32"}
NAMESPACE = Namespace("ab" * 16, FACTS)
SECRET = "hunter2-swordfish"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def prefix(request):
    """A name of the test's own."""
    return f"{request.node.name.partition('[')[0]}-{time.time_ns()}"


def on_s3(server, prefix, chunks=64, **options):
    options = {"storage_options": server.storage_options, "timeout": 20.0, **options}
    return open_remote_tier(server.url(prefix), chunks, SIZE, **options)


def in_memory(prefix, chunks=64):
    return open_remote_tier(f"memory://{prefix}", chunks, SIZE)


def on_files(folder, chunks=64, **options):
    return open_remote_tier(f"plain://{folder}", chunks, SIZE, publish="rename", **options)


def key(number, namespace=NAMESPACE):
    return ChunkKey(namespace, number.to_bytes(4, "little") * 9)


def filled(value):
    buffer = aligned_buffer(SIZE)
    buffer[:] = bytes([value]) * SIZE
    return buffer


def write(tier, *keys):
    return tier.write(keys, [filled(k.hash[0]) for k in keys])


def read(tier, *keys):
    buffers = [aligned_buffer(SIZE) for _ in keys]
    outcomes = tier.read(keys, buffers)
    for k, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome is not ReadOutcome.HIT or buffer == filled(k.hash[0])
    return outcomes


def refusal(**options):
    with pytest.raises(ConfigError) as raised:
        load({"tiers": ["cpu", {"type": "fs", **options}]}, {})
    return str(raised.value)


def loaded(**options):
    return load({"tiers": ["cpu", {"type": "fs", **options}]}, {}).config.tiers[1]


# Configuration ------------------------------------------------------------------


def test_a_url_makes_a_filesystem_tier_remote_and_a_file_url_a_local_one(tmp_path):
    assert loaded(path="memory://kv").tier_class() is RemoteFsTier
    local = loaded(path=f"file://{tmp_path}/kv")
    assert local.tier_class() is FsTier
    assert local.options.path == tmp_path / "kv"


def test_variables_in_a_url_are_expanded(monkeypatch):
    monkeypatch.setenv("BUCKET", "kv")
    assert loaded(path="memory://$BUCKET/x").options.path == "memory://kv/x"
    assert "the variable $BUCKETT is not set" in refusal(path="memory://$BUCKETT/x")
    monkeypatch.setenv("PLACE", "memory://kv/y")
    assert loaded(path="$PLACE").tier_class() is RemoteFsTier


def test_ways_to_write_a_url_are_one_place_and_other_servers_another():
    here = {"type": "fs", "path": "s3://kv/x", "storage_options": {"endpoint_url": "http://a"}}
    there = {**here, "name": "b", "storage_options": {"endpoint_url": "http://b"}}
    again = {**here, "name": "c", "path": "S3://kv/x/"}
    load({"tiers": ["cpu", here, there]}, {})
    with pytest.raises(ConfigError, match=r"tiers\[1\] lies in that folder already"):
        load({"tiers": ["cpu", here, again]}, {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "s4://kv"}, "fsspec knows no protocol 's4'. Did you mean 's3'?"),
        ({"path": "gs://kv"}, "Please install gcsfs to access Google Storage"),
        ({"path": "s3://"}, "it must name a place, such as s3://bucket/prefix"),
        ({"path": "simplecache::s3://kv"}, "Chains of filesystems are not taken"),
        ({"path": "s3://kv?versionId=1"}, "it must end before the '?'"),
        ({"path": "http://host/kv"}, "does not know when others see a file on 'http'"),
        ({"path": "memory://kv", "publish": "rename"}, "by copying and deleting it"),
        ({"path": "s3:/kv/x"}, "two slashes after its colon, such as s3://kv/x."),
        ({"path": "s3://kv", "capacity": "10%"}, "has no whole on this machine"),
        ({"url": "s3://kv"}, "'url' is not an option here. Set 'path'."),
        ({"path": "s3://kv", "uri": "x"}, "'uri' is not an option here. Set 'path'."),
        ({"path": "s3://kv", "endpoint_url": "x"}, "Write it into 'storage_options'."),
        ({"path": "s3://kv", "direct": True}, "'direct' is for a 'path' on this machine"),
        ({"path": "/kv", "storage_options": {}}, "is for a 'path' that is a URL"),
        ({"path": "s3://kv", "storage_option": {}}, "Did you mean 'storage_options'?"),
        ({"path": "s3://kv", "timeout": "3s"}, "it must be a number of seconds above 0"),
        ({"path": "s3://kv", "required": "yes"}, "it must be true or false"),
    ],
)
def test_what_cannot_work_is_refused_and_says_how_it_would(options, says):
    assert says in refusal(**options)


@pytest.mark.parametrize(
    ("module", "protocol", "says"),
    [
        ("fsspec", "memory", "URLs need the package fsspec, which is not installed. Try: pip "),
        ("s3fs", "s3", "Install s3fs to access S3. Try: pip install 'kvtiers[s3]'"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, module, protocol, says):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(registry._registry, protocol, raising=False)
    assert says in refusal(path=f"{protocol}://kv/x")


def test_secrets_are_shown_nowhere(capsys, caplog, monkeypatch):
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "AKIA", "secret": SECRET}
    options["client_kwargs"] = {"aws_session_token": SECRET}
    entry = {"type": "fs", "path": "s3://kv/x", "storage_options": options, "timeout": 5.0}
    spec = load({"tiers": ["cpu", entry]}, {}).config.tiers[1]
    monkeypatch.setenv("KVTIERS_TIERS", json.dumps(["cpu", entry]))
    assert cli.main(["config"]) == 0
    config = spec.with_bytes("tiers[1]", CHUNK)
    assert config.storage_options["secret"] == SECRET
    tier = RemoteFsTier(config, SIZE)
    told = [str(config), repr(config), str(tier.probe()), capsys.readouterr().out]
    assert read(tier, key(1)) == [ReadOutcome.FAILED]
    for wrong in (f"secret={SECRET}", [SECRET]):
        told.append(refusal(path="s3://kv", storage_options=wrong, timeout=0))
    told.append(refusal(path="s3://kv", storage_options={"secret": SECRET}, timeout=0))
    told.append(refusal(path=f"sftp://me:{SECRET}@host/kv", timeout=0))
    told.append(caplog.text)
    assert all(told)
    assert [text for text in told if SECRET in text] == []
    assert (
        "{endpoint_url: http://127.0.0.1:9, key: ***, secret: ***, client_kwargs: ***}" in told[0]
    )
    in_a_url = StorageOptions({"endpoint_url": f"http://me:{SECRET}@host"})
    assert repr(in_a_url) == "{endpoint_url: http://me:***@host}"


def test_a_password_in_a_url_goes_where_the_filesystem_looks_for_it():
    config = RemoteFsTier.Config(path="plain://me:p@ss/w:rd@host/kv", publish="rename")
    assert config.path == "plain://me@host/kv"
    assert dict(config.storage_options) == {"password": "p@ss/w:rd"}
    with pytest.raises(ValueError, match="'storage_options' another one"):
        RemoteFsTier.Config(path="plain://me:a@host/kv", storage_options={"password": "b"})


@given(st.text(max_size=20))
def test_no_password_in_a_url_stays_in_it(password):
    marked = f"{SECRET}{password}{SECRET}"
    config = RemoteFsTier.Config(path=f"plain://me:{marked}@host/kv", publish="rename")
    assert config.storage_options["password"] == marked
    assert SECRET not in repr(config)


class Repeating(BaseHTTPRequestHandler):
    """A store that refuses everything, and repeats in its error who asked."""

    protocol_version = "HTTP/1.1"
    status = 400

    def refuse(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        error = f"<Error><Code>BadRequest</Code><Message>you are {SECRET}</Message></Error>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(error)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(error.encode())

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = refuse  # noqa: N815 - http.server's names

    def log_message(self, *_: object) -> None:
        """To nobody."""


@pytest.mark.parametrize("status", [400, 403, 409])
def test_a_store_that_repeats_a_secret_does_not_get_it_into_errors_and_logs(caplog, status):
    handler = type("Refusing", (Repeating,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        options = {"endpoint_url": endpoint, "key": "AKIA", "secret": SECRET}
        tier = open_remote_tier("s3://kv/x", 8, SIZE, storage_options=options)
        keys, buffers = [ChunkKey(NAMESPACE, b"h" * 16)], [aligned_buffer(SIZE)]
        assert tier.read(keys, buffers) == [ReadOutcome.FAILED]
        assert tier.write(keys, buffers) == [WriteOutcome.FAILED]
        calls = (tier.probe, lambda: tier.contains(keys), lambda: tier.remove(keys))
        told = [caplog.text]
        for call in (*calls, lambda: list(tier.scan())):
            with pytest.raises((OSError, TierConfigError)) as raised:
                call()
            told += traceback.format_exception(raised.value)
        server.shutdown()
    assert "you are ***" in "".join(told)
    assert [text for text in told if SECRET in text] == []


@given(st.dictionaries(st.sampled_from(["secret", "client_kwargs", "x"]), st.text(min_size=4)))
def test_no_value_that_may_be_a_secret_is_in_a_cleaned_text(options):
    hidden = StorageOptions(options)
    text = hidden.without_secrets(f"could not connect: {' '.join(options.values())}")
    assert [value for value in options.values() if value in text] == [] or any(
        value in "could not connect: ***" for value in options.values()
    )


# At the start -------------------------------------------------------------------


def test_a_store_that_does_all_a_tier_needs_is_used_and_left_as_it_was(server, prefix, tmp_path):
    assert on_s3(server, prefix).probe() is None
    assert server.names(prefix) == []
    assert on_files(tmp_path).probe() is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_client_that_knows_no_checksum_options_is_given_none(monkeypatch):
    """As botocore's before 1.36, which refuses what it does not know."""
    for option in ("request_checksum_calculation", "response_checksum_validation"):
        monkeypatch.delitem(botocore.config.Config.OPTION_DEFAULTS, option)
    options = client_options("s3", 16, 10.0)["config_kwargs"]
    botocore.config.Config(**options)
    assert options["max_pool_connections"] == 16


def test_a_bucket_that_is_not_there_is_refused(server):
    options = {"storage_options": server.storage_options}
    tier = open_remote_tier("s3://nobodys/x", 64, SIZE, **options)
    with pytest.raises(
        TierConfigError, match=r"cannot write to its 'path' 's3://nobodys/x' .* Make the bucket"
    ):
        tier.probe()


def test_credentials_that_are_refused_say_so(tmp_path):
    with S3Server(tmp_path, trusting=False) as server:
        tier = on_s3(server, "x")
        with pytest.raises(TierConfigError, match="Give these credentials the right to list"):
            tier.probe()


def test_credentials_that_are_not_there_are_asked_for(server, prefix, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = on_s3(server, prefix, storage_options={"endpoint_url": server.endpoint})
    with pytest.raises(TierConfigError, match=r"NoCredentialsError.* name others in 'storage_opt"):
        tier.probe()


@pytest.mark.parametrize("options", [{"no_such": "x"}, {"config_kwargs": {"no_such": 1}}])
def test_options_that_the_filesystem_does_not_know_are_refused(server, prefix, options):
    tier = on_s3(server, prefix, storage_options={**server.storage_options, **options})
    with pytest.raises(TierConfigError, match="Correct 'path' or 'storage_options'"):
        tier.probe()


def test_a_store_that_is_away_is_told_and_is_used_once_it_is_back(tmp_path):
    server = S3Server(tmp_path)
    tier = on_s3(server, "x")
    assert "s3://kvcache/x cannot be reached" in tier.probe()
    with pytest.raises(OSError, match="EndpointConnectionError"):
        tier.contains([key(1)])
    with server:
        assert tier.probe() is None
        assert write(tier, key(1)) == [WriteOutcome.STORED]
        assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_a_store_that_is_away_and_required_stops_the_start(tmp_path):
    tier = on_s3(S3Server(tmp_path), "x", required=True)
    with pytest.raises(TierConfigError, match=r"is required, but .* cannot be reached"):
        tier.probe()


def test_a_store_that_accepts_and_keeps_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(PlainFileSystem, "mv", lambda self, a, b, **_: self.rm_file(a))
    with pytest.raises(TierConfigError, match="what was written there is not there at once"):
        on_files(tmp_path).probe()


def test_a_chunk_larger_than_one_request_takes_is_refused():
    with pytest.raises(TierConfigError, match=r"at most 5368709120 in 's3://kv'"):
        RemoteFsTier(RemoteFsTier.Config(path="s3://kv", capacity=1 << 40), 5 << 30)


def test_a_capacity_below_one_chunk_is_refused():
    with pytest.raises(TierConfigError, match=r"'capacity' of 8192 bytes .* 12288 bytes"):
        RemoteFsTier(RemoteFsTier.Config(path="memory://kv", capacity=8192), SIZE)


# Failures -----------------------------------------------------------------------


def test_a_store_that_hangs_is_a_failure_in_time_and_serves_once_it_goes_on(server, prefix):
    tier = on_s3(server, prefix, timeout=1.0)
    write(tier, key(1))
    server.pause()
    try:
        assert read(tier, key(1)) == [ReadOutcome.FAILED]
        assert write(tier, key(2)) == [WriteOutcome.FAILED]
        with pytest.raises(TimeoutError, match="no answer within 1 seconds"):
            tier.contains([key(number) for number in range(40)])
        with pytest.raises(TimeoutError):
            tier.remove([key(1)])
    finally:
        server.resume()
    assert read(on_s3(server, prefix), key(1)) == [ReadOutcome.HIT]


def test_a_batch_waits_once_for_a_store_that_hangs(server, prefix, monkeypatch):
    """Its slots of the arena would be out of use for as long for each of its chunks."""
    tier = on_s3(server, prefix, timeout=1.0)
    keys = [key(number) for number in range(5)]
    write(tier, *keys)
    asked = []
    each = tier._store._each

    def counting(call, paths, requests=1):
        asked.extend(paths)
        return each(call, paths, requests)

    monkeypatch.setattr(tier._store, "_each", counting)
    server.pause()
    try:
        assert read(tier, *keys) == [ReadOutcome.FAILED] * 5
        assert len(asked) == 1
        assert write(tier, *keys) == [WriteOutcome.FAILED] * 5
        assert len(asked) == 2
    finally:
        server.resume()


def test_a_store_that_dies_is_a_failure_and_empty_when_it_is_back(tmp_path):
    with S3Server(tmp_path) as server:
        tier = on_s3(server, "x")
        write(tier, key(1))
        server.kill()
        assert read(tier, key(1)) == [ReadOutcome.FAILED]
        assert write(tier, key(2)) == [WriteOutcome.FAILED]
        assert tier.usage().chunks == 1
        server.start()
        assert read(tier, key(1)) == [ReadOutcome.MISS]
        assert list(tier.scan()) == []
        assert tier.usage().chunks == 0


def test_an_error_is_logged_once_per_kind(tmp_path, caplog):
    tier = on_s3(S3Server(tmp_path), "x")
    with caplog.at_level(logging.WARNING, "kvtiers"):
        assert read(tier, key(1), key(2)) == [ReadOutcome.FAILED] * 2
    assert caplog.text.count("Could not read a chunk") == 1


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    tier = on_files(tmp_path)
    write(tier, key(1))

    def half(self, path, value, **options):
        Path(path).write_bytes(value[: len(value) // 2])
        raise OSError("the connection broke")

    with monkeypatch.context() as broken:
        broken.setattr(PlainFileSystem, "pipe_file", half)
        assert write(tier, key(2)) == [WriteOutcome.FAILED]
    assert [path.name for path in tmp_path.rglob("*.kv*")] == [Path(name_of(key(1))).name]
    assert tier.usage().chunks == 1
    assert write(tier, key(2)) == [WriteOutcome.STORED]


def test_a_store_that_says_it_is_full_refuses(tmp_path, monkeypatch):
    tier = on_files(tmp_path)
    write(tier, key(1))

    def full(self, path, value, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PlainFileSystem, "pipe_file", full)
    assert write(tier, key(2)) == [WriteOutcome.REFUSED]
    assert tier.usage().nbytes == CHUNK


def test_folders_that_somebody_removed_are_made_again(tmp_path):
    tier = on_files(tmp_path)
    write(tier, key(1))
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    outcomes = [write(tier, key(1)), write(tier, key(1))]
    assert [WriteOutcome.STORED] in outcomes
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_a_connection_that_broke_is_made_anew(tmp_path, monkeypatch):
    tier = on_files(tmp_path)
    write(tier, key(1))

    def closed(self, *_):
        raise EOFError("connection closed")

    with monkeypatch.context() as broken:
        broken.setattr(PlainFileSystem, "open", closed)
        assert read(tier, key(1)) == [ReadOutcome.FAILED]
    assert tier._store._connected is None
    assert read(tier, key(1)) == [ReadOutcome.HIT]


# What lies in the store -----------------------------------------------------------


def test_a_chunk_that_is_there_is_not_written_again(server, prefix):
    client = server.client()
    client.put_bucket_versioning(
        Bucket=server.bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    try:
        assert write(on_s3(server, prefix), key(1)) == [WriteOutcome.STORED]
        assert write(on_s3(server, prefix), key(1)) == [WriteOutcome.EXISTS]
        versions = client.list_object_versions(Bucket=server.bucket, Prefix=prefix)["Versions"]
        assert sorted(Path(version["Key"]).name for version in versions) == (
            [Path(name_of(key(1))).name, "namespace.json"]
        )
    finally:
        client.put_bucket_versioning(
            Bucket=server.bucket, VersioningConfiguration={"Status": "Suspended"}
        )


def test_an_object_store_holds_chunks_and_facts_and_nothing_unfinished(server, prefix):
    tier = on_s3(server, prefix)
    write(tier, key(1), key(2))
    assert sorted(server.names(prefix)) == sorted(
        [
            f"{prefix}/{name_of(key(1))}",
            f"{prefix}/{name_of(key(2))}",
            f"{prefix}/v1/{NAMESPACE.id}/namespace.json",
        ]
    )
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket=server.bucket)
    facts = server.get(f"{prefix}/v1/{NAMESPACE.id}/namespace.json")
    assert json.loads(facts) == FACTS


def test_a_large_chunk_is_one_upload_and_not_one_in_parts(server, prefix):
    """Of which a killed writer would leave some, invisible and billed."""
    tier = on_s3(server, prefix)
    tier._store.publish(f"{server.bucket}/{prefix}/large", "", bytes(101 << 20))
    found = server.client().head_object(Bucket=server.bucket, Key=f"{prefix}/large")
    # After a dash stands the number of parts.
    assert (found["ContentLength"], "-" in found["ETag"]) == (101 << 20, False)


def test_a_reader_leaves_the_position_of_other_readers_alone():
    """Who opens a file of fsspec's memory gets the same one as everybody."""
    MemoryFileSystem.store.clear()
    tier = in_memory("positions")
    write(tier, key(1))
    file = MemoryFileSystem.store[f"/positions/{name_of(key(1))}"]
    file.seek(100)
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert file.tell() == 100


def test_of_two_writers_of_a_chunk_one_waits_and_finds_it_there(tmp_path, monkeypatch):
    tier = on_files(tmp_path)
    write(tier, key(2))
    publish, second = tier._store.publish, threading.Event()
    published = []

    def slow(path, *rest):
        published.append(path)
        second.wait(1)
        publish(path, *rest)

    def ask(keys, ask=tier._lookup.ask):
        if published:
            second.set()
        return ask(keys)

    monkeypatch.setattr(tier._store, "publish", slow)
    monkeypatch.setattr(tier._lookup, "ask", ask)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: write(tier, key(1))[0], range(2)))
    assert sorted(outcome.name for outcome in outcomes) == ["EXISTS", "STORED"]
    assert len(published) == 1


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE + 40, CHUNK - 1])
def test_a_flipped_bit_is_never_served_and_the_object_is_removed(server, prefix, at):
    tier = on_s3(server, prefix)
    write(tier, key(1))
    server.flip_bit(f"{prefix}/{name_of(key(1))}", at)
    assert read(tier, key(1)) == [ReadOutcome.CORRUPT]
    assert server.get(f"{prefix}/{name_of(key(1))}") is None
    assert write(tier, key(1)) == [WriteOutcome.STORED]


@pytest.mark.parametrize("left", [0, 1, SIZE, CHUNK - 1])
def test_a_short_object_is_no_chunk_and_is_replaced(server, prefix, left):
    tier = on_s3(server, prefix)
    write(tier, key(1), key(2))
    for number in (1, 2):
        name = f"{prefix}/{name_of(key(number))}"
        server.put(name, server.get(name)[:left])
    assert tier.contains([key(1)]) == [False]
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1), key(2)) == [ReadOutcome.HIT, ReadOutcome.CORRUPT]
    assert tier.usage().nbytes == CHUNK


@settings(max_examples=60, deadline=None)
@given(
    junk=st.binary(max_size=64)
    | st.binary(min_size=64, max_size=64).map(lambda seed: seed * (CHUNK // 64))
)
def test_whatever_lies_in_a_chunks_place_is_never_served_and_is_replaced(junk):
    MemoryFileSystem.store.clear()
    tier = in_memory("junk")
    fsspec.filesystem("memory").pipe_file(f"/junk/{name_of(key(1))}", junk)
    assert tier.contains([key(1)]) == [False]
    assert read(tier, key(1)) == [ReadOutcome.CORRUPT]
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    fsspec.filesystem("memory").pipe_file(f"/junk/{name_of(key(1))}", junk)
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert [entry.key for entry in tier.scan()] == [key(1)]


def test_a_damaged_object_that_cannot_be_removed_is_replaced(tmp_path, monkeypatch):
    tier = on_files(tmp_path)
    write(tier, key(1))
    chunk = tmp_path / name_of(key(1))
    chunk.write_bytes(b"x" + chunk.read_bytes()[1:])

    def forbidden(self, path):
        raise PermissionError("not yours to delete")

    monkeypatch.setattr(PlainFileSystem, "rm_file", forbidden)
    assert read(tier, key(1)) == [ReadOutcome.CORRUPT]
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_what_is_damaged_is_replaced_where_nothing_is_moved_onto_a_file(tmp_path, monkeypatch):
    tier = on_files(tmp_path)
    write(tier, key(1))
    (tmp_path / name_of(key(1))).write_bytes(b"x")
    move = PlainFileSystem.mv

    def careful(self, source, target, **options):
        if Path(target).exists():
            raise FileExistsError(target)
        move(self, source, target, **options)

    monkeypatch.setattr(PlainFileSystem, "mv", careful)
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_a_root_can_be_carried_between_a_disk_and_a_bucket(server, prefix, tmp_path):
    local = FsTier(FsTier.Config(path=tmp_path), SIZE)
    write(local, key(1), key(2))
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        server.put(f"{prefix}/{path.relative_to(tmp_path)}", path.read_bytes())
    tier = on_s3(server, prefix)
    assert read(tier, key(1), key(2)) == [ReadOutcome.HIT] * 2
    write(tier, key(3))
    back = tmp_path / name_of(key(3))
    back.parent.mkdir(exist_ok=True)
    back.write_bytes(server.get(f"{prefix}/{name_of(key(3))}"))
    assert read(local, key(3)) == [ReadOutcome.HIT]


def test_facts_that_differ_keep_the_namespace_from_being_used(server, prefix, caplog):
    write(on_s3(server, prefix), key(1))
    other = ChunkKey(Namespace(NAMESPACE.id, {**FACTS, "dtype": "bfloat16"}), key(1).hash)
    tier = on_s3(server, prefix)
    assert tier.contains([other]) == [False]
    assert read(tier, other) == [ReadOutcome.MISS]
    assert write(tier, other) == [WriteOutcome.REFUSED]
    assert "dtype: stored 'float32', here 'bfloat16'" in caplog.text
    assert tier.remove([other]) == 1


@pytest.mark.parametrize("damage", [b"{", b"[]", b"\xff" * 100, b" " * (1 << 20) + b"{}"])
def test_damaged_facts_are_written_anew(damage):
    MemoryFileSystem.store.clear()
    write(in_memory("facts"), key(1))
    place = f"/facts/v1/{NAMESPACE.id}/namespace.json"
    fsspec.filesystem("memory").pipe_file(place, damage)
    assert read(in_memory("facts"), key(1)) == [ReadOutcome.HIT]
    assert json.loads(fsspec.filesystem("memory").cat_file(place)) == FACTS


# Scans and lookups ------------------------------------------------------------------


def test_a_scan_removes_what_killed_writers_left_and_nothing_of_others(tmp_path):
    tier = on_files(tmp_path)
    write(tier, key(1))
    now = int(time.time())
    temporary = tmp_path / "v1" / NAMESPACE.id / "tmp"
    names = [f"a.kv.{now - 4000}.00", f"b.kv.{now}.00", "c.kv", f"d.{now - 4000}"]
    for name in names:
        (temporary / name).write_bytes(b"x")
    (tmp_path / "v1" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "v1" / "tmp" / f"trial.{now - 4000}.00").write_bytes(b"x")
    assert [entry.key for entry in tier.scan()] == [key(1)]
    assert sorted(path.name for path in temporary.iterdir()) == names[1:]
    assert list((tmp_path / "v1" / "tmp").iterdir()) == []


def test_a_scan_shows_what_is_no_chunk_and_counts_only_chunks(server, prefix):
    tier = on_s3(server, prefix)
    write(tier, key(1))
    folder = name_of(key(1)).rpartition("/")[0]
    strangers = [f"{prefix}/{folder}/notes.txt", f"{prefix}/v1/README", f"{prefix}/v1/ns/x"]
    for name in strangers:
        server.put(name, b"hello")
    for placeholder in (f"{prefix}/{folder}/", f"{prefix}/v1/"):
        server.put(placeholder, b"")
    tier = on_s3(server, prefix)
    entries = list(tier.scan())
    assert {entry.key for entry in entries} == {key(1), None}
    assert {entry.where for entry in entries if entry.key is None} == {
        f"{server.bucket}/{name}" for name in strangers
    }
    assert (tier.usage().chunks, tier.usage().nbytes) == (1, CHUNK)


def test_a_scan_says_when_a_chunk_was_written(server, prefix):
    tier = on_s3(server, prefix)
    before = time.time()
    write(tier, key(1))
    [entry] = tier.scan()
    assert before - 2 < entry.last_used < time.time() + 2


def test_the_bound_counts_what_others_wrote_once_it_is_scanned(server, prefix):
    write(on_s3(server, prefix), key(1), key(2))
    tier = on_s3(server, prefix, chunks=3)
    list(tier.scan())
    assert write(tier, key(3), key(4)) == [WriteOutcome.STORED, WriteOutcome.REFUSED]
    tier.remove([key(1)])
    assert write(tier, key(4)) == [WriteOutcome.STORED]


@settings(max_examples=40, deadline=None)
@given(stored=st.sets(st.integers(0, 200), max_size=40), asked=st.sets(st.integers(0, 200)))
def test_a_lookup_finds_the_same_however_it_looks(stored, asked):
    """From 65 chunks on it may list instead of asking for each."""
    MemoryFileSystem.store.clear()
    tier = in_memory("lookup")
    write(tier, *map(key, stored))
    found = tier.contains([key(number) for number in sorted(asked)])
    assert found == [number in stored for number in sorted(asked)]


def test_a_lookup_that_lists_takes_no_other_file_for_a_chunk():
    MemoryFileSystem.store.clear()
    tier = in_memory("sizes")
    write(tier, key(1), key(2))
    fsspec.filesystem("memory").pipe_file(f"/sizes/{name_of(key(2))}", b"short")
    found = tier.contains([key(number) for number in range(70)])
    assert [number for number, there in enumerate(found) if there] == [1]


@pytest.mark.parametrize(
    ("chunks", "asked", "asks"),
    [(3, 64, 64), (3, 65, 0), (3, 2000, 0), (1024, 65, 0), (1536, 65, 65)],
)
def test_a_lookup_takes_the_way_that_costs_less(monkeypatch, chunks, asked, asks):
    MemoryFileSystem.store.clear()
    tier = in_memory("ways", chunks=2000)
    # Spread as hashes are, so that a sample says something.
    stored = [ChunkKey(NAMESPACE, bytes([number % 256, number // 256])) for number in range(chunks)]
    write(tier, *stored)
    seen = []
    ranges = tier._store.ranges
    monkeypatch.setattr(
        tier._store, "ranges", lambda paths, *span: seen.extend(paths) or ranges(paths, *span)
    )
    tier.contains([ChunkKey(NAMESPACE, bytes([n % 256, n // 256])) for n in range(asked)])
    assert len([path for path in seen if path.endswith(".kv")]) == asks


# Clients --------------------------------------------------------------------------


def test_tiers_with_other_options_have_clients_of_their_own(server, prefix, tmp_path):
    with S3Server(tmp_path) as other:
        here, there = on_s3(server, prefix), on_s3(other, prefix)
        write(here, key(1))
        assert (here.contains([key(1)]), there.contains([key(1)])) == ([True], [False])
    assert read(here, key(1)) == [ReadOutcome.HIT]


def test_a_client_that_others_may_use_is_left_as_it_is():
    theirs = fsspec.filesystem("memory")
    assert in_memory("clients").contains([key(1)]) == [False]
    assert fsspec.filesystem("memory") is theirs
    assert theirs.dircache.use_listings_cache


def test_what_another_process_stores_is_seen_at_once(server, prefix):
    tier = on_s3(server, prefix)
    write(tier, key(1))
    assert tier.contains([key(2)]) == [False]
    assert {entry.key for entry in tier.scan()} == {key(1)}
    write(on_s3(server, prefix), key(2), key(257))
    assert tier.contains([key(2), key(257)]) == [True] * 2
    # In a folder that was listed before, and in a new one.
    assert {entry.key for entry in tier.scan()} == {key(1), key(2), key(257)}


def test_a_forked_process_opens_a_tier_of_its_own(server, prefix):
    """vLLM may fork its engine from a process that has used fsspec already."""
    write(on_s3(server, prefix), key(1))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(
        target=lambda: answers.put(read(on_s3(server, prefix), key(1)) == [ReadOutcome.HIT]),
        daemon=True,
    )
    child.start()
    child.join(60)
    assert not child.is_alive()
    assert answers.get() is True


def test_a_load_does_not_wait_for_the_whole_of_a_long_lookup(server, prefix, monkeypatch):
    import s3fs

    tier = on_s3(server, prefix, threads=2)
    write(tier, key(1))
    looking, loading = threading.Event(), threading.Event()
    order = []
    call, send = s3fs.S3FileSystem._cat_file, tier._store._all

    async def noting(self, path, **options):
        kind = "load" if options["start"] == 0 else "lookup"
        order.append(kind)
        looking.set()
        while kind == "lookup" and not loading.is_set():
            await asyncio.sleep(0.001)
        return await call(self, path, **options)

    async def queueing(call, paths, seconds):
        answers = asyncio.ensure_future(send(call, paths, seconds))
        if len(paths) == 1:
            await asyncio.sleep(0.01)
            loading.set()
        return await answers

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", noting)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(tier._store, "_all", queueing)
        found = pool.submit(tier.contains, [key(number) for number in range(40)])
        assert looking.wait(30)
        assert read(tier, key(1)) == [ReadOutcome.HIT]
        assert found.result() == [number == 1 for number in range(40)]
    assert order.count("lookup") == 40
    assert order.index("load") <= 4


def test_no_more_requests_are_under_way_than_there_are_connections(server, prefix, monkeypatch):
    import s3fs

    now, most = 0, 0
    call = s3fs.S3FileSystem._cat_file

    async def counting(self, path, **options):
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            return await call(self, path, **options)
        finally:
            now -= 1

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", counting)
    tier = on_s3(server, prefix, threads=3)
    assert tier.contains([key(number) for number in range(30)]) == [False] * 30
    assert most == 3


@pytest.mark.parametrize("place", ["s3", "memory"])
def test_namespaces_are_told_with_their_facts(server, prefix, place):
    tier = on_s3(server, prefix) if place == "s3" else in_memory(prefix)
    assert tier.namespaces(9) == []
    spaces = [Namespace(f"{n:032x}", {"n": n}) for n in range(3)]
    for space in spaces:
        write(tier, key(1, space))
    assert {s.id: s.facts for s in tier.namespaces(9)} == {s.id: s.facts for s in spaces}
    assert len(tier.namespaces(2)) == 2
