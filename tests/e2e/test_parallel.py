"""Two pipeline stages share one arena; two data-parallel engines share what lies below theirs.

Tensor parallelism is in ``test_tensor_parallel.py``. Engines with two ranks take half a
minute each to start, so one serves several tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, connector_config, cpu, file_digests, fs, redis_tier
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.connector import TieredKVConnector
from kvtiers.tiers.host_memory import available_bytes
from kvtiers.tools.server import VllmServer
from models import prompts
from redis_server import RedisServer
from serving import complete, metric_of, server, wait_for
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="vLLM for CPU wants a core for each rank"
)

FIRST, SECOND = prompts(2, 700)
CACHEABLE, CHUNKS = 640, 5
CHUNK_BYTES = 2 * 2 * 4 * 32 * 4 * 128
"""K and V of two layers, four heads of 32 floats, 128 tokens."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(scope="module")
def without(llama: Path) -> list[tuple[int, ...]]:
    """Answers of one rank without the connector."""
    with Engine(llama) as engine:
        return [answer.tokens for answer in engine.ask_each([FIRST, SECOND])]


# Pipeline parallelism -------------------------------------------------------

# Without the warm-up run that eager mode leaves out, the second stage of vLLM's CPU runner
# has nothing to receive into: "assert self.intermediate_tensors is not None".
WARMED_UP: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


@dataclass(frozen=True)
class Pipeline:
    """What engines said, both prompts each time, and which tiers served them.

    Attributes:
        cold, cpu: of two stages, the first time and with the GPU's cache emptied.
        restarted: of two stages again; Redis has the second prompt only.
        alone: of one stage, over the same Redis and folder.
        hits: by step and tier.
        namespaces: of two stages, and of one.
        files: what two stages left on disk.
        arena: what they had in the arena then.

    """

    cold: list[Answer]
    cpu: list[Answer]
    restarted: list[Answer]
    alone: list[Answer]
    hits: dict[str, dict[str, int]]
    namespaces: tuple[str, str]
    files: dict[bytes, bytes]
    arena: dict[bytes, bytes]


@pytest.fixture(scope="module")
def pipeline(llama: Path, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    root = tmp_path_factory.mktemp("pipeline")
    tiers = [cpu(), redis_tier(redis.url), fs(root)]
    hits: dict[str, dict[str, int]] = {}

    def hits_of(engine: Engine) -> dict[str, int]:
        return {tier: engine.counts(tier)["hits"] for tier in ("cpu", "redis", "fs")}

    with Engine(llama, tiers, pipeline_parallel=2, **WARMED_UP) as engine:
        cold = [engine.ask(FIRST)]
        redis.client().flushall()
        cold.append(engine.ask(SECOND))
        engine.reset_gpu()
        from_cpu = engine.ask_each([FIRST, SECOND])
        hits["cpu"] = hits_of(engine)
        two, arena = engine.namespace, engine.arena_digests()
    files = file_digests(root, two)
    with Engine(llama, tiers, pipeline_parallel=2, **WARMED_UP) as engine:
        restarted = engine.ask_each([FIRST, SECOND])
        hits["restarted"] = hits_of(engine)
    with Engine(llama, tiers) as engine:
        alone = engine.ask_each([FIRST, SECOND])
        hits["alone"] = hits_of(engine)
        namespaces = (two, engine.namespace)
    return Pipeline(cold, from_cpu, restarted, alone, hits, namespaces, files, arena)


def test_two_stages_give_the_same_answers_from_every_tier(
    pipeline: Pipeline, without: list[tuple[int, ...]]
) -> None:
    for answers in (pipeline.cold, pipeline.cpu, pipeline.restarted):
        assert [answer.tokens for answer in answers] == without
    assert [answer.cached for answer in pipeline.cold] == [0, 0]
    assert [answer.cached for answer in pipeline.cpu] == [CACHEABLE, CACHEABLE]
    assert [answer.cached for answer in pipeline.restarted] == [CACHEABLE, CACHEABLE]
    assert pipeline.hits["cpu"] == {"cpu": 2 * CHUNKS, "redis": 0, "fs": 0}
    assert pipeline.hits["restarted"] == {"cpu": 0, "redis": CHUNKS, "fs": CHUNKS}


def test_a_chunk_of_two_stages_is_whole_on_disk(pipeline: Pipeline) -> None:
    assert len(pipeline.files) == 2 * CHUNKS
    assert pipeline.files == pipeline.arena


def test_one_stage_does_not_read_what_two_have_written(
    pipeline: Pipeline, without: list[tuple[int, ...]]
) -> None:
    two, one = pipeline.namespaces
    assert one != two
    assert [answer.cached for answer in pipeline.alone] == [0, 0]
    assert pipeline.hits["alone"] == {"cpu": 0, "redis": 0, "fs": 0}
    assert [answer.tokens for answer in pipeline.alone] == without


# Data parallelism -----------------------------------------------------------


@pytest.fixture(scope="module")
def pair(
    llama: Path, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server with two engines, and no capacity of the cpu tier set."""
    # One stage has left its chunks there, which are these engines' too.
    redis.client().flushall()
    home = tmp_path_factory.mktemp("pair") / "home"
    tiers = [{"type": "cpu"}, redis_tier(redis.url), fs(home / "fs")]
    with server(
        llama,
        home,
        extra={"tiers": tiers},
        arguments=["--data-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as started:
        yield started


def test_what_one_engine_stored_serves_the_other(
    pair: VllmServer, redis: RedisServer, without: list[tuple[int, ...]]
) -> None:
    first, second = ["".join(f" w{token}" for token in tokens) for tokens in without]

    def hits(engine: int, tier: str) -> float:
        return metric_of(pair, "hits_total", tier, engine) or 0

    def stored(engine: int) -> bool:
        """All that it computed, in both tiers."""
        writes = [metric_of(pair, "bytes_written_total", tier, engine) for tier in ("redis", "fs")]
        return writes == [CHUNKS * CHUNK_BYTES] * 2

    assert complete(pair, FIRST, 16, rank=0) == first
    wait_for(lambda: stored(0), pair)
    assert complete(pair, FIRST, 16, rank=1) == first
    wait_for(lambda: hits(1, "redis") == CHUNKS, pair)
    assert complete(pair, SECOND, 16, rank=1) == second
    wait_for(lambda: stored(1), pair)
    redis.client().flushall()
    assert complete(pair, SECOND, 16, rank=0) == second
    wait_for(lambda: hits(0, "fs") == CHUNKS, pair)
    assert hits(1, "fs") == 0


def test_engines_of_one_host_divide_its_memory(pair: VllmServer) -> None:
    sizes = [metric_of(pair, "capacity_bytes", "cpu", engine) or 0 for engine in (0, 1)]
    # Half of the free memory is the default, and so a quarter for each of them.
    for size in sizes:
        assert 0.12 * available_bytes() < size < 0.36 * available_bytes()


def test_each_engine_has_figures_of_its_own(pair: VllmServer) -> None:
    figures = re.findall(r'kvtiers_tier_chunks\{engine="(\d)"', pair.get("/metrics"))
    assert set(figures) == {"0", "1"}


# Several nodes --------------------------------------------------------------


def test_an_engine_that_spans_nodes_is_refused_before_it_meets_them(llama: Path) -> None:
    """Where vLLM's workers build the connector; a real second node is not needed to see it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    spanning = EngineArgs(
        model=str(llama),
        nnodes=2,
        node_rank=0,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        kv_transfer_config=KVTransferConfig(**connector_config([cpu()])),
    ).create_engine_config()
    with pytest.raises(ConfigError, match="spans 2 nodes, and kvtiers' arena is memory of one"):
        TieredKVConnector(spanning, KVConnectorRole.WORKER, None)
