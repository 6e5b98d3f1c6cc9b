"""Does a policy keep its contract? A test suite for whoever writes one.

Derive a class, say which policy, and run pytest::

    from kvtiers.policies.conformance import PolicyConformance

    class TestMyPolicy(PolicyConformance):
        policy_class = MyPolicy
        prefix_closed = True  # if it never names a parent before its child

A policy that needs a configuration overrides the fixture instead::

        @pytest.fixture
        def policy_factory(self):
            return lambda tiers, clock: MyPolicy(tiers, MyPolicy.Config(k=2), clock)

Needs pytest and hypothesis, which kvtiers does not install.
"""

# The names of rules and tests say what they do and check; a summary would repeat them.
# ruff: noqa: D102

from __future__ import annotations

import gc
import hashlib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from kvtiers.policies.base import ChunkId, Policy, PolicyRequest, Run, TierInfo

Clock = Callable[[], float]
PolicyFactory = Callable[[Sequence[TierInfo], Clock], Policy]

CHUNK_BYTES = 4096
CAPACITY = {"cpu": 4, "fs": 10, "redis": 0}  # in chunks, 0 for unbounded
GROUPS = 2


def three_tiers() -> tuple[TierInfo, ...]:
    """Two tiers that fill up within a test, and one without a bound."""
    return tuple(
        TierInfo(
            name=name,
            capacity=chunks * CHUNK_BYTES or None,
            shared=name == "redis",
            persistent=name != "cpu",
            read_seconds=_slower(i),
            write_seconds=_slower(i),
        )
        for i, (name, chunks) in enumerate(CAPACITY.items())
    )


def _slower(i: int) -> Callable[[int], float]:
    return lambda nbytes: i * (1e-3 + nbytes * 1e-9)


class VirtualClock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Branch:
    """A prompt of the test's prefix forest, and how its chunks are named."""

    numbers: tuple[int, ...]

    def run(self, group: int, begin: int, end: int, kind: str) -> Run:
        """Chunks ``begin`` to ``end`` of the prompt, as a run of one KV-cache group."""
        numbers = [n * GROUPS + group for n in self.numbers]
        ids = [_chunk_id(n, kind) for n in numbers]
        part: Sequence[ChunkId] = tuple(ids[begin:end])
        if kind == "range" and part:
            spaced = range(numbers[begin], numbers[begin] + GROUPS * len(part), GROUPS)
            # A prompt that forks off another is not one range, but its parts are.
            part = spaced if tuple(spaced) == part else part
        return Run(
            chunks=part,
            start=begin,
            chunk_bytes=CHUNK_BYTES,
            group=group,
            parent=ids[begin - 1] if begin else None,
            tenant=f"tenant{self.numbers[0] % 2}",
        )


def _chunk_id(number: int, kind: str) -> ChunkId:
    return number if kind == "range" else hashlib.sha256(b"%d" % number).digest()


class Twins:
    """Two instances of the policy that are told and asked the same.

    Every answer is compared, so a policy that depends on anything but its calls
    (the wall clock, an unseeded generator, the order of a set) is caught.
    """

    def __init__(self, one: Policy, other: Policy) -> None:
        self.one = one
        self.other = other

    def tell(self, hook: str, *args: Any) -> None:
        """Call a hook; what it returns does not matter."""
        getattr(self.one, hook)(*args)
        getattr(self.other, hook)(*args)

    def ask(self, question: str, *args: Any) -> Any:
        """Call a method that answers; an iterable is returned as a list."""
        first, second = (_plain(getattr(p, question)(*args)) for p in (self.one, self.other))
        assert first == second, (
            f"{question}{args} is not deterministic: two instances with the same past "
            f"answer {first!r} and {second!r}"
        )
        return first


def _plain(answer: Any) -> Any:
    return list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else answer


class HierarchyModel(RuleBasedStateMachine):
    """Drives a policy as ``kvtiers.policies.base`` says a hierarchy does."""

    prefix_closed: ClassVar[bool]

    def make_policy(self, clock: Clock) -> Policy:
        raise NotImplementedError

    @initialize(kind=st.sampled_from(["bytes", "range"]))
    def start(self, kind: str) -> None:
        self.kind = kind
        self.clock = VirtualClock()
        self.twins = Twins(self.make_policy(self.clock), self.make_policy(self.clock))
        self.held: dict[str, dict[ChunkId, Run]] = {name: {} for name in CAPACITY}
        self.pinned: set[ChunkId] = set()
        self.branches = [Branch(tuple(range(8)))]
        self.numbers = 8
        self.requests: list[PolicyRequest] = []
        self.arrivals = 0
        self.age = 0.0

    # Steps ------------------------------------------------------------------

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(of=st.integers(0), keep=st.integers(0, 8), n=st.integers(1, 6))
    def fork(self, of: int, keep: int, n: int) -> None:
        """A prompt that shares its beginning with another one, or nothing."""
        old = self.branches[of % len(self.branches)].numbers[:keep]
        self.branches.append(Branch(old + tuple(range(self.numbers, self.numbers + n))))
        self.numbers += n

    @rule(of=st.integers(0))
    def arrive(self, of: int) -> None:
        branch = self.branches[of % len(self.branches)]
        runs = [branch.run(g, 0, len(branch.numbers), self.kind) for g in range(GROUPS)]
        request = PolicyRequest(
            request_id=f"r{self.arrivals}",
            runs=runs,
            arrival=self.clock.now,
            tenant=runs[0].tenant,
            session=f"s{branch.numbers[0]}",
            prompt_tokens=len(branch.numbers) * 16,
        )
        self.arrivals += 1
        self.twins.tell("on_request", request)
        self.requests.append(request)
        _assert_runs("prefetch", self.twins.ask("prefetch", request))

    @rule(data=st.data(), first=st.integers(0, 8))
    def hit(self, data: st.DataObject, first: int) -> None:
        """A request is admitted and gets its leading chunks, or the end of them, from a tier."""
        if not self.requests:
            self.arrive(len(self.branches) - 1)
        request = data.draw(st.sampled_from(self.requests))
        for run in request.runs:
            hits = {tier: _leading(run, held) for tier, held in self.held.items()}
            hits = {tier: n for tier, n in hits.items() if n} or {"gpu": len(run)}
            tier = data.draw(st.sampled_from(list(hits)))
            begin = first if first < hits[tier] else 0
            used = run.head(hits[tier]).tail(begin)
            self.twins.tell("on_access", used, request, tier)
            self._insert_again(used)
        self.twins.tell("on_start", request)

    @rule(of=st.integers(0), group=st.integers(0, GROUPS - 1), data=st.data())
    def store(self, of: int, group: int, data: st.DataObject) -> None:
        """Chunks were computed: into the nearest tier, and wherever they are placed."""
        branch = self.branches[of % len(self.branches)]
        end = data.draw(st.integers(1, len(branch.numbers)))
        begin = data.draw(st.integers(0, end - 1))
        run = branch.run(group, begin, end, self.kind)
        self._insert(run, "cpu")
        for tier in self._places(run):
            self._insert(run, tier)

    @rule(
        of=st.integers(0), group=st.integers(0, GROUPS - 1), tier=st.sampled_from(["fs", "redis"])
    )
    def promote(self, of: int, group: int, tier: str) -> None:
        branch = self.branches[of % len(self.branches)]
        run = branch.run(group, 0, len(branch.numbers), self.kind)
        hit = _leading(run, self.held[tier])
        if hit:
            self._insert(run.head(hit), "cpu")

    @rule(
        of=st.integers(0),
        group=st.integers(0, GROUPS - 1),
        tier=st.sampled_from(["fs", "redis"]),
        older=st.floats(0, 100),
    )
    def find(self, of: int, group: int, tier: str, older: float) -> None:
        """A scan finds chunks one by one, tails first, and what precedes them is not known."""
        self.age += older
        held, branch = self.held[tier], self.branches[of % len(self.branches)]
        # What the interface says of found chunks, older than all others, can't be
        # true of one that another chunk of the tier needs.
        needed = {run.parent for run in held.values()}
        for chunk in reversed(branch.run(group, 0, len(branch.numbers), self.kind).chunks):
            full = CAPACITY[tier] and len(held) >= CAPACITY[tier]
            if not full and chunk not in held and chunk not in needed:
                held[chunk] = Run((chunk,), chunk_bytes=CHUNK_BYTES, group=group)
                self.twins.tell("on_found", held[chunk], tier, self.age)

    @rule(data=st.data(), tier=st.sampled_from(list(CAPACITY)))
    def lose(self, data: st.DataObject, tier: str) -> None:
        """Some chunks vanish or prove corrupt: any, not only leaves."""
        if self.held[tier]:
            ids = list(self.held[tier])
            lost = data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=3))
            self._remove(lost, tier)

    @rule()
    def lose_shared_tier(self) -> None:
        """Another replica emptied it, so that what is evicted now has no other copy."""
        self._remove(list(self.held["redis"]), "redis")

    @rule(of=st.integers(0), n=st.integers(0, 8))
    def pin(self, of: int, n: int) -> None:
        branch = self.branches[of % len(self.branches)]
        for group in range(GROUPS):
            self.pinned |= set(branch.run(group, 0, n, self.kind).chunks)

    @rule()
    def unpin(self) -> None:
        self.pinned.clear()

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.requests:
            i = data.draw(st.integers(0, len(self.requests) - 1))
            request = self.requests.pop(i)
            request.output_tokens = 5
            request.finish_reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
            self.twins.tell("on_finish", request)

    @rule(of=st.integers(0), heat=st.floats(0, 1))
    def measure(self, of: int, heat: float) -> None:
        branch = self.branches[of % len(self.branches)]
        run = branch.run(0, 0, len(branch.numbers), self.kind)
        self.twins.tell("on_heat", run, [heat / (i + 1) for i in range(len(run))])

    @rule(tier=st.sampled_from(list(CAPACITY)))
    def idle(self, tier: str) -> None:
        expired = self.twins.ask("expired", tier)
        _assert_held_once("expired", tier, expired, self.held[tier])
        self._remove([c for c in expired if c not in self.pinned], tier)
        _assert_runs("anticipate", self.twins.ask("anticipate"))
        _assert_runs("favour", self.twins.ask("favour", 4 * CHUNK_BYTES))

    @rule(of=st.integers(0), within=st.floats(0, 1000))
    def foretell(self, of: int, within: float) -> None:
        """Probabilities, one a chunk, or None."""
        branch = self.branches[of % len(self.branches)]
        run = branch.run(0, 0, len(branch.numbers), self.kind)
        chances = self.twins.ask("reuse", run, within)
        if chances is not None:
            assert len(chances) == len(run), f"reuse({len(run)} chunks) returned {len(chances)}"
            assert all(0.0 <= chance <= 1.0 for chance in chances), f"reuse: {chances}"

    # What must hold after each step -----------------------------------------

    @invariant()
    def victims_are_what_the_tier_holds(self) -> None:
        for tier in CAPACITY:
            named = self._victims(tier)
            _assert_held_once("victims", tier, named, self.held[tier])
            missing = set(self.held[tier]) - set(named)
            assert not missing, f"victims('{tier}') never names {missing!r}, which it holds"
            if self.prefix_closed:
                self._assert_leaves_first(tier, named)

    def _victims(self, tier: str) -> list[ChunkId]:
        first = self.twins.ask("victims", tier, CHUNK_BYTES)
        again = self.twins.ask("victims", tier, CHUNK_BYTES)
        assert first == again, f"victims('{tier}') changed something: {first!r}, then {again!r}"
        return list(first)

    def _assert_leaves_first(self, tier: str, named: list[ChunkId]) -> None:
        seen: set[ChunkId] = set()
        for chunk in named:
            parent = self.held[tier][chunk].parent
            assert parent not in seen, (
                f"victims('{tier}') names {parent!r} before {chunk!r}, which needs it"
            )
            seen.add(chunk)

    # What a hierarchy does --------------------------------------------------

    def _insert(self, run: Run, tier: str) -> None:
        """Admit, make room, insert: what does not fit stays out."""
        n = self.twins.ask("admit", run, tier)
        assert isinstance(n, int), f"admit must return an int, not {n!r}"
        assert 0 <= n <= len(run), f"admit of {len(run)} chunks to '{tier}' returned {n}"
        # Room is made for what is not there yet; what is there must not make room.
        new = [c for c in run.chunks[:n] if c not in self.held[tier]]
        fits = self._make_room(tier, len(new), keep=set(run.chunks))
        n = run.chunks.index(new[fits]) if fits < len(new) else n
        if n:
            for i, chunk in enumerate(run.chunks[:n]):
                self.held[tier][chunk] = run.tail(i).head(1)
            self.twins.tell("on_insert", run.head(n), tier)

    def _insert_again(self, run: Run) -> None:
        """What the first tier holds of a run that was used goes where it is wanted by now."""
        held = run.head(_leading(run, self.held["cpu"]))
        for tier in self._places(run, "place_again") if len(held) else ():
            self._insert(held, tier)

    def _make_room(self, tier: str, n: int, keep: set[ChunkId]) -> int:
        if not CAPACITY[tier]:
            return n
        surplus = len(self.held[tier]) + n - CAPACITY[tier]
        if surplus > 0:
            named = self._victims(tier)
            unused = [c for c in named if c not in self.pinned and c not in keep]
            self._evict(unused[:surplus], tier)
        return min(n, CAPACITY[tier] - len(self.held[tier]))

    def _evict(self, chunks: list[ChunkId], tier: str) -> None:
        below = list(CAPACITY)[list(CAPACITY).index(tier) + 1 :]
        for chunk in chunks:
            if any(chunk in self.held[name] for name in below):
                continue
            target = self.twins.ask("demote", chunk, tier)
            assert target is None or target in below, (
                f"demote from '{tier}' must name one of {below} or None, not {target!r}"
            )
            if target is not None:
                self._insert(self.held[tier][chunk], target)
        self._remove(chunks, tier)

    def _remove(self, chunks: list[ChunkId], tier: str) -> None:
        for chunk in chunks:
            del self.held[tier][chunk]
        self.twins.tell("on_remove", chunks, tier)

    def _places(self, run: Run, question: str = "place") -> list[str]:
        below = list(CAPACITY)[1:]
        places = self.twins.ask(question, run)
        assert isinstance(places, list), f"{question} must return names of tiers, not {places!r}"
        assert set(places) <= set(below), f"{question} must name some of {below}, not {places}"
        assert len(places) == len(set(places)), f"{question} names a tier twice: {places}"
        return places


class PolicyConformance:
    """Inherit from it; see the module's text.

    Attributes:
        policy_class: the policy, if it is made from tiers and a clock alone.
        prefix_closed: promise that ``victims`` names a chunk only after those
            chunks of the tier that directly follow it.
        effort: how long hypothesis searches for a sequence of calls that breaks
            the contract; raise ``max_examples`` before a release.

    """

    policy_class: ClassVar[type[Policy]]
    prefix_closed: ClassVar[bool] = False
    effort: ClassVar[settings] = settings(
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    @pytest.fixture
    def policy_factory(self) -> PolicyFactory:
        """Makes a new policy from tiers and a clock."""
        return lambda tiers, clock: self.policy_class(tiers, clock=clock)

    @pytest.fixture
    def policy(self, policy_factory: PolicyFactory) -> Policy:
        """A policy that was told nothing yet."""
        return policy_factory(three_tiers(), VirtualClock())

    def test_keeps_the_contract_in_any_sequence_of_calls(
        self, policy_factory: PolicyFactory
    ) -> None:
        class Machine(HierarchyModel):
            prefix_closed = self.prefix_closed

            def make_policy(self, clock: Clock) -> Policy:
                return policy_factory(three_tiers(), clock)

        run_state_machine_as_test(Machine, settings=self.effort)

    def test_names_no_victims_before_anything_was_inserted(self, policy: Policy) -> None:
        for tier in policy.tiers:
            assert list(policy.victims(tier.name, CHUNK_BYTES)) == []

    def test_unknown_chunks_raise_nothing_and_are_never_victims(self, policy: Policy) -> None:
        run, request = Run((b"never", b"seen"), 3, CHUNK_BYTES, 0, b"before"), PolicyRequest("r")
        policy.on_access(run, request, "gpu")
        policy.on_heat(run, [0.5, 0.5])
        policy.on_finish(request)
        for tier in policy.tiers:
            policy.on_access(run, request, tier.name)
            policy.on_remove(run.chunks, tier.name)
            assert list(policy.victims(tier.name, CHUNK_BYTES)) == []

    def test_a_removed_chunk_is_named_again_only_after_it_is_inserted_again(
        self, policy: Policy
    ) -> None:
        run = Run((b"a", b"b", b"c"), chunk_bytes=CHUNK_BYTES)
        for _ in range(3):
            policy.on_insert(run, "cpu")
            assert set(policy.victims("cpu", CHUNK_BYTES)) == {b"a", b"b", b"c"}
            policy.on_remove([b"c"], "cpu")
            assert set(policy.victims("cpu", CHUNK_BYTES)) == {b"a", b"b"}
            policy.on_remove([b"a", b"b"], "cpu")
            assert list(policy.victims("cpu", CHUNK_BYTES)) == []

    def test_inserting_twice_is_inserting_once(self, policy: Policy) -> None:
        run = Run((b"a", b"b"), chunk_bytes=CHUNK_BYTES)
        policy.on_insert(run, "cpu")
        policy.on_insert(run, "cpu")
        assert sorted(policy.victims("cpu", CHUNK_BYTES)) == [b"a", b"b"]  # type: ignore[type-var]
        policy.on_remove([b"a", b"b"], "cpu")
        assert list(policy.victims("cpu", CHUNK_BYTES)) == []

    def test_tiers_do_not_mix(self, policy: Policy) -> None:
        run = Run((b"a", b"b"), chunk_bytes=CHUNK_BYTES)
        policy.on_insert(run, "cpu")
        policy.on_insert(run.head(1), "fs")
        policy.on_remove([b"a"], "cpu")
        assert list(policy.victims("cpu", CHUNK_BYTES)) == [b"b"]
        assert list(policy.victims("fs", CHUNK_BYTES)) == [b"a"]

    def test_chunks_found_at_start_without_position_or_parent_are_victims_too(
        self, policy: Policy
    ) -> None:
        for chunk in (b"c", b"a", b"b"):
            policy.on_insert(Run((chunk,), chunk_bytes=CHUNK_BYTES), "cpu")
        policy.on_access(Run((b"a", b"b"), 0, CHUNK_BYTES), PolicyRequest("r"), "cpu")
        assert sorted(policy.victims("cpu", CHUNK_BYTES)) == [b"a", b"b", b"c"]  # type: ignore[type-var]

    def test_what_it_remembers_of_chunks_that_are_gone_is_bounded(
        self, policy_factory: PolicyFactory
    ) -> None:
        """Ghosts and sketches may stay, but must stop growing with the chunks seen."""
        tier = TierInfo("cpu", 20 * CHUNK_BYTES)
        policy, sizes = policy_factory((tier,), VirtualClock()), []
        for turn in range(60):
            _churn(policy, turn)
            sizes.append(_reachable(policy))
        early, late = max(sizes[20:30]), max(sizes[50:])
        assert late <= early * 1.1 + 50, (
            f"after {60 * 20} chunks came and went it holds {late} objects, "
            f"after {30 * 20} it held {early}"
        )


def _churn(policy: Policy, turn: int) -> None:
    """Twenty chunks never seen before come, are used, and go."""
    ids = tuple(hashlib.sha256(b"%d %d" % (turn, i)).digest() for i in range(20))
    run = Run(ids, 0, CHUNK_BYTES)
    request = PolicyRequest(f"r{turn}", (run,))
    policy.on_request(request)
    policy.on_start(request)
    policy.on_insert(run.head(policy.admit(run, "cpu")), "cpu")
    policy.on_access(run, request, "cpu")
    policy.on_finish(request)
    policy.on_remove(list(policy.victims("cpu", 20 * CHUNK_BYTES)), "cpu")


def _reachable(root: object) -> int:
    """How many references lead away from what ``root`` holds, code not followed."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    seen, todo, references = {id(root)}, [root], 0
    while todo:
        for found in gc.get_referents(todo.pop()):
            references += 1
            if id(found) not in seen and not isinstance(found, code):
                seen.add(id(found))
                todo.append(found)
    return references


def _leading(run: Run, held: dict[ChunkId, Run]) -> int:
    return next((i for i, c in enumerate(run.chunks) if c not in held), len(run))


def _assert_runs(question: str, runs: list[Any]) -> None:
    for run in runs:
        assert isinstance(run, Run), f"{question} must yield runs, not {run!r}"
        assert len(run), f"{question} yields an empty run"


def _assert_held_once(
    question: str, tier: str, named: list[ChunkId], held: dict[ChunkId, Run]
) -> None:
    twice = {c for c in named if named.count(c) > 1}
    assert not twice, f"{question}('{tier}') names {twice!r} more than once"
    strangers = set(named) - set(held)
    assert not strangers, f"{question}('{tier}') names {strangers!r}, which it does not hold"
