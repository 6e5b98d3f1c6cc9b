"""Linked lists in arrays, against plain lists."""

from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies.rings import Rings

steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "discard", "drop_oldest"]),
        st.integers(0, 9),
        st.integers(0, 2),
    ),
    max_size=80,
)


@given(steps)
def test_rings_are_lists_that_share_their_chunks(steps: list[tuple[str, int, int]]) -> None:
    rings, lists = Rings(3), [[], [], []]
    for what, chunk, ring in steps:
        if what == "drop_oldest":
            rings.drop_oldest(ring)
            del lists[ring][:1]
        else:
            for each in lists:
                if chunk in each:
                    each.remove(chunk)
            if what == "discard":
                rings.discard(chunk)
            else:
                rings.append(chunk, ring)
                lists[ring].append(chunk)
        assert [list(rings.oldest(i)) for i in range(3)] == lists
        assert rings.sizes == [len(each) for each in lists]
        where = {c: i for i, each in enumerate(lists) for c in each}
        assert [rings.where(c) for c in range(10)] == [where.get(c) for c in range(10)]


many = st.lists(
    st.tuples(
        st.sampled_from(
            ["append_all", "prepend_all", "use_all", "discard_all", "move_oldest", "pass_marked"]
        ),
        st.lists(st.integers(0, 9), unique=True, max_size=6),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(many)
def test_what_takes_many_chunks_does_to_each_what_it_would_do_to_one(steps) -> None:
    rings, lists, marks = Rings(3), [[], [], []], {}
    for what, chunks, ring, other in steps:
        if what == "append_all":
            rings.append_all(chunks, ring)
            move(lists, marks, chunks, ring)
        elif what == "prepend_all":
            rings.prepend_all(chunks, ring)
            move(lists, marks, chunks, None)
            lists[ring][:0] = chunks
            marks |= dict.fromkeys(chunks, 0)
        elif what == "use_all":
            rings.mark_all(chunks, 2)
            marks |= {chunk: min(2, marks[chunk] + 1) for chunk in chunks if chunk in marks}
            rings.use_all(chunks, other, ring)
            move(lists, marks, [c for c in chunks for each in lists[:other] if c in each], ring)
        elif what == "discard_all":
            rings.discard_all(chunks)
            move(lists, marks, chunks, None)
        elif what == "move_oldest":
            moved = lists[ring][: len(chunks)]
            assert rings.move_oldest(ring, other, len(chunks)) == moved
            move(lists, marks, moved, other)
        else:
            rings.pass_marked(ring, other, (-1, 0, 1))
            while lists[ring] and marks[first := lists[ring][0]]:
                marks[first] -= 1
                move(lists, marks, [first], other)
        assert [list(rings.oldest(i)) for i in range(3)] == lists
        assert rings.sizes == [len(each) for each in lists]
        assert dict(pair for i in range(3) for pair in rings.oldest_marked(i)) == marks
        assert rings.where_all(range(10)) == [rings.where(c) for c in range(10)]
        below = {c for each in lists[:other] for c in each}
        assert rings.absent(range(10), other) == [c for c in range(10) if c not in below]
        assert rings.absent(range(10)) == [c for c in range(10) if rings.where(c) is None]


def move(lists: list[list[int]], marks: dict[int, int], chunks: list[int], to: int | None) -> None:
    for chunk in chunks:
        for each in lists:
            if chunk in each:
                each.remove(chunk)
        if to is None:
            marks.pop(chunk, None)
        else:
            lists[to].append(chunk)
            marks.setdefault(chunk, 0)


def test_lists_made_later_come_and_go() -> None:
    rings = Rings(1)
    later = rings.new_ring()
    rings.append_all("ab", 0)
    rings.append("a", later)
    assert ([*rings.oldest(later)], rings.is_empty(later), rings.sizes) == (["a"], False, [1])
    rings.append("a", 0)
    assert (rings.is_empty(later), [*rings.oldest(0)], rings.sizes) == (True, ["b", "a"], [2])
    rings.drop_ring(later)
    assert rings.new_ring() == later


def test_nodes_of_what_is_gone_are_used_again() -> None:
    rings = Rings(2)
    for turn in range(50):
        for chunk in range(4):
            rings.append((turn, chunk), 1)
        for chunk in range(4):
            rings.discard((turn, chunk))
    assert len(rings._chunk) == 2 + 4
