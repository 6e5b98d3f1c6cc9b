"""The option that keeps tenants within a quota: how it is written, and what it does to tiers."""

from __future__ import annotations

from typing import Any

import pytest
from hierarchy_kit import CHUNK, DictTier, Stack, prefix
from kvtiers.connector.config import load, values
from kvtiers.connector.config_errors import ConfigError
from kvtiers.policies import TierInfo
from kvtiers.policies.quota import QuotaPolicy
from kvtiers.tiers.units import portion_bytes
from kvtiers.tiers.workers import OpKind

WHERE = "(from kv_connector_extra_config)"
GIB = 1 << 30


def quotas(**extra: Any) -> dict[str, tuple[object, str]]:
    """Each tier's quota, and where it comes from."""
    loaded = load(extra, {})
    shown = dict(values(loaded.config))
    paths = [f"tiers[{index}].tenant_quota" for index in range(len(loaded.config.tiers))]
    return {path[:8]: (str(shown[path]), loaded.origins[path]) for path in paths}


def problem(**extra: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(extra, {})
    (only,) = raised.value.problems
    return only


# How it is written ----------------------------------------------------------


def test_the_top_level_key_is_for_every_tier_that_says_nothing_else() -> None:
    tiers = [
        {"type": "cpu", "capacity": "1GiB"},
        {"type": "fs", "tenant_quota": "50GB"},
        {"type": "redis", "tenant_quota": None},
    ]
    assert quotas(tiers=tiers, tenant_quota="20%") == {
        "tiers[0]": ("20%", "kv_connector_extra_config"),
        "tiers[1]": ("50 GB", "kv_connector_extra_config"),
        "tiers[2]": ("None", "kv_connector_extra_config"),
    }
    assert quotas(tiers=["cpu"]) == {"tiers[0]": ("None", "default")}


@pytest.mark.parametrize(
    ("written", "read"), [("10GiB", 10 * GIB), (4096, 4096), ("25%", 0.25), (0.25, 0.25)]
)
def test_it_is_a_size_or_a_share(written: object, read: object) -> None:
    (cpu, *_) = load({"tenant_quota": written}, {}).config.tiers
    assert cpu.options.tenant_quota == read


@pytest.mark.parametrize("written", ["lots", "0", 0, -1, "120%", 1.5, True, [1]])
def test_what_is_neither_is_told(written: object) -> None:
    text = problem(tenant_quota=written)
    assert text.startswith("tenant_quota is ")
    assert "it must be a size or a share of a tier's capacity, such as 10GiB or 20%." in text


def test_a_share_of_no_capacity_is_refused_where_it_is_asked_for_and_told_where_it_is_not() -> None:
    assert problem(tiers=["cpu", {"type": "redis", "tenant_quota": "20%"}]) == (
        f"tiers[1].tenant_quota is '20%' {WHERE}: the tier has no capacity to take a share of. "
        "Give it one, or write the quota as a size, such as 10GiB."
    )
    (warning,) = load({"tiers": ["cpu", "redis"], "tenant_quota": "20%"}, {}).warnings
    assert warning.startswith("tenant_quota is 20%, and the redis tier has no capacity")
    assert load({"tiers": ["cpu", "redis"], "tenant_quota": "1GiB"}, {}).warnings == ()


def test_a_quota_below_a_chunk_is_refused() -> None:
    tiers = [{"type": "cpu", "capacity": "1GiB"}]
    config = load({"tiers": tiers, "tenant_quota": "0.1%"}, {}).config
    with pytest.raises(ConfigError, match=r"The tenant_quota of tiers\[0\] is 1 MiB \(0.1%\), whi"):
        config.tier_configs(4 << 20)


def test_a_policy_is_wrapped_only_where_there_is_a_quota() -> None:
    policy = load({}, {}).config.policy
    assert not isinstance(policy.make([TierInfo("cpu")], lambda: 0.0), QuotaPolicy)
    assert isinstance(policy.make([TierInfo("cpu", tenant_quota=1)], lambda: 0.0), QuotaPolicy)


@pytest.mark.parametrize(
    ("portion", "whole", "nbytes"),
    [(None, 8, None), (5, 8, 5), (5, None, 5), (0.5, 8, 4), (0.5, None, None)],
)
def test_a_portion_in_bytes(portion: Any, whole: Any, nbytes: Any) -> None:
    assert portion_bytes(portion, whole) == nbytes


# What it does ---------------------------------------------------------------


def flood(stack: Stack, tenant: str, prompts: int) -> None:
    for number in range(prompts):
        stack.store(prefix(f"p{number}", 2, tenant=tenant))
        stack.settle()


def chores(stack: Stack) -> None:
    stack.clock.now += 2
    stack.settle()
    stack.settle()


def test_a_tenant_that_floods_leaves_the_others_what_they_have() -> None:
    disk = DictTier(32 * CHUNK, headroom=0.0, tenant_quota=0.25)
    stack = Stack(16, {"disk": disk}, tenant_quota=0.25)
    quiet, nobodys = prefix("quiet", 4, tenant="blue"), prefix("plain", 4)
    for run in (quiet, nobodys):
        stack.store(run)
        stack.settle()
    flood(stack, "red", 30)
    chores(stack)
    kept = {key for run in (quiet, nobodys) for key in run.chunks}
    assert kept <= stack.ready()
    assert kept <= {key.hash for key in disk.chunks}
    # Its last two prompts in the arena, and its last four below.
    assert len(stack.ready() - kept) == 4
    assert len(disk.chunks) == 8 + 8
    newest = {k for n in (28, 29) for k in prefix(f"p{n}", 2, tenant="red").chunks}
    assert newest == stack.ready() - kept


def test_what_a_quota_does_not_hold_is_counted_as_refused() -> None:
    stack = Stack(
        16, {"disk": DictTier(32 * CHUNK, tenant_quota=2 * CHUNK)}, tenant_quota=CHUNK * 3
    )
    assert len(stack.store(prefix("long", 8, tenant="red"))) == 3
    stack.settle()
    counts = stack.counts()
    assert counts["cpu"]["refused"] == 5
    assert counts["disk"]["refused"] == 1


def test_what_goes_to_a_tier_with_a_wider_quota_comes_through_the_arena_whole() -> None:
    disk = DictTier(tenant_quota=9 * CHUNK)
    stack = Stack(16, {"disk": disk}, tenant_quota=2 * CHUNK)
    run = prefix("long", 12, tenant="red")
    stack.store(run)
    # The arena lets go of nothing that the tier is still to get.
    for _ in range(8):
        stack.clock.now += 2
        stack.h.tick()
        stack.workers["disk"].run(OpKind.CONTAINS, OpKind.WRITE)
    assert {key.hash for key in disk.chunks} == set(run.chunks[:9])
    chores(stack)
    assert stack.ready() == set(run.chunks[:2])


def test_a_prefix_longer_than_the_quota_is_promoted_all_the_same_and_brought_down_later() -> None:
    disk = DictTier()
    run = prefix("long", 6, tenant="red")
    disk.put(run)
    stack = Stack(16, {"disk": disk}, tenant_quota=2 * CHUNK)
    stack.settle()
    stack.begin("r", run)
    stack.settle()
    assert len(stack.load("r", run)) == 6
    stack.h.loaded("r")
    stack.h.end("r")
    chores(stack)
    assert stack.ready() == set(run.chunks[:2])
