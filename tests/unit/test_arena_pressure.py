"""A full arena makes a hit in a lower tier wait, and never makes it a miss.

As long as anything in the arena can be evicted, or will be once a copy or a load has
ended: in a queue of requests, with a prefetch window, for hybrids, beside stores, and
where the engine leaves requests waiting that have all they need.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hierarchy_kit import DictTier, Stack, prefix
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.policies import Run
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind

# Steps in which every request must have been served: each takes a few at most.
_ENOUGH = 400


@dataclass
class Asked:
    """A request.

    Attributes:
        name: its id.
        runs: one per group.
        needs: chunks that the engine looks up; of a windowed group the last ones only.

    """

    name: str
    runs: tuple[Run, ...]
    needs: list[bytes]


@dataclass
class Engine:
    """Steps as vLLM's scheduler does: it looks, loads, and lets go of the slots a step later.

    Attributes:
        stack: the tiers.
        at_once: requests that it starts in one step at most.
        patience: steps that a request waits, with all it needs, before the engine takes it.

    """

    stack: Stack
    at_once: int = 99
    patience: int = 0
    windowed: frozenset[int] = frozenset()
    waiting: dict[str, Asked] = field(default_factory=dict)
    loading: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    ready_for: dict[str, int] = field(default_factory=dict)

    def arrive(self, *asked: Asked) -> None:
        for request in asked:
            self.waiting[request.name] = request
            self.stack.begin(request.name, *request.runs, windowed=self.windowed)

    def step(self) -> None:
        for name in self.loading:
            self.stack.h.loaded(name)
            self.stack.h.end(name)
        self.loading.clear()
        for request in list(self.waiting.values()):
            if len(self.loading) < self.at_once:
                self._consider(request)
        self.stack.h.tick()
        # Far less than anybody's patience.
        self.stack.clock.now += 0.001

    def _consider(self, request: Asked) -> None:
        if self.stack.h.waits(request.name):
            return
        answers = [self.stack.h.lookup(request.name, key) for key in request.needs]
        assert Lookup.MISS not in answers, f"{request.name} has to compute what a tier holds"
        if set(answers) != {Lookup.HIT}:
            return
        self.ready_for[request.name] = self.ready_for.get(request.name, -1) + 1
        if self.ready_for[request.name] >= self.patience:
            assert -1 not in self.stack.h.load(request.name, request.needs)
            self.stack.h.admitted(request.name, {})
            del self.waiting[request.name]
            self.loading.append(request.name)
            self.served.append(request.name)

    def run(self) -> None:
        for _ in range(_ENOUGH):
            if not self.waiting:
                return
            self.step()
            for workers in self.stack.workers.values():
                workers.run()
        raise AssertionError(f"{list(self.waiting)} still wait")


def whole(name: str, run: Run) -> Asked:
    return Asked(name, (run,), list(run.chunks))


def plain(name: str, prompt: str, n: int) -> Asked:
    return whole(name, prefix(prompt, n))


def hybrid(name: str, prompt: str, n: int) -> Asked:
    """Full attention in group 0; group 1 needs the last two chunks."""
    full, window = prefix(prompt, n, 0), prefix(prompt, n, 1)
    return Asked(name, (full, window), [*full.chunks, *window.chunks[-2:]])


def stack_of(slots: int, *asked: Asked, window: dict[int, int] | None = None) -> Stack:
    """Everything that will be asked for is in a tier below."""
    tier = DictTier()
    for request in asked:
        for run in request.runs:
            tier.put(run)
    stack = Stack(slots, {"disk": tier}, window=window)
    stack.settle()
    return stack


def fill(stack: Stack, chunks: int) -> None:
    """Older KV, all of it evictable."""
    stack.store(prefix("old", chunks))
    stack.settle()
    assert len(stack.ready()) == chunks


@pytest.mark.parametrize("window", [None, {0: 2}, {0: 0}])
@pytest.mark.parametrize("slots", [4, 5, 9])
def test_a_queue_streams_through_an_arena_of_hardly_more_than_one_prompt(slots, window) -> None:
    asked = [plain(f"p{number}", f"p{number}", 4) for number in range(12)]
    stack = stack_of(slots, *asked, window=window)
    fill(stack, slots)
    engine = Engine(stack)
    engine.arrive(*asked)
    engine.run()
    assert sorted(engine.served) == sorted(request.name for request in asked)
    reads = sum(len(op.keys) for op in stack.workers["disk"].submitted if op.kind is OpKind.READ)
    # With a window, what came early may have to come again.
    assert reads == 48 or window is not None


def test_requests_that_share_heads_load_all_of_them_into_a_quarter_of_the_room() -> None:
    heads = [prefix(f"head{number}", 4) for number in range(2)]
    asked = []
    for number in range(8):
        head, tail = heads[number % 2], prefix(f"tail{number}", 4)
        asked.append(whole(f"s{number}", Run((*head.chunks, *tail.chunks), 0, head.chunk_bytes)))
        asked.append(plain(f"p{number}", f"p{number}", 8))
    stack = stack_of((8 * 8 + 8 * 4 + 8) // 4, *asked)
    engine = Engine(stack)
    engine.arrive(*asked)
    engine.run()
    assert len(engine.served) == 16


@pytest.mark.parametrize("slots", [6, 8])
def test_hybrids_load_all_that_they_need(slots) -> None:
    asked = [hybrid(f"h{number}", f"h{number}", 4) for number in range(8)]
    stack = stack_of(slots, *asked)
    fill(stack, slots)
    engine = Engine(stack, windowed=frozenset({1}))
    engine.arrive(*asked)
    engine.run()
    assert len(engine.served) == 8


def test_what_is_held_for_those_who_wait_for_the_engine_keeps_others_waiting_only() -> None:
    asked = [plain(f"p{number}", f"p{number}", 3) for number in range(6)]
    stack = stack_of(4, *asked)
    engine = Engine(stack, at_once=1, patience=10)
    engine.arrive(*asked)
    engine.run()
    # In the order in which they came: nobody overtakes, nobody starves.
    assert engine.served == [request.name for request in asked]


def test_stores_that_only_wait_give_way() -> None:
    request = plain("p", "p", 4)
    stack = stack_of(4, request)
    stack.store(prefix("new", 4))
    # Their copies to the tier have not begun, and pin the arena.
    assert stack.h.pinned() > 0
    engine = Engine(stack)
    engine.arrive(request)
    engine.step()
    stack.workers["disk"].run(OpKind.CONTAINS)
    for _ in range(6):
        engine.step()
        stack.workers["disk"].run(OpKind.READ)
    assert engine.served == ["p"]


REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=REQUESTS,
    hybrids=st.booleans(),
    slots=st.integers(8, 14),
    window=st.sampled_from([None, {0: 0}, {0: 1}, {0: 3}]),
    at_once=st.integers(1, 4),
    patience=st.integers(0, 3),
    stores=st.lists(st.integers(0, 4), max_size=12),
)
def test_in_any_mixture_all_is_loaded(
    requests, hybrids, slots, window, at_once, patience, stores
) -> None:
    kind = hybrid if hybrids else plain
    asked = [kind(f"r{number}", f"p{prompt}", n) for number, (prompt, n) in enumerate(requests)]
    stack = stack_of(slots, *asked, window=window)
    engine = Engine(stack, at_once, patience, frozenset({1} if hybrids else ()))
    engine.arrive(*asked)
    for number, chunks in enumerate(stores):
        engine.step()
        if chunks:
            # Somebody else's prompt is computed meanwhile, and takes what room there is.
            stack.store(prefix(f"other{number}", chunks))
        for workers in stack.workers.values():
            workers.run()
    engine.run()
    assert len(engine.served) == len(asked)
