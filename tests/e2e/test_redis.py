"""A Redis below a real engine: it serves, hangs, dies and comes back, and answers stay right."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from engine import Answer, Engine, cpu, redis_tier
from kvtiers.tiers import TierConfigError
from kvtiers.tiers.breaker import BreakerState
from models import prompts
from passage import assert_same_through_every_tier, pass_through
from redis_server import RedisServer

CHUNKS = 5
PROMPTS = prompts(2, 700)
DEADLINE = 2.0
# For what comes back after a breaker's cooldown, which doubles while the server is away.
PATIENCE = 90.0


def test_answers_are_the_same_from_every_tier_and_after_a_restart(
    llama: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    passage = pass_through(llama, prompts(4, 700), tmp_path, redis=redis_server.unix_url)
    assert_same_through_every_tier(passage)


def test_a_required_redis_that_is_away_refuses_the_start(llama: Path, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        url = server.url
    with pytest.raises(TierConfigError, match=f"The redis tier is required, but .*{url}"):
        Engine(llama, [cpu(), redis_tier(url, required=True)]).close()


class Scene:
    """An engine that started while its Redis was away, and what it answers without one."""

    def __init__(self, model: Path, server: RedisServer) -> None:
        self.server = server
        self.engine = Engine(model, [cpu(), redis_tier(server.url, deadline=DEADLINE)])
        self.right = self.engine.ask_each(PROMPTS)

    def ask(self, number: int = 0) -> Answer:
        """From below the arena; the tokens are always right."""
        self.engine.drop_arena()
        answer = self.engine.ask(PROMPTS[number])
        assert answer.tokens == self.right[number].tokens
        return answer

    def state(self) -> BreakerState:
        return self.engine.usage("redis").breaker

    def until_it_serves(self) -> None:
        """Requests go on, and nobody does anything about it."""
        end = time.monotonic() + PATIENCE
        while self.ask().cached < CHUNKS * 128:
            assert time.monotonic() < end, "Redis is there, and was not used again"
        assert self.state() is BreakerState.CLOSED

    def limited(self, policy: str, chunks: int) -> AbstractContextManager[None]:
        """No memory beyond what is used now and that of so many more chunks."""
        room = chunks * self.engine.hierarchy.chunk_bytes
        return self.server.limited(policy, self.server.used() + room)

    def stored(self) -> list[str]:
        with self.server.client() as client:
            return [name.decode() for name in client.keys("kvtiers:v1:*")]


class TestOneEngine:
    """The tests come in this order: each leaves a Redis that serves."""

    @pytest.fixture(scope="class")
    @classmethod
    def scene(cls, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        scene = Scene(llama, server)
        try:
            yield scene
        finally:
            scene.engine.close()
            server.kill()

    def test_it_starts_without_redis_and_uses_it_once_it_is_there(self, scene: Scene) -> None:
        assert scene.state() is not BreakerState.CLOSED, "left alone, or being probed"
        assert scene.ask().cached == 0
        scene.server.start()
        scene.until_it_serves()
        assert scene.engine.counts("redis")["hits"] == CHUNKS
        assert scene.stored()

    def test_a_flipped_bit_is_a_miss_and_the_chunk_is_stored_anew(self, scene: Scene) -> None:
        scene.until_it_serves()
        before = scene.engine.counts("redis")["corrupt"]
        chunks = [name for name in scene.stored() if not name.endswith(":about")]
        with scene.server.client() as client:
            for name in chunks:
                byte = client.getrange(name, 5000, 5000)
                client.setrange(name, 5000, bytes([byte[0] ^ 1]))
        assert scene.ask().cached == 0
        assert scene.engine.counts("redis")["corrupt"] == before + CHUNKS
        assert scene.ask().cached == CHUNKS * 128, "stored anew"

    def test_a_redis_that_hangs_costs_time_and_no_answer(self, scene: Scene) -> None:
        scene.until_it_serves()
        before = scene.engine.counts("redis")["timeouts"]
        scene.server.pause()
        try:
            assert scene.ask().cached == 0
            assert scene.engine.counts("redis")["timeouts"] > before
        finally:
            scene.server.resume()
        scene.until_it_serves()

    def test_a_full_redis_refuses_what_is_new_and_costs_no_answer(self, scene: Scene) -> None:
        scene.until_it_serves()
        refused = scene.engine.counts("redis")["refused"]
        with scene.limited("noeviction", chunks=0):
            assert scene.ask(1).cached == 0
            assert scene.engine.counts("redis")["refused"] > refused
            assert scene.state() is BreakerState.CLOSED, "it answers"
        scene.until_it_serves()

    def test_a_redis_that_evicts_by_itself_costs_hits_and_no_answer(self, scene: Scene) -> None:
        scene.until_it_serves()
        failures = scene.engine.counts("redis")["failures"]
        with scene.limited("allkeys-lru", chunks=2):
            for number in (1, 0, 1, 0):
                scene.ask(number)
            with scene.server.client() as client:
                assert client.info("stats")["evicted_keys"] > 0
            assert scene.engine.counts("redis")["failures"] == failures
            assert scene.state() is BreakerState.CLOSED
        scene.until_it_serves()


# A thousand requests ------------------------------------------------------------------

REQUESTS = 1000
AT_ONCE = 4
HEADS = 16
KILLED_AT, STARTED_AT = 300, 500


class Load:
    """Requests handed in a few at a time, each timed from submission to its last token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: list[tuple[int, Answer, float]] = []
        self._flying: dict[str, tuple[int, float]] = {}

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        order: Sequence[int],
        events: Mapping[int, Callable[[], object]],
    ) -> None:
        """``order`` names prompts by number; an event happens before the request of its number."""
        waiting = deque(enumerate(order))
        while waiting or self._flying:
            while waiting and len(self._flying) < AT_ONCE:
                index, number = waiting.popleft()
                events.get(index, int)()
                name = self.engine.submit(prompts[number], max_tokens=2)
                self._flying[name] = (number, time.monotonic())
            for name, answer in self.engine.step().items():
                number, begun = self._flying.pop(name)
                self.answers.append((number, answer, time.monotonic() - begun))

    @property
    def slowest(self) -> float:
        return max(seconds for _, _, seconds in self.answers)


def shared_heads() -> list[list[int]]:
    """A handful of heads of three chunks, two prompts that begin with each."""
    heads, tails = prompts(HEADS, 384), prompts(2 * HEADS, 20, seed=2)
    return [heads[n % HEADS][:384] + tail for n, tail in enumerate(tails)]


def test_redis_killed_in_the_middle_of_a_thousand_requests(
    llama: Path, redis_server: RedisServer
) -> None:
    questions = shared_heads()
    with Engine(llama) as engine:
        # The first request of an engine takes longer, and so is not one to compare with.
        engine.ask(PROMPTS[0], max_tokens=2)
        cold = Load(engine)
        for start in range(0, len(questions), HEADS):
            # No two of these share a head.
            engine.reset_gpu()
            cold.run(questions, range(start, start + HEADS), {})
    assert {answer.cached for _, answer, _ in cold.answers} == {0}
    right = {number: answer.tokens for number, answer, _ in cold.answers}
    assert len(set(right.values())) > HEADS, "answers that do not tell KV apart"

    # GPU and arena together hold two thirds of the heads, so that Redis is asked all along.
    tiers = [cpu("3MiB"), redis_tier(redis_server.url, deadline=DEADLINE)]
    order = random.Random(1).choices(range(len(questions)), k=REQUESTS)
    start = threading.Thread(target=redis_server.start)
    with Engine(llama, tiers, blocks=24) as engine:
        engine.ask(PROMPTS[0], max_tokens=2)
        load, hits = Load(engine), {}

        def kill() -> None:
            hits["before"] = engine.counts("redis")["hits"]
            redis_server.kill()

        def restart() -> None:
            hits["away"] = engine.counts("redis")["hits"]
            start.start()

        load.run(questions, order, {KILLED_AT: kill, STARTED_AT: restart})
        start.join()
        assert len(load.answers) == REQUESTS
        assert all(answer.tokens == right[number] for number, answer, _ in load.answers)
        # The deadline is the margin for what else the machine does: of a server that is
        # gone, unlike one that hangs, nobody waits for an answer.
        assert load.slowest <= cold.slowest + DEADLINE
        assert hits["before"] > KILLED_AT // 2, "Redis was to be used before"
        end = time.monotonic() + PATIENCE
        while engine.counts("redis")["hits"] <= hits["away"]:
            assert time.monotonic() < end, "Redis is back, and was not used again"
            load.run(questions, order[:20], {})
        assert all(answer.tokens == right[number] for number, answer, _ in load.answers)
        print(f"cold {cold.slowest:.3f} s, with Redis killed {load.slowest:.3f} s, hits {hits}")
