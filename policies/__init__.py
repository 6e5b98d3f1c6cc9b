"""Policies: which chunk of KV lives in which tier.

A policy knows facts about chunks and takes decisions. It holds no bytes, starts
no threads and knows no engine, so the same class runs in a live engine, in the
simulator and in the conformance suite.
"""

from kvtiers.policies.base import ChunkId, Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.leaf_heap import ChunkFacts
from kvtiers.policies.registry import Registry
from kvtiers.policies.scored import ScoredPolicy

POLICIES: Registry[Policy] = Registry("kvtiers.policies", "policy", Policy)  # type: ignore[type-abstract]

__all__ = [
    "POLICIES",
    "ChunkFacts",
    "ChunkId",
    "Policy",
    "PolicyRequest",
    "Registry",
    "Run",
    "ScoredPolicy",
    "TierInfo",
]
