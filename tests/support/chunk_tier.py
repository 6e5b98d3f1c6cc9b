"""A tier of chunks under a policy, driven as a hierarchy would, and held against another cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from hypothesis import strategies as st
from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from libcachesim import Request
from traces import zipf_ids

REQUEST = PolicyRequest("r")


class Cache(Protocol):
    """What libcachesim's caches have in common, and the models that tests write instead."""

    def get(self, request: Request) -> bool: ...


class ChunkTier:
    """A tier of ``capacity`` chunks, which makes room for so many ``at_once``, then asks again."""

    def __init__(self, policy_class: type[Policy], capacity: int, at_once: int = 1 << 30) -> None:
        self.capacity = capacity
        self.at_once = at_once
        self.policy = policy_class([TierInfo("cpu", capacity)])
        self.held: set[int] = set()

    def get(self, chunk: int) -> bool:
        """Whether one chunk is a hit; it is held afterwards."""
        if chunk in self.held:
            self.policy.on_access(Run((chunk,)), REQUEST, "cpu")
            return True
        assert self.store((chunk,)) == 1
        return False

    def serve(self, prompt: Sequence[int]) -> int:
        """The prompt's chunks that are held are used in one call, the others stored in one.

        Returns how many of the others were admitted.
        """
        missing = [chunk for chunk in prompt if chunk not in self.held]
        self.policy.on_access(Run([c for c in prompt if c in self.held]), REQUEST, "cpu")
        return self.store(missing) if missing else 0

    def store(self, chunks: Sequence[int]) -> int:
        """As many as are admitted, after room was made for them."""
        run = Run(chunks)
        run = run.head(self.policy.admit(run, "cpu"))
        while (surplus := len(self.held) + len(run) - self.capacity) > 0:
            out = list(islice(self.policy.victims("cpu", surplus), min(surplus, self.at_once)))
            self.policy.on_remove(out, "cpu")
            self.held.difference_update(out)
        if len(run):
            self.policy.on_insert(run, "cpu")
            self.held.update(run.chunks)
        assert len(self.held) <= self.capacity
        return len(run)

    def order(self) -> list[object]:
        """All chunks, as victims."""
        return list(self.policy.victims("cpu", 1))


def assert_equal_hits(
    policy_class: type[Policy], make: Callable[[int], Cache], ids: Iterable[int], capacity: int
) -> None:
    """At every request."""
    ours, theirs, hits = ChunkTier(policy_class, capacity), make(capacity), 0
    for i, chunk in enumerate(ids):
        hit = ours.get(chunk)
        hits += hit
        assert hit == theirs.get(Request(obj_size=1, obj_id=chunk)), f"request {i}"
    assert 0 < hits <= i


few_prompts = st.lists(
    st.lists(st.integers(0, 24), min_size=1, max_size=5, unique=True), max_size=60
)


def assert_runs_decide_as_chunks(
    policy_class: type[Policy], prompts: Sequence[Sequence[int]], capacity: int, at_once: int
) -> None:
    """Room is made for a whole run, at once or in parts; what is held comes out equal, in order."""
    by_run = ChunkTier(policy_class, capacity, at_once)
    by_chunk = ChunkTier(policy_class, capacity)
    for prompt in prompts:
        fitting = prompt[:capacity]
        held = [chunk for chunk in fitting if chunk in by_run.held]
        by_run.serve(fitting)
        # What is held is used first, so that no chunk makes another of its prompt go.
        for chunk in reversed(held):
            assert by_chunk.get(chunk)
        for chunk in reversed(fitting):
            if chunk not in held:
                assert not by_chunk.get(chunk)
        if not by_chunk.held.issuperset(fitting):
            # A chunk pushed out another one of its own prompt, as none does in a run.
            return
        assert by_run.held == by_chunk.held
        assert by_run.order() == by_chunk.order()


def uniform_ids(n: int) -> list[int]:
    """All of a thousand equally often."""
    rng = random.Random(1)
    return [rng.randrange(1000) for _ in range(n)]


def loops_between_popular_ids(capacity: int) -> list[int]:
    """What is popular by turns with what comes twice and never again."""
    rng, ids = random.Random(7), list[int]()
    for phase in range(0, 400, 2):
        ids += zipf_ids(rng, 100, 3 * capacity)
        ids += list(range(phase * 1000, phase * 1000 + capacity // 2)) * 2
    return ids
