"""What is asked of each system: one request at a time, and sixteen at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtiers.tools.measure import Answer, ask, complete, prompts
from kvtiers.tools.redis_server import RedisServer
from kvtiers.tools.server import VllmServer

from benchmarks.record import OURS, Sample
from benchmarks.systems import BLOCK, Engine, chunks_in, drain, new_folder, serve

_WARM_UP = 512
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What a turn asks.

    Attributes:
        lengths: of the prompts of the single scenario, in whole blocks of tokens.
        prompts: how many of each length.
        concurrency: requests in flight in the load scenario; half of them share
            two heads.
        load_tokens: of each of them, half of it the head.
        rest: tokens beyond the last whole block, which no tier can hold.
        seed: another one shares no block with this one.

    """

    lengths: Sequence[int]
    prompts: int
    concurrency: int
    load_tokens: int
    rest: int
    seed: int

    @property
    def gpu_tokens(self) -> int:
        """What vLLM's own cache must hold so that it evicts nothing."""
        single = self.prompts * sum(length + 2 * BLOCK for length in self.lengths)
        # The load scenario asks two sets of prompts of one server.
        load = 2 * self.concurrency * (self.load_tokens + 2 * BLOCK)
        return max(single, load) + 8 * (_WARM_UP + BLOCK)

    @property
    def load_chunks(self) -> int:
        """Distinct chunks of the load scenario's prompts."""
        half = self.load_tokens // 2
        shared = self.concurrency // 2
        tokens = (self.concurrency - shared) * self.load_tokens + shared * half + 2 * half
        return tokens // BLOCK


@dataclass(frozen=True)
class Turn:
    """One system's turn.

    Attributes:
        engine, plan: the same in all turns.
        system: whose turn it is.
        number: counted from 0.
        log: of the servers.
        say: reports progress.

    """

    engine: Engine
    plan: Plan
    system: str
    number: int
    log: Path
    say: Say

    @contextmanager
    def server(self, where: Path | str, arena_chunks: int) -> Iterator[VllmServer]:
        """A server that has stored and loaded before, so that first uses are not timed."""
        self.say("starting vLLM")
        with serve(self.engine, self.system, where, arena_chunks, self.log) as server:
            warm_up = prompts(server, 2, _WARM_UP, seed=-1 - self.plan.seed)
            for _ in range(2):
                for prompt in warm_up:
                    complete(server, prompt, 1)
                drain(server, where, quiet=0.5)
                server.reset_prefix_cache()
            yield server

    def sample(self, scenario: str, step: str, tokens: int, answers: Sequence[Answer]) -> Sample:
        """Record a step, and say what came out."""
        sample = Sample(
            scenario,
            self.system,
            self.number,
            step,
            tokens,
            [answer.ttft_s for answer in answers],
            [answer.cached_tokens for answer in answers],
            statistics.mode(answer.source for answer in answers),
        )
        times = sorted(sample.ttft_s)
        self.say(
            f"{scenario} {step}, {tokens} tokens: median {statistics.median(times):.3f} s, "
            f"slowest {times[-1]:.3f} s, {sample.loaded} of {len(answers)} loaded {sample.source}"
        )
        return sample


def single(turn: Turn) -> Iterator[Sample]:
    """One request at a time: cold, then from each tier, the lowest after a restart."""
    plan = turn.plan
    arena_chunks = 2 * plan.gpu_tokens // BLOCK
    with new_folder() as folder:
        with turn.server(folder, arena_chunks) as server:
            asked = {
                length: prompts(server, plan.prompts, length + plan.rest, plan.seed + length)
                for length in plan.lengths
            }
            yield from _one_by_one(turn, server, "cold", asked)
            drain(server, folder)
            yield from _one_by_one(turn, server, "gpu", asked)
            server.reset_prefix_cache()
            yield from _one_by_one(turn, server, "cpu", asked)
        with turn.server(folder, arena_chunks) as server:
            yield from _one_by_one(turn, server, "fs", asked)


def _one_by_one(
    turn: Turn, server: VllmServer, step: str, asked: dict[int, list[list[int]]]
) -> Iterator[Sample]:
    for length, of_length in asked.items():
        answers = [ask(server, prompt, 1) for prompt in of_length]
        yield turn.sample("single", step, length, answers)


def load(turn: Turn) -> Iterator[Sample]:
    """All requests at once: cold, then from the filesystem into a large and a small arena."""
    with new_folder() as folder:
        with turn.server(folder, 4 * turn.plan.load_chunks) as server:
            asked = _load_prompts(server, turn.plan, turn.plan.seed)
            unheard = _load_prompts(server, turn.plan, turn.plan.seed + 1)
            yield turn.sample("load", "cold", turn.plan.load_tokens, _at_once(server, unheard))
            drain(server, folder)
            _store(turn, server, folder, asked)
        yield from _under_pressure(turn, "fs", folder, asked)


def load_redis(turn: Turn) -> Iterator[Sample]:
    """All requests at once, from a Redis into a large and a small arena. kvtiers only."""
    if turn.system != OURS:
        return
    with new_folder() as folder, RedisServer(folder) as redis:
        with turn.server(redis.unix_url, 4 * turn.plan.load_chunks) as server:
            asked = _load_prompts(server, turn.plan, turn.plan.seed)
            _store(turn, server, redis.unix_url, asked)
        yield from _under_pressure(turn, "redis", redis.unix_url, asked)


def _under_pressure(
    turn: Turn, tier: str, where: Path | str, asked: list[list[int]]
) -> Iterator[Sample]:
    """From a tier that holds everything, after a restart, into a large and a small arena."""
    chunks = turn.plan.load_chunks
    for share, arena_chunks in (("whole", 2 * chunks), ("quarter", chunks // 4)):
        with turn.server(where, arena_chunks) as server:
            answers = _at_once(server, asked)
            yield turn.sample("load", f"{tier}-{share}", turn.plan.load_tokens, answers)


def _store(turn: Turn, server: VllmServer, where: Path | str, asked: list[list[int]]) -> None:
    """Bring every chunk into the tier: the second time round, what was left out."""
    before = chunks_in(where, turn.engine)
    for _ in range(2):
        for prompt in asked:
            complete(server, prompt, 1)
        drain(server, where)
        server.reset_prefix_cache()
    stored = chunks_in(where, turn.engine) - before
    turn.say(f"load: {stored} of {turn.plan.load_chunks} chunks stored")


def _load_prompts(server: VllmServer, plan: Plan, seed: int) -> list[list[int]]:
    """Half of the prompts are all different, half have one of two heads."""
    half, shared = plan.load_tokens // 2, plan.concurrency // 2
    heads = prompts(server, 2, half, seed=3 * seed)
    tails = prompts(server, shared, half + plan.rest, seed=3 * seed + 1)
    others = prompts(
        server, plan.concurrency - shared, plan.load_tokens + plan.rest, seed=3 * seed + 2
    )
    return [*(heads[i % 2] + tail for i, tail in enumerate(tails)), *others]


def _at_once(server: VllmServer, asked: list[list[int]]) -> list[Answer]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, 1), asked))
