"""What writers of a root may announce, and what a keeper remembers between two processes."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers import keeper_snapshot
from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.grants import Standing, additions
from kvtiers.tiers.keeper_snapshot import Position
from kvtiers.tiers.pace import Pace
from kvtiers.tiers.root_index import Facts, RootIndex, unpacked

STANDINGS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Standing, st.integers(0, 1 << 30), st.integers(1, 1 << 24), st.integers(0, 1 << 32)),
)


@given(st.integers(0, 1 << 34), STANDINGS)
def test_never_more_is_granted_than_is_free_and_whole_chunks(free, writers):
    added = additions(free, writers)
    assert sum(added.values()) <= free
    for name, more in added.items():
        assert more > 0
        assert more % writers[name].unit == 0


@given(st.integers(0, 1 << 34), STANDINGS)
def test_while_there_is_room_nobody_is_left_without_a_chunk(free, writers):
    added = additions(free, writers)
    left = free - sum(added.values())
    for name, writer in writers.items():
        if writer.left + added.get(name, 0) < writer.unit:
            assert left < writer.unit


def test_an_idle_writer_holds_no_more_than_its_part_of_what_is_free():
    writers = {str(n): Standing(0, ALIGNMENT) for n in range(4)}
    added = additions(800 * ALIGNMENT, writers)
    assert set(added.values()) == {100 * ALIGNMENT}
    assert max(additions(1 << 50, writers).values()) == 256 << 20


def test_a_fast_writer_gets_more():
    fast = {"fast": Standing(0, ALIGNMENT, 1 << 30), "slow": Standing(0, ALIGNMENT, 0)}
    added = additions(1 << 50, fast)
    assert added == {"fast": 4 << 30, "slow": 256 << 20}


FACTS = st.builds(
    Facts,
    st.integers(1, 2**31).map(lambda pages: pages * ALIGNMENT),
    st.integers(0, 2**32 - 1).map(float),
    st.integers(-1, 2**31 - 1),
    st.binary(min_size=8, max_size=8),
    st.binary(max_size=64),
)


@given(FACTS)
def test_facts_are_unpacked_as_they_were_packed(facts):
    assert unpacked(facts.packed()) == facts


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 5))))
def test_an_index_adds_up(changes):
    index, model = RootIndex(), {}
    for adds, number, pages in changes:
        chunk = index.id_of("ns" + str(number % 2), bytes([number, 1]))
        if adds:
            index.put(chunk, Facts(pages * ALIGNMENT).packed())
            model[chunk] = pages * ALIGNMENT
        else:
            assert index.pop(chunk) == model.pop(chunk, 0)
    assert (index.nbytes, index.chunks) == (sum(model.values()), len(model))
    assert set(index) == set(model)


def test_the_garbage_collector_does_not_walk_an_index():
    index = RootIndex()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(20_000):
        digest = number.to_bytes(4, "big") * 9
        index.put(index.id_of("ns", digest), Facts(ALIGNMENT, 1.0, 2, b"t" * 8, digest).packed())
    gc.collect()
    assert len(gc.get_objects()) - before < 1000


def rest() -> None:
    pass


SNAPSHOT = {
    "namespaces": ["ab" * 16, "cd" * 16],
    "writers": {"w-1": Position(3, 17, 4096, 8192)},
    "pending": {"w-1": [bytes([0, n % 2, n % 256]) for n in range(700)], "w-2": [b"\0\1x"]},
    "chunks": [
        (bytes([0, n % 2, n % 256, n // 256]), Facts((n % 9) * ALIGNMENT).packed() + b"p" * (n % 3))
        for n in range(1200)
    ],
}


def test_a_snapshot_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / "snapshot")
    nbytes = keeper_snapshot.write(path, **SNAPSHOT, rest=rest)
    assert (tmp_path / "snapshot").stat().st_size == nbytes
    assert vars(keeper_snapshot.read(path, rest)) == SNAPSHOT


@given(st.data())
def test_a_damaged_snapshot_is_none(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "snapshot"
    keeper_snapshot.write(str(path), **SNAPSHOT, rest=rest)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(whole[:at] + (b"" if cut else bytes([whole[at] ^ 1]) + whole[at + 1 :]))
    assert keeper_snapshot.read(str(path), rest) is None


def test_no_snapshot_is_none(tmp_path):
    assert keeper_snapshot.read(str(tmp_path / "none"), rest) is None


def test_a_loop_runs_for_its_share_of_the_time():
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(0.25, lambda: now[0], sleep)
    rested = 0
    for _ in range(1000):
        now[0] += 2**-11
        rested += pace.rest()
    assert rested == len(slept) == 200  # every fifth turn passes 2 ms
    assert sum(slept) >= 0.8 * 3 * 1000 * 2**-11
