"""Chunk ids that count how often a dict asks for their hash: cost, counted instead of timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Counted(int):
    """An id that counts how often any of its kind is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return int.__hash__(self)


def counted(ids: Iterable[int]) -> tuple[Counted, ...]:
    """The same ids, counting."""
    return tuple(map(Counted, ids))


def lookups(action: Callable[[], object]) -> int:
    """How often ids are looked up meanwhile."""
    before = Counted.looked_up
    action()
    return Counted.looked_up - before
