"""How fast chunks go to a redis-server and back: our tier beside redis-py's own calls.

    python benchmarks/redis_values.py [--mib 4] [--chunks 24] [--rounds 7]

Starts a redis-server of its own. Each round measures every way once, one after the
other, so that what else the machine does hits all of them alike; the medians of the
rounds are printed, in GB/s, over TCP on loopback and over a unix socket. Read them as
ratios. "redis-py, hiredis" is measured where hiredis is installed; nothing needs it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import redis
from kvtiers.tiers import ChunkKey, Namespace, ReadOutcome, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.redis import RedisTier
from kvtiers.tools.redis_server import RedisServer
from redis._parsers import _RESP2Parser
from redis.connection import HIREDIS_AVAILABLE, PythonRespSerializer

Store = Callable[[Sequence[int]], None]
Fetch = Callable[[Sequence[int]], None]

HERE = Namespace("be" * 16)


class Chunks:
    """Chunks of random bytes, and a buffer to read each into."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.keys = [ChunkKey(HERE, n.to_bytes(4, "big") * 8) for n in range(count)]
        self.source = [aligned_buffer(nbytes) for _ in self.keys]
        self.target = [aligned_buffer(nbytes) for _ in self.keys]
        for buffer in self.source:
            buffer[:] = os.urandom(nbytes)
        for buffer in self.target:
            buffer[:] = bytes(nbytes)


def tier_ways(tier: RedisTier, chunks: Chunks) -> tuple[Store, Fetch]:
    def store(numbers: Sequence[int]) -> None:
        found = tier.write([chunks.keys[n] for n in numbers], [chunks.source[n] for n in numbers])
        assert set(found) == {WriteOutcome.STORED}, found

    def fetch(numbers: Sequence[int]) -> None:
        found = tier.read([chunks.keys[n] for n in numbers], [chunks.target[n] for n in numbers])
        assert set(found) == {ReadOutcome.HIT}, found

    return store, fetch


def library_ways(client: redis.Redis, chunks: Chunks) -> tuple[Store, Fetch]:
    """What one would write first: set what lies in a slot, and copy into it what came."""

    def store(numbers: Sequence[int]) -> None:
        for n in numbers:
            client.set(f"plain:{n}", chunks.source[n], nx=True)

    def fetch(numbers: Sequence[int]) -> None:
        for n in numbers:
            chunks.target[n][:] = client.get(f"plain:{n}")

    return store, fetch


def client(url: str, *, hiredis: bool) -> redis.Redis:
    """RESP2, as the tier speaks it."""
    pool = redis.ConnectionPool.from_url(url, protocol=2)
    if not hiredis:
        packer = PythonRespSerializer(6000, redis.Connection().encoder.encode)
        pool.connection_kwargs |= {"parser_class": _RESP2Parser, "command_packer": packer}
    return redis.Redis(connection_pool=pool)


def rate(call: Callable[[Sequence[int]], None], chunks: Chunks, threads: int) -> float:
    """GB/s of so many threads, each with its share of the chunks in calls of four."""
    numbers = range(len(chunks.keys))
    calls = [numbers[start : start + 4] for start in range(0, len(numbers), 4)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))
        begun = time.perf_counter()
        list(pool.map(call, calls))
        seconds = time.perf_counter() - begun
    return len(numbers) * chunks.nbytes / seconds / 1e9


def measure(server: RedisServer, url: str, chunks: Chunks, rounds: int) -> dict[str, list[float]]:
    tier = RedisTier(RedisTier.Config(url=url, pool_size=9, deadline=60.0), chunks.nbytes)
    ways = {f"tier, {n} threads": (*tier_ways(tier, chunks), n) for n in (1, 2, 3, 4, 8)}
    ways["redis-py"] = (*library_ways(client(url, hiredis=False), chunks), 1)
    if HIREDIS_AVAILABLE:
        ways["redis-py, hiredis"] = (*library_ways(client(url, hiredis=True), chunks), 1)
    found: dict[str, list[float]] = {}
    with redis.Redis(unix_socket_path=str(server.socket)) as door:
        for _ in range(rounds):
            for name, (store, fetch, threads) in ways.items():
                door.flushall()
                found.setdefault(f"{name}: SET", []).append(rate(store, chunks, threads))
                found.setdefault(f"{name}: GET", []).append(rate(fetch, chunks, threads))
    tier.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=float, default=4.0, help="size of a chunk")
    parser.add_argument("--chunks", type=int, default=24, help="chunks a round moves each way")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    chunks = Chunks(given.chunks, int(given.mib * 256) * 4096)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        for where, url in (("loopback", server.url), ("unix socket", server.unix_url)):
            print(f"{where}, {given.mib} MiB a chunk, median of {given.rounds}, GB/s")
            for name, rates in measure(server, url, chunks, given.rounds).items():
                print(f"  {name:24} {statistics.median(rates):6.2f}  (best {max(rates):.2f})")


if __name__ == "__main__":
    main()
