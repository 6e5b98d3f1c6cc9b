"""Promotion before anybody's turn: for requests in the queue, and where the policy says so.

What is promoted here is held for nobody, so that it never keeps out a request whose
turn it is. With a *window*, of each prefix only so much is promoted before the engine
considers its request. Without one all of it is wanted when the request arrives, and
held: ``promotion`` does that, in order, so there is nothing to bound here.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtiers.policies import Policy, PolicyRequest, Run
from kvtiers.tiers.promotion import Promotion
from kvtiers.tiers.requests import RequestState
from kvtiers.tiers.residency import Residency

# Share of the arena for what requests in the queue may find there. With more, what
# comes for the last one would push out what came for the first, who needs it sooner.
_AHEAD_SHARE = 0.5


class Ahead:
    """The prefetch window. The hierarchy's thread only.

    Args:
        residency: what is where.
        promotion: reads chunks into the arena.
        policy: names runs to promote.
        window: chunks per group, None for no bound.

    """

    def __init__(
        self,
        residency: Residency,
        promotion: Promotion,
        policy: Policy,
        window: Mapping[int, int] | None,
    ) -> None:
        self._residency = residency
        self._promotion = promotion
        self._policy = policy
        self._window = window
        self._off = window is not None and not any(window.values())
        # Chunks that came for requests in the queue, by request.
        self._taken: dict[str, int] = {}

    @property
    def bounded(self) -> bool:
        """Whether a request's turn makes a difference."""
        return self._window is not None

    def promote(self, request: RequestState, n: int) -> None:
        """Promote what the window has of the first ``n`` chunks that the GPU lacks."""
        (run,) = request.beyond_gpu
        self.forget(request)
        room = int(self._residency.cpu.arena.slots * _AHEAD_SHARE) - sum(self._taken.values())
        head = self._bounded(run.head(max(0, min(n, room))))
        if len(head):
            self._taken[request.facts.request_id] = len(head)
            self._promotion.prefetch(head)

    def forget(self, request: RequestState) -> None:
        """The request waits in the queue no longer."""
        self._taken.pop(request.facts.request_id, None)

    def prefetch(self, facts: PolicyRequest) -> None:
        """Promote what the policy expects to be asked for after this request."""
        for run in () if self._off else self._policy.prefetch(facts):
            self._promotion.prefetch(self._bounded(run))

    def anticipate(self) -> None:
        """Promote what the policy expects to be asked for soon."""
        for run in () if self._off else self._policy.anticipate():
            self._promotion.prefetch(self._bounded(run))

    def _bounded(self, run: Run) -> Run:
        return run if self._window is None else run.head(self._window.get(run.group, 0))
