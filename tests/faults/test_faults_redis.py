"""A Redis server dies, hangs, fills up, or holds something else than it should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
from engine import cpu, redis_tier
from fault_cases import DEADLINE, case
from fault_trial import ALL, PATIENCE, Row, Trial
from faulty_bench import Bench, Question
from kvtiers.connector.prefill import PrefillClock
from kvtiers.policies import Run
from redis_server import RedisServer
from tcp_proxy import TcpProxy

AMID = 100_000
"""Bytes; less than a chunk has, and more than all else that is said."""
SLOW = 0.1
PROMPTS_MEASURED = 4
"""After which the engine knows how long it takes to compute one."""
# A larger model's time to compute, of that of two layers.
_LARGER = 8


class RedisBench(Bench):
    """An engine over a Redis, with a proxy between them."""

    def __init__(self, model: Path, folder: Path, threads: int = 4, **extra: str) -> None:
        self.server = RedisServer(folder / "redis")
        self.server.start()
        self.proxy = TcpProxy(self.server.port)
        url = f"redis://127.0.0.1:{self.proxy.port}/0"
        tier = redis_tier(url, deadline=DEADLINE, threads=threads)
        super().__init__(model, folder, [cpu(), tier], extra=extra)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.proxy.close()
        self.server.kill()

    def chunks(self) -> set[bytes]:
        with self.server.client() as client:
            return {name for name in client.keys("kvtiers:*") if not name.endswith(b":about")}

    def full(self, policy: str) -> AbstractContextManager[None]:
        """The server has room for nothing more inside."""
        return self.server.limited(policy, self.server.used())


@pytest.fixture(scope="class")
def bench(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBench]:
    with RedisBench(llama, tmp_path_factory.mktemp("redis")) as bench:
        yield bench


class TestWithADeadline:
    """Everything that can be loaded is; a class, since only one engine lives at a time."""

    @pytest.fixture
    def trial(self, bench: RedisBench, row: Row) -> Trial:
        return Trial(bench, row)

    @pytest.fixture
    def stored(self, trial: Trial) -> Question:
        return trial.stored_below()

    @case("redis-refused")
    def test_nobody_listens(self, bench: RedisBench, trial: Trial, stored: Question) -> None:
        with trial.watching():
            bench.proxy.close()
            assert trial.ask(stored) == 0
            bench.quiet()
            bench.proxy.open()
        trial.recovers(stored)

    @case("redis-killed-set")
    def test_it_dies_amid_a_store(self, bench: RedisBench, trial: Trial) -> None:
        question = bench.question()
        with trial.watching():
            bench.proxy.in_request(AMID, bench.server.kill)
            assert trial.ask(question) == 0
            bench.quiet()
            assert bench.server._process is None, "no store came to half of a chunk"
            bench.server.start()
        trial.recovers(question)

    @case("redis-killed-get")
    def test_it_dies_amid_a_load(self, bench: RedisBench, trial: Trial, stored: Question) -> None:
        with trial.watching():
            bench.proxy.in_reply(AMID, bench.server.kill)
            assert trial.ask(stored) < ALL
            bench.quiet()
            assert bench.server._process is None, "no load came to half of a chunk"
            bench.server.start()
        trial.recovers(stored)

    @case("redis-hung")
    def test_it_hangs(self, bench: RedisBench, trial: Trial, stored: Question) -> None:
        with trial.watching():
            bench.server.pause()
            assert trial.ask(stored) == 0
            bench.server.resume()
            bench.quiet()
        trial.recovers(stored)

    @case("redis-full")
    def test_it_is_full(self, bench: RedisBench, trial: Trial, stored: Question) -> None:
        question = bench.question()
        with trial.watching(), bench.full("noeviction"):
            assert trial.ask(question) == 0
            bench.quiet()
            assert trial.below(stored) == ALL, "what it has can be read"
        trial.recovers(question)

    @case("redis-evicting")
    def test_it_evicts(self, bench: RedisBench, trial: Trial) -> None:
        with bench.server.client() as client:
            client.flushall()
        stored = trial.stored_below()
        before = bench.chunks()
        with trial.watching(), bench.full("allkeys-lru"):
            while before <= bench.chunks():
                bench.stored()
            bench.engine.drop_arena()
            assert trial.ask(stored) < ALL
            bench.quiet()
        trial.recovers(stored)

    @case("redis-empty")
    def test_it_is_restarted_empty(self, bench: RedisBench, trial: Trial, stored: Question) -> None:
        with trial.watching():
            bench.server.kill()
            bench.server.start()
            assert trial.ask(stored) == 0
        trial.recovers(stored)

    @case("redis-password")
    def test_it_wants_another_password(
        self, bench: RedisBench, trial: Trial, stored: Question
    ) -> None:
        with trial.watching(), bench.server.client() as admin:
            admin.config_set("requirepass", "another")
            admin.client_kill_filter(_type="normal", skipme=True)
            assert trial.ask(stored) == 0
            bench.quiet()
            admin.config_set("requirepass", "")
        trial.recovers(stored)

    @case("redis-wrong-type")
    def test_it_has_something_else_under_our_keys(self, bench: RedisBench, trial: Trial) -> None:
        before = bench.chunks()
        stored = trial.stored_below()
        with trial.watching():
            with bench.server.client() as client:
                for name in bench.chunks() - before:
                    client.delete(name)
                    client.rpush(name, b"no chunk")
            assert trial.ask(stored) == 0
        trial.recovers(stored)


class TestSlow:
    """As by default, what takes longer to load than to compute is computed."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBench]:
        folder = tmp_path_factory.mktemp("slow")
        seconds = PrefillClock.seconds

        def larger_model(clock: PrefillClock, run: Run) -> float | None:
            found = seconds(clock, run)
            return None if found is None else _LARGER * found

        # Two layers are computed about as soon as a quick Redis is read, now one first, now the
        # other. One thread, so that the chunks of a prompt wait one after the other.
        with (
            mock.patch.object(PrefillClock, "seconds", larger_model),
            RedisBench(llama, folder, threads=1, load_or_recompute="auto") as bench,
        ):
            yield bench

    @case("redis-slow")
    def test_a_slow_server_is_left_for_computing(self, bench: RedisBench, row: Row) -> None:
        trial = Trial(bench, row)
        for _ in range(PROMPTS_MEASURED):
            bench.stored()
        stored = trial.stored_below()
        before = bench.counted("redis")["recomputed"]
        with trial.watching():
            bench.proxy.delay = SLOW
            end = time.monotonic() + PATIENCE
            while bench.counted("redis")["recomputed"] == before:
                assert time.monotonic() < end, "it was loaded from all along"
                trial.ask(stored)
                bench.engine.drop_arena()
            bench.proxy.delay = 0.0
        trial.loads_again(stored, "redis")
