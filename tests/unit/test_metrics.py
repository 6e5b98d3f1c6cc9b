"""What goes to vLLM's metrics: nothing without a definition, nothing that says nothing."""

from __future__ import annotations

import pytest
from kvtiers.connector import metrics
from kvtiers.tiers import Usage
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.figures import TierStats

EVERY_COUNT = {
    "hits": 1,
    "misses": 2,
    "bytes_read": 3,
    "bytes_written": 4,
    "failures": 5,
    "timeouts": 6,
    "corrupt": 7,
    "evictions": 8,
    "dropped": 9,
    "refused": 10,
    "breaker_opened": 11,
    "recomputed": 13,
    "something_internal": 12,
}
STATS = [
    TierStats("gpu", Usage(100, 2, 400), {"hits": 3}),
    TierStats("cpu", Usage(50, 1, 200), {}, pinned=4),
    TierStats("fs", Usage(70, 1, None), EVERY_COUNT, BreakerState.OPEN, 0.25),
]


def recorded(first: bool) -> dict[str, dict[tuple[str, ...], float]]:
    stats = metrics.record(STATS, first, prefill=900.0)
    return {name.removeprefix("vllm:kvtiers_"): v for name, v in stats.data["data"].items()}


@pytest.mark.parametrize("first", [True, False])
def test_every_value_has_a_definition_with_its_labels(first: bool) -> None:
    defined = metrics.definitions()
    for name, values in metrics.record(STATS, first, 900.0).data["data"].items():
        assert all(len(labels) == len(defined[name].labelnames) for labels in values)


def test_every_definition_has_a_value_at_first() -> None:
    assert set(metrics.record(STATS, True, 900.0).data["data"]) == set(metrics.definitions())


def test_levels_and_counts_are_told_per_tier() -> None:
    told = recorded(first=False)
    assert told["tier_used_bytes"] == {("gpu",): 100, ("cpu",): 50, ("fs",): 70}
    assert told["tier_capacity_bytes"] == {("gpu",): 400, ("cpu",): 200}, "fs has no bound"
    assert told["tier_breaker_state"][("fs",)] == 2
    assert told["tier_pinned_chunks"] == {("cpu",): 4}
    assert told["tier_chunk_read_seconds"] == {("fs",): 0.25}
    assert told["prefill_tokens_per_second"] == {(): 900.0}
    assert told["tier_hits"] == {("gpu",): 3, ("fs",): 1}
    assert told["tier_corrupt"] == {("fs",): 7}


def test_what_was_not_measured_is_not_told() -> None:
    told = metrics.record(STATS[:2], True).data["data"]
    assert not [name for name in told if "seconds" in name or "per_second" in name]


def test_zeros_are_told_once_and_only_where_they_can_change() -> None:
    assert recorded(first=True)["tier_evictions"] == {("cpu",): 0, ("fs",): 8}
    assert recorded(first=False)["tier_evictions"] == {("fs",): 8}
