"""The connector's figures on vLLM's own ``/metrics``.

vLLM builds the Prometheus objects in the API server's process, from these
definitions, and ships the values there with the step's output. A value without
a definition ends the server, so both are made from one table.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtiers.tiers.figures import TierStats
from kvtiers.tiers.residency import GPU
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

# vLLM unregisters its metrics by this prefix when an engine is made anew.
_PREFIX = "vllm:kvtiers_"
_LABELS = ("tier",)

_GAUGES = {
    "tier_used_bytes": "Bytes of KV that the tier holds.",
    "tier_capacity_bytes": "Bytes that the tier may hold; absent if it has no bound.",
    "tier_chunks": "Chunks that the tier holds.",
    "tier_breaker_state": "0: the tier is used; 1: it is being probed; 2: it is left alone.",
    "tier_chunk_read_seconds": "Estimated seconds to read one chunk; absent before some were.",
    "tier_pinned_chunks": "Chunks of the cpu tier that a copy, or a request that waits, uses now.",
}
# Of the engine and no tier.
_PREFILL = "prefill_tokens_per_second"
_PREFILL_TEXT = (
    "Estimated speed at which the engine computes the first 1,024 tokens of a prompt; absent "
    "before some were."
)
_COUNTERS = {
    "hits": "Prompt chunks that the tier served to admitted requests.",
    "misses": "Prompt chunks of admitted requests that neither this tier nor one above it held.",
    "bytes_read": "Bytes read from the tier: promoted, or for cpu copied to the GPU.",
    "bytes_written": "Bytes stored into the tier.",
    "bytes_not_written": "Bytes that the tier was spared: of chunks that left the cpu tier, and "
    "that the policy or a quota had not admitted here since they came.",
    "failures": "Chunks or calls that failed.",
    "timeouts": "Calls that were given up at their deadline.",
    "corrupt": "Chunks found damaged; each was a miss.",
    "unreadable": "Chunks found that others encrypted, or did not encrypt; each was a miss.",
    "evictions": "Chunks evicted from the tier.",
    "dropped": "Chunks not stored because the tier had no room or could not keep up.",
    "refused": "Chunks not stored because the policy did not admit them, the tier was full, or "
    "their place has a chunk that only others can read.",
    "recomputed": "Prompt chunks that the tier held and that were computed, since loading them "
    "would have taken longer.",
    "breaker_opened": "Times that the tier was left alone for failing or being slow.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that ``record`` may emit."""
    gauges = {
        _PREFIX + name: OffloadingGaugeMetadata(text, _LABELS) for name, text in _GAUGES.items()
    }
    counters = {
        f"{_PREFIX}tier_{name}": OffloadingCounterMetadata(text, _LABELS)
        for name, text in _COUNTERS.items()
    }
    prefill = {_PREFIX + _PREFILL: OffloadingGaugeMetadata(_PREFILL_TEXT)}
    return {**gauges, **prefill, **counters}


# vLLM moves the bytes of its own cache, and nothing of it can fail here.
_OF_GPU = ("hits", "misses")


def record(
    tiers: Iterable[TierStats], first: bool, prefill: float | None = None
) -> OffloadingConnectorStats:
    """The values of one step.

    Args:
        tiers: with the increases of their counts.
        first: name every counter, also those at zero: a query must find the series
            before the first event. Later zeros would only fill vLLM's log.
        prefill: tokens a second, None if not measured.

    """
    stats = OffloadingConnectorStats()
    if prefill is not None:
        stats.set_gauge(_PREFIX + _PREFILL, prefill)
    for tier in tiers:
        labels = (tier.name,)
        stats.set_gauge(_PREFIX + "tier_used_bytes", tier.usage.nbytes, labels)
        stats.set_gauge(_PREFIX + "tier_chunks", tier.usage.chunks, labels)
        stats.set_gauge(_PREFIX + "tier_breaker_state", int(tier.breaker), labels)
        if tier.read_seconds is not None:
            stats.set_gauge(_PREFIX + "tier_chunk_read_seconds", tier.read_seconds, labels)
        if tier.pinned is not None:
            stats.set_gauge(_PREFIX + "tier_pinned_chunks", tier.pinned, labels)
        if tier.usage.limit is not None:
            stats.set_gauge(_PREFIX + "tier_capacity_bytes", tier.usage.limit, labels)
        for name in _OF_GPU if tier.name == GPU else _COUNTERS:
            count = tier.counts.get(name, 0)
            if count or first:
                stats.increase_counter(f"{_PREFIX}tier_{name}", count, labels)
    return stats
