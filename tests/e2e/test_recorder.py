"""What a real engine's cache saw is recorded, and the simulator finds the same hits in it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine import BLOCK, Answer, Engine, cpu
from kvtiers.tiers.recording_format import parts_of
from kvtiers.tools import cli
from kvtiers.tools.recorded import Summary, summarise
from models import VOCABULARY

parquet = pytest.importorskip("pyarrow.parquet")

CAPACITY = "8MiB"
CHUNKS = 32
"""Of the CPU tier, at 256 KiB each: many times those of the requests under way. Of a request that
waits the engine holds what it has found, so that nothing else pushes it out. The simulator knows
of none that wait, and in a cache of a few requests' size that is seen."""
BLOCKS = 13
"""Of the GPU, one of them vLLM's own."""
AT_ONCE = 2
ROUNDS = 52
AT_WORK = 18
"""Sessions that take their turns at any time; every fourth turn, one ends and another begins."""
LONGEST = 6 * BLOCK


@dataclass
class Live:
    """A run of an engine.

    Attributes:
        folder: what it recorded in.
        prompts: lengths, in the order in which they were asked.
        answers: in that order.
        chunks: hits of each tier, as the engine's own figures count them.
        evictions: of the CPU tier.

    """

    folder: Path
    prompts: list[int]
    answers: list[Answer]
    chunks: dict[str, int]
    evictions: int

    @property
    def token_hit_ratio(self) -> float:
        return sum(answer.cached for answer in self.answers) / sum(self.prompts)


def conversations(rounds: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Turns of sessions on a few system prompts, some at a time, each with its number.

    Every fifth prompt ends where a chunk does: of such one vLLM computes the last chunk, though
    it may be there.
    """
    choose = random.Random(11)

    def words(n: int) -> list[int]:
        return [choose.randrange(10, VOCABULARY) for _ in range(n)]

    systems = [words(BLOCK) for _ in range(3)]
    sessions: dict[int, list[int]] = {}
    for turn in range(0, rounds * AT_ONCE, AT_ONCE):
        asked = []
        for also in range(AT_ONCE):
            number = (turn + also) // 4 + choose.randrange(AT_WORK)
            beginning = systems[number % 3] + words(choose.randrange(BLOCK, 2 * BLOCK))
            session = sessions.setdefault(number, beginning)
            session += words(choose.randrange(40, 160))
            if len(session) > LONGEST:
                session[:] = beginning
            if (turn + also) % 5 == 0:
                session += words(-len(session) % BLOCK)
            asked.append((number, list(session)))
        yield asked


@pytest.fixture(scope="module")
def live(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Live:
    folder = tmp_path_factory.mktemp("recorder") / "rec"
    with Engine(llama, [cpu(CAPACITY)], blocks=BLOCKS, extra={"record": str(folder)}) as engine:
        prompts, answers = [], []
        for asked in conversations(ROUNDS):
            # Not after the last: an engine that idles takes no more steps.
            engine.settle()
            names = [_submit(engine, i, prompt) for i, prompt in asked]
            done: dict[str, Answer] = {}
            engine.run_until(lambda names=names, done=done: len(done) == len(names), done)
            prompts += [len(prompt) for _, prompt in asked]
            answers += [done[name] for name in names]
        chunks = {tier: engine.counts(tier)["hits"] for tier in ("gpu", "cpu")}
        evictions = engine.counts("cpu")["evictions"]
    return Live(folder, prompts, answers, chunks, evictions)


def _submit(engine: Engine, session: int, prompt: list[int]) -> str:
    params = {"session_id": f"session {session}", "turn": session}
    sampling = {"extra_args": {"kv_transfer_params": params}}
    return engine.submit(prompt, 2, sampling=sampling, cache_salt=f"tenant {session % 3}")


@pytest.fixture(scope="module")
def recorded(live: Live) -> Summary:
    return summarise(parts_of(live.folder))


def simulated(live: Live, capacity: str | int, output: Path) -> float:
    """The hit ratio that ``kvtiers simulate`` finds."""
    what = [str(live.folder), "--policies", "lru", "--capacity", str(capacity)]
    assert cli.main(["simulate", *what, "--jobs", "1", "--json", str(output)]) == 0
    (row,) = json.loads(output.read_text())
    ratio: float = row["token_hit_ratio"]
    return ratio


def test_each_request_is_recorded_with_what_the_engine_says_it_hit(
    live: Live, recorded: Summary
) -> None:
    rows = parquet.read_table(parts_of(live.folder)).sort_by("req").to_pylist()
    # Of those that were asked together, one that waits for a load may come in after another.
    hits = [(row["input_len"], row["hit_gpu"] + row["hit_cpu"]) for row in rows]
    cached = [answer.cached for answer in live.answers]
    assert sorted(hits) == sorted(zip(live.prompts, cached, strict=True))
    assert recorded.hit_tokens == {tier: n * BLOCK for tier, n in live.chunks.items()}
    assert {(row["output_len"], row["finish"]) for row in rows} == {(2, "length")}
    assert recorded.tenants == 3
    # The turn stands for the session here.
    sessions = {(row["session"], row["turn"]) for row in rows}
    assert len(sessions) == recorded.sessions == len({turn for _, turn in sessions})
    assert "session" not in str(sessions)


def test_the_recording_describes_its_engine(recorded: Summary) -> None:
    engine = recorded.about
    assert (engine.chunk_tokens, engine.policy, engine.stores_output) == (BLOCK, "lru", False)
    capacities = {tier.name: tier.capacity for tier in engine.tiers}
    assert capacities == {
        "gpu": BLOCKS * engine.chunk_bytes,
        "cpu": CHUNKS * engine.chunk_bytes,
    }


def test_the_simulator_reproduces_the_live_hit_ratio_within_a_point(
    live: Live, recorded: Summary, tmp_path: Path
) -> None:
    # It is no cache that holds everything, and no request that finds nothing.
    assert recorded.chunks > 3 * CHUNKS
    assert live.evictions > CHUNKS
    assert min(live.chunks.values()) > 0.1 * sum(live.chunks.values())
    assert 0.2 < live.token_hit_ratio < 0.8
    # The CPU tier has what the GPU has of prompts, so it alone says what is hit.
    ratio = simulated(live, CAPACITY, tmp_path / "result.json")
    assert ratio == pytest.approx(live.token_hit_ratio, abs=0.01)


def test_the_simulator_reproduces_what_the_gpu_alone_hit(
    live: Live, recorded: Summary, tmp_path: Path
) -> None:
    # Block 0 is vLLM's own, and each request under way has a last one that is not full.
    most, least = BLOCKS - 1, BLOCKS - 1 - AT_ONCE
    high, low = (simulated(live, n, tmp_path / "result.json") for n in (most, least))
    assert low <= recorded.ratio("gpu") <= high
    assert high - low < 0.15
