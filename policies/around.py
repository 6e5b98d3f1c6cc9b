"""A policy around another one, which decides all that it does not decide itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtiers.policies.base import ChunkId, Policy, PolicyRequest, Run


class PolicyAround(Policy):
    """Tells the inner policy everything and answers as it does, as far as not overridden.

    Args:
        inner: decides; told of everything.

    """

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        super().__init__(inner.tiers, inner.config, inner.clock, inner.recompute_seconds)

    def on_request(self, request: PolicyRequest) -> None:
        """See ``Policy``."""
        self.inner.on_request(request)

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:
        """See ``Policy``."""
        self.inner.on_access(run, request, tier)

    def on_start(self, request: PolicyRequest) -> None:
        """See ``Policy``."""
        self.inner.on_start(request)

    def on_finish(self, request: PolicyRequest) -> None:
        """See ``Policy``."""
        self.inner.on_finish(request)

    def on_heat(self, run: Run, heat: Sequence[float]) -> None:
        """See ``Policy``."""
        self.inner.on_heat(run, heat)

    def on_insert(self, run: Run, tier: str) -> None:
        """See ``Policy``."""
        self.inner.on_insert(run, tier)

    def on_found(self, run: Run, tier: str, age: float) -> None:
        """See ``Policy``."""
        self.inner.on_found(run, tier, age)

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """See ``Policy``."""
        self.inner.on_remove(chunks, tier)

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        """See ``Policy``."""
        return self.inner.victims(tier, n_bytes)

    def expired(self, tier: str) -> Iterable[ChunkId]:
        """See ``Policy``."""
        return self.inner.expired(tier)

    def admit(self, run: Run, tier: str) -> int:
        """See ``Policy``."""
        return self.inner.admit(run, tier)

    def place(self, run: Run) -> Sequence[str]:
        """See ``Policy``."""
        return self.inner.place(run)

    def place_again(self, run: Run) -> Sequence[str]:
        """See ``Policy``."""
        return self.inner.place_again(run)

    def demote(self, chunk: ChunkId, from_tier: str) -> str | None:
        """See ``Policy``."""
        return self.inner.demote(chunk, from_tier)

    def reuse(self, run: Run, within: float) -> Sequence[float] | None:
        """See ``Policy``."""
        return self.inner.reuse(run, within)

    def prefetch(self, request: PolicyRequest) -> Iterable[Run]:
        """See ``Policy``."""
        return self.inner.prefetch(request)

    def anticipate(self) -> Iterable[Run]:
        """See ``Policy``."""
        return self.inner.anticipate()

    def favour(self, n_bytes: int) -> Iterable[Run]:
        """See ``Policy``."""
        return self.inner.favour(n_bytes)


def answers(policy: Policy, question: str) -> bool:
    """Whether the policy, or one inside it, has an answer of its own to ``question``.

    Who asks often need not ask those that only have the default.
    """
    while isinstance(policy, PolicyAround):
        if getattr(type(policy), question) is not getattr(PolicyAround, question):
            return True
        policy = policy.inner
    return getattr(type(policy), question) is not getattr(Policy, question)
