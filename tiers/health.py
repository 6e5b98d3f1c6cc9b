"""What the outcome of a call says of its tier: figures, the breaker, the log; and probes.

A tier that is left alone is asked by a probe of our own whether it answers again, and not
by the next request, which would wait for that until its deadline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvtiers.tiers.base import ChunkKey, ReadOutcome, WriteOutcome
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.outages import Outages
from kvtiers.tiers.residency import Residency
from kvtiers.tiers.workers import Op, OpKind

logger = logging.getLogger(__name__)

_LEFT_ALONE = (
    "The %s tier is left alone for now and probed again by itself",
    "The %s tier answers again after %.0f s, and is used.",
)
_NOT_STORED = (
    "Nothing is stored in the %s tier for now; that is tried again by itself",
    "The %s tier takes stores again after %.0f s.",
)
# Any key will do: what matters is that there is an answer.
_PROBED = bytes(16)


class Health:
    """Judges ops as they come back. One thread: the hierarchy's.

    Args:
        residency: for the namespace that is asked for, and what may be asked at all.
        clock: what deadlines are measured on.

    """

    def __init__(self, residency: Residency, clock: Callable[[], float]) -> None:
        self._residency = residency
        self._clock = clock
        names = [tier.name for tier in residency.lower]
        self._outages = {name: Outages(*_LEFT_ALONE, name) for name in names}
        self._store_outages = {name: Outages(*_NOT_STORED, name) for name in names}

    def judge(self, tier: LowerTier, op: Op) -> bool:
        """An op came back, once. Returns True if such ops are not to be submitted from now on."""
        if op.error is not None:
            _log_once(tier, op)
        failures = op.reads.count(ReadOutcome.FAILED) + op.writes.count(WriteOutcome.FAILED)
        if op.error is not None or failures:
            tier.counts["failures"] += max(1, failures)
            # Nobody waits for a scan: it is tried again, and says nothing of the rest. What
            # was given up has been judged: how it ends says nothing of the tier as it is now.
            heard = op.kind is not OpKind.SCAN and not op.given_up
            return heard and self._failed(tier, op.kind, _reason(op))
        if self._clock() >= op.deadline and not op.given_up:
            # Right, but too late: between two steps nobody looked at the clock.
            return self.too_late(tier, op.kind)
        if not op.given_up and op.kind is not OpKind.SCAN:
            self._answers(tier, op.kind)
        return False

    def too_late(self, tier: LowerTier, kind: OpKind) -> bool:
        """A call has missed its deadline. Returns True if the tier is to be left alone."""
        tier.counts["timeouts"] += 1
        return self._failed(tier, kind, f"took longer than its deadline of {tier.deadline:g} s")

    def away(self, tier: LowerTier, why: str) -> None:
        """The tier does not answer, as is known without a call: leave it alone."""
        tier.breaker.trip()
        tier.unseen = True
        self._outages[tier.name].begins(why, self._clock())

    def probe_due(self, tier: LowerTier) -> float:
        """When a tier that is left alone is to be probed; infinite if it is not."""
        # First: each step asks, and a tier that is used may have hundreds of ops.
        if tier.breaker.closed() or not self._residency.may_hold(tier):
            return math.inf
        under_way = any(op.kind is OpKind.PROBE and not op.given_up for op in tier.ops)
        return math.inf if under_way else tier.breaker.probe_at

    def probe(self, tier: LowerTier) -> None:
        """Ask a tier that is left alone whether it answers again, when that is due."""
        now = self._clock()
        if self.probe_due(tier) <= now and tier.breaker.allows():
            key = ChunkKey(self._residency.namespace, _PROBED)
            deadline = now + tier.deadline
            tier.submit(Op(OpKind.PROBE, [key], epoch=self._residency.epoch, deadline=deadline))

    def _answers(self, tier: LowerTier, kind: OpKind) -> None:
        breaker = tier.breaker_of(kind)
        if not breaker.closed():
            tier.unseen |= breaker is tier.breaker
            self._outages_of(tier, kind).ends(self._clock())
        breaker.success(kind)

    def _failed(self, tier: LowerTier, kind: OpKind, why: str) -> bool:
        breaker = tier.breaker_of(kind)
        was_used = breaker.closed()
        if not breaker.failure(kind):
            return False
        tier.counts["breaker_opened"] += was_used and breaker is tier.breaker
        next_try = f"next try in {breaker.cooldown:g} s"
        text = f"{kind.value}() keeps failing, lastly it {why}; {next_try}"
        self._outages_of(tier, kind).begins(text, self._clock())
        return True

    def _outages_of(self, tier: LowerTier, kind: OpKind) -> Outages:
        return (self._store_outages if kind is OpKind.WRITE else self._outages)[tier.name]


def _reason(op: Op) -> str:
    return "failed" if op.error is None else f"raised {type(op.error).__name__}"


def _log_once(tier: LowerTier, op: Op) -> None:
    kind = f"{op.kind.value} {type(op.error).__name__}"
    if kind not in tier.logged:
        tier.logged.add(kind)
        logger.warning(
            "The %s tier failed in %s(); further errors of this kind are only counted.",
            tier.name,
            op.kind.value,
            exc_info=op.error,
        )
