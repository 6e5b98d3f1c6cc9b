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

For failures that show the values compared, put
``pytest.register_assert_rewrite("kvtiers.tiers.conformance")`` before the import.
This is the only module of kvtiers that imports pytest and hypothesis.
"""

# ruff: noqa: D102 - a test's name says what it holds the tier to

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kvtiers.tiers.base import (
    ALIGNMENT,
    ChunkKey,
    Namespace,
    ReadOutcome,
    Tier,
    WriteOutcome,
)
from kvtiers.tiers.buffers import aligned_buffer

T = TypeVar("T")

HERE = Namespace("a1" * 16)
ELSEWHERE = Namespace("b2" * 16)

# Room for every test that does not set out to fill the tier.
ROOMY = 64


def key(number: int, namespace: Namespace = HERE) -> ChunkKey:
    """A key whose hash has the usual length of 36 bytes."""
    return ChunkKey(namespace, number.to_bytes(4, "little") * 9)


class TierConformance:
    """Derive from this, implement ``open_tier``, and pytest does the rest.

    Attributes:
        payload_bytes: size of a chunk in the tests, a multiple of ``ALIGNMENT``.
        supports_damage: ``poke_damage`` works, and the tier detects what it did.
        supports_peek: ``peek`` works.
        supports_persistence: a tier opened again at a place has what was there.
        bounded: the tier refuses writes beyond the ``chunks`` it was opened with.

    """

    payload_bytes: ClassVar[int] = 2 * ALIGNMENT
    supports_damage: ClassVar[bool] = True
    supports_peek: ClassVar[bool] = True
    supports_persistence: ClassVar[bool] = False
    bounded: ClassVar[bool] = False

    def open_tier(self, place: Path, chunks: int) -> Tier:
        """Open the tier that lives at ``place``.

        ``place`` is a folder of its own for each tier, empty at first. A tier
        that lives elsewhere derives a name from it (a key prefix), a tier in
        memory ignores it. The tier must hold ``chunks`` chunks, and if
        ``bounded`` not one more.
        """
        raise NotImplementedError

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        """The payload as stored, None if there is none, without calling ``tier``."""
        raise NotImplementedError

    def poke_damage(self, tier: Tier, key: ChunkKey) -> None:
        """Flip a bit of the stored payload, without calling ``tier``."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier with room for ``ROOMY`` chunks."""
        tier = self.open_tier(_folder(tmp_path, "tier"), ROOMY)
        yield tier
        tier.close()

    # Reading and writing ------------------------------------------------------

    def test_a_stored_chunk_reads_back_equal(self, tier: Tier) -> None:
        assert _write(tier, [key(1)], [payload(tier, 7)]) == [WriteOutcome.STORED]
        assert _read(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 7))]

    def test_what_is_stored_lies_where_an_outsider_finds_it(self, tier: Tier) -> None:
        self._needs(self.supports_peek, "peek")
        assert self.peek(tier, key(1)) is None
        _write(tier, [key(1)], [payload(tier, 7)])
        assert self.peek(tier, key(1)) == payload(tier, 7)

    def test_an_unknown_chunk_is_a_miss(self, tier: Tier) -> None:
        assert _outcomes(tier, [key(1)]) == [ReadOutcome.MISS]
        assert tier.contains([key(1)]) == [False]

    def test_a_batch_is_answered_in_its_order(self, tier: Tier) -> None:
        stored = [key(n) for n in (5, 1, 3)]
        assert _write(tier, stored, [payload(tier, n) for n in (5, 1, 3)]) == (
            [WriteOutcome.STORED] * 3
        )
        asked = [key(n) for n in (3, 9, 5, 8, 1)]
        assert tier.contains(asked) == [True, False, True, False, True]
        answers = _read(tier, asked)
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

    def test_a_second_write_says_exists_and_changes_nothing(self, tier: Tier) -> None:
        _write(tier, [key(1)], [payload(tier, 1)])
        before = tier.usage()
        assert _write(tier, [key(2), key(1)], [payload(tier, 2), payload(tier, 1)]) == [
            WriteOutcome.STORED,
            WriteOutcome.EXISTS,
        ]
        assert tier.usage().chunks == before.chunks + 1
        assert _read(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 1))]

    def test_equal_hashes_in_two_namespaces_are_two_chunks(self, tier: Tier) -> None:
        _write(tier, [key(1, HERE)], [payload(tier, 1)])
        assert _outcomes(tier, [key(1, ELSEWHERE)]) == [ReadOutcome.MISS]
        assert tier.contains([key(1, ELSEWHERE)]) == [False]
        assert _write(tier, [key(1, ELSEWHERE)], [payload(tier, 2)]) == [WriteOutcome.STORED]
        assert _read(tier, [key(1, HERE), key(1, ELSEWHERE)]) == [
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
        assert _write(tier, keys, contents) == [WriteOutcome.STORED] * len(keys)
        assert _read(tier, keys) == [(ReadOutcome.HIT, content) for content in contents]
        assert _scanned(tier) == set(keys)

    def test_buffers_are_not_kept(self, tier: Tier) -> None:
        """A kept view would make ``close`` of the memory below it fail."""
        source, target = aligned_buffer(tier.payload_bytes), aligned_buffer(tier.payload_bytes)
        source[:] = payload(tier, 3)
        tier.write([key(1)], [source])
        source[:] = payload(tier, 4)
        assert tier.read([key(1)], [target]) == [ReadOutcome.HIT]
        assert bytes(target) == payload(tier, 3)
        target[:] = payload(tier, 5)
        assert _read(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 3))]
        for view in (source, target):
            memory = view.obj
            view.release()
            memory.close()  # type: ignore[attr-defined]

    # Removing and counting ------------------------------------------------------

    def test_remove_drops_and_counts_what_was_there(self, tier: Tier) -> None:
        _write(tier, [key(1), key(2)], [payload(tier, 1), payload(tier, 2)])
        assert tier.remove([key(1), key(9)]) == 1
        assert tier.remove([key(1)]) == 0
        assert _outcomes(tier, [key(1), key(2)]) == [ReadOutcome.MISS, ReadOutcome.HIT]
        assert _write(tier, [key(1)], [payload(tier, 8)]) == [WriteOutcome.STORED]
        assert _read(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 8))]

    def test_scan_shows_what_was_written_and_nothing_else(self, tier: Tier) -> None:
        assert _scanned(tier) == set()
        keys = [key(1), key(2), key(1, ELSEWHERE)]
        _write(tier, keys, [payload(tier, 1)] * 3)
        tier.remove([key(2)])
        assert _scanned(tier) == {key(1), key(1, ELSEWHERE)}

    def test_scan_and_usage_agree_on_the_space_taken(self, tier: Tier) -> None:
        _write(tier, [key(n) for n in range(5)], [payload(tier, n) for n in range(5)])
        entries = [entry for entry in tier.scan() if entry.key is not None]
        assert all(entry.nbytes >= tier.payload_bytes for entry in entries)
        assert tier.usage().nbytes == sum(entry.nbytes for entry in entries)
        assert tier.usage().chunks == 5

    def test_any_sequence_of_calls_matches_a_dict(self, tmp_path: Path) -> None:
        suite, numbers = self, count()

        class Machine(_AgainstADict):
            def __init__(self) -> None:
                place = _folder(tmp_path, f"machine-{next(numbers)}")
                super().__init__(suite, place)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=30,
                stateful_step_count=25,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    # Damage ---------------------------------------------------------------------

    def test_a_damaged_chunk_is_corrupt_once_and_then_a_miss(self, tier: Tier) -> None:
        self._needs(self.supports_damage, "damage")
        _write(tier, [key(1), key(2)], [payload(tier, 1), payload(tier, 2)])
        self.poke_damage(tier, key(1))
        assert _outcomes(tier, [key(1), key(2)]) == [ReadOutcome.CORRUPT, ReadOutcome.HIT]
        assert _outcomes(tier, [key(1)]) == [ReadOutcome.MISS]
        assert tier.contains([key(1)]) == [False]
        assert _scanned(tier) == {key(2)}
        assert tier.usage().chunks == 1

    def test_a_damaged_chunk_can_be_stored_anew(self, tier: Tier) -> None:
        self._needs(self.supports_damage, "damage")
        _write(tier, [key(1)], [payload(tier, 1)])
        self.poke_damage(tier, key(1))
        _outcomes(tier, [key(1)])
        assert _write(tier, [key(1)], [payload(tier, 1)]) == [WriteOutcome.STORED]
        assert _read(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 1))]

    # Threads --------------------------------------------------------------------

    def test_writers_of_one_key_leave_one_whole_chunk(self, tier: Tier) -> None:
        """The contents differ here, which they never do in life, to show a mixture."""

        def write(number: int) -> WriteOutcome:
            return _write(tier, [key(1)], [payload(tier, number)])[0]

        outcomes = _together([lambda n=n: write(n) for n in range(8)])  # type: ignore[misc]
        assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
        assert WriteOutcome.STORED in outcomes
        [(outcome, content)] = _read(tier, [key(1)])
        assert outcome is ReadOutcome.HIT
        assert content in [payload(tier, number) for number in range(8)]
        assert tier.usage().chunks == 1
        assert _scanned(tier) == {key(1)}

    def test_readers_beside_writers_see_whole_chunks_or_none(self, tier: Tier) -> None:
        versions = [payload(tier, number) for number in range(2)]

        def churn() -> list[bytes]:
            for turn in range(60):
                _write(tier, [key(1)], [versions[turn % 2]])
                tier.remove([key(1)])
            return []

        def watch() -> list[bytes]:
            answers = [_read(tier, [key(1)])[0] for _ in range(120)]
            assert {outcome for outcome, _ in answers} <= {ReadOutcome.HIT, ReadOutcome.MISS}
            return [content for outcome, content in answers if outcome is ReadOutcome.HIT]

        for seen in _together([churn, churn, watch, watch]):
            assert all(content in versions for content in seen)
        assert tier.usage().chunks == len(_scanned(tier))

    def test_usage_is_exact_after_threads_wrote_and_removed(self, tier: Tier) -> None:
        def work(thread: int) -> int:
            mine = [key(8 * thread + n) for n in range(8)]
            outcomes = _write(tier, mine, [payload(tier, thread)] * 8)
            return outcomes.count(WriteOutcome.STORED) - tier.remove(mine[:3])

        left = _together([lambda t=t: work(t) for t in range(4)])  # type: ignore[misc]
        assert left == [5] * 4
        assert tier.usage().chunks == 20 == len(_scanned(tier))

    # Bounds and restarts ----------------------------------------------------------

    def test_a_full_tier_refuses_and_keeps_what_it_has(self, tmp_path: Path) -> None:
        self._needs(self.bounded, "a bound")
        tier = self.open_tier(_folder(tmp_path, "small"), 3)
        keys = [key(n) for n in range(5)]
        assert _write(tier, keys, [payload(tier, n) for n in range(5)]) == (
            [WriteOutcome.STORED] * 3 + [WriteOutcome.REFUSED] * 2
        )
        usage = tier.usage()
        assert usage.limit is not None
        assert usage.nbytes <= usage.limit
        assert tier.contains(keys) == [True] * 3 + [False] * 2
        assert _outcomes(tier, keys) == [ReadOutcome.HIT] * 3 + [ReadOutcome.MISS] * 2
        assert _scanned(tier) == set(keys[:3])
        tier.remove(keys[:1])
        assert _write(tier, keys[4:], [payload(tier, 4)]) == [WriteOutcome.STORED]
        tier.close()

    def test_the_bound_holds_among_threads(self, tmp_path: Path) -> None:
        self._needs(self.bounded, "a bound")
        tier = self.open_tier(_folder(tmp_path, "small"), 5)

        def write(thread: int) -> list[WriteOutcome]:
            return _write(tier, [key(4 * thread + n) for n in range(4)], [payload(tier, 1)] * 4)

        answers = _together([lambda t=t: write(t) for t in range(4)])  # type: ignore[misc]
        outcomes = [outcome for answer in answers for outcome in answer]
        assert outcomes.count(WriteOutcome.STORED) == 5
        assert outcomes.count(WriteOutcome.REFUSED) == 11
        assert tier.usage().chunks == 5 == len(_scanned(tier))
        tier.close()

    def test_chunks_survive_closing_and_opening(self, tmp_path: Path) -> None:
        self._needs(self.supports_persistence, "persistence")
        place = _folder(tmp_path, "kept")
        before = self.open_tier(place, ROOMY)
        _write(before, [key(1), key(2)], [payload(before, 1), payload(before, 2)])
        before.remove([key(2)])
        before.close()
        tier = self.open_tier(place, ROOMY)
        assert tier.contains([key(1), key(2)]) == [True, False]
        assert _read(tier, [key(1)]) == [(ReadOutcome.HIT, payload(tier, 1))]
        assert _write(tier, [key(1)], [payload(tier, 1)]) == [WriteOutcome.EXISTS]
        assert _scanned(tier) == {key(1)}
        assert tier.usage().chunks == 1
        tier.close()

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
        self.tier = suite.open_tier(place, ROOMY)
        self.model: dict[ChunkKey, bytes] = {}

    def keys(self, numbers: Sequence[int]) -> list[ChunkKey]:
        """Two namespaces over the same six hashes."""
        return [key(n // 2, ELSEWHERE if n % 2 else HERE) for n in numbers]

    @rule(numbers=numbers)
    def write(self, numbers: Sequence[int]) -> None:
        keys = self.keys(numbers)
        contents = [payload(self.tier, number) for number in numbers]
        expected = [WriteOutcome.EXISTS if k in self.model else WriteOutcome.STORED for k in keys]
        assert _write(self.tier, keys, contents) == expected
        self.model.update(zip(keys, contents, strict=True))

    @rule(numbers=numbers)
    def read(self, numbers: Sequence[int]) -> None:
        for k, (outcome, content) in zip(
            self.keys(numbers), _read(self.tier, self.keys(numbers)), strict=True
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
            self.suite.poke_damage(self.tier, k)
            assert _outcomes(self.tier, [k]) == [ReadOutcome.CORRUPT]
            del self.model[k]

    @rule()
    def reopen(self) -> None:
        if self.suite.supports_persistence:
            self.tier.close()
            self.tier = self.suite.open_tier(self.place, ROOMY)
            # Usage may be unknown before it.
            assert _scanned(self.tier) == set(self.model)

    @rule()
    def scan(self) -> None:
        entries = [entry for entry in self.tier.scan() if entry.key is not None]
        assert len(entries) == len(self.model)
        assert {entry.key for entry in entries} == set(self.model)
        assert self.tier.usage().nbytes == sum(entry.nbytes for entry in entries)

    @invariant()
    def counts_and_presence_agree(self) -> None:
        keys = self.keys(range(12))
        assert self.tier.contains(keys) == [k in self.model for k in keys]
        assert self.tier.usage().chunks == len(self.model)

    def teardown(self) -> None:
        self.tier.close()


def payload(tier: Tier, number: int) -> bytes:
    """A chunk's worth of bytes, different for each number below 64 and at each page."""
    pages = tier.payload_bytes // ALIGNMENT
    return b"".join(bytes([number, page % 256]) * (ALIGNMENT // 2) for page in range(pages))


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def _write(tier: Tier, keys: Sequence[ChunkKey], contents: Sequence[bytes]) -> list[WriteOutcome]:
    buffers = []
    for content in contents:
        buffer = aligned_buffer(tier.payload_bytes)
        buffer[:] = content
        buffers.append(buffer)
    return tier.write(keys, buffers)


def _read(tier: Tier, keys: Sequence[ChunkKey]) -> list[tuple[ReadOutcome, bytes]]:
    buffers = [aligned_buffer(tier.payload_bytes) for _ in keys]
    outcomes = tier.read(keys, buffers)
    return [(outcome, bytes(buffer)) for outcome, buffer in zip(outcomes, buffers, strict=True)]


def _outcomes(tier: Tier, keys: Sequence[ChunkKey]) -> list[ReadOutcome]:
    return [outcome for outcome, _ in _read(tier, keys)]


def _scanned(tier: Tier) -> set[ChunkKey]:
    return {entry.key for entry in tier.scan() if entry.key is not None}


def _together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run each call on a thread of its own, started at the same moment."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
