"""Where the chunks of a request are: asked of lower tiers, waited for, given up.

All of a request is asked at once when it arrives, and what is found is wanted before
the engine looks. Nothing blocks: answers come back as ops, and a wait ends by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtiers.policies import ChunkId
from kvtiers.tiers.ahead import Ahead
from kvtiers.tiers.base import ChunkKey
from kvtiers.tiers.directory import Chunk, State
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.promotion import Promotion
from kvtiers.tiers.requests import RequestState
from kvtiers.tiers.residency import Residency
from kvtiers.tiers.workers import Op, OpKind
from kvtiers.tiers.worth import Worth


class Lookups:
    """Questions to lower tiers, and the patience of who asks. The hierarchy's thread only.

    Args:
        residency: what is where.
        promotion: told what is wanted.
        ahead: what may be promoted before a request's turn.
        requests: the hierarchy's, by id.
        worth: weighs waiting against computing.
        patience: seconds that a request waits at most.

    """

    def __init__(
        self,
        residency: Residency,
        promotion: Promotion,
        ahead: Ahead,
        requests: Mapping[str, RequestState],
        worth: Worth,
        patience: float,
    ) -> None:
        self._residency = residency
        self._promotion = promotion
        self._ahead = ahead
        self._requests = requests
        self._worth = worth
        self._patience = patience

    def ask(self, request: RequestState, keys: Sequence[ChunkId]) -> None:
        """Ask every lower tier that may be asked, in one batch each, where chunks are."""
        unknown: list[bytes] = []
        for key in keys:
            assert isinstance(key, bytes)
            chunk = self._residency.get(key)
            if chunk is None or self._residency.is_nowhere(chunk):
                unknown.append(key)
            request.asked.add(key)
        named = [ChunkKey(self._residency.namespace, key) for key in unknown]
        for tier in self._residency.lower if unknown else ():
            if not self._residency.may_hold(tier) or not tier.breaker.closed():
                continue
            for key in unknown:
                request.unanswered[key] = request.unanswered.get(key, 0) + 1
            tier.submit(
                Op(
                    OpKind.CONTAINS,
                    named,
                    request_id=request.facts.request_id,
                    epoch=self._residency.epoch,
                    deadline=self._residency.clock() + tier.deadline,
                )
            )

    def answered(self, tier: LowerTier, op: Op, found: Sequence[bool]) -> None:
        """A tier said which of an op's chunks it has; False for all if it is too late."""
        ensure = self._residency.directory.ensure
        there = [ensure(key.hash) for key, yes in zip(op.keys, found, strict=True) if yes]
        request = self._requests.get(op.request_id)
        for run in request.beyond_gpu if request is not None and there else ():
            self._residency.learn(run)
        self._residency.now_in(tier, there)
        if request is None or request.expired:
            return
        self._owes_no_more(request, op)
        self.plan(request)

    @staticmethod
    def _owes_no_more(request: RequestState, op: Op) -> None:
        for key in op.keys:
            left = request.unanswered.get(key.hash, 0) - 1
            if left > 0:
                request.unanswered[key.hash] = left
            else:
                request.unanswered.pop(key.hash, None)

    def plan(self, request: RequestState) -> None:
        """Want the leading run that tiers hold, before the engine looks.

        Not for hybrids: which chunks they need depends on how far all groups
        reach, which the engine's own lookups find out.
        """
        if len(request.beyond_gpu) != 1 or request.windowed or request.unanswered:
            return
        leading: list[Chunk] = []
        for key in request.beyond_gpu[0].chunks:
            chunk = self._residency.get(key)
            if chunk is None or self._residency.is_nowhere(chunk):
                break
            leading.append(chunk)
        if not request.considered and self._ahead.bounded:
            self._ahead.promote(request, len(leading))
        elif any(chunk.state is not State.READY for chunk in leading):
            # All of it, so that what is there already is held for the rest.
            for chunk in leading:
                self._promotion.want(request, chunk.key)

    def consider(self, request: RequestState) -> None:
        """The engine looks at the request: from now on all of it may be promoted, and held."""
        if request.considered:
            return
        request.considered = True
        if self._ahead.bounded:
            self._ahead.forget(request)
            self.plan(request)
        self._promotion.let_go(request)
        slow = self._worth.slow_to_say(request)
        for _, op in slow:
            # The answer is of use to others only.
            op.request_id = ""
            self._owes_no_more(request, op)
        if slow:
            self.plan(request)

    def ends(self, request: RequestState) -> bool:
        """Whether the request has waited as long as it may, counted from the first question.

        That is its patience, or until it would have been computed if that is sooner. What
        has not landed by then is a miss for it.
        """
        now = self._residency.clock()
        if request.deadline is None:
            patience = self._worth.patience(request, self._patience)
            request.impatient = patience < self._patience
            request.deadline = now + patience
        if now < request.deadline:
            return False
        if request.impatient:
            self._worth.computes(request, [*request.wanted, *request.awaited])
        self.expire(request)
        return True

    def expire(self, request: RequestState) -> None:
        """What has not landed by now is a miss for this request."""
        request.expired = True
        request.unanswered.clear()
        self._promotion.forget(request)
