"""Every tier there is keeps its promises far away, and behind what makes it fail when told to.

Days with faults at random are in the suite itself; it runs on the bare tiers as well.
"""

from __future__ import annotations

import doc_pages
import example_packages
from kvtiers.tiers import Tier
from kvtiers.tiers.wrappers import FaultyTier, LatencyTier
from redis_tiers import RedisConformance
from remote_recipes import MemoryRecipe as MemoryUrlRecipe
from remote_recipes import PlainRecipe, S3Recipe
from tier_recipes import CpuRecipe, FsRecipe

example_packages.importable()

from test_kvtiers_sqlite import TestSqliteTier as SqliteRecipe  # noqa: E402 - found since then

doc_pages.module("write-a-tier.md", "kvtiers_memory")
MemoryRecipe = doc_pages.module("write-a-tier.md", "test_kvtiers_memory").TestMemoryTier


class FarAway:
    """Calls take their time, so that those of several threads overlap."""

    # Which sequences of calls a tier can't stand is found on the bare one.
    sequences = 5

    def wrap(self, tier: Tier) -> Tier:
        return LatencyTier(tier, call_seconds=1e-4, bytes_per_second=1e9)


class Faultless:
    """Calls pass through what would make them fail."""

    sequences = 5

    def wrap(self, tier: Tier) -> Tier:
        return FaultyTier(tier)


class TestCpuTierFarAway(FarAway, CpuRecipe):
    pass


class TestCpuTierFaultless(Faultless, CpuRecipe):
    pass


class TestFsTierFarAway(FarAway, FsRecipe):
    pass


class TestFsTierFaultless(Faultless, FsRecipe):
    pass


class TestFsTierInMemoryFarAway(FarAway, MemoryUrlRecipe):
    pass


class TestFsTierInMemoryFaultless(Faultless, MemoryUrlRecipe):
    pass


class TestFsTierOnAUrlFarAway(FarAway, PlainRecipe):
    pass


class TestFsTierOnAUrlFaultless(Faultless, PlainRecipe):
    pass


class TestFsTierOnS3(S3Recipe):
    """Behind both at once, as its calls are slow by themselves."""

    sequences = 1

    def wrap(self, tier: Tier) -> Tier:
        return FaultyTier(FarAway().wrap(tier))


class TestRedisTierFarAway(FarAway, RedisConformance):
    pass


class TestRedisTierFaultless(Faultless, RedisConformance):
    pass


class TestSqliteTierBare(SqliteRecipe):
    pass


class TestSqliteTierFarAway(FarAway, SqliteRecipe):
    pass


class TestSqliteTierFaultless(Faultless, SqliteRecipe):
    pass


class TestMemoryTierFarAway(FarAway, MemoryRecipe):
    pass


class TestMemoryTierFaultless(Faultless, MemoryRecipe):
    pass
