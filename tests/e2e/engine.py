"""A real vLLM engine for tests, with its scheduler, and so our hierarchy, in this process.

So is its worker, unless there are several, which are child processes. Tests drive
the engine step by step, look at the hierarchy between steps, and reach through
the connector where a fault must be put in by hand. Starting one takes seconds
after the first, which imports vLLM.

    with Engine(model, [cpu(), fs(folder)]) as engine:
        first = engine.ask(prompt)          # Answer(tokens, cached)
        engine.reset_gpu()                  # so that the next answer comes from below
        assert engine.ask(prompt) == ...

Every wait has a deadline and fails the test, so that a hung request is a failure
and not a hung suite.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import xxhash
from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.figures import TierStats
from kvtiers.tiers.format import METADATA_BYTES, Defect, unpack
from kvtiers.tiers.hierarchy import Hierarchy

if TYPE_CHECKING:
    from kvtiers.connector.connector import TieredKVConnector

BLOCK = 128
"""Tokens of a vLLM block on CPU."""
_TIMEOUT = 120.0


def cpu(capacity: str = "64MiB") -> dict[str, Any]:
    """Configuration of a CPU tier."""
    return {"type": "cpu", "capacity": capacity}


def fs(path: Path, capacity: str = "1GiB", **options: Any) -> dict[str, Any]:
    """Configuration of a filesystem tier."""
    return {"type": "fs", "path": str(path), "capacity": capacity, **options}


def redis_tier(url: str, **options: Any) -> dict[str, Any]:
    """Configuration of a Redis tier."""
    return {"type": "redis", "url": url, **options}


@dataclass(frozen=True)
class Answer:
    """What the engine said.

    Attributes:
        tokens: the generated token ids.
        cached: prompt tokens that were not computed.
        finished: vLLM's finish reason.
        logprobs: of the prompt's tokens but the first, if asked for.

    """

    tokens: tuple[int, ...]
    cached: int
    finished: str | None = None
    logprobs: tuple[float, ...] = ()


class Engine:
    """An offline vLLM engine, float32, greedy, one prompt at a time unless told otherwise.

    Use it as a context manager, or call ``close``. Only one may be alive at a time.

    Args:
        model: folder of the model.
        tiers: the connector's tiers; None runs without the connector.
        blocks: blocks of the GPU's KV cache; few of them force preemptions.
        tensor_parallel: ranks, each with a core of its own.
        pipeline_parallel: stages, the same.
        extra: further keys of ``kv_connector_extra_config``.
        transfer: replaces the whole ``kv_transfer_config``.
        environment: variables while the engine lives.
        options: of ``vllm.LLM``.

    """

    def __init__(
        self,
        model: Path,
        tiers: Sequence[Mapping[str, Any]] | None = None,
        *,
        blocks: int = 256,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        extra: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if tiers is not None:
            transfer = connector_config(tiers, **(extra or {}))
        self._counts: dict[str, Counter[str]] = {}
        self._last_stats: list[TierStats] = []
        self._preemptions: dict[str, int] = {}
        self._asked = 0
        self._patch = pytest.MonkeyPatch()
        # vLLM binds this thread to cores, and child processes would inherit that.
        self._cores = os.sched_getaffinity(0)
        self._set_environment(tensor_parallel * pipeline_parallel, environment or {})
        options |= {
            "tensor_parallel_size": tensor_parallel,
            "pipeline_parallel_size": pipeline_parallel,
        }
        try:
            self.llm: Any = self._start(model, blocks, transfer, options)
        except BaseException:
            _forget_connector()
            self._restore()
            raise
        if transfer is not None:
            # vLLM would take the figures on its way; here ``counts`` does.
            self._patch.setattr(self.connector._manager, "get_stats", lambda: None)

    def _set_environment(self, ranks: int, environment: Mapping[str, str]) -> None:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **environment,
        }
        if ranks > 1:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def _start(
        self,
        model: Path,
        blocks: int,
        transfer: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Any:
        from vllm import LLM, envs

        # The engine before this one in this process froze its environment.
        envs.disable_envs_cache()
        self._keep_kernels()
        settings = {
            "dtype": "float32",
            # Block 0 is vLLM's own.
            "max_model_len": min(4096, (blocks - 1) * BLOCK),
            "max_num_seqs": 8,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": blocks,
            **options,
        }
        if transfer is not None:
            settings["kv_transfer_config"] = dict(transfer)
        return LLM(model=str(model), **settings)

    def _keep_kernels(self) -> None:
        """Let vLLM look for its kernels once in a process.

        On CPU it replaces them for each engine anew, looks into every module for them, and
        fails at llvmlite's, which n-gram speculation loads (numba).
        """
        from vllm.triton_utils import dispatcher

        if dispatcher._registry:
            self._patch.setattr(dispatcher, "_rebind_kernels", lambda overrides: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers and drain the tiers."""
        llm, self.llm = self.llm, None
        if llm is not None:
            try:
                llm.llm_engine.engine_core.shutdown()
            finally:
                self._restore()
            del llm
            gc.collect()

    def _restore(self) -> None:
        self._patch.undo()
        os.sched_setaffinity(0, self._cores)

    # What a test may look at ------------------------------------------------

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore``."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def connector(self) -> TieredKVConnector:
        """The scheduler's connector."""
        connector: TieredKVConnector = self.scheduler.connector
        return connector

    @property
    def tiered(self) -> bool:
        """Whether it runs with the connector."""
        return self.scheduler.connector is not None

    @property
    def hierarchy(self) -> Hierarchy:
        """The tiers."""
        return self.connector._manager.hierarchy

    @property
    def namespace(self) -> str:
        """Id of what the bytes of this engine mean."""
        return self.hierarchy.namespace.id

    @property
    def preemptions(self) -> int:
        """How often vLLM has preempted a request so far."""
        return sum(self._preemptions.values())

    def counts(self, tier: str) -> Counter[str]:
        """Figures of a tier since the engine started: hits, misses, corrupt, and so on."""
        self._take_stats()
        return self._counts.get(tier, Counter())

    def usage(self, tier: str) -> TierStats:
        """How full a tier is."""
        self._take_stats()
        return next(stats for stats in self._last_stats if stats.name == tier)

    def _take_stats(self) -> None:
        self._last_stats = self.hierarchy.stats()
        for stats in self._last_stats:
            self._counts.setdefault(stats.name, Counter()).update(stats.counts)

    # Asking -----------------------------------------------------------------

    def ask(self, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> Answer:
        """One prompt alone, and then wait until everything it set off has ended."""
        return self.ask_all([prompt], max_tokens, **options)[0]

    def ask_each(self, prompts: Iterable[Sequence[int]], max_tokens: int = 16) -> list[Answer]:
        """The prompts one after the other."""
        return [self.ask(prompt, max_tokens) for prompt in prompts]

    def ask_all(
        self, prompts: Iterable[Sequence[int]], max_tokens: int = 16, **options: Any
    ) -> list[Answer]:
        """The prompts all at once."""
        ids = [self.submit(prompt, max_tokens, **options) for prompt in prompts]
        answers: dict[str, Answer] = {}
        self.run_until(lambda: len(answers) == len(ids), answers)
        self.settle()
        return [answers[name] for name in ids]

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        lora: Any = None,
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Hand in a prompt without a step. Returns its id.

        Args:
            prompt: token ids.
            max_tokens: to generate.
            lora: vLLM's ``LoRARequest``.
            sampling: further ``SamplingParams``.
            options: further keys of the prompt, such as ``cache_salt``.

        """
        from vllm import SamplingParams

        self._asked += 1
        name = str(self._asked)
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(max_tokens=max_tokens, **greedy, **(sampling or {}))
        asked = {"prompt_token_ids": list(prompt), **options}
        self.llm.llm_engine.add_request(name, asked, params, lora_request=lora)
        return name

    def abort(self, name: str) -> None:
        """As when a client hangs up."""
        self.llm.llm_engine.abort_request([name])

    def step(self) -> dict[str, Answer]:
        """One step of the engine. Returns the answers that are complete now."""
        outputs = self.llm.llm_engine.step()
        for request in self.scheduler.requests.values():
            self._preemptions[request.request_id] = request.num_preemptions
        return {output.request_id: _answer(output) for output in outputs if output.finished}

    def run_until(
        self, done: Callable[[], bool], answers: dict[str, Answer] | None = None
    ) -> dict[str, Answer]:
        """Step until ``done``, collecting answers. Fails after two minutes."""
        answers = {} if answers is None else answers
        deadline = time.monotonic() + _TIMEOUT
        while not done():
            assert time.monotonic() < deadline, "the engine did not get there in time"
            answers.update(self.step())
        return answers

    def settle(self) -> None:
        """Wait until no copy, store or lookup is under way."""
        deadline = time.monotonic() + _TIMEOUT
        while self.scheduler.has_requests() or not self._tiers_idle():
            assert time.monotonic() < deadline, "stores or loads are still under way"
            self.step()
            time.sleep(0.001)

    def _tiers_idle(self) -> bool:
        if not self.tiered:
            return True
        self.hierarchy.poll()
        return self.hierarchy.idle()

    # Moving chunks by hand --------------------------------------------------

    def reset_gpu(self) -> None:
        """Empty vLLM's own prefix cache and nothing else."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def drop_arena(self) -> None:
        """Empty the CPU tier too, so that only lower tiers can answer.

        Done by distrusting every slot, which counts as failures of the CPU tier.
        """
        self.reset_gpu()
        self.hierarchy.spoil(range(self.hierarchy._residency.cpu.arena.slots))
        assert self.usage("cpu").usage.chunks == 0

    def arena(self) -> dict[bytes, memoryview]:
        """Chunks of the CPU tier by their hash: the arena's own memory, writable."""
        residency = self.hierarchy._residency
        return {
            chunk.key: residency.slots.memory(chunk.slot)
            for chunk in residency.directory
            if chunk.slot >= 0
        }

    def arena_digests(self) -> dict[bytes, bytes]:
        """Hash of the bytes of every chunk in the CPU tier."""
        return {key: xxhash.xxh3_128_digest(memory) for key, memory in self.arena().items()}


def _answer(output: Any) -> Answer:
    positions = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    return Answer(
        tuple(output.outputs[0].token_ids),
        output.num_cached_tokens or 0,
        output.outputs[0].finish_reason,
        tuple(known[token].logprob for token, known in positions if known is not None),
    )


def _forget_connector() -> None:
    """VLLM keeps the connector of a worker in this process for the next engine in it."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


def connector_config(tiers: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """A ``kv_transfer_config`` with these tiers.

    Tiny models compute in no time: what is tested mostly is that what can be loaded is.
    """
    settings = {"load_or_recompute": "always_load", **extra}
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": list(tiers), **settings},
    }


def chunk_files(root: Path, namespace: str = "*") -> dict[bytes, Path]:
    """Chunks of a filesystem tier by their hash."""
    return {
        bytes.fromhex(path.name.removesuffix(".kv")): path
        for path in root.glob(f"v1/{namespace}/??/*.kv")
    }


def file_digests(root: Path, namespace: str = "*") -> dict[bytes, bytes]:
    """Hash of the payload of every chunk file; fails for one that is no whole chunk."""
    digests = {}
    for key, path in chunk_files(root, namespace).items():
        data = memoryview(path.read_bytes())
        payload, metadata = data[:-METADATA_BYTES], unpack(data[-METADATA_BYTES:])
        assert not isinstance(metadata, Defect), f"{path}: {metadata}"
        assert len(payload) == metadata.payload_bytes
        assert len(payload) % ALIGNMENT == 0
        digests[key] = xxhash.xxh3_128_digest(payload)
        assert digests[key] == metadata.checksum, path
    return digests
