"""The learner of reuse: its contract, what it learns, and that it forgets what is gone."""

import random
import tracemalloc
from collections.abc import Sequence
from itertools import islice

import pytest
from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.conformance import PolicyConformance
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.prefix_reuse import PrefixReusePolicy


class TestPrefixReuseConformance(PolicyConformance):
    policy_class = PrefixReusePolicy
    prefix_closed = True


class Tier:
    """A tier of ``capacity`` chunks that serves prompts, as the hierarchy would."""

    def __init__(self, policy_class: type[Policy], capacity: int) -> None:
        self.now, self.capacity, self.served = 0.0, capacity, 0
        self.policy = policy_class([TierInfo("cpu", capacity)], clock=lambda: self.now)
        self.held: set[int] = set()

    def serve(
        self,
        now: float,
        prompt: Sequence[int],
        session: str = "",
        reason: str = "stop",
        agent: str = "",
        tenant: str = "",
        output: int | None = 100,
    ) -> int:
        """Hit length of the prompt, of which the answer has so many tokens or goes on."""
        self.now, self.served = now, self.served + 1
        run = Run(prompt)
        request = PolicyRequest(
            f"r{self.served}", (run,), now, session=session, prompt_tokens=256 * len(prompt)
        )
        request.tenant, request.hints = tenant, {"agent": agent}
        hit = next((i for i, c in enumerate(prompt) if c not in self.held), len(prompt))
        self.policy.on_request(request)
        if hit:
            self.policy.on_access(run.head(hit), request, "cpu")
        self.policy.on_start(request)
        self.store(run.tail(hit), set(prompt))
        if output is not None:
            request.output_tokens, request.finish_reason = output, reason
            self.policy.on_finish(request)
        return hit

    def chance(self, prompt: Sequence[int], within: float) -> float:
        """How likely the end of a prompt is used within so many seconds."""
        of_each = self.policy.reuse(Run(prompt), within)
        assert of_each is not None
        return of_each[-1]

    def store(self, run: Run, used: set[int]) -> None:
        run = run.head(self.policy.admit(run, "cpu"))
        surplus = len(self.held) + len(run) - self.capacity
        if surplus > 0:
            named = (c for c in self.policy.victims("cpu", surplus) if c not in used)
            out = list(islice(named, surplus))
            self.policy.on_remove(out, "cpu")
            self.held.difference_update(out)
        if len(run):
            self.policy.on_insert(run, "cpu")
            self.held.update(run.chunks)


# Of each kind of prompt: how many chunks, why its request ends, which agent of a session of its
# own asks, and whether it comes again.
Kind = tuple[int, str, str, bool]
BY_LENGTH: tuple[Kind, Kind] = (4, "stop", "", True), (30, "stop", "", False)
BY_REASON: tuple[Kind, Kind] = (10, "tool_use", "", True), (10, "end_turn", "", False)
BY_AGENT: tuple[Kind, Kind] = (10, "stop", "helper", True), (10, "stop", "", False)


def after_returning_and_single_prompts(
    policy_class: type[Policy], kinds: tuple[Kind, Kind]
) -> tuple[Tier, float]:
    """Prompts that come back after a minute among others that never do; the share of hits."""
    tier, rng, ids = Tier(policy_class, 120), random.Random(5), iter(range(10**9))
    hits, asked = 0, 0
    due: list[tuple[float, range, str, str]] = []
    for step in range(3000):
        now = 2.0 * step
        while due and due[0][0] <= now:
            _, prompt, reason, agent = due.pop(0)
            asked += len(prompt)
            hits += tier.serve(now, prompt, agent and f"s{prompt.start}", reason, agent)
        start = next(islice(ids, 64, None))
        chunks, reason, agent, returns = kinds[rng.random() < 0.5]
        prompt = range(start, start + chunks)
        tier.serve(now, prompt, agent and f"s{start}", reason, agent)
        if returns:
            due.append((now + 60, prompt, reason, agent))
    return tier, hits / asked


@pytest.mark.parametrize("kinds", [BY_LENGTH, BY_REASON, BY_AGENT])
def test_prompts_that_return_are_kept_before_those_that_never_do(kinds: tuple[Kind, Kind]) -> None:
    _, ours = after_returning_and_single_prompts(PrefixReusePolicy, kinds)
    _, lru = after_returning_and_single_prompts(LruPolicy, kinds)
    assert ours > 0.6
    assert lru == 0.0


class ToldLate(PrefixReusePolicy):
    """Hears of what came in when its request has ended, as of a short answer."""

    def setup(self) -> None:
        super().setup()
        self._late: list[tuple[Run, str]] = []

    def on_insert(self, run: Run, tier: str) -> None:
        self._late.append((run, tier))

    def on_finish(self, request: PolicyRequest) -> None:
        super().on_finish(request)
        while self._late:
            super().on_insert(*self._late.pop(0))


@pytest.mark.parametrize("kinds", [BY_LENGTH, BY_REASON])
def test_what_comes_in_after_its_request_has_ended_is_known_as_well(
    kinds: tuple[Kind, Kind],
) -> None:
    _, in_time = after_returning_and_single_prompts(PrefixReusePolicy, kinds)
    _, late = after_returning_and_single_prompts(ToldLate, kinds)
    assert late == pytest.approx(in_time, abs=0.05)


def test_where_nothing_tells_what_returns_the_order_is_lrus() -> None:
    ours, lru = Tier(PrefixReusePolicy, 200), Tier(LruPolicy, 200)
    rng, now = random.Random(3), 0.0
    hits = list[tuple[int, int]]()
    for _ in range(3000):
        now += rng.expovariate(1.0)
        prompt = range(10 * (which := rng.randrange(50)), 10 * which + 10)
        hits.append((ours.serve(now, prompt), lru.serve(now, prompt)))
    assert all(mine == its for mine, its in hits)


def test_what_is_worth_less_than_what_is_there_is_not_taken() -> None:
    tier, _ = after_returning_and_single_prompts(PrefixReusePolicy, BY_LENGTH)
    admitted = []
    for name, chunks in (("returns", 4), ("single", 30)):
        run = Run(range(10**9, 10**9 + chunks))
        request = PolicyRequest(name, (run,), tier.now, prompt_tokens=256 * chunks)
        tier.policy.on_request(request)
        admitted.append(tier.policy.admit(run, "cpu"))
        tier.policy.on_finish(request)
    assert admitted[0] == 4
    assert admitted[1] < 30


@pytest.mark.parametrize("session", ["agent", ""])
def test_what_a_session_went_on_without_goes_first(session: str) -> None:
    tier = Tier(PrefixReusePolicy, 40)
    tier.serve(0.0, range(100, 110), "other")
    tier.serve(1.0, range(20), session)
    # The agent edits its prompt: twelve chunks stay, eight are left behind.
    tier.serve(2.0, [*range(12), *range(200, 205)], session)
    named = list(tier.policy.victims("cpu", 8))
    assert named[:8] == list(range(19, 11, -1))


def test_what_others_use_too_is_not_left_behind_by_one() -> None:
    tier = Tier(PrefixReusePolicy, 40)
    tier.serve(0.0, range(100, 110), "other")
    tier.serve(1.0, range(10), "one")
    tier.serve(2.0, range(10), "two")
    tier.serve(3.0, range(200, 210), "two")
    assert list(tier.policy.victims("cpu", 10))[:10] == list(range(109, 99, -1))


def test_what_is_found_later_was_used_later() -> None:
    tier = Tier(PrefixReusePolicy, 40)
    tier.policy.on_found(Run((1,)), "cpu", 5.0)
    tier.policy.on_found(Run((2,)), "cpu", 5.1)
    tier.serve(600.0, range(10, 12))
    tier.now = 3600.0
    tier.policy.on_found(Run((3,)), "cpu", 5.0)
    assert list(tier.policy.victims("cpu", 40)) == [1, 2, 11, 10, 3]


def test_marks_go_with_what_they_were_on() -> None:
    tier = Tier(PrefixReusePolicy, 50)
    for i in range(2000):
        tier.serve(float(i), range(20 * i, 20 * i + 10))
    policy = tier.policy
    assert isinstance(policy, PrefixReusePolicy)
    # One for each session that is remembered, few for what is held.
    assert len(policy._marks._since) <= 256
    assert len(policy._watches) <= 128


def test_what_returns_is_told_from_what_does_not() -> None:
    tier, _ = after_returning_and_single_prompts(PrefixReusePolicy, BY_LENGTH)
    policy, now, chances = tier.policy, tier.now, []
    for name, chunks, first in (("returns", 4, 10**9), ("single", 30, 10**10)):
        tier.now = now
        run = Run(range(first, first + chunks))
        request = PolicyRequest(name, (run,), tier.now, prompt_tokens=256 * chunks)
        policy.on_request(request)
        policy.on_insert(run.head(2), "cpu")
        request.output_tokens, request.finish_reason = 100, "stop"
        policy.on_finish(request)
        policy.on_insert(run, "cpu")
        for age, within in (0.0, 80.0), (0.0, 20.0), (100.0, 80.0):
            tier.now = now + age
            of_each = policy.reuse(run, within)
            assert of_each is not None
            assert len(of_each) == chunks
            assert len(set(of_each)) == 1
            chances.append(of_each[0])
    soon, at_once, late = chances[:3]
    assert soon > 0.6
    assert at_once < 0.3
    assert late < 0.3
    assert max(chances[3:]) < 0.2


def test_what_nobody_knows_is_not_expected_back() -> None:
    tier, _ = after_returning_and_single_prompts(PrefixReusePolicy, BY_LENGTH)
    run = Run(range(10**9, 10**9 + 4))
    of_each = tier.policy.reuse(run, 10.0)
    assert of_each is not None
    assert len(of_each) == 4
    assert max(of_each) < 0.1


def test_a_prefix_that_many_share_is_known_to_return_though_none_of_them_does() -> None:
    tier, head = Tier(PrefixReusePolicy, 400), range(10)
    for number in range(200):
        tail = range(20 * number + 100, 20 * number + 110)
        tier.serve(10.0 * number, [*head, *tail], f"s{number}")
    assert tier.chance(head, 20.0) > 0.4
    assert tier.chance([*head, *tail], 20.0) < 0.1


def test_what_sessions_leave_is_known_to_return_where_they_come_back_to_it() -> None:
    """They try two ends of a prompt in turn, among prompts that never return."""
    tier, ids, now = Tier(PrefixReusePolicy, 400), iter(range(10**9)), 0.0

    def new(chunks: int) -> list[int]:
        return list(islice(ids, chunks))

    for number in range(61):
        head, ends = new(6), (new(4), new(4))
        for turn in range(8 if number < 60 else 2):
            now += 10.0
            tier.serve(now, head + ends[turn % 2], f"s{number}")
            tier.serve(now + 0.5, new(10), f"once at {now}")
    assert tier.chance(head + ends[0], 30.0) > 0.25


def test_the_answer_says_nothing_of_a_prompt_that_is_asked_again_as_it_was() -> None:
    """But of a conversation: those here go on after short answers, and end with a long one."""
    tier, rng, now = Tier(PrefixReusePolicy, 400), random.Random(1), 0.0
    ids = iter(range(10**9))
    for number in range(200):
        prompt, short = list(islice(ids, 4)), True
        while short:
            now, short = now + 5.0, rng.random() < 0.7
            tier.serve(now, prompt, f"s{number}", output=10 if short else 1000)
            prompt += islice(ids, 2)
    prompts = [list(islice(ids, 4)) for _ in range(5)]
    twice, once = prompts[:3], prompts[3:]
    for prompt in twice:
        tier.serve(now + 5.0, prompt)
    answers = (10, 1000, None)
    for prompt, output in [*zip(twice, answers, strict=True), *zip(once, answers, strict=False)]:
        tier.serve(now + 15.0, prompt, output=output)
    short, long, unanswered = (tier.chance(prompt, 20.0) for prompt in twice)
    assert short == long == unanswered
    short, long = (tier.chance(prompt, 20.0) for prompt in once)
    assert short > 0.8
    assert long < 0.1


def test_an_agent_does_not_leave_behind_what_its_session_needs() -> None:
    tier = Tier(PrefixReusePolicy, 60)
    tier.serve(0.0, range(100, 110), "other")
    tier.serve(1.0, range(20), "one")
    tier.serve(2.0, range(200, 210), "one", agent="helper")
    assert list(tier.policy.victims("cpu", 10))[:10] == list(range(109, 99, -1))


def test_sessions_of_one_name_are_of_different_tenants() -> None:
    tier = Tier(PrefixReusePolicy, 60)
    tier.serve(0.0, range(100, 110), "other")
    tier.serve(1.0, range(20), "one", tenant="here")
    tier.serve(2.0, range(200, 210), "one", tenant="there")
    assert list(tier.policy.victims("cpu", 10))[:10] == list(range(109, 99, -1))


def test_chunks_are_named_once_though_nobody_knows_where_they_begin() -> None:
    """As where LMCache stores what it has not seen in a prompt: all runs begin at 0."""
    tier = Tier(PrefixReusePolicy, 40)
    for chunks in ((1, 2, 3), (2, 3, 4), (0, 1), (3, 4, 5), (9,), (8, 9)):
        request = PolicyRequest("portion", (Run(chunks),))
        tier.policy.on_request(request)
        assert tier.policy.admit(Run(chunks), "cpu") == len(chunks)
        tier.policy.on_insert(Run(chunks), "cpu")
        tier.policy.on_finish(request)
    assert sorted(tier.policy.victims("cpu", 40)) == [0, 1, 2, 3, 4, 5, 8, 9]


def test_names_of_sessions_take_little_room_however_long_they_are() -> None:
    tier = Tier(PrefixReusePolicy, 40)
    tracemalloc.start()
    try:
        for n in range(80):
            tier.serve(float(n), range(10 * n, 10 * n + 5), f"{n}" + "x" * 1_000_000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The last few requests are remembered as they are.
    assert taken < 30_000_000


def test_long_names_that_differ_are_of_different_sessions() -> None:
    tier = Tier(PrefixReusePolicy, 40)
    name = "x" * 200
    tier.serve(0.0, range(10), name + "1")
    tier.serve(1.0, range(20, 30), name + "2")
    tier.serve(2.0, range(100, 105), name + "1")
    # Only the first session has gone on without what it had.
    assert list(tier.policy.victims("cpu", 10))[:10] == list(range(9, -1, -1))
