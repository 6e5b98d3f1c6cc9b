"""Runs, and the defaults a policy gets for free."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import ChunkFacts, ChunkId, Policy, PolicyRequest, Run, ScoredPolicy, TierInfo
from pydantic import ValidationError

TIERS = (TierInfo("cpu", 100), TierInfo("fs"), TierInfo("redis"))


class Minimal(Policy):
    """The least one can write."""

    def on_insert(self, run: Run, tier: str) -> None: ...

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None: ...

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        return iter(())


# Runs ------------------------------------------------------------------------


@given(st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_head_and_tail_put_together_are_the_run(n: int, cut: int, as_range: bool) -> None:
    chunks = range(100, 100 + n) if as_range else tuple(range(100, 100 + n))
    run = Run(chunks, 7, 4096, 2, parent=99, tenant="t")
    cut = min(cut, n)
    head, tail = run.head(cut), run.tail(cut)
    assert [*head.chunks, *tail.chunks] == list(chunks)
    assert (head.start, tail.start) == (7, 7 + cut)
    assert (head.parent, tail.parent) == (99, 99 + cut)
    for part in (head, tail):
        assert (part.chunk_bytes, part.group, part.tenant) == (4096, 2, "t")
        assert isinstance(part.chunks, range) == as_range


def test_a_run_is_as_long_as_its_chunks() -> None:
    assert len(Run(range(5, 9))) == 4
    assert not len(Run(()))


# Defaults --------------------------------------------------------------------


def test_by_default_everything_is_admitted_and_written_through_in_order() -> None:
    policy, run = Minimal(TIERS), Run("abc")
    assert [policy.admit(run, tier.name) for tier in TIERS] == [3, 3, 3]
    assert list(policy.place(run)) == ["fs", "redis"]
    assert policy.demote("a", "cpu") is None


def test_by_default_nothing_is_fetched_dropped_or_favoured_unasked() -> None:
    policy = Minimal(TIERS)
    answers = (
        policy.prefetch(PolicyRequest("r")),
        policy.anticipate(),
        policy.expired("cpu"),
        policy.favour(1 << 20),
    )
    assert [list(answer) for answer in answers] == [[], [], [], []]


def test_without_measurements_reading_is_free_and_every_chunk_costs_the_same_to_compute() -> None:
    policy = Minimal(TIERS)
    assert TIERS[0].read_seconds(1 << 20) == TIERS[0].write_seconds(1 << 20) == 0
    assert policy.recompute_seconds(Run("abc")) == 3 * policy.recompute_seconds(Run("a", 50))


def test_an_option_the_policy_does_not_have_is_refused() -> None:
    with pytest.raises(ValidationError, match="alhpa"):
        Minimal.Config(alhpa=1)
    assert Minimal(TIERS).config == Minimal.Config()


# Scored policies -------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class ByUses(ScoredPolicy):
    def score(self, chunk: ChunkFacts, now: float) -> float:
        return chunk.uses


class ByFreshness(ScoredPolicy):
    """Scores that all fall as time goes by, some faster than others."""

    def score(self, chunk: ChunkFacts, now: float) -> float:
        return chunk.uses / (1 + now - chunk.last_used)


def order(policy: Policy, tier: str = "cpu") -> str:
    return "".join(map(str, policy.victims(tier, 1)))


def use(policy: Policy, run: Run, times: int = 1) -> None:
    for _ in range(times):
        policy.on_access(run, PolicyRequest("r"), "cpu")


def test_the_lowest_score_goes_first() -> None:
    policy = ByUses(TIERS)
    for chunk, uses in (("a", 2), ("b", 0), ("c", 1)):
        policy.on_insert(Run(chunk), "cpu")
        use(policy, Run(chunk), uses)
    assert order(policy) == "bca"
    use(policy, Run("b"), 5)
    assert order(policy) == "cab"


def test_a_leaf_goes_before_a_head_with_a_lower_score() -> None:
    policy = ByUses(TIERS)
    policy.on_insert(Run("ab"), "cpu")
    policy.on_insert(Run("x"), "cpu")
    use(policy, Run("b", 1, parent="a"), 3)  # a: 1 use, b: 4
    use(policy, Run("x"), 1)
    assert order(policy) == "xba"
    policy.on_remove(["b"], "cpu")
    assert order(policy) == "ax"


def test_a_chunk_lost_from_the_middle_does_not_hold_its_parent_back() -> None:
    policy = ByUses(TIERS)
    policy.on_insert(Run("abc"), "cpu")
    use(policy, Run("c", 2, parent="b"), 9)
    policy.on_remove(["b"], "cpu")
    assert order(policy) == "ac"
    policy.on_insert(Run("b", 1, parent="a"), "cpu")
    assert order(policy) == "cba"


def test_a_parent_that_a_scan_did_not_tell_is_learned_from_a_request() -> None:
    policy = ByUses(TIERS)
    for chunk in "ab":
        policy.on_insert(Run(chunk), "cpu")
    use(policy, Run("b"), 3)
    assert order(policy) == "ab"
    use(policy, Run("ab"))
    assert order(policy) == "ba"


def test_a_score_that_falls_with_time_catches_up_as_chunks_come_in() -> None:
    clock = Clock()
    policy = ByFreshness(TIERS, clock=clock)
    policy.on_insert(Run("o"), "cpu")
    use(policy, Run("o"), 9)  # scores 10 now, and less and less
    clock.now = 1000.0
    for chunk in "pqrs":
        policy.on_insert(Run(chunk), "cpu")
    assert order(policy)[0] == "o"


class ByAge(ScoredPolicy):
    """Scores that rise as time goes by, at a rate of each chunk's own."""

    def score(self, chunk: ChunkFacts, now: float) -> float:
        return chunk.heat * (now - chunk.inserted)


def test_a_score_that_rises_with_time_is_exact() -> None:
    clock = Clock()
    policy = ByAge(TIERS, clock=clock)
    for chunk, heat, clock.now in (("a", 3.0, 0.0), ("b", 1.0, 1.0), ("c", 2.0, 2.0)):
        policy.on_insert(Run(chunk), "cpu")
        policy.on_heat(Run(chunk), [heat])
    clock.now = 10.0  # a 30, b 9, c 16; all were 0 when they came
    assert order(policy) == "bca"


def test_the_author_reads_facts_that_all_tiers_share() -> None:
    clock = Clock()
    policy = ByUses(TIERS, clock=clock)
    run = Run("ab", start=4, chunk_bytes=512, group=1, parent="z", tenant="t")
    policy.on_insert(run, "cpu")
    clock.now = 5.0
    policy.on_insert(run, "fs")
    use(policy, run.tail(1))
    policy.on_heat(run, [0.25, 0.75])
    facts = policy.facts("b")
    assert facts == policy.facts("b")
    assert (facts.chunk, facts.parent, facts.position) == ("b", "a", 5)
    assert (facts.nbytes, facts.group, facts.tenant) == (512, 1, "t")
    assert (facts.inserted, facts.last_used, facts.uses) == (0.0, 5.0, 2)
    assert (facts.heat, facts.copies) == (0.75, 2)
    policy.on_remove("b", "cpu")
    assert policy.facts("b").copies == 1
    policy.on_remove("b", "fs")
    assert policy.facts("b") is None


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from("iaar")), max_size=60))
def test_scored_victims_are_those_found_by_looking_at_every_leaf(calls) -> None:
    """Chunk n follows chunk n // 2, so the forest forks at every chunk."""
    policy = ByUses(TIERS)
    for n, what in calls:
        path = [n]
        while path[0] > 1:
            path.insert(0, path[0] // 2)
        if what == "i":
            policy.on_insert(Run(path), "cpu")
        elif what == "a":
            use(policy, Run(path))
        else:
            policy.on_remove([n], "cpu")
        assert_leaves_ascend(policy)


def assert_leaves_ascend(policy: ByUses) -> None:
    named = list(policy.victims("cpu", 1))
    left = {c: policy.facts(c) for c in named}
    for chunk in named:
        leaves = [f for f in left.values() if not any(g.parent == f.chunk for g in left.values())]
        assert policy.facts(chunk) in leaves
        assert policy.facts(chunk).uses == min(f.uses for f in leaves)
        del left[chunk]


ONE_PATH = [Run(range(40))]
NO_PATHS = [Run((i,)) for i in range(40)]


@pytest.mark.parametrize("runs", [ONE_PATH, NO_PATHS], ids=["one path", "no paths"])
def test_nothing_is_left_behind_when_all_chunks_are_gone(runs: list[Run]) -> None:
    policy = ByUses(TIERS)
    for _ in range(50):
        for run in runs:
            policy.on_insert(run, "cpu")
            use(policy, run)
        policy.on_remove(list(policy.victims("cpu", 1)), "cpu")
    heap = policy._heaps["cpu"]
    assert len(policy._facts) == len(heap._facts) == len(heap._children) == 0
    assert len(heap._heap) <= 16  # superseded entries, up to the size where a rebuild pays
