"""The forest behind prefix-reuse, against the same chunks kept one by one; and its order."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from counted_ids import Counted, counted, lookups
from kvtiers.policies import ChunkId
from kvtiers.policies.reuse_classes import OWN, Turn, own
from kvtiers.policies.reuse_hazard import HazardLearner
from kvtiers.policies.reuse_marks import Marks
from kvtiers.policies.reuse_nodes import NO_NODE, NOTHING, Nodes
from kvtiers.policies.reuse_ranks import Ranks
from small_traces import forest

Path = tuple[int, ...]


class Pair:
    """Nodes, and what they should hold.

    Args:
        at_once: whether chunks are discarded together.

    """

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self.marked: dict[int, int] = {}
        self.nodes = Nodes(self._mark)
        self.held: set[int] = set()
        self.parents: dict[int, int | None] = {}

    def _mark(self, mark: int, count: int) -> None:
        self.marked[mark] = self.marked.get(mark, 0) + count

    def add(self, path: Path, begin: int, mark: int, parent_known: bool) -> None:
        """What is missing of a path from ``begin`` on."""
        run = path[begin:]
        parent = path[begin - 1] if begin else NOTHING
        above = parent if parent_known else None
        for start, end in self.nodes.absent(run, above):
            self.nodes.add(run[start:end], run[start - 1] if start else above, mark, 0)
        self.nodes.learn_parents(run, above)
        self.held.update(run)

    def discard(self, chunks: list[int]) -> None:
        for some in [chunks] if self.at_once else [[chunk] for chunk in chunks]:
            self.nodes.discard(some)
        self.held.difference_update(chunks)

    def named(self) -> list[int]:
        """All chunks in the order of their nodes' marks, as they would be evicted."""
        nodes = self.nodes
        leaves = [int(row) for row in nodes.leaves()]
        ranked = sorted((float(nodes.mark_of(node)), node) for node in leaves)
        order = nodes.ascending(iter(ranked), lambda node: float(nodes.mark_of(node)))
        chunks = [chunk for _, node in order for chunk in nodes.tail_first(node)]
        return [chunk for chunk in chunks if isinstance(chunk, int)]


def steps(rng: random.Random, pair: Pair, paths: list[Path]) -> Iterator[Path]:
    """Chunks come with their prefix, without it or without a parent, and go anyhow."""
    for mark in range(1, 400):
        path = rng.choice(paths)
        what = rng.random()
        if what < 0.4:
            pair.add(path, 0, mark, parent_known=True)
        elif what < 0.5:
            pair.add(path, rng.randrange(len(path)), mark, parent_known=rng.random() < 0.5)
        elif what < 0.6:
            list(pair.nodes.cover(path, NOTHING))
        elif what < 0.8:
            pair.discard(pair.named()[: rng.randint(1, 20)])
        else:
            pair.discard(rng.sample(path, rng.randint(1, len(path))))
        yield path


def test_what_is_there_is_known_whatever_comes_and_goes() -> None:
    for seed in range(20):
        rng, pair = random.Random(seed), Pair()
        paths = forest(rng, 12)
        parents = {c: p for path in paths for p, c in pairwise(path)}
        for path in steps(rng, pair, paths):
            for begin in (0, rng.randrange(len(path))):
                run, parent = path[begin:], path[begin - 1] if begin else NOTHING
                # The chunk before may be said or not.
                for above in (parent, None):
                    absent = [c for b, e in pair.nodes.absent(run, above) for c in run[b:e]]
                    assert absent == [chunk for chunk in run if chunk not in pair.held]
                    leading = run.index(absent[0]) if absent else len(run)
                    assert pair.nodes.leading(run, above) == leading
            assert pair.nodes.held == len(pair.held)
            named = pair.named()
            assert len(named) == len(set(named))
            assert set(named) == pair.held
            at = {chunk: i for i, chunk in enumerate(named)}
            for chunk in path:
                # A parent that is known goes after what follows it.
                node = pair.nodes.node_of(chunk)
                if node != NO_NODE and pair.nodes.parent_of(node) != NO_NODE:
                    assert at[parents[named[at[chunk]]]] > at[chunk]
        pair.discard(sorted(pair.held))
        assert not any(pair.marked.values())
        assert pair.nodes.held == len(pair.nodes.leaves()) == 0
        for left in (pair.nodes._index, pair.nodes._children, pair.nodes._lost):
            assert not len(left)
        assert not pair.nodes._loose


def test_chunks_that_go_together_leave_what_they_would_one_by_one() -> None:
    for seed in range(20):
        one, other = Pair(), Pair(at_once=False)
        rng, again = random.Random(seed), random.Random(seed)
        paths = forest(rng, 12)
        forest(again, 12)
        for _ in zip(steps(rng, one, paths), steps(again, other, paths), strict=True):
            assert one.named() == other.named()
            assert one.nodes.changed() == other.nodes.changed()


def lookups_of(nodes: Nodes, run: Sequence[ChunkId], parent: ChunkId) -> float:
    """Lookups a chunk of a run that comes in whole and is evicted again."""

    def come_and_go() -> None:
        for begin, end in nodes.absent(run, parent):
            nodes.add(run[begin:end], parent, 0, 0)
        nodes.discard(run[::-1])

    return lookups(come_and_go) / len(run)


def test_a_chunk_is_looked_up_once_to_come_and_once_to_go() -> None:
    nodes = Nodes(lambda _mark, _count: None)
    prompt = counted(range(1000))
    # To come costs one more, for the dict of what is added at once.
    assert lookups_of(nodes, prompt, NOTHING) < 3.1
    nodes.add(prompt, NOTHING, 0, 0)
    following = counted(range(1000, 2000))
    assert lookups_of(nodes, following, prompt[-1]) < 3.1
    # With a part of a prompt that lacks its head somewhere, it may be of the same prompt.
    nodes.add(counted([5000]), Counted(4999), 0, 0)
    assert lookups_of(nodes, following, prompt[-1]) < 7.1


def test_leaves_go_in_the_order_of_their_worth_however_many_there_are() -> None:
    rng, marks = random.Random(3), Marks(HazardLearner())
    nodes = Nodes(marks.hold)
    ranks = Ranks(nodes, marks)

    def add(chunk: int, used: float) -> None:
        mark = marks.new(own(Turn(chunk % 7, 4.0, 2.0, 1, 1, None, chunk % 90), False), used)
        nodes.add((chunk,), NOTHING, mark, 0)
        marks.hold(mark, -1)
        ranks.changes += 1

    def expected(now: float) -> list[tuple[float, int]]:
        rows = nodes.leaves()
        worth = marks.worth(nodes.marks(rows), now)
        return sorted(zip(worth.tolist(), rows.tolist(), strict=True))

    for chunk in range(1000):
        add(chunk, rng.uniform(0.0, 5000.0))
    assert list(ranks.ascending(5000.0, 1)) == expected(5000.0)
    for chunk in range(1000, 1010):
        add(chunk, rng.uniform(0.0, 5000.0))
    nodes.discard(range(40))
    new = {nodes.node_of(chunk) for chunk in range(1000, 1010)}
    # Of many, the few that came since go last. Asked for some, for all, and for all again.
    ranked = expected(5000.0)
    late = sorted(ranked, key=lambda pair: pair[1] in new)
    for count in (1, 100, 2000, 2000):
        named = [pair for pair, _ in zip(ranks.ascending(5000.0, 2), range(count), strict=False)]
        assert named == late[:count]
    for chunk in range(1010, 1020):
        add(chunk, rng.uniform(0.0, 5000.0))
    for count in (1, 100, 2000, 2000):
        named = [pair for pair, _ in zip(ranks.ascending(5000.0, 3), range(count), strict=False)]
        assert named == expected(5000.0)[:count]


def test_of_a_few_leaves_what_has_just_come_has_its_place_at_once() -> None:
    marks = Marks(HazardLearner())
    nodes = Nodes(marks.hold)
    ranks = Ranks(nodes, marks)
    for chunk, used in enumerate((10.0, 30.0, 20.0)):
        mark = marks.new(own(Turn(0, -1.0, 0.0, 1, 1, None, 9), False), used)
        nodes.add((chunk,), NOTHING, mark, 0)
        marks.hold(mark, -1)
        list(ranks.ascending(40.0, chunk))
    assert [node for _, node in ranks.ascending(40.0, 3)] == [0, 2, 1]


def test_one_mark_is_worth_what_it_is_among_many() -> None:
    rng, marks = np.random.default_rng(1), Marks(HazardLearner())
    uses = [own(Turn(i % 9, i * 3.0, 3.0, i, 2 * i, 5 * i, i), False) for i in range(50)]
    rows = np.array([marks.new(use, rng.uniform(-1e5, 2.0)) for use in uses], np.int32)
    assert uses[0].stratum == OWN
    assert marks.worth_of_few(rows.tolist()[:9], 1.0) == marks.worth(rows, 1.0).tolist()[:9]


def test_what_a_scan_found_is_looked_up_as_quickly_once_its_place_is_known() -> None:
    nodes = Nodes(lambda _mark, _count: None)
    prompt = counted(range(100))
    for chunk in prompt:
        nodes.add([chunk], None, 0, 0)
    list(nodes.cover(list(prompt), NOTHING))
    assert lookups_of(nodes, counted(range(100, 200)), prompt[-1]) < 4
    assert nodes.parent_of(nodes.node_of(prompt[50])) == nodes.node_of(prompt[49])


def test_what_comes_while_there_is_room_is_valued_before_somebody_asks() -> None:
    learner = HazardLearner()
    marks = Marks(learner)
    nodes = Nodes(marks.hold)
    ranks = Ranks(nodes, marks)
    for chunk in range(2000):
        mark = marks.new(own(Turn(0, -1.0, 0.0, 1, 1, None, chunk), False), float(chunk))
        nodes.add((chunk,), NOTHING, mark, 0)
        marks.hold(mark, -1)
        ranks.keep_up(float(chunk))
    valued = list[int]()
    curves = learner.curves
    learner.curves = lambda *what: valued.append(len(what[0])) or curves(*what)  # type: ignore[method-assign, func-returns-value]
    assert len(list(ranks.ascending(2000.0, 1))) == 2000
    assert max(valued) < 300
