"""What the arena evicts goes down ahead of need: no copy that takes its time loses anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hierarchy_kit import CHUNK, DemotingLru, DictTier, Stack, prefix
from kvtiers.policies import ChunkId, Run
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind

PROMPTS = [prefix(f"p{number}", 4) for number in range(24)]


def stack_of(slots: int, policy: type[DemotingLru] = DemotingLru) -> Stack:
    return Stack(slots, {"disk": DictTier()}, policy=policy)


def on_disk(stack: Stack) -> set[bytes]:
    return {key.hash for key in stack.tiers["disk"].chunks}  # type: ignore[attr-defined]


def store_all(stack: Stack, prompts: Sequence[Run]) -> None:
    """One after the other; a copy that is under way ends when the next but one prompt comes."""
    disk = stack.workers["disk"]
    for run in prompts:
        under_way = disk.of(OpKind.WRITE)
        stack.store(run)
        for op in under_way:
            if not op.started:
                disk.begin(op)
            disk.end(op)
        stack.h.tick()


def keys(runs: Sequence[Run]) -> set[object]:
    return {key for run in runs for key in run.chunks}


def test_nothing_is_lost_while_a_copy_takes_as_long_as_a_prompt() -> None:
    stack = stack_of(32)
    store_all(stack, PROMPTS)
    assert keys(PROMPTS) == on_disk(stack) | stack.ready()
    assert stack.counts()["cpu"]["evictions"] == 4 * len(PROMPTS) - 32


def test_no_more_is_written_than_the_coldest_share() -> None:
    stack = stack_of(32)
    store_all(stack, PROMPTS)
    stack.settle()
    written = len(on_disk(stack))
    assert keys(PROMPTS[-4:]) & on_disk(stack) == set(), "half of the arena is hotter than that"
    assert written == stack.counts()["disk"]["bytes_written"] // CHUNK


def test_a_chunk_is_served_while_it_is_copied() -> None:
    stack = stack_of(32)
    store_all(stack, PROMPTS[:8])
    disk = stack.workers["disk"]
    copied = [key.hash for op in disk.of(OpKind.WRITE) for key in op.keys]
    assert set(copied) <= keys(PROMPTS[:3])
    assert copied
    stack.begin("r", PROMPTS[0])
    assert stack.look("r", PROMPTS[0]) == [Lookup.HIT] * 4


def test_a_tier_that_never_gets_done_keeps_nobody_from_storing() -> None:
    stack = stack_of(32)
    for run in PROMPTS:
        assert len(stack.store(run)) == 4
        stack.h.tick()
    assert on_disk(stack) == set()
    assert stack.counts()["cpu"]["evictions"] == 4 * len(PROMPTS) - 32


def test_what_is_used_again_is_copied_when_it_is_cold_again() -> None:
    stack = stack_of(32)
    store_all(stack, PROMPTS[:8])
    stack.settle()
    copied = on_disk(stack)
    stack.begin("r", PROMPTS[2])
    stack.look("r", PROMPTS[2])
    stack.load("r", PROMPTS[2])
    stack.h.loaded("r")
    stack.h.end("r")
    store_all(stack, PROMPTS[8:10])
    stack.settle()
    assert not keys(PROMPTS[2:3]) & (on_disk(stack) - copied), "it is hot"
    store_all(stack, PROMPTS[10:20])
    assert keys(PROMPTS[2:3]) <= on_disk(stack) | stack.ready()


class TailsOnly(DemotingLru):
    """Wants the third chunk of each prompt kept, and is asked about each."""

    def demote(self, chunk: object, from_tier: str) -> str | None:
        wanted = chunk in {run.chunks[2] for run in PROMPTS}
        return super().demote(chunk, from_tier) if wanted else None


def test_what_comes_before_a_wanted_chunk_goes_down_with_it() -> None:
    stack = stack_of(32, TailsOnly)
    store_all(stack, PROMPTS)
    stack.settle()
    prompt = PROMPTS[0]
    assert set(prompt.chunks[:3]) <= on_disk(stack)
    assert prompt.chunks[3] not in on_disk(stack)


class Refusing(DemotingLru):
    """Wants nothing kept, and counts how often it is asked."""

    asked = 0

    def demote(self, chunk: object, from_tier: str) -> str | None:
        Refusing.asked += 1
        return None


def test_a_chunk_that_is_not_wanted_is_asked_about_once_and_goes_first() -> None:
    Refusing.asked = 0
    stack = stack_of(32, Refusing)
    store_all(stack, PROMPTS)
    assert stack.ready() == keys(PROMPTS[-8:])
    assert 64 <= Refusing.asked <= 64 + 8 + 2


def test_what_has_its_copy_below_goes_before_what_still_waits_for_its_own() -> None:
    stack, old, below = stack_of(8), prefix("old", 3), prefix("below", 2)
    stack.tiers["disk"].put(below)  # type: ignore[attr-defined]
    stack.store(old)
    stack.begin("r", below)
    stack.settle()
    stack.look("r", below)
    stack.load("r", below)
    stack.h.loaded("r")
    stack.h.end("r")
    # The copies of the tail are all that may be under way: the head waits for its turn.
    stack.store(prefix("new", 3))
    stack.store(prefix("newer", 1))
    assert stack.ready() >= {*old.chunks, below.chunks[0]}
    stack.settle()
    assert keys([old, below]) <= on_disk(stack) | stack.ready()


class Choosy(DemotingLru):
    """Wants nothing of one prompt kept."""

    unwanted = prefix("unwanted", 2)

    def demote(self, chunk: object, from_tier: str) -> str | None:
        return None if chunk in self.unwanted.chunks else super().demote(chunk, from_tier)


def test_what_nobody_wants_below_goes_before_what_waits_for_its_copy() -> None:
    stack, old = stack_of(8, Choosy), prefix("old", 3)
    for run in (old, Choosy.unwanted, prefix("new", 3), prefix("newer", 1)):
        stack.store(run)
    assert stack.ready() >= {*old.chunks, Choosy.unwanted.chunks[0]}
    stack.settle()
    assert keys([old]) <= on_disk(stack) | stack.ready()


class Counting(DemotingLru):
    """Counts how often its order is asked for."""

    asked = 0

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        Counting.asked += 1
        return super().victims(tier, n_bytes)


def test_the_coldest_are_looked_through_when_a_part_of_them_has_gone() -> None:
    """Not for each slot, and in time: of the coldest quarter few have no copy."""
    stack, runs = stack_of(64, Counting), [prefix(f"one{number}", 1) for number in range(192)]
    store_all(stack, runs[:72])
    stack.settle()
    Counting.asked = 0
    for number, run in enumerate(runs[72:], 72):
        stack.store(run)
        stack.settle()
        coldest = keys(runs[number - 63 : number - 63 + 12])
        assert coldest <= on_disk(stack) & stack.ready()
    # Once for each slot that is taken, and once more for four of them.
    assert Counting.asked <= 120 + 120 / 4


class Full(DemotingLru):
    """Wants all that goes to be kept below, where nothing more fits."""

    def admit(self, run: Run, tier: str) -> int:
        return len(run) if tier == "cpu" else 0


def test_what_was_wanted_below_and_found_no_room_is_not_counted_as_spared() -> None:
    stack = stack_of(4, Full)
    for number in range(8):
        stack.store(prefix(f"one{number}", 1))
    counts = stack.counts()["disk"]
    assert counts["refused"] > 0
    assert counts.get("bytes_not_written", 0) == 0
