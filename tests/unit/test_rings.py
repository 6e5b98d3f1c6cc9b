"""Linked lists in arrays, against plain lists."""

from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies.rings import Rings

steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "prepend", "discard", "drop_oldest"]),
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
            elif what == "append":
                rings.append(chunk, ring)
                lists[ring].append(chunk)
            else:
                rings.prepend(chunk, ring)
                lists[ring].insert(0, chunk)
        assert [list(rings.oldest(i)) for i in range(3)] == lists
        assert rings.sizes == [len(each) for each in lists]
        where = {c: i for i, each in enumerate(lists) for c in each}
        assert [rings.where(c) for c in range(10)] == [where.get(c) for c in range(10)]


def test_nodes_of_what_is_gone_are_used_again() -> None:
    rings = Rings(2)
    for turn in range(50):
        for chunk in range(4):
            rings.append((turn, chunk), 1)
        for chunk in range(4):
            rings.discard((turn, chunk))
    assert len(rings._chunk) == 2 + 4
