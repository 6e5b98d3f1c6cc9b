"""What the Redis tier does beyond the suite: full, hung, restarted, shared and strange servers."""

import contextlib
import gc
import json
import logging
import os
import socket
import threading
import time
import traceback
import tracemalloc

import pytest
import redis
from kvtiers.tiers import (
    ChunkKey,
    Namespace,
    ReadOutcome,
    TierConfigError,
    WriteOutcome,
    redis_scan,
)
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.redis import RedisTier
from kvtiers.tiers.redis_protocol import pack
from redis_server import RedisServer
from redis_tiers import name_of
from redis_tls import clustered

SIZE = 8192
STORED = SIZE + METADATA_BYTES
HERE = Namespace("ab" * 16)
KEYS = [ChunkKey(HERE, bytes([n]) * 20) for n in range(8)]
HIT, MISS = ReadOutcome.HIT, ReadOutcome.MISS
CORRUPT, FAILED = ReadOutcome.CORRUPT, ReadOutcome.FAILED


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """Empty, with its settings as they were."""
    with shared_server.client() as client:
        client.flushall()
        for name, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction")):
            client.config_set(name, value)
    return shared_server


@pytest.fixture
def own_server(tmp_path):
    """One to kill, pause or restart."""
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture
def open_tier():
    """Tiers that are closed at the end."""
    opened = []

    def open_one(server, size=SIZE, **options):
        config = RedisTier.Config(**{"url": server.url, "deadline": 20.0, **options})
        opened.append(RedisTier(config, size))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(server, open_tier):
    return open_tier(server)


def write(tier, keys):
    return tier.write(keys, [filled(tier, key) for key in keys])


def filled(tier, key):
    buffer = aligned_buffer(tier.payload_bytes)
    buffer[:] = (key.hash * tier.payload_bytes)[: tier.payload_bytes]
    return buffer


def read(tier, keys):
    """Outcomes; every hit has the right bytes."""
    buffers = [aligned_buffer(tier.payload_bytes) for _ in keys]
    outcomes = tier.read(keys, buffers)
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert outcome is not HIT or buffer == filled(tier, key)
    return outcomes


# Full servers -----------------------------------------------------------------


def test_a_server_without_room_refuses_and_serves_what_it_has(tier, client):
    assert write(tier, KEYS[:1]) == [WriteOutcome.STORED]
    client.config_set("maxmemory", 1)
    assert write(tier, KEYS[:3]) == [WriteOutcome.EXISTS] + [WriteOutcome.REFUSED] * 2
    assert read(tier, KEYS[:3]) == [HIT, MISS, MISS]
    assert tier.usage().nbytes == STORED


def test_what_the_server_evicts_is_a_miss_and_uncounted(tier, client):
    write(tier, KEYS)
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.ResponseError):
        client.set("x", "y")
    client.config_set("maxmemory", 0)
    assert client.dbsize() == 0
    assert read(tier, KEYS[:3]) == [MISS] * 3
    assert tier.usage().chunks == 5, "of these nobody has heard yet"
    assert list(tier.scan()) == []
    assert tier.usage().chunks == 0


def test_chunks_live_for_their_ttl(server, open_tier, client):
    facts = Namespace(HERE.id, {"model": "m"})
    tier = open_tier(server, ttl=300)
    write(tier, [ChunkKey(facts, key.hash) for key in KEYS[:2]])
    names = client.keys("*")
    assert len(names) == 3, "two chunks, and what their namespace is about"
    assert all(0 < client.ttl(name) <= 300 for name in names)
    assert write(open_tier(server), KEYS[2:3]) == [WriteOutcome.STORED]
    assert client.ttl(name_of(tier, KEYS[2])) == -1, "without a ttl it stays"


# Values that are not what they claim ------------------------------------------------


def damage_length(client, name):
    client.append(name, b"x")


def truncate(client, name):
    client.set(name, client.get(name)[:-1])


def swap(client, name):
    client.set(name, client.get(name.replace(KEYS[0].hash.hex(), KEYS[1].hash.hex())))


def retype(client, name):
    client.delete(name)
    client.lpush(name, "x")


def empty(client, name):
    client.set(name, b"")


def flip_metadata(client, name):
    client.setrange(name, SIZE + 100, b"\xff")


DAMAGES = [damage_length, truncate, swap, retype, empty, flip_metadata]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_is_not_the_chunk_is_corrupt_once_deleted_and_stored_anew(
    tier, client, damage, caplog
):
    write(tier, KEYS[:2])
    damage(client, name_of(tier, KEYS[0]))
    assert read(tier, KEYS[:2]) == [CORRUPT, HIT]
    assert not client.exists(name_of(tier, KEYS[0]))
    assert tier.usage().chunks == 1
    assert read(tier, KEYS[:2]) == [MISS, HIT]
    assert write(tier, KEYS[:2]) == [WriteOutcome.STORED, WriteOutcome.EXISTS]
    assert read(tier, KEYS[:2]) == [HIT, HIT]
    assert len(caplog.records) == 1
    assert name_of(tier, KEYS[0]) in caplog.text


# Servers that hang, vanish and come back ----------------------------------------------


def test_a_server_that_hangs_costs_one_deadline_a_call_and_is_used_again(own_server, open_tier):
    tier = open_tier(own_server, deadline=0.5)
    write(tier, KEYS[:4])
    waits, translated = [], tier._client._translated
    tier._client._translated = lambda error: waits.append(error) or translated(error)
    own_server.pause()
    assert read(tier, KEYS) == [FAILED] * 8
    assert write(tier, KEYS) == [WriteOutcome.FAILED] * 8
    for call in (tier.contains, tier.remove, lambda _: list(tier.scan())):
        with pytest.raises(ConnectionError, match="does not answer"):
            call(KEYS)
    assert len(waits) == 5, "and not once for each chunk"
    own_server.resume()
    assert read(tier, KEYS[:4]) == [HIT] * 4


def test_after_a_restart_no_call_fails_and_what_was_lost_is_uncounted(own_server, open_tier):
    tier = open_tier(own_server, pool_size=4)
    connect(tier, 4)
    write(tier, KEYS)
    own_server.kill()
    assert read(tier, KEYS) == [FAILED] * 8
    own_server.start()
    for _ in range(4):
        assert read(tier, KEYS[:2]) == [MISS] * 2, "every connection of the pool is dead"
    assert tier.usage().chunks == 6
    assert list(tier.scan()) == []
    assert tier.usage().nbytes == 0
    assert write(tier, KEYS) == [WriteOutcome.STORED] * 8
    assert read(tier, KEYS) == [HIT] * 8


def connect(tier, count):
    """Fill the pool: so many threads have a connection each at one moment."""
    barrier = threading.Barrier(count)

    def hold():
        with tier._client.session() as session:
            barrier.wait(30)
            assert session.ask([[b"PING"]]) == [b"PONG"]

    threads = [threading.Thread(target=hold) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_kind_of_failure_is_logged_once(own_server, open_tier, caplog):
    tier = open_tier(own_server)
    own_server.kill()
    for _ in range(3):
        read(tier, KEYS)
    assert len(caplog.records) == 1
    assert f"the Redis server at {own_server.url} does not answer" in caplog.text


class Trickle(threading.Thread):
    """A server that sends a reply a byte at a time, and never to the end.

    Args:
        slow_at: the command that it answers like that; the others are answered at once.
        begins: what that reply begins with.

    """

    def __init__(self, slow_at, begins):
        super().__init__(daemon=True)
        self.slow_at, self.begins = slow_at, begins
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.stopped = threading.Event()
        self.sent = 0
        self.start()

    def run(self):
        peer, _ = self.listener.accept()
        with peer, contextlib.suppress(ConnectionError):
            while self.slow_at not in peer.recv(4096):
                peer.sendall(b"+OK\r\n")
            peer.sendall(self.begins)
            while not self.stopped.wait(0.02):
                peer.sendall(b"x")
                self.sent += 1


@pytest.mark.parametrize(("slow_at", "begins"), [(b"GET", b"$%d\r\n" % STORED), (b"AUTH", b"+")])
def test_a_server_that_is_never_done_is_left_at_the_deadline(slow_at, begins):
    """Nor with the password's, which redis-py waits for."""
    server = Trickle(slow_at, begins)
    url = f"redis://:secret@127.0.0.1:{server.listener.getsockname()[1]}"
    tier = RedisTier(RedisTier.Config(url=url, deadline=0.5), SIZE)
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(read(tier, KEYS[:1])), daemon=True)
    thread.start()
    thread.join(60)
    assert server.sent > 0
    assert outcomes == [FAILED], "at that pace it would have taken four minutes"
    server.stopped.set()
    server.listener.close()


class Link(threading.Thread):
    """Passes bytes on to a server, until the connections of the moment are forgotten."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}"
        self._server = server
        self._open = []
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                ends = (self.listener.accept()[0], socket.socket(socket.AF_UNIX))
                ends[1].connect(str(self._server.socket))
                alive = threading.Event()
                alive.set()
                self._open.append((alive, ends))
                for way in (ends, ends[::-1]):
                    args = (alive, *way)
                    threading.Thread(target=self._pass, args=args, daemon=True).start()

    @staticmethod
    def _pass(alive, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if alive.is_set():
                    target.sendall(data)

    def forget(self):
        """As when a host vanishes, or a firewall drops what it knew: no word to either end."""
        for alive, _ in self._open:
            alive.clear()

    def close(self):
        self.listener.close()
        for _, ends in self._open:
            for end in ends:
                end.close()


def test_connections_that_died_without_a_word_cost_one_deadline_together(own_server, open_tier):
    link = Link(own_server)
    tier = open_tier(link, pool_size=4, deadline=1.0)
    connect(tier, 4)
    write(tier, KEYS[:1])
    link.forget()
    assert read(tier, KEYS[:1]) == [FAILED]
    with contextlib.ExitStack() as stack:
        # All at once: one after the other they would use the same one.
        for _ in range(4):
            session = stack.enter_context(tier._client.session())
            assert session.ask([[b"PING"]]) == [b"PONG"]
    link.close()


def test_what_a_hung_server_leaves_is_closed_without_the_garbage_collector(own_server, open_tier):
    """vLLM freezes what it has made at its start: the collector seldom looks at the rest."""
    tier = open_tier(own_server, pool_size=4, deadline=1.0)
    connect(tier, 4)
    gc.collect()
    gc.disable()
    try:
        before = open_sockets()
        for _ in range(2):
            own_server.pause()
            assert read(tier, KEYS[:1]) == [FAILED]
            own_server.resume()
            connect(tier, 4)
        assert open_sockets() <= before
    finally:
        gc.enable()


def open_sockets():
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        # That of the listing itself is gone.
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


def test_a_connection_that_was_left_in_the_middle_is_not_used_again(server, open_tier):
    """Or the next call would take the late answer for its own."""
    tier = open_tier(server, pool_size=1)
    with contextlib.suppress(ConnectionError), tier._client.session() as session:
        session.send([pack(b"BLPOP", b"nothing", b"1")], answers=1)
        raise ConnectionResetError
    with tier._client.session() as session:
        assert session.ask([[b"PING"]]) == [b"PONG"]


def test_a_full_pool_makes_threads_wait_and_never_has_more_connections(server, open_tier, client):
    tier = open_tier(server, pool_size=2)
    before = len(client.client_list())
    threads = [threading.Thread(target=lambda n=n: write(tier, KEYS[n : n + 1])) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.usage().chunks == 8
    assert len(client.client_list()) <= before + 2


def test_a_connection_that_cannot_be_made_anew_is_not_lost_to_the_pool(tmp_path, open_tier):
    started = RedisServer(tmp_path / "redis", ["--requirepass", "first"], password="first")
    with started as server, server.client() as client:
        tier = open_tier(server, pool_size=2, deadline=1.0, password="first")
        connect(tier, 2)
        server.pause()
        assert read(tier, KEYS[:1]) == [FAILED]
        server.resume()
        with tier._client.session():
            # The other one is from before: it is made anew, and now the server refuses that.
            client.config_set("requirepass", "second")
            with pytest.raises(ConnectionError, match="refuses"), tier._client.session():
                pass
            client.config_set("requirepass", "first")
            with tier._client.session() as session:
                assert session.ask([[b"PING"]]) == [b"PONG"]


def test_a_closed_tier_keeps_no_connection(own_server, open_tier):
    tier = open_tier(own_server, pool_size=3)
    with own_server.client() as client:
        before = len(client.client_list())
        connect(tier, 3)
        assert len(client.client_list()) == before + 3
        tier.close()
        until = time.monotonic() + 30
        while len(client.client_list()) > before:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_cluster_that_was_away_at_start_is_told_when_it_answers(tmp_path, open_tier, caplog):
    with RedisServer(tmp_path, clustered()) as server:
        tier = open_tier(server)
        assert write(tier, KEYS[:2]) == [WriteOutcome.FAILED] * 2
        assert read(tier, KEYS[:2]) == [FAILED] * 2
    assert "That is how a Redis Cluster answers" in caplog.text


def test_a_wrong_password_is_a_failure_later_on_and_never_shown(own_server, open_tier, caplog):
    """The server was away at start, or changed its mind."""
    caplog.set_level(logging.DEBUG)
    tier = open_tier(own_server, password="s3cret-and-long")
    assert read(tier, KEYS[:1]) == [FAILED]
    with pytest.raises(ConnectionError, match="refuses 'username' and 'password'") as raised:
        tier.contains(KEYS)
    assert "s3cret" not in f"{raised.value!r} {tier!r} {tier.config!r} {caplog.text}"


@pytest.mark.parametrize("password", ["s3cret-and-long", "s3cret-" + 200 * "x"])
def test_a_server_that_repeats_what_it_does_not_know_shows_no_password(
    tmp_path, open_tier, caplog, password
):
    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path, ["--rename-command", "AUTH", ""]) as server:
        tier = open_tier(server, username="kvtiers", password=password)
        assert read(tier, KEYS[:1]) == [FAILED]
        for call in (tier.probe, lambda: tier.contains(KEYS)):
            with pytest.raises((ConnectionError, TierConfigError), match="unknown command") as told:
                call()
            assert "s3cret" not in "".join(traceback.format_exception(told.value))
    assert "s3cret" not in caplog.text


# What lies there ------------------------------------------------------------------


def test_a_key_says_what_it_is(tier, client):
    write(tier, KEYS[:1])
    assert client.keys() == [f"kvtiers:v1:{HERE.id}:{KEYS[0].hash.hex()}".encode()]
    assert client.strlen(client.keys()[0]) == STORED


def test_a_scan_counts_chunks_of_others_by_their_own_size(server, open_tier, tier):
    other = open_tier(server, size=5 * 4096)
    elsewhere = [ChunkKey(Namespace("cd" * 16), key.hash) for key in KEYS[:3]]
    write(other, elsewhere)
    write(tier, KEYS[:2])
    assert tier.usage().nbytes == 2 * STORED, "of the others nobody has heard yet"
    entries = list(tier.scan())
    assert {entry.key for entry in entries} == {*elsewhere, *KEYS[:2]}
    assert tier.usage().nbytes == sum(entry.nbytes for entry in entries)
    assert tier.usage().nbytes == 2 * STORED + 3 * (6 * 4096)
    assert {entry.where for entry in entries if entry.key == KEYS[0]} == {name_of(tier, KEYS[0])}


def test_a_scan_tells_strangers_from_chunks_and_passes_over_what_others_keep(tier, client):
    write(tier, [ChunkKey(Namespace(HERE.id, {"model": "m"}), KEYS[0].hash)])
    base = f"kvtiers:v1:{HERE.id}:"
    strangers = {f"{base}xyz", f"{base}abc", f"{base}{'ab' * 65}", "kvtiers:v1:abcd"}
    strangers.add("kvtiers:v1:\N{LATIN SMALL LETTER E WITH ACUTE}:abcd")
    for name in strangers:
        client.set(name, "what")
    client.lpush("kvtiers:v1:list", "x")
    strangers.add("kvtiers:v1:list")
    for name in ("kvtiers:v2:x:ab", "kvtiersv1:x:ab", "other:v1:x:ab"):
        client.set(name, "not ours")
    entries = list(tier.scan())
    assert {entry.where for entry in entries if entry.key is None} == strangers | {
        "kvtiers:v1:list"
    }
    assert all(entry.nbytes > 0 for entry in entries)
    assert [entry.key for entry in entries if entry.key is not None] == KEYS[:1]
    assert tier.usage().chunks == 1


def test_a_prefix_means_itself_and_no_pattern(server, open_tier, client):
    tier = open_tier(server, key_prefix=r"a*[b-c]?\:")
    write(tier, KEYS[:1])
    for name in (r"axb?\:v1", "axxb:v1", r"a*bx\:v1", r"a*[b-c]x\:v1"):
        client.set(f"{name}:{HERE.id}:abab", "not ours")
    assert [entry.key for entry in tier.scan()] == KEYS[:1]


def age(client, key, seconds):
    """As if nobody had used a key for so long."""
    client.restore(key, 0, client.dump(key), replace=True, idletime=seconds)


def test_a_scan_tells_when_chunks_were_used_and_is_no_use_itself(tier, client):
    write(tier, KEYS[:4])
    for n, key in enumerate(KEYS[:4]):
        age(client, name_of(tier, key), 1000 * (n + 1))
    read(tier, KEYS[1:2])
    write(tier, KEYS[2:3])
    tier.contains(KEYS)
    for _ in range(2):
        now = time.time()
        ages = {entry.key: now - entry.last_used for entry in tier.scan()}
        assert 900 < ages[KEYS[0]] < 1900, "neither a lookup nor a scan is a use"
        assert ages[KEYS[1]] < 900, "a read is one"
        assert ages[KEYS[2]] < 900, "and so is a store of what is there"
        assert ages[KEYS[3]] > 3900


def test_the_sizes_of_others_chunks_are_asked_of_a_few(server, open_tier, client):
    """STRLEN is a use, so that all but a few keep their age."""
    write(open_tier(server), KEYS)
    for key in KEYS:
        age(client, f"kvtiers:v1:{HERE.id}:{key.hash.hex()}", 5000)
    tier = open_tier(server)
    assert len(list(tier.scan())) == 8
    now = time.time()
    assert sum(now - entry.last_used > 4000 for entry in tier.scan()) >= 3


def test_servers_that_count_frequency_are_scanned_too(tier, client):
    write(tier, KEYS[:3])
    client.config_set("maxmemory-policy", "allkeys-lfu")
    entries = list(tier.scan())
    assert {entry.key for entry in entries} == set(KEYS[:3])
    assert all(abs(time.time() - entry.last_used) < 900 for entry in entries)


def test_a_scan_of_many_keys_finds_each_once(tier, client):
    client.mset({f"other:{n}": "x" for n in range(5000)})
    keys = [ChunkKey(HERE, n.to_bytes(4, "big")) for n in range(300)]
    write(tier, keys)
    entries = list(tier.scan())
    assert len(entries) == 300
    assert {entry.key for entry in entries} == set(keys)


# Namespaces -------------------------------------------------------------------------


def test_the_facts_of_a_namespace_lie_beside_its_chunks(tier, client):
    namespace = Namespace("ef" * 16, {"model": "m", "layers": 2, "odd": {1: (2, 3)}})
    key = ChunkKey(namespace, b"h" * 20)
    assert tier.contains([key]) == [False]
    assert client.keys() == [], "a lookup writes nothing"
    assert write(tier, [key]) == [WriteOutcome.STORED]
    facts = json.loads(client.get(f"kvtiers:v1:{namespace.id}:about"))
    assert facts == {"model": "m", "layers": 2, "odd": {"1": [2, 3]}}


def test_a_namespace_with_other_facts_is_refused_and_explained(server, open_tier, tier, caplog):
    ours, theirs = Namespace("ef" * 16, {"model": "a"}), Namespace("ef" * 16, {"model": "b"})
    write(tier, [ChunkKey(ours, b"h" * 20)])
    other = open_tier(server)
    key = ChunkKey(theirs, b"h" * 20)
    assert other.contains([key]) == [False]
    assert read(other, [key]) == [MISS]
    assert write(other, [key]) == [WriteOutcome.REFUSED]
    assert "model: stored 'a', here 'b'" in caplog.text
    assert other.remove([key]) == 1


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b"{}", b"[" * 100_000])
def test_facts_that_name_none_are_written_anew(tier, client, content):
    namespace = Namespace("ef" * 16, {"model": "a"})
    client.set(f"kvtiers:v1:{namespace.id}:about", content)
    assert write(tier, [ChunkKey(namespace, b"h" * 20)]) == [WriteOutcome.STORED]
    assert json.loads(client.get(f"kvtiers:v1:{namespace.id}:about")) == {"model": "a"}


# Several at once, and copies -----------------------------------------------------------


def test_two_engines_store_a_chunk_once(server, open_tier):
    first, second = open_tier(server), open_tier(server)
    assert write(first, KEYS[:2]) == [WriteOutcome.STORED] * 2
    assert write(second, KEYS[1:3]) == [WriteOutcome.EXISTS, WriteOutcome.STORED]
    assert read(second, KEYS[:3]) == [HIT] * 3


def test_a_chunk_that_another_engine_stores_meanwhile_stays_as_it_is(server, open_tier):
    first, second = open_tier(server), open_tier(server)
    metadata = second._tail_buffer

    def late():
        """Between the question whether the chunk is there and its store."""
        assert write(first, KEYS[:1]) == [WriteOutcome.STORED]
        return metadata()

    second._tail_buffer = late
    assert second.write(KEYS[:1], [filled(second, KEYS[1])]) == [WriteOutcome.EXISTS]
    second._tail_buffer = metadata
    assert read(second, KEYS[:1]) == [HIT], "with the first one's bytes"
    assert (first.usage().chunks, second.usage().chunks) == (1, 0)


def test_a_chunk_removed_while_it_is_stored_is_counted_as_the_server_has_it(tier, client):
    present, removals = tier._ledger.present, []

    def removed_before(*news, **reserved):
        """Another thread removes it before the store is written down."""
        removals.append(threading.Thread(target=tier.remove, args=(KEYS[:1],)))
        removals[0].start()
        removals[0].join(0.5)
        present(*news, **reserved)

    tier._ledger.present = removed_before
    assert write(tier, KEYS[:1]) == [WriteOutcome.STORED]
    removals[0].join(30)
    assert tier.usage().chunks == client.exists(name_of(tier, KEYS[0]))


def test_moving_a_chunk_takes_no_memory_of_its_size(server, open_tier):
    """Neither a copy to send nor one to receive: both would be bytes of Python's."""
    size = 8 << 20
    tier = open_tier(server, size=size)
    source, target = filled(tier, KEYS[0]), aligned_buffer(size)
    tier.contains(KEYS)
    tracemalloc.start()
    try:
        assert tier.write(KEYS[:1], [source]) == [WriteOutcome.STORED]
        assert tier.read(KEYS[:1], [target]) == [HIT]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert target == source
    assert peak < size // 16


def test_namespaces_are_told_with_their_facts_among_keys_of_others(server, client, tier):
    spaces = [Namespace(f"{n:032x}", {"n": n}) for n in range(3)]
    for space in spaces:
        write(tier, [ChunkKey(space, b"h" * 20)])
    client.set("kvtiers:v1:damaged:about", "{")
    client.lpush("kvtiers:v1:list:about", "x")
    client.set("other:about", '{"n": 9}')
    assert {s.id: s.facts for s in tier.namespaces(9)} == {s.id: s.facts for s in spaces}
    assert len(tier.namespaces(2)) == 2


def test_looking_for_namespaces_ends_however_many_keys_there_are(client, tier, monkeypatch):
    monkeypatch.setattr(redis_scan, "_AT_ONCE", 1)
    monkeypatch.setattr(redis_scan, "_PAGES_OF_FACTS", 3)
    client.mset({f"kvtiers:v1:{n:032x}:about": '{"n": 1}' for n in range(500)})
    assert 0 < len(tier.namespaces(500)) < 100
