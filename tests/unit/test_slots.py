"""A slot comes back when nobody owns it and nobody has it pinned, in either order."""

from __future__ import annotations

import pytest
from kvtiers.tiers import ALIGNMENT
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Chunk, Directory
from kvtiers.tiers.slots import SlotTable

CHUNKS = Directory()


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(CpuTier(CpuTier.Config(capacity=2 * ALIGNMENT), ALIGNMENT), CHUNKS)


def chunk(name: bytes = b"a") -> Chunk:
    return CHUNKS.ensure(name)


def test_a_taken_slot_is_owned_and_pinned_by_whoever_fills_it(table: SlotTable) -> None:
    owner = chunk()
    slot = table.take(owner)
    assert (table.owner(slot), owner.slot, table.is_pinned(slot)) == (owner, slot, True)
    assert (table.free, table.unpinned, table.pinned) == (1, 1, 1)


def test_dropping_an_unpinned_chunk_frees_its_slot_at_once(table: SlotTable) -> None:
    owner = chunk()
    slot = table.take(owner)
    table.unpin([slot])
    assert table.free == 1
    table.drop(owner)
    assert (table.free, owner.slot, table.owner(slot)) == (2, -1, None)


def test_dropping_a_pinned_chunk_keeps_the_slot_until_the_last_pin_ends(table: SlotTable) -> None:
    owner = chunk()
    slot = table.take(owner)
    table.pin(slot)
    table.drop(owner)
    table.unpin([slot])
    assert table.free == 1, "one user is still at it"
    table.unpin([slot])
    assert table.free == 2


def test_one_pin_each_is_taken_back_from_a_slot_named_twice(table: SlotTable) -> None:
    slot = table.take(chunk())
    table.pin(slot)
    table.unpin([slot, slot])
    assert table.pinned == 0


def test_taking_back_a_pin_that_nobody_has_is_a_programming_error(table: SlotTable) -> None:
    with pytest.raises(AssertionError, match="slot 0 is not pinned"):
        table.unpin([0])


def test_the_memory_of_a_slot_is_the_arenas(table: SlotTable) -> None:
    slot = table.take(chunk())
    table.memory(slot)[:3] = b"abc"
    other = table.take(chunk(b"b"))
    assert bytes(table.memory(slot)[:3]) == b"abc"
    assert bytes(table.memory(other)[:3]) == bytes(3)
