"""The CPU tier's own side: its slots, beside the calls that every tier has."""

from __future__ import annotations

import pytest
from hierarchy_kit import CHUNK, FIRST, key, truth
from kvtiers.tiers import ChunkKey, ReadOutcome, TierConfigError, WriteOutcome
from kvtiers.tiers.arena import Arena
from kvtiers.tiers.cpu import CpuTier

A, B = ChunkKey(FIRST, key("a")), ChunkKey(FIRST, key("b"))


@pytest.fixture
def tier() -> CpuTier:
    return CpuTier(CpuTier.Config(capacity=2 * CHUNK + 100), CHUNK)


def buffer() -> memoryview:
    return memoryview(bytearray(CHUNK))


def test_it_has_as_many_slots_as_fit(tier: CpuTier) -> None:
    assert (tier.arena.slots, tier.free_slots) == (2, 2)
    assert tier.usage().limit == 2 * CHUNK


def test_a_capacity_below_one_chunk_is_refused_with_both_figures() -> None:
    with pytest.raises(TierConfigError, match=f"4095 bytes.*{CHUNK} bytes"):
        CpuTier(CpuTier.Config(capacity=4095), CHUNK)


def test_a_capacity_that_the_kernel_refuses_is_a_configuration_error() -> None:
    with pytest.raises(TierConfigError, match="could not reserve"):
        CpuTier(CpuTier.Config(capacity=1 << 62), CHUNK)


def test_chunks_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="multiple"):
        CpuTier(CpuTier.Config(capacity=1 << 20), CHUNK + 1)


def test_a_given_arena_is_used() -> None:
    arena = Arena.create(3, CHUNK)
    assert CpuTier(CpuTier.Config(capacity=CHUNK), CHUNK, arena).free_slots == 3


def test_low_slots_go_first_because_they_are_populated_first(tier: CpuTier) -> None:
    assert [tier.take(), tier.take()] == [0, 1]
    with pytest.raises(IndexError):
        tier.take()


def test_a_taken_slot_is_readable_only_once_published(tier: CpuTier) -> None:
    slot = tier.take()
    tier.arena.slot(slot)[:] = truth(A.hash)
    assert tier.contains([A]) == [False]
    assert tier.read([A], [buffer()]) == [ReadOutcome.MISS]
    tier.publish(A, slot)
    target = buffer()
    assert tier.read([A], [target]) == [ReadOutcome.HIT]
    assert bytes(target) == truth(A.hash)


def test_a_withdrawn_chunk_is_gone_but_its_slot_is_not_free(tier: CpuTier) -> None:
    slot = tier.take()
    tier.publish(A, slot)
    tier.withdraw(A)
    tier.withdraw(A)
    assert (tier.contains([A]), tier.free_slots) == ([False], 1)
    tier.give(slot)
    assert tier.free_slots == 2


def test_calls_of_the_tier_and_of_its_slots_share_them(tier: CpuTier) -> None:
    tier.take()
    assert tier.write([A], [memoryview(truth(A.hash))]) == [WriteOutcome.STORED]
    assert tier.write([B], [memoryview(truth(B.hash))]) == [WriteOutcome.REFUSED]
    assert tier.write([A], [memoryview(truth(A.hash))]) == [WriteOutcome.EXISTS]
    assert tier.usage().chunks == 1
    assert tier.remove([A, B]) == 1
    assert tier.free_slots == 1
