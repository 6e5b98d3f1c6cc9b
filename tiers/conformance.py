"""The promises of ``Tier``, as tests: run them on your own class.

    class TestMyTier(TierConformance):
        bounded = True

        def open_tier(self, place, chunks):
            return MyTier(MyTier.Config(type="my", folder=place), self.payload_bytes)

        def peek(self, tier, key):
            return tier.path_of(key).read_bytes() if tier.path_of(key).exists() else None

        def poke_damage(self, tier, key):
            ...

``peek`` and ``poke_damage`` must go round the class under test: a tier that
checks itself with its own code proves nothing. What a tier cannot do is declared
by the flags below, never guessed from what happens.

The same suite behind a wrapper, here as if the tier were far away::

    class TestMyTierFarAway(TestMyTier):
        def wrap(self, tier):
            return LatencyTier(tier, call_seconds=1e-4, bytes_per_second=1e9)

Tests on a bad day, with faults put in by ``FaultyTier``, are in the suite itself.

For failures that show the values compared, put
``pytest.register_assert_rewrite("kvtiers.tiers.conformance")`` before the import.
This is the only module of kvtiers that imports pytest and hypothesis.
"""

# ruff: noqa: D102 - a test's name says what it holds the tier to

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kvtiers.tiers.base import ALIGNMENT, ChunkKey, ReadOutcome, Tier, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.conformance_kit import (
    BAD_DAY,
    BAD_DAY_KEYS,
    ELSEWHERE,
    HERE,
    KILLED_AFTER,
    KILLED_KEYS,
    ROOMY,
    assert_books_balance,
    bad_day,
    entries_of,
    get,
    inside,
    is_hit,
    key,
    kill_a_writer,
    new_folder,
    outcomes_of,
    payload,
    put,
    scanned,
    together,
)
from kvtiers.tiers.wrappers import FaultyTier


class TierConformance:
    """Derive from this, implement ``open_tier``, and pytest does the rest.

    Attributes:
        payload_bytes: size of a chunk in the tests, a multiple of ``ALIGNMENT``.
        supports_damage: ``poke_damage`` works, and the tier detects what it did.
        supports_peek: ``peek`` works.
        supports_persistence: a tier opened again at a place has what was there.
        bounded: the tier refuses writes beyond the ``chunks`` it was opened with.
        records_use: ``scan`` knows when a chunk was read, and not only when it was written.
        sequences: of calls that are tried against a dict; fewer where a call takes long.

    """

    payload_bytes: ClassVar[int] = 2 * ALIGNMENT
    supports_damage: ClassVar[bool] = True
    supports_peek: ClassVar[bool] = True
    supports_persistence: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    records_use: ClassVar[bool] = True
    sequences: ClassVar[int] = 30

    def open_tier(self, place: Path, chunks: int) -> Tier:  # noqa: ARG002 - for who derives
        """Open the tier that lives at ``place``.

        ``place`` is a folder of its own for each tier, empty at first. A tier
        that lives elsewhere derives a name from it (a key prefix), a tier in
        memory ignores it. The tier must hold ``chunks`` chunks, and if
        ``bounded`` not one more.
        """
        raise self._lacks("open_tier")

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:  # noqa: ARG002 - as above
        """The payload as stored, None if there is none, without calling ``tier``."""
        raise self._lacks("peek, or declare supports_peek = False for bytes in memory")

    def poke_damage(self, tier: Tier, key: ChunkKey) -> None:  # noqa: ARG002 - as above
        """Flip a bit of the stored payload, without calling ``tier``."""
        raise self._lacks("poke_damage, or declare supports_damage = False for bytes in memory")

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must implement {what}.")

    def wrap(self, tier: Tier) -> Tier:
        """What the tests call in place of ``tier``: override it to certify behind a wrapper.

        The back doors are given the tier inside all the same.
        """
        return tier

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier with room for ``ROOMY`` chunks."""
        tier = self.opened(new_folder(tmp_path, "tier"), ROOMY)
        yield tier
        tier.close()

    def opened(self, place: Path, chunks: int) -> Tier:
        """What the tests call for the tier at ``place``."""
        return self.wrap(self.open_tier(place, chunks))

    # Reading and writing ------------------------------------------------------

    def test_a_stored_chunk_reads_back_equal(self, tier: Tier) -> None:
        assert put(tier, [key(1)], [payload(tier, 7)]) == [WriteOutcome.STORED]
        assert get(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 7))]

    def test_what_is_stored_lies_where_an_outsider_finds_it(self, tier: Tier) -> None:
        self._needs(self.supports_peek, "peek")
        assert self.peek(inside(tier), key(1)) is None
        put(tier, [key(1)], [payload(tier, 7)])
        assert self.peek(inside(tier), key(1)) == payload(tier, 7)

    def test_an_unknown_chunk_is_a_miss(self, tier: Tier) -> None:
        assert outcomes_of(tier, [key(1)]) == [ReadOutcome.MISS]
        assert tier.contains([key(1)]) == [False]

    def test_a_batch_is_answered_in_its_order(self, tier: Tier) -> None:
        stored = [key(n) for n in (5, 1, 3)]
        assert put(tier, stored, [payload(tier, n) for n in (5, 1, 3)]) == (
            [WriteOutcome.STORED] * 3
        )
        asked = [key(n) for n in (3, 9, 5, 8, 1)]
        assert tier.contains(asked) == [True, False, True, False, True]
        answers = get(tier, asked)
        assert [outcome for outcome, _ in answers] == [
            ReadOutcome.HIT,
            ReadOutcome.MISS,
            ReadOutcome.HIT,
            ReadOutcome.MISS,
            ReadOutcome.HIT,
        ]
        for place, number in ((0, 3), (2, 5), (4, 1)):
            assert answers[place][1] == payload(tier, number)

    def test_an_empty_batch_gets_an_empty_answer(self, tier: Tier) -> None:
        assert tier.contains([]) == []
        assert tier.read([], []) == []
        assert tier.write([], []) == []
        assert tier.remove([]) == 0

    def test_a_tier_that_can_be_used_answers_the_probe(self, tier: Tier) -> None:
        assert tier.probe() is None

    def test_a_second_write_says_exists_and_changes_nothing(self, tier: Tier) -> None:
        put(tier, [key(1)], [payload(tier, 1)])
        before = tier.usage()
        assert put(tier, [key(2), key(1)], [payload(tier, 2), payload(tier, 1)]) == [
            WriteOutcome.STORED,
            WriteOutcome.EXISTS,
        ]
        assert tier.usage().chunks == before.chunks + 1
        assert get(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 1))]

    def test_equal_hashes_in_two_namespaces_are_two_chunks(self, tier: Tier) -> None:
        put(tier, [key(1, HERE)], [payload(tier, 1)])
        assert outcomes_of(tier, [key(1, ELSEWHERE)]) == [ReadOutcome.MISS]
        assert tier.contains([key(1, ELSEWHERE)]) == [False]
        assert put(tier, [key(1, ELSEWHERE)], [payload(tier, 2)]) == [WriteOutcome.STORED]
        assert get(tier, [key(1, HERE), key(1, ELSEWHERE)]) == [
            (ReadOutcome.HIT, payload(tier, 1)),
            (ReadOutcome.HIT, payload(tier, 2)),
        ]

    @pytest.mark.parametrize(
        "hashes",
        [
            pytest.param([bytes([n, 255 - n]) for n in range(0, 256, 17)], id="any-byte"),
            pytest.param([b"\x00", b"\x00\x00", b"\xff", b"a", b"a\x00"], id="short"),
            pytest.param([bytes(64), b"\xff" * 64, bytes(range(64))], id="longest"),
            pytest.param([b"../..", b"/etc/x", b"*\r\n$", b"{a}:b c", b".kv"], id="hostile"),
        ],
    )
    def test_hashes_of_any_bytes_and_length_up_to_64(
        self, tier: Tier, hashes: Sequence[bytes]
    ) -> None:
        keys = [ChunkKey(HERE, digest) for digest in hashes]
        contents = [payload(tier, number) for number in range(len(keys))]
        assert put(tier, keys, contents) == [WriteOutcome.STORED] * len(keys)
        assert get(tier, keys) == [(ReadOutcome.HIT, content) for content in contents]
        assert scanned(tier) == set(keys)

    def test_a_lookup_of_the_longest_prompt_is_one_call(self, tier: Tier) -> None:
        """Stores bound what one of their calls may hold: SQLite 32,766 variables, for one."""
        put(tier, [key(7), key(39_999)], [payload(tier, 1), payload(tier, 2)])
        found = tier.contains([key(number) for number in range(40_000)])
        assert [number for number, there in enumerate(found) if there] == [7, 39_999]

    def test_a_write_leaves_the_callers_memory_as_it_is(self, tier: Tier) -> None:
        """It is the arena's own, and the engine may be reading it."""
        source = aligned_buffer(tier.payload_bytes)
        source[:] = payload(tier, 3)
        tier.write([key(1)], [source])
        assert source == payload(tier, 3)

    def test_buffers_are_not_kept(self, tier: Tier) -> None:
        """A kept view would make ``close`` of the memory below it fail."""
        source, target = aligned_buffer(tier.payload_bytes), aligned_buffer(tier.payload_bytes)
        source[:] = payload(tier, 3)
        tier.write([key(1)], [source])
        source[:] = payload(tier, 4)
        assert tier.read([key(1)], [target]) == [ReadOutcome.HIT]
        assert bytes(target) == payload(tier, 3)
        target[:] = payload(tier, 5)
        assert get(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 3))]
        for view in (source, target):
            memory = view.obj
            view.release()
            memory.close()  # type: ignore[attr-defined]

    # Removing and counting ------------------------------------------------------

    def test_remove_drops_and_counts_what_was_there(self, tier: Tier) -> None:
        put(tier, [key(1), key(2)], [payload(tier, 1), payload(tier, 2)])
        assert tier.remove([key(1), key(9)]) == 1
        assert tier.remove([key(1)]) == 0
        assert outcomes_of(tier, [key(1), key(2)]) == [ReadOutcome.MISS, ReadOutcome.HIT]
        assert put(tier, [key(1)], [payload(tier, 8)]) == [WriteOutcome.STORED]
        assert get(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 8))]

    def test_scan_shows_what_was_written_and_nothing_else(self, tier: Tier) -> None:
        assert scanned(tier) == set()
        keys = [key(1), key(2), key(1, ELSEWHERE)]
        put(tier, keys, [payload(tier, 1)] * 3)
        tier.remove([key(2)])
        assert scanned(tier) == {key(1), key(1, ELSEWHERE)}

    def test_scan_and_usage_agree_on_the_space_taken(self, tier: Tier) -> None:
        put(tier, [key(n) for n in range(5)], [payload(tier, n) for n in range(5)])
        sizes = {entry.nbytes for entry in entries_of(tier)}
        assert sizes == {tier.chunk_bytes}, (
            f"scan() shows chunks of {sizes} bytes, and chunk_bytes says {tier.chunk_bytes}"
        )
        assert tier.usage().chunks == 5
        assert_books_balance(tier)

    def test_a_scan_beside_other_calls_shows_what_was_there_all_along(self, tier: Tier) -> None:
        stay, go = [key(number) for number in range(8)], [key(number) for number in range(20, 24)]
        put(tier, stay + go, [payload(tier, 1)] * 12)
        entries = tier.scan()
        seen = [next(entries)]
        tier.remove(go)
        put(tier, [key(30), key(31)], [payload(tier, 2)] * 2)
        seen += entries
        assert {entry.key for entry in seen} >= set(stay)
        assert len({entry.key for entry in seen}) == len(seen), "a chunk was shown twice"

    def test_a_scan_says_when_a_chunk_was_last_used(self, tier: Tier) -> None:
        """After a restart nothing else is known of it. A read is a use."""
        put(tier, [key(1)], [payload(tier, 1)])
        put(tier, [key(2)], [payload(tier, 2)])
        assert outcomes_of(tier, [key(1)]) == [ReadOutcome.HIT]
        used = {entry.key: entry.last_used for entry in entries_of(tier)}
        now = time.time()
        assert all(now - 60 < seconds <= now + 1 for seconds in used.values()), (
            f"last_used must be in seconds since the epoch, now {now}: {used}"
        )
        self._needs(self.records_use, "a record of uses")
        assert used[key(1)] >= used[key(2)], "the chunk that was read looks older than the other"

    def test_any_sequence_of_calls_matches_a_dict(self, tmp_path: Path) -> None:
        suite, numbers = self, count()

        class Machine(_AgainstADict):
            def __init__(self) -> None:
                place = new_folder(tmp_path, f"machine-{next(numbers)}")
                super().__init__(suite, place)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=suite.sequences,
                stateful_step_count=25,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    # Damage ---------------------------------------------------------------------

    def test_a_damaged_chunk_is_corrupt_once_and_then_a_miss(self, tier: Tier) -> None:
        self._needs(self.supports_damage, "damage")
        put(tier, [key(1), key(2)], [payload(tier, 1), payload(tier, 2)])
        self.poke_damage(inside(tier), key(1))
        assert outcomes_of(tier, [key(1), key(2)]) == [ReadOutcome.CORRUPT, ReadOutcome.HIT]
        assert outcomes_of(tier, [key(1)]) == [ReadOutcome.MISS]
        assert tier.contains([key(1)]) == [False]
        assert scanned(tier) == {key(2)}
        assert tier.usage().chunks == 1

    def test_a_damaged_chunk_can_be_stored_anew(self, tier: Tier) -> None:
        self._needs(self.supports_damage, "damage")
        put(tier, [key(1)], [payload(tier, 1)])
        self.poke_damage(inside(tier), key(1))
        outcomes_of(tier, [key(1)])
        assert put(tier, [key(1)], [payload(tier, 1)]) == [WriteOutcome.STORED]
        assert get(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 1))]

    # Threads --------------------------------------------------------------------

    def test_writers_of_one_key_leave_one_whole_chunk(self, tier: Tier) -> None:
        """The contents differ here, which they never do in life, to show a mixture."""

        def write(number: int) -> WriteOutcome:
            return put(tier, [key(1)], [payload(tier, number)])[0]

        outcomes = together([lambda n=n: write(n) for n in range(8)])  # type: ignore[misc]
        assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
        assert WriteOutcome.STORED in outcomes
        [(outcome, content)] = get(tier, [key(1)])
        assert outcome is ReadOutcome.HIT
        assert content in [payload(tier, number) for number in range(8)]
        assert scanned(tier) == {key(1)}
        assert_books_balance(tier)

    def test_readers_beside_writers_see_whole_chunks_or_none(self, tier: Tier) -> None:
        versions = [payload(tier, number) for number in range(2)]
        writing = [True, True]

        def churn() -> list[bytes]:
            try:
                for turn in range(60):
                    put(tier, [key(1)], [versions[turn % 2]])
                    tier.remove([key(1)])
            finally:
                writing.pop()
            return []

        def watch() -> list[bytes]:
            answers = []
            while writing:
                answers += get(tier, [key(1)])
            assert {outcome for outcome, _ in answers} <= {ReadOutcome.HIT, ReadOutcome.MISS}
            return [content for outcome, content in answers if outcome is ReadOutcome.HIT]

        for seen in together([churn, churn, watch, watch]):
            assert all(content in versions for content in seen)
        assert_books_balance(tier)

    def test_usage_is_exact_after_threads_wrote_and_removed(self, tier: Tier) -> None:
        def work(thread: int) -> int:
            mine = [key(8 * thread + n) for n in range(8)]
            outcomes = put(tier, mine, [payload(tier, thread)] * 8)
            return outcomes.count(WriteOutcome.STORED) - tier.remove(mine[:3])

        left = together([lambda t=t: work(t) for t in range(4)])  # type: ignore[misc]
        assert left == [5] * 4
        assert tier.usage().chunks == 20
        assert_books_balance(tier)

    # Bounds and restarts ----------------------------------------------------------

    def test_a_full_tier_refuses_and_keeps_what_it_has(self, tmp_path: Path) -> None:
        self._needs(self.bounded, "a bound")
        tier = self.opened(new_folder(tmp_path, "small"), 3)
        keys = [key(n) for n in range(5)]
        assert put(tier, keys, [payload(tier, n) for n in range(5)]) == (
            [WriteOutcome.STORED] * 3 + [WriteOutcome.REFUSED] * 2
        )
        usage = tier.usage()
        assert usage.limit is not None
        assert usage.nbytes <= usage.limit
        assert tier.contains(keys) == [True] * 3 + [False] * 2
        assert outcomes_of(tier, keys) == [ReadOutcome.HIT] * 3 + [ReadOutcome.MISS] * 2
        assert scanned(tier) == set(keys[:3])
        tier.remove(keys[:1])
        assert put(tier, keys[4:], [payload(tier, 4)]) == [WriteOutcome.STORED]
        tier.close()

    def test_the_bound_holds_among_threads(self, tmp_path: Path) -> None:
        self._needs(self.bounded, "a bound")
        tier = self.opened(new_folder(tmp_path, "small"), 5)

        def write(thread: int) -> list[WriteOutcome]:
            return put(tier, [key(4 * thread + n) for n in range(4)], [payload(tier, 1)] * 4)

        answers = together([lambda t=t: write(t) for t in range(4)])  # type: ignore[misc]
        outcomes = [outcome for answer in answers for outcome in answer]
        assert outcomes.count(WriteOutcome.STORED) == 5
        assert outcomes.count(WriteOutcome.REFUSED) == 11
        assert tier.usage().chunks == 5
        assert_books_balance(tier)
        tier.close()

    def test_persistence_is_declared_by_the_class(self, tier: Tier) -> None:
        """KV that must not outlive its engine is kept away from a tier that says it is kept."""
        assert tier.persistent == self.supports_persistence, (
            f"{type(inside(tier)).__name__}.persistent is {tier.persistent}, and "
            f"{type(self).__name__}.supports_persistence {self.supports_persistence}: one is wrong"
        )

    def test_chunks_survive_closing_and_opening(self, tmp_path: Path) -> None:
        self._needs(self.supports_persistence, "persistence")
        place = new_folder(tmp_path, "kept")
        before = self.opened(place, ROOMY)
        put(before, [key(1), key(2)], [payload(before, 1), payload(before, 2)])
        before.remove([key(2)])
        before.close()
        tier = self.opened(place, ROOMY)
        assert tier.contains([key(1), key(2)]) == [True, False]
        assert get(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 1))]
        assert put(tier, [key(1)], [payload(tier, 1)]) == [WriteOutcome.EXISTS]
        assert scanned(tier) == {key(1)}
        assert tier.usage().chunks == 1
        tier.close()

    def test_a_killed_writer_leaves_whole_chunks_and_nothing_in_the_way(
        self, tmp_path: Path
    ) -> None:
        self._needs(self.supports_persistence, "persistence")
        place = new_folder(tmp_path, "killed")
        for pause in KILLED_AFTER:
            kill_a_writer(lambda: self.opened(place, ROOMY), pause)
            tier = self.opened(place, ROOMY)
            keys = [key(number) for number in range(KILLED_KEYS)]
            contents = [payload(tier, number) for number in range(KILLED_KEYS)]
            for (outcome, content), right in zip(get(tier, keys), contents, strict=True):
                assert outcome in (ReadOutcome.HIT, ReadOutcome.MISS)
                assert outcome is ReadOutcome.MISS or content == right
            assert set(put(tier, keys, contents)) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
            assert get(tier, keys) == [(ReadOutcome.HIT, content) for content in contents]
            assert scanned(tier) == set(keys)
            assert_books_balance(tier)
            tier.close()

    def test_engines_that_share_it_see_each_others_chunks(self, tmp_path: Path) -> None:
        place = new_folder(tmp_path, "shared")
        one = self.opened(place, ROOMY)
        if not one.shared:
            one.close()
        self._needs(one.shared, "sharing")
        other = self.opened(place, ROOMY)
        put(one, [key(1), key(2)], [payload(one, 1), payload(one, 2)])
        assert other.contains([key(1), key(2)]) == [True, True]
        assert get(other, [key(1)]) == [(ReadOutcome.HIT, payload(one, 1))]
        assert put(other, [key(1)], [payload(one, 1)]) == [WriteOutcome.EXISTS]
        assert other.remove([key(1)]) == 1
        assert one.contains([key(1), key(2)]) == [False, True]
        assert outcomes_of(one, [key(1), key(2)]) == [ReadOutcome.MISS, ReadOutcome.HIT]
        assert put(one, [key(1)], [payload(one, 1)]) == [WriteOutcome.STORED]
        for tier in (one, other):
            # What others did may be unknown before a scan.
            assert scanned(tier) == {key(1), key(2)}
            assert tier.usage().chunks == 2
            tier.close()

    # Bad days -------------------------------------------------------------------

    def test_on_a_bad_day_hits_are_right_and_the_books_balance(self, tmp_path: Path) -> None:
        """Threads write, read and remove the same chunks while calls fail at random."""
        tier = self.opened(new_folder(tmp_path, "bad-day"), 10)
        faulty = FaultyTier(tier, rates=BAD_DAY)
        together([lambda t=t: bad_day(faulty, seed=t) for t in range(4)])  # type: ignore[misc]
        keys = [key(number) for number in range(BAD_DAY_KEYS)]
        there = {
            k for k, outcome in zip(keys, outcomes_of(tier, keys), strict=True) if is_hit(outcome)
        }
        assert {k for k, found in zip(keys, tier.contains(keys), strict=True) if found} == there
        assert scanned(tier) == there
        assert_books_balance(tier)
        assert tier.remove(keys) == len(there)
        assert (tier.usage().chunks, tier.usage().nbytes) == (0, 0)
        faulty.close()

    def test_on_a_bad_day_damage_is_never_served(self, tmp_path: Path) -> None:
        self._needs(self.supports_damage, "damage")
        tier = self.opened(new_folder(tmp_path, "bad-day"), ROOMY)
        faulty = FaultyTier(tier, rates=BAD_DAY)
        for number in range(20):
            stored = False
            while not stored:
                with suppress(OSError):
                    stored = put(faulty, [key(number)], [payload(tier, number)]) in (
                        [WriteOutcome.STORED],
                        [WriteOutcome.EXISTS],
                    )
            self.poke_damage(inside(tier), key(number))
            for _ in range(3):
                with suppress(OSError):
                    assert outcomes_of(faulty, [key(number)]) != [ReadOutcome.HIT]
        assert not any(map(is_hit, outcomes_of(tier, [key(number) for number in range(20)])))
        assert_books_balance(tier)
        faulty.close()

    def _needs(self, capability: bool, what: str) -> None:
        if not capability:
            pytest.skip(f"{type(self).__name__} declares no support for {what}")


class _AgainstADict(RuleBasedStateMachine):
    """Calls a tier and a dict alike, and compares after every call."""

    numbers = st.lists(st.integers(0, 11), unique=True, max_size=5)

    def __init__(self, suite: TierConformance, place: Path) -> None:
        super().__init__()
        self.suite = suite
        self.place = place
        self.tier = suite.opened(place, ROOMY)
        self.model: dict[ChunkKey, bytes] = {}

    def keys(self, numbers: Sequence[int]) -> list[ChunkKey]:
        """Two namespaces over the same six hashes."""
        return [key(n // 2, ELSEWHERE if n % 2 else HERE) for n in numbers]

    @rule(numbers=numbers)
    def write(self, numbers: Sequence[int]) -> None:
        keys = self.keys(numbers)
        contents = [payload(self.tier, number) for number in numbers]
        expected = [WriteOutcome.EXISTS if k in self.model else WriteOutcome.STORED for k in keys]
        assert put(self.tier, keys, contents) == expected
        self.model.update(zip(keys, contents, strict=True))

    @rule(numbers=numbers)
    def read(self, numbers: Sequence[int]) -> None:
        for k, (outcome, content) in zip(
            self.keys(numbers), get(self.tier, self.keys(numbers)), strict=True
        ):
            assert outcome is (ReadOutcome.HIT if k in self.model else ReadOutcome.MISS)
            assert outcome is ReadOutcome.MISS or content == self.model[k]

    @rule(numbers=numbers)
    def remove(self, numbers: Sequence[int]) -> None:
        keys = self.keys(numbers)
        assert self.tier.remove(keys) == sum(k in self.model for k in keys)
        for k in keys:
            self.model.pop(k, None)

    @rule(number=st.integers(0, 11))
    def damage(self, number: int) -> None:
        [k] = self.keys([number])
        if self.suite.supports_damage and k in self.model:
            self.suite.poke_damage(inside(self.tier), k)
            assert outcomes_of(self.tier, [k]) == [ReadOutcome.CORRUPT]
            del self.model[k]

    @rule()
    def reopen(self) -> None:
        if self.suite.supports_persistence:
            self.tier.close()
            self.tier = self.suite.opened(self.place, ROOMY)
            # Usage may be unknown before it.
            assert scanned(self.tier) == set(self.model)

    @rule()
    def scan(self) -> None:
        entries = entries_of(self.tier)
        assert len(entries) == len(self.model)
        assert {entry.key for entry in entries} == set(self.model)
        assert_books_balance(self.tier)

    @invariant()
    def counts_and_presence_agree(self) -> None:
        keys = self.keys(range(12))
        assert self.tier.contains(keys) == [k in self.model for k in keys]
        assert self.tier.usage().chunks == len(self.model)

    def teardown(self) -> None:
        self.tier.close()
