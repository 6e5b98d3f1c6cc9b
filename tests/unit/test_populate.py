"""The window of populated slots ahead of those in use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvtiers.tiers import ALIGNMENT
from kvtiers.tiers.arena import Arena
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.populate import Populator


class CountingArena(Arena):
    """Notes what is populated, and does it."""

    asked: list[tuple[int, int]]
    refuses = False

    def populate(self, first: int, count: int) -> bool:
        self.asked.append((first, count))
        return not self.refuses and super().populate(first, count)


@pytest.fixture
def arena() -> CountingArena:
    made = CountingArena.create(10_000, ALIGNMENT)
    made.asked = []
    return made


def covered(arena: CountingArena) -> int:
    """Slots populated; they must follow one another without a gap."""
    end = 0
    for first, count in arena.asked:
        assert first == end
        end += count
    return end


def closed_after(populator: Populator, arena: CountingArena, enough: Callable[[int], bool]) -> int:
    """Let the thread come to rest, then stop it: a target once set is reached before that."""
    while not enough(covered(arena)):
        assert populator._thread.is_alive()
    populator.close()
    return covered(arena)


def test_a_window_is_populated_at_start_and_no_more(arena: CountingArena) -> None:
    populator = Populator(arena, ahead_bytes=2000 * ALIGNMENT)
    assert closed_after(populator, arena, lambda slots: slots >= 2001) == 2001


def test_the_window_moves_with_the_slots_in_use(arena: CountingArena) -> None:
    populator = Populator(arena, ahead_bytes=2000 * ALIGNMENT)
    populator.expect(500)  # well inside: nothing to do
    populator.expect(1500)
    assert closed_after(populator, arena, lambda slots: slots >= 3501) == 3501


def test_it_ends_with_the_arena(arena: CountingArena) -> None:
    populator = Populator(arena, ahead_bytes=2000 * ALIGNMENT)
    populator.expect(9_999)
    populator.expect(9_999)
    assert closed_after(populator, arena, lambda slots: slots >= 10_000) == 10_000


def test_it_gives_up_where_the_kernel_does(arena: CountingArena) -> None:
    arena.refuses = True
    populator = Populator(arena)
    populator._thread.join()
    populator.expect(5_000)
    populator.close()
    assert len(arena.asked) == 1


def test_no_byte_changes(arena: CountingArena) -> None:
    for index in range(100):
        arena.slot(index)[:2] = b"ab"
    populator = Populator(arena)
    closed_after(populator, arena, lambda slots: slots >= 100)
    assert all(bytes(arena.slot(i)[:2]) == b"ab" for i in range(100))


def test_the_cpu_tier_tells_it_of_the_slots_it_hands_out(arena: CountingArena) -> None:
    populator = Populator(arena, ahead_bytes=100 * ALIGNMENT)
    tier = CpuTier(CpuTier.Config(capacity=arena.nbytes), ALIGNMENT, arena, populator)
    for expected in range(200):
        assert tier.take() == expected
    assert closed_after(populator, arena, lambda slots: slots >= 250) <= 301
