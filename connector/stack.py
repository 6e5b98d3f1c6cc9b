"""Builds the tiers of one engine from its configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.config_specs import TierSpec
from kvtiers.connector.namespace import build_namespace, kernel_facts, shareable_hash
from kvtiers.connector.neighbours import announce
from kvtiers.connector.prefill import PrefillClock
from kvtiers.connector.roles import loads, stores
from kvtiers.connector.sizes import format_bytes
from kvtiers.connector.transfer import WorkerReport
from kvtiers.connector.weights import engine_fingerprint
from kvtiers.tiers import Namespace, Tier, TierConfigError, Usage
from kvtiers.tiers.arena import Arena
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.populate import Populator
from kvtiers.tiers.residency import GPU
from vllm.v1.kv_offload.config import OffloadingConfig

if TYPE_CHECKING:
    from kvtiers.connector.spec import Context

logger = logging.getLogger(__name__)


def build_hierarchy(
    offloading: OffloadingConfig,
    context: Context,
    report: WorkerReport,
    gpu_usage: Callable[[], Usage],
    prefill: PrefillClock,
) -> Hierarchy:
    """The hierarchy of one engine, in its scheduler process.

    Args:
        offloading: vLLM's summary of the engine.
        context: our configuration and vLLM's.
        report: what the workers made.
        gpu_usage: how full vLLM's own prefix cache is.
        prefill: how fast the engine computes prompts.

    Raises:
        ConfigError, TierConfigError: a tier that the user asked for can't work.

    """
    context.loaded.log()
    arena = Arena.attach(report.arena)
    chunk_bytes = arena.slot_bytes
    quota = context.loaded.config.tiers[0].options.tenant_quota
    capacity = CpuTier.Config(capacity=arena.nbytes, tenant_quota=quota)
    cpu = CpuTier(capacity, chunk_bytes, arena, Populator(arena))
    namespace, private = _namespace(offloading, context, report)
    lower: dict[str, Tier] = {}
    away: dict[str, str] = {}
    for index, spec in enumerate(context.loaded.config.tiers[1:], start=1):
        tier = _build_tier(context, index, spec, chunk_bytes, private, away)
        if tier is not None:
            lower[spec.name] = tier
    _log(offloading, context, report, {"cpu": cpu, **lower}, namespace)
    announce(namespace, {name: tier for name, tier in lower.items() if name not in away})
    role = context.vllm_config.kv_transfer_config.kv_role
    settings = context.loaded.config
    return Hierarchy(
        cpu,
        lower,
        lambda tiers, clock: settings.policy.make(tiers, clock, prefill.worth, settings.placement),
        namespace,
        observed={GPU: gpu_usage},
        # Nothing is to be found in the arena by those who load nothing.
        window=_window(offloading, settings.prefetch_window if loads(role) else 0),
        stores=stores(role),
        away=away,
        prefill=prefill if settings.load_or_recompute == "auto" else None,
    )


def _window(offloading: OffloadingConfig, tokens: int | None) -> Mapping[int, int] | None:
    """The prefetch window in chunks of each group; a part of a chunk is a chunk."""
    if tokens is None:
        return None
    blocks = offloading.cache.blocks_per_chunk
    return {
        group.group_id: -(-tokens // (group.tokens_per_block * blocks))
        for group in offloading.groups
    }


def _namespace(
    offloading: OffloadingConfig, context: Context, report: WorkerReport
) -> tuple[Namespace, str | None]:
    """The namespace, and why nothing of it may be shared or outlive the engine, if so."""
    settings = context.loaded.config
    weights = engine_fingerprint(context.vllm_config, settings.weights_version)
    namespace = build_namespace(
        context.vllm_config,
        context.kv_cache_config,
        offloading,
        weights=weights.value,
        weights_version=settings.weights_version,
        portable=report.portable,
        kernel=kernel_facts(context.vllm_config, context.kv_cache_config),
        environ=os.environ,
    )
    private = weights.reason if weights.value is None else None
    return namespace, private or shareable_hash(context.vllm_config, os.environ)


def _build_tier(
    context: Context,
    index: int,
    spec: TierSpec,
    chunk_bytes: int,
    private: str | None,
    away: dict[str, str],
) -> Tier | None:
    """One lower tier. One that nobody asked for is left out where it can't work.

    Why one does not answer now goes into ``away``, by its name.
    """
    loaded = context.loaded
    by_default = loaded.origins.get(f"tiers[{index}].type") == "default"
    cls = spec.tier_class()
    try:
        if private is not None and (cls.shared or cls.persistent):
            raise ConfigError([_must_stay_private(index, spec, private)])
        tier = cls(spec.with_bytes(f"tiers[{index}]", chunk_bytes), chunk_bytes)
        why_away = tier.probe()
    except (ConfigError, TierConfigError) as error:
        if not by_default:
            raise
        logger.warning("kvtiers runs without its default %s tier: %s", spec.name, error)
        return None
    if why_away is not None:
        away[spec.name] = why_away
    return tier


def _must_stay_private(index: int, spec: TierSpec, private: str) -> str:
    return (
        f"tiers[{index}] ({spec.type}) outlives this engine or is shared with others, but the "
        f"KV of this engine must not be: {private}. Change that, or leave the tier out."
    )


def _log(
    offloading: OffloadingConfig,
    context: Context,
    report: WorkerReport,
    tiers: Mapping[str, Tier],
    namespace: Namespace,
) -> None:
    """What an operator wants to see of a start: where KV goes, and under which name."""
    tokens = {
        group.tokens_per_block * offloading.cache.blocks_per_chunk for group in offloading.groups
    }
    logger.info(
        "kvtiers: policy %s; %s; chunks of %s tokens, %s, in %s layout; namespace %s",
        context.loaded.config.policy.type,
        "; ".join(_described(name, tier) for name, tier in tiers.items()),
        " or ".join(map(str, sorted(tokens))),
        format_bytes(report.arena.slot_bytes),
        "canonical" if report.canonical else "direct",
        namespace.id,
    )


def _described(name: str, tier: Tier) -> str:
    limit = tier.usage().limit
    path = getattr(tier.config, "path", None) or getattr(tier.config, "url", None)
    size = "without bound" if limit is None else format_bytes(limit)
    secrecy = ", encrypted" if getattr(tier.config, "encryption", None) else ""
    return f"{name} {size}" + (f" in {path}" if path is not None else "") + secrecy
