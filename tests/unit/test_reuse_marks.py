"""Marks of prefix-reuse and the ranks made of them: what a fit finds counts from then on."""

import numpy as np
import pytest
from kvtiers.policies.reuse_hazard import HazardLearner
from kvtiers.policies.reuse_marks import Marks
from kvtiers.policies.reuse_nodes import NOTHING, Nodes
from kvtiers.policies.reuse_ranks import Ranks
from reuse_samples import QUICK, SLOW, answered, learn, quick_and_slow

NOW = 30.0


def learn_to_tell(learner: HazardLearner) -> None:
    """Quick from slow: a second fit shows that the first was right."""
    seen, _ = quick_and_slow(3000)
    learn(learner, seen, seen)


def worth_of(marks: Marks, rows: list[int], few: bool) -> list[float]:
    if few:
        return marks.worth_of_few(rows, NOW)
    return marks.worth(np.array(rows, np.int32), NOW).tolist()


@pytest.mark.parametrize("few", [True, False])
def test_what_was_valued_before_a_fit_is_valued_anew_after_it(few: bool) -> None:
    learner = HazardLearner()
    marks = Marks(learner)
    rows = [marks.new(answered(output), 0.0) for output in (QUICK, SLOW)]
    quick, slow = worth_of(marks, rows, few)
    assert quick == slow
    learn_to_tell(learner)
    marks.refresh()
    found = worth_of(marks, rows, few)
    assert found == pytest.approx([1 / 50, 1 / 500], rel=0.35)


def test_what_comes_after_a_fit_is_not_valued_like_its_class_before_it() -> None:
    learner = HazardLearner()
    marks = Marks(learner)
    before = marks.worth_of_few([marks.new(answered(SLOW), 0.0)], NOW)
    learn_to_tell(learner)
    after = marks.worth_of_few([marks.new(answered(SLOW), 0.0)], NOW)
    assert after == pytest.approx([1 / 500], rel=0.35)
    assert before != pytest.approx(after, rel=0.35)


@pytest.mark.parametrize(("leaves", "seconds"), [(100, 1.5), (1000, 20.0)])
def test_leaves_that_nobody_uses_are_ranked_anew_by_what_was_learned(
    leaves: int, seconds: float
) -> None:
    """Few of them at the next second, many when they have earned the time that it takes."""
    learner = HazardLearner()
    marks = Marks(learner)
    nodes = Nodes(marks.hold)
    ranks = Ranks(nodes, marks)
    # By turns, the quick ones first, as the oldest go first while nothing is known.
    slow = set[int]()
    for chunk in range(leaves):
        mark = marks.new(answered(SLOW if chunk % 2 else QUICK), 5 * chunk / leaves)
        nodes.add((chunk,), NOTHING, mark, 0)
        marks.hold(mark, -1)
        ranks.changes += 1
        if chunk % 2:
            slow.add(nodes.node_of(chunk))

    def named(now: float) -> list[int]:
        return [node for _, node in ranks.ascending(now, leaves)]

    before = named(NOW)
    assert [nodes.last_chunk(node) for node in before] == list(range(leaves))
    learn_to_tell(learner)
    assert named(NOW) == before
    assert set(named(NOW + seconds)[: leaves // 2]) == slow
