"""The suite accepts what keeps the contract and catches what breaks it."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import Phase, settings
from kvtiers.policies import ChunkFacts, ChunkId, Policy, PolicyRequest, Run, ScoredPolicy, TierInfo
from kvtiers.policies.conformance import PolicyConformance
from kvtiers.policies.lru import LruPolicy


class ByAge(ScoredPolicy):
    """A score that falls as time goes by."""

    def score(self, chunk: ChunkFacts, now: float) -> float:
        return (chunk.uses + chunk.heat) / (1 + now - chunk.last_used)


class TestScoredConformance(PolicyConformance):
    policy_class = ByAge
    prefix_closed = True


class Fifo(Policy):
    """Not leaf first, and made by a fixture: what the defaults allow."""

    def __init__(self, tiers, config=None, clock=lambda: 0.0) -> None:
        super().__init__(tiers, config, clock)
        self.chunks: dict[str, dict[ChunkId, None]] = {tier.name: {} for tier in self.tiers}

    def on_insert(self, run: Run, tier: str) -> None:
        for chunk in run.chunks:
            self.chunks[tier].setdefault(chunk)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        for chunk in chunks:
            self.chunks[tier].pop(chunk, None)

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        return iter(self.chunks[tier])


class TestFifoConformance(PolicyConformance):
    @pytest.fixture
    def policy_factory(self):
        return lambda tiers, clock: Fifo(tiers, Fifo.Config(), clock)


class ForgetsToRemove(Fifo):
    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        pass


class RaisesForUnknown(Fifo):
    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        for chunk in chunks:
            del self.chunks[tier][chunk]


class IgnoresWhatWasFound(Fifo):
    def on_found(self, run: Run, tier: str, age: float) -> None:
        pass


class NamesTwice(Fifo):
    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        return iter([*self.chunks[tier], *self.chunks[tier]])


class StopsEarly(Fifo):
    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        return iter(list(self.chunks[tier])[:2])


class ChangesOnVictims(Fifo):
    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        chunks = self.chunks[tier]
        for chunk in list(chunks)[:1]:
            chunks[chunk] = chunks.pop(chunk)
        return iter(list(chunks))


class DependsOnMoreThanItsCalls(Fifo):
    """Every second instance answers otherwise, as with an unseeded generator."""

    made = itertools.count()

    def __init__(self, tiers, config=None, clock=lambda: 0.0) -> None:
        super().__init__(tiers, config, clock)
        self.step = 1 if next(self.made) % 2 else -1

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        return iter(list(self.chunks[tier])[:: self.step])


class OneOrderForAllTiers(Fifo):
    def on_insert(self, run: Run, tier: str) -> None:
        for name in self.chunks:
            super().on_insert(run, name)


class AdmitsTooMany(Fifo):
    def admit(self, run: Run, tier: str) -> int:
        return len(run) + 1


class PlacesNowhereKnown(Fifo):
    def place(self, run: Run) -> Sequence[str]:
        return ["attic"]


class DemotesUpwards(Fifo):
    def place(self, run: Run) -> Sequence[str]:
        return []

    def demote(self, chunk: ChunkId, from_tier: str) -> str | None:
        return "cpu"


class PrefetchesChunks(Fifo):
    def prefetch(self, request: PolicyRequest):
        return request.runs[0].chunks


class ExpiresWhatIsGone(Fifo):
    def expired(self, tier: str) -> Sequence[ChunkId]:
        return ["never seen"]


class RemembersAll(LruPolicy):
    """Leaks one entry for each chunk it ever saw."""

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
        super().on_access(run, request, tier)
        self.uses = getattr(self, "uses", {})
        self.uses.update(dict.fromkeys(run.chunks, 1))


class HeadsFirst(LruPolicy):
    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        return reversed(list(super().victims(tier, n_bytes)))


STATEFUL = "test_keeps_the_contract_in_any_sequence_of_calls"


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (ForgetsToRemove, "does not hold"),
        (IgnoresWhatWasFound, "never names"),
        (NamesTwice, "more than once"),
        (StopsEarly, "never names"),
        (ChangesOnVictims, "changed something"),
        (DependsOnMoreThanItsCalls, "not deterministic"),
        (OneOrderForAllTiers, "does not hold"),
        (AdmitsTooMany, "admit of"),
        (PlacesNowhereKnown, "place must name some of"),
        (DemotesUpwards, "demote from"),
        (PrefetchesChunks, "prefetch must yield runs"),
        (ExpiresWhatIsGone, "does not hold"),
        (HeadsFirst, "which needs it"),
    ],
)
def test_driving_a_broken_policy_names_what_it_breaks(broken, complaint) -> None:
    suite = PolicyConformance()
    suite.prefix_closed = broken is HeadsFirst
    # The same search each time, long enough to meet each fault; shrinking is not the point.
    suite.effort = settings(
        suite.effort, max_examples=1000, derandomize=True, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError, match=complaint):
        getattr(suite, STATEFUL)(lambda tiers, clock: broken(tiers, clock=clock))


def test_a_policy_that_raises_for_unknown_chunks_is_caught() -> None:
    policy = RaisesForUnknown([TierInfo("cpu")])
    with pytest.raises(KeyError):
        PolicyConformance().test_unknown_chunks_raise_nothing_and_are_never_victims(policy)


def test_a_policy_that_never_forgets_is_caught() -> None:
    suite = PolicyConformance()
    with pytest.raises(AssertionError, match="came and went"):
        suite.test_what_it_remembers_of_chunks_that_are_gone_is_bounded(
            lambda tiers, clock: RemembersAll(tiers, clock=clock)
        )
