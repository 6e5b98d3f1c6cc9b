"""Tiers: where chunks of KV lie, and the hierarchy that moves them.

Nothing in here knows vLLM, torch, or what attention is: bytes, keys, capacity
and time only. The simulator, the command line and a policy author's laptop run
the same code as the live engine.
"""

from kvtiers.policies.registry import Registry
from kvtiers.tiers.base import (
    ALIGNMENT,
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    Tier,
    TierConfig,
    TierConfigError,
    Usage,
    WriteOutcome,
)

TIERS: Registry[Tier] = Registry("kvtiers.tiers", "tier", Tier)  # type: ignore[type-abstract]

__all__ = [
    "ALIGNMENT",
    "TIERS",
    "ChunkKey",
    "Entry",
    "Namespace",
    "ReadOutcome",
    "Registry",
    "Tier",
    "TierConfig",
    "TierConfigError",
    "Usage",
    "WriteOutcome",
]
