"""A real engine that replays a small trace, in a process of its own.

The model is as small as vLLM takes it, with random weights that nobody reads: what is
counted is which tokens are computed. Requests are handed in as the engine gets done with
those before, however fast the machine is, and the policy's clock says the trace's time, so
that gaps between requests are what they were.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtiers.simulator.trace import Trace, TraceRequest

from benchmarks.live_trace import BLOCK, VOCABULARY, prompts

_LAYERS, _KV_HEADS, _HEAD = 2, 1, 32
CHUNK_BYTES = _LAYERS * 2 * _KV_HEADS * _HEAD * 4 * BLOCK
"""Of keys and values in float32."""

_TOGETHER = 2.0
"""Requests that come within so many seconds of the trace are under way together."""
_AT_ONCE = 8


@dataclass
class Live:
    """What an engine did.

    Attributes:
        computed, gpu, lower: tokens of prompts that were computed, were in vLLM's own prefix
            cache, and came from the tiers below: vLLM's counters.
        cached: tokens that were not computed, of each request.

    """

    computed: int = 0
    gpu: int = 0
    lower: int = 0
    cached: list[int] = field(default_factory=list)

    @property
    def token_hit_ratio(self) -> float:
        """Tokens that were not computed, of all."""
        return 1 - self.computed / (self.computed + self.gpu + self.lower)


def gpu_chunks(trace: Trace) -> int:
    """Room for prefixes that is left to vLLM: little more than the longest request takes."""
    longest = max(request.input_tokens + request.output_tokens for request in trace.requests)
    return -(-longest // BLOCK) + _AT_ONCE


def replay_live(trace: Trace, policy: str, capacity: int, seconds: float = 3600) -> Live:
    """Replay a trace whose chunks are of ``BLOCK`` tokens on an engine made for it.

    Args:
        trace: scaled or made.
        policy: the registered name.
        capacity: chunks of the CPU tier.
        seconds: after which it is given up.

    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(_replay, trace, policy, capacity, seconds).result()


def _replay(trace: Trace, policy: str, capacity: int, seconds: float) -> Live:
    with tempfile.TemporaryDirectory() as folder:
        engine = _Engine(Path(folder), trace, policy, capacity, time.monotonic() + seconds)
        for request, prompt in zip(trace.requests, prompts(trace), strict=True):
            engine.ask(request, prompt)
        return engine.end()


class _Engine:
    """vLLM with a CPU tier, driven step by step."""

    def __init__(
        self, folder: Path, trace: Trace, policy: str, capacity: int, deadline: float
    ) -> None:
        self._now = trace.requests[0].arrival
        self._deadline = deadline
        self._under_way: dict[str, float] = {}
        self._cached: dict[str, int] = {}
        self._let_policies_read(lambda: self._now)
        self._llm = _start(folder, trace, policy, capacity)
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        tiers = self._scheduler.connector._manager.hierarchy.stats()
        (tier,) = [stats for stats in tiers if stats.name == "cpu"]
        assert tier.usage.limit == capacity * CHUNK_BYTES, tier.usage

    def _let_policies_read(self, clock: Any) -> None:
        from kvtiers.connector.config_specs import PolicySpec

        make = PolicySpec.make
        PolicySpec.make = lambda spec, tiers, _, *more: make(spec, tiers, clock, *more)  # type: ignore[method-assign]

    def ask(self, request: TraceRequest, prompt: list[int]) -> None:
        """Hand in a request, as soon as those well before it have ended."""
        while len(self._under_way) >= _AT_ONCE or self._oldest < request.arrival - _TOGETHER:
            self._step()
        if not self._under_way:
            self._settle()
        self._now = request.arrival
        name = str(request.row)
        self._under_way[name] = request.arrival
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(request))

    @property
    def _oldest(self) -> float:
        """When the first of the requests under way came."""
        return next(iter(self._under_way.values()), math.inf)

    def _settle(self) -> None:
        """Until what has ended is stored: an engine takes steps until then, if nobody asks."""
        while self._scheduler.has_requests():
            self._step()

    def _step(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{len(self._under_way)} requests were under way for too long")
        for output in self._llm.llm_engine.step():
            if output.finished:
                del self._under_way[output.request_id]
                self._cached[output.request_id] = output.num_cached_tokens or 0

    def end(self) -> Live:
        """Wait for all requests and read vLLM's counters."""
        self._settle()
        counts = {
            metric.labels["source"]: int(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:prompt_tokens_by_source"
        }
        self._llm.llm_engine.engine_core.shutdown()
        return Live(
            counts["local_compute"],
            counts["local_cache_hit"],
            counts["external_kv_transfer"],
            [self._cached[name] for name in sorted(self._cached, key=int)],
        )


def _sampling(request: TraceRequest) -> Any:
    from vllm import SamplingParams

    hints = {**request.hints, "session_id": request.session, "turn": request.turn}
    known = {name: value for name, value in hints.items() if value not in ("", None)}
    return SamplingParams(
        max_tokens=request.output_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": known} if known else None,
    )


def _start(folder: Path, trace: Trace, policy: str, capacity: int) -> Any:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM

    longest = max(request.input_tokens + request.output_tokens for request in trace.requests)
    (folder / "config.json").write_text(json.dumps(_model(longest)))
    extra = {
        "tiers": [{"type": "cpu", "capacity": capacity * CHUNK_BYTES}],
        "policy": policy,
        # What can be loaded is: computing takes such a model no time.
        "load_or_recompute": "always_load",
    }
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=longest,
        max_num_seqs=_AT_ONCE,
        # Block 0 is vLLM's own.
        num_gpu_blocks_override=1 + gpu_chunks(trace),
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "TieredKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )


def _model(longest: int) -> dict[str, Any]:
    """The configuration of the smallest Llama that vLLM's kernels know."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _LAYERS,
        "hidden_size": 2 * _HEAD,
        "intermediate_size": 4 * _HEAD,
        "num_attention_heads": 2,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": longest,
        "torch_dtype": "float32",
    }
