"""The learner of reuse: its contract, what it learns, and that it forgets what is gone."""

import random
from itertools import islice

import numpy as np
from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.policies.conformance import PolicyConformance
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.prefix_reuse import PrefixReusePolicy
from kvtiers.policies.reuse_classes import OWN, Turn, own
from kvtiers.policies.reuse_hazard import HazardLearner


class TestPrefixReuseConformance(PolicyConformance):
    policy_class = PrefixReusePolicy
    prefix_closed = True


class Tier:
    """A tier of ``capacity`` chunks that serves prompts, as the hierarchy would."""

    def __init__(self, policy_class: type[Policy], capacity: int) -> None:
        self.now, self.capacity, self.served = 0.0, capacity, 0
        self.policy = policy_class([TierInfo("cpu", capacity)], clock=lambda: self.now)
        self.held: set[int] = set()

    def serve(self, now: float, prompt: range, session: str = "", output: int = 100) -> int:
        """Hit length of the prompt."""
        self.now, self.served = now, self.served + 1
        run = Run(prompt)
        request = PolicyRequest(
            f"r{self.served}", (run,), now, session=session, prompt_tokens=256 * len(prompt)
        )
        hit = next((i for i, c in enumerate(prompt) if c not in self.held), len(prompt))
        self.policy.on_request(request)
        if hit:
            self.policy.on_access(run.head(hit), request, "cpu")
        self.policy.on_start(request)
        self.store(run.tail(hit), set(prompt))
        request.output_tokens, request.finish_reason = output, "stop"
        self.policy.on_finish(request)
        return hit

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


def hits_of_returning_and_single_prompts(policy_class: type[Policy]) -> int:
    """Short prompts that come back after a minute among long ones that never do."""
    tier, rng, ids, hits = Tier(policy_class, 120), random.Random(5), iter(range(10**9)), 0
    due: list[tuple[float, range]] = []
    for step in range(3000):
        now = 2.0 * step
        while due and due[0][0] <= now:
            hits += tier.serve(now, due.pop(0)[1])
        start = next(islice(ids, 64, None))
        if rng.random() < 0.5:
            tier.serve(now, range(start, start + 4))
            due.append((now + 60, range(start, start + 4)))
        else:
            tier.serve(now, range(start, start + 30))
    return hits


def test_prompts_that_return_are_kept_before_longer_ones_that_never_do() -> None:
    ours = hits_of_returning_and_single_prompts(PrefixReusePolicy)
    lru = hits_of_returning_and_single_prompts(LruPolicy)
    assert ours > 4 * lru + 1000


def test_what_a_session_went_on_without_goes_first() -> None:
    tier = Tier(PrefixReusePolicy, 40)
    tier.serve(0.0, range(20), "agent")
    tier.serve(1.0, range(100, 110), "other")
    # The agent edits its prompt: five chunks stay, fifteen are left behind.
    run = Run([*range(5), *range(200, 205)])
    tier.serve(2.0, run.chunks, "agent")
    named = list(tier.policy.victims("cpu", 15))
    assert named[:15] == list(range(19, 4, -1))


def test_marks_go_with_what_they_were_on() -> None:
    tier = Tier(PrefixReusePolicy, 50)
    for i in range(2000):
        tier.serve(float(i), range(20 * i, 20 * i + 10))
    policy = tier.policy
    assert isinstance(policy, PrefixReusePolicy)
    # One for each session that is remembered, few for what is held.
    assert len(policy._marks._since) <= 256
    assert len(policy._watches) <= 128


def test_a_hazard_is_learned_from_uses_and_from_waiting() -> None:
    """Uses after an exponential time of mean 100 s, given up on after 200 s."""
    rng, learner = np.random.default_rng(1), HazardLearner()
    use = own(Turn(0, -1.0, 0.0, 4, 4, None, 100), repeated=False)
    for _ in range(100):
        times = rng.exponential(100.0, 64)
        end = np.minimum(times, 200.0)
        strata, rows = np.full(64, OWN), np.tile(use.rows, (64, 1))
        learner.learn(strata, rows, np.zeros(64), end, (times < 200).astype(float))
    curve = learner.curves(strata[:1], rows[:1])[0]
    # A constant hazard has an index that is the hazard.
    assert 0.008 < curve[:12].min() <= curve[:12].max() < 0.0125
