"""LRU against libcachesim, against brute force, and against itself."""

import random
from collections.abc import Callable, Sequence
from itertools import islice

import pytest
from counted_ids import counted, lookups
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import PolicyRequest, Run, TierInfo
from kvtiers.policies.conformance import PolicyConformance
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.prefix_order import PrefixOrder
from libcachesim import LRU, Request
from small_traces import forest
from traces import real_prompts, zipf_ids

REQUEST = PolicyRequest("r")
Prompt = Sequence[int]


class TestLruConformance(PolicyConformance):
    policy_class = LruPolicy
    prefix_closed = True


# Against libcachesim ---------------------------------------------------------


class LruTier:
    """A tier of ``capacity`` chunks that serves prompts, as the hierarchy would."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.policy = LruPolicy([TierInfo("cpu", capacity)])
        self.held: set[int] = set()

    def serve(self, prompt: Prompt) -> int:
        """Hit length of the prompt, which is held afterwards."""
        hit = next((i for i, c in enumerate(prompt) if c not in self.held), len(prompt))
        run = Run(prompt)
        if hit:
            self.policy.on_access(run.head(hit), REQUEST, "cpu")
        missed = run.tail(hit)
        surplus = len(self.held) + len(missed) - self.capacity
        if surplus > 0:
            out = list(islice(self.policy.victims("cpu", surplus), surplus))
            self.policy.on_remove(out, "cpu")
            self.held.difference_update(out)
        if missed.chunks:
            self.policy.on_insert(missed, "cpu")
            self.held.update(missed.chunks)
        return hit


class Libcachesim:
    """The same tier with libcachesim's LRU, fed the same chunks in the same order.

    Its cache inserts what it misses. So the hit part is touched first, as a
    request does when it arrives, then the whole prompt, tail before head.
    """

    def __init__(self, capacity: int) -> None:
        self.cache = LRU(cache_size=capacity)

    def get(self, chunk: int) -> bool:
        return self.cache.get(Request(obj_size=1, obj_id=chunk))

    def holds(self, chunk: int) -> bool:
        request = Request(obj_size=1, obj_id=chunk)
        return self.cache.find(request, update_cache=False) is not None

    def serve(self, prompt: Prompt) -> int:
        hit = next((i for i, c in enumerate(prompt) if not self.holds(c)), len(prompt))
        for chunk in reversed(prompt[:hit]):
            assert self.get(chunk)
        hits = [self.get(chunk) for chunk in reversed(prompt)]
        assert sum(hits) == hit
        return hit


def assert_equal_hits(prompts: Sequence[Prompt], capacity: int) -> None:
    ours, theirs = LruTier(capacity), Libcachesim(capacity)
    hits = [ours.serve(prompt) for prompt in prompts]
    assert hits == [theirs.serve(prompt) for prompt in prompts]
    assert 0 < sum(hits) < sum(map(len, prompts))
    assert len(ours.held) == capacity


@pytest.mark.parametrize("capacity", [1, 2, 10, 100, 900])
def test_uniform_single_chunks_hit_as_in_libcachesim(capacity: int) -> None:
    rng = random.Random(1)
    assert_equal_hits([(rng.randrange(1000),) for _ in range(20_000)], capacity)


@pytest.mark.parametrize("capacity", [1, 2, 10, 100, 900])
def test_zipf_single_chunks_hit_as_in_libcachesim(capacity: int) -> None:
    assert_equal_hits([(c,) for c in zipf_ids(random.Random(2), 20_000, 2000)], capacity)


@pytest.mark.parametrize("capacity", [64, 100, 500, 3000])
def test_zipf_conversations_of_a_prefix_tree_hit_as_in_libcachesim(capacity: int) -> None:
    """System prompts, shared documents and turns; the popular ones return."""
    rng, ids, children = random.Random(3), iter(range(10**9)), {}

    def grow(path: tuple[int, ...], depth: int) -> tuple[int, ...]:
        branch = zipf_ids(rng, 1, 8)[0]
        key = (path[-1] if path else None, branch)
        if key not in children:
            children[key] = tuple(next(ids) for _ in range(rng.randint(1, 12)))
        path += children[key]
        return path if depth == 0 else grow(path, depth - 1)

    prompts = [grow((), rng.randint(0, 4)) for _ in range(3000)]
    assert max(map(len, prompts)) <= 60
    assert_equal_hits(prompts, capacity)


def test_first_requests_of_a_real_trace_hit_as_in_libcachesim() -> None:
    assert_equal_hits(real_prompts(2000), capacity=5000)


# Against brute force ---------------------------------------------------------


class LeafFirst:
    """Evicts the least recently used leaf, found by looking at every chunk.

    Args:
        prefix_counts: whether using a chunk also uses what precedes it, as far
            as it is there without a gap. What is evicted does not depend on it;
            where a chunk stands after the loss of what needed it does.

    """

    def __init__(self, prefix_counts: bool) -> None:
        self.prefix_counts = prefix_counts
        self.used: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}
        self.now = 0

    def _touch(self, chunk: int) -> None:
        self.now += 1
        self.used[chunk] = self.now

    def use(self, path: Sequence[int], skip: int) -> None:
        held = [c for c in path[skip:] if c in self.used]
        for chunk in reversed(held):
            self._touch(chunk)
        before = path[: path.index(held[0])] if held else ()
        for chunk in reversed(before):
            if not self.prefix_counts or chunk not in self.used:
                break
            self._touch(chunk)

    def add(self, path: Sequence[int], skip: int) -> None:
        for i, chunk in enumerate(path):
            if i >= skip:
                self.used.setdefault(chunk, 0)
                self.parent[chunk] = path[i - 1] if i else None
        self.use(path, skip)

    def lose(self, chunk: int) -> None:
        self.used.pop(chunk, None)

    def victims(self) -> list[int]:
        left, order = dict(self.used), []
        while left:
            inner = {self.parent[c] for c in left}
            victim = min((c for c in left if c not in inner), key=left.__getitem__)
            del left[victim]
            order.append(victim)
        return order


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """The path to each chunk of a random prefix forest."""
    paths: list[tuple[int, ...]] = []
    for chunk in range(draw(st.integers(1, 24))):
        # Mostly long stretches, as prompts are; forks and new roots in between.
        parent = chunk - 1 if draw(st.integers(0, 3)) else draw(st.integers(-1, chunk - 1))
        paths.append((*(paths[parent] if parent >= 0 else ()), chunk))
    return paths


# What to do, to which chunk's path, and how much of its head to leave out.
steps = st.lists(
    st.tuples(st.sampled_from(["add", "use", "evict", "lose"]), st.integers(0), st.integers(0)),
    max_size=40,
)


def run_of(path: tuple[int, ...], skip: int) -> Run:
    return Run(path).tail(skip)


def play(paths, steps, reference: LeafFirst, whole_prompts: bool) -> None:
    """Do the same to LRU and the reference; their victims must agree at every step."""
    policy = LruPolicy([TierInfo("cpu")])
    for what, node, skip in steps:
        path = paths[node % len(paths)]
        skip = 0 if whole_prompts else skip % len(path)
        gone: list[int] = []
        if what == "add":
            policy.on_insert(run_of(path, skip), "cpu")
            reference.add(path, skip)
        elif what == "use":
            policy.on_access(run_of(path, skip), REQUEST, "cpu")
            reference.use(path, skip)
        elif what == "evict":
            gone = reference.victims()[: 1 + node % 4]
        elif not whole_prompts:
            gone = [path[-1]]
        policy.on_remove(gone, "cpu")
        for chunk in gone:
            reference.lose(chunk)
        assert list(policy.victims("cpu", 1)) == reference.victims()


@given(forests(), steps)
def test_victims_are_the_least_recently_used_leaves(paths, steps) -> None:
    play(paths, steps, LeafFirst(prefix_counts=False), whole_prompts=True)


@given(forests(), steps)
def test_victims_stay_exact_when_chunks_are_lost_and_parts_of_prompts_used(paths, steps) -> None:
    play(paths, steps, LeafFirst(prefix_counts=True), whole_prompts=False)


# Against itself --------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("iar"), st.integers(0, 3), st.integers(0, 30),
                          st.integers(0, 30)), max_size=40))  # fmt: skip
def test_a_range_and_a_tuple_of_the_same_chunks_decide_the_same(calls) -> None:
    by_range, by_tuple = LruPolicy([TierInfo("cpu")]), LruPolicy([TierInfo("cpu")])
    for what, prefix, a, b in calls:
        begin, end = min(a, b), max(a, b) + 1
        chunks = range(prefix * 100 + begin, prefix * 100 + end)
        parent = chunks[0] - 1 if begin else None
        for policy, ids in ((by_range, chunks), (by_tuple, tuple(chunks))):
            apply_call(policy, what, Run(ids, begin, parent=parent))
        assert list(by_range.victims("cpu", 1)) == list(by_tuple.victims("cpu", 1))


def apply_call(policy: LruPolicy, what: str, run: Run) -> None:
    calls: dict[str, Callable[[], None]] = {
        "i": lambda: policy.on_insert(run, "cpu"),
        "a": lambda: policy.on_access(run, REQUEST, "cpu"),
        "r": lambda: policy.on_remove(run.chunks, "cpu"),
    }
    calls[what]()


# What the references do not say ----------------------------------------------


def order(policy: LruPolicy, tier: str = "cpu") -> list[object]:
    return list(policy.victims(tier, 1))


def test_an_access_refreshes_the_run_in_every_tier_that_has_some_of_it() -> None:
    policy = LruPolicy([TierInfo("cpu"), TierInfo("fs")])
    for tier in ("cpu", "fs"):
        policy.on_insert(Run("ab"), tier)
        policy.on_insert(Run("xy"), tier)
    policy.on_remove("b", "cpu")
    policy.on_access(Run("ab"), REQUEST, "fs")
    assert order(policy, "cpu") == ["y", "x", "a"]
    assert order(policy, "fs") == ["y", "x", "b", "a"]


def test_storing_the_end_of_a_prompt_refreshes_its_beginning() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    policy.on_insert(Run("ab"), "cpu")
    policy.on_insert(Run("xy"), "cpu")
    policy.on_insert(Run("c", start=2, parent="b"), "cpu")
    assert order(policy) == ["y", "x", "c", "b", "a"]


def test_chunks_found_at_start_one_by_one_are_joined_by_the_first_prompt_that_names_them() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    for chunk in "cabx":
        policy.on_insert(Run(chunk), "cpu")  # neither position nor parent is known
    policy.on_access(Run("abc"), REQUEST, "cpu")
    policy.on_access(Run("x"), REQUEST, "cpu")
    policy.on_access(Run("c", start=2, parent="b"), REQUEST, "cpu")
    assert order(policy) == ["x", "c", "b", "a"]


def test_a_chunk_found_at_start_is_joined_to_the_parent_that_a_run_names() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    for chunk in "abx":
        policy.on_insert(Run(chunk), "cpu")
    policy.on_access(Run("b", start=1, parent="a"), REQUEST, "cpu")
    assert order(policy) == ["x", "b", "a"]


def test_a_chunk_lost_from_the_middle_joins_both_sides_again_when_it_returns() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    policy.on_insert(Run("abcdef"), "cpu")
    policy.on_remove("e", "cpu")
    policy.on_insert(Run("e", start=4, parent="d"), "cpu")
    policy.on_insert(Run("x"), "cpu")
    policy.on_access(Run("f", start=5, parent="e"), REQUEST, "cpu")
    assert order(policy) == ["x", *"fedcba"]


def test_a_wrong_position_does_not_put_a_chunk_behind_a_stranger() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    policy.on_insert(Run("abc"), "cpu")
    policy.on_insert(Run("y", start=3, parent="a"), "cpu")  # follows "a", so it is at 1
    policy.on_access(Run("y", start=3, parent="a"), REQUEST, "cpu")
    assert order(policy) == ["c", "b", "y", "a"]


@pytest.mark.parametrize("parts", ["a", "ab", "abc"])
def test_runs_that_follow_themselves_hang_nobody(parts: str) -> None:
    policy = LruPolicy([TierInfo("cpu")])
    for i, part in enumerate(parts):
        policy.on_insert(Run(part, start=i, parent=parts[i - 1]), "cpu")
    policy.on_access(Run("a", start=9, parent=parts[-1]), REQUEST, "cpu")
    assert sorted(order(policy)) == list(parts)


def test_nothing_is_left_behind_when_all_chunks_are_gone() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    rng = random.Random(5)
    chunks = list(range(300))
    policy.on_insert(Run(chunks[:200]), "cpu")
    policy.on_insert(Run(chunks[200:], start=50, parent=49), "cpu")
    for n in (120, 30, 170, 7):
        policy.on_access(Run(chunks[:n]), REQUEST, "cpu")
    rng.shuffle(chunks)
    policy.on_remove(chunks, "cpu")
    kept = policy._orders["cpu"]
    assert len(kept) == 0
    for table in (kept._chunks, kept._chains, kept._segments):
        assert len(table) == (table is kept._segments), "but for the segment that is none"


# Cost, counted instead of timed: how often a chunk is looked up.


def test_using_a_prompt_that_is_there_costs_one_lookup_per_branch() -> None:
    policy = LruPolicy([TierInfo("cpu")])
    prompts = [Run(counted(range(10_000))), Run(counted([*range(5000), *range(20_000, 25_000)]))]
    for prompt in prompts:
        policy.on_insert(prompt, "cpu")
    for prompt in prompts:
        assert lookups(lambda p=prompt: policy.on_access(p, REQUEST, "cpu")) <= 4


def test_a_prompt_that_grew_chunk_by_chunk_is_one_branch() -> None:
    policy, ids = LruPolicy([TierInfo("cpu")]), counted(range(100))
    for i in range(100):
        policy.on_insert(Run(ids).tail(i).head(1), "cpu")
    assert lookups(lambda: policy.on_access(Run(ids), REQUEST, "cpu")) <= 4


def test_losing_a_prompt_from_its_head_on_costs_a_few_lookups_a_chunk() -> None:
    policy, ids = LruPolicy([TierInfo("cpu")]), counted(range(1000))
    policy.on_insert(Run(ids), "cpu")
    assert lookups(lambda: policy.on_remove(ids, "cpu")) <= 6 * 1000


def test_chunks_that_a_scan_finds_are_older_than_all_others_and_keep_their_order() -> None:
    policy = LruPolicy([TierInfo("cpu"), TierInfo("fs")])
    policy.on_insert(Run("ab"), "fs")
    policy.on_found(Run("x", start=-1), "fs", age=10.0)  # found last used first
    policy.on_found(Run("a", start=-1), "fs", age=15.0)  # known already: as recent as before
    policy.on_found(Run("y", start=-1), "fs", age=20.0)
    policy.on_insert(Run("cd"), "fs")
    assert list(policy.victims("fs", 1)) == list("yxbadc")


def test_a_found_run_is_evicted_from_its_tail() -> None:
    policy = LruPolicy([TierInfo("fs")])
    policy.on_found(Run("abc"), "fs", age=1.0)
    policy.on_insert(Run("z"), "fs")
    assert list(policy.victims("fs", 1)) == list("cbaz")
    policy.on_access(Run("abc"), PolicyRequest("r"), "fs")
    assert list(policy.victims("fs", 1)) == list("zcba")


def test_chunks_that_go_together_leave_what_they_would_one_by_one() -> None:
    rng = random.Random(7)
    together, one_by_one = PrefixOrder(), PrefixOrder()
    paths = forest(rng, 300)
    for i in range(300):
        run = Run(rng.choice(paths[: i + 1]))
        # Ends of segments as they are evicted, and anything, which is lost or not there.
        named = list(islice(together, rng.randint(0, 12)))
        gone = named if rng.random() < 0.6 else rng.choices(rng.choice(paths), k=4)
        together.add(run)
        together.discard_all(gone)
        one_by_one.add(run)
        for chunk in gone:
            one_by_one.discard(chunk)
        assert list(together) == list(one_by_one)
        assert len(together) == len(list(together))
