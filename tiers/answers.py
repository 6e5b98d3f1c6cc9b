"""What tiers' workers answer, and what becomes of it: taken in, waited for no longer, dropped.

Workers put what has ended into two queues, from their threads; all else runs on the
hierarchy's.
"""

from __future__ import annotations

from collections import deque

from kvtiers.tiers.eviction import Eviction
from kvtiers.tiers.findings import Findings
from kvtiers.tiers.health import Health
from kvtiers.tiers.lookups import Lookups
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.promotion import Promotion
from kvtiers.tiers.residency import Residency
from kvtiers.tiers.spill import Spill
from kvtiers.tiers.workers import Op, OpKind

# What comes when nothing is left to sweep.
_SWEPT = object()


class Inbox:
    """Ops that have ended. Any thread puts; the hierarchy's takes out."""

    def __init__(self) -> None:
        self.ops: deque[tuple[LowerTier, Op]] = deque()
        self.scans: deque[tuple[LowerTier, Op]] = deque()

    def put(self, tier: LowerTier, op: Op) -> None:
        """An op of the tier has ended, well or not."""
        (self.scans if op.kind is OpKind.SCAN else self.ops).append((tier, op))


class Answers:
    """Takes in what an inbox holds. One thread: the hierarchy's.

    Args:
        inbox: what has ended.
        residency: learns what is where.
        lookups, promotion, spill: learn how what they asked for went.
        eviction: may go on when something ended.
        health: judges each op.

    """

    def __init__(
        self,
        inbox: Inbox,
        residency: Residency,
        lookups: Lookups,
        promotion: Promotion,
        spill: Spill,
        eviction: Eviction,
        health: Health,
    ) -> None:
        self._inbox = inbox
        self._residency = residency
        self._lookups = lookups
        self._promotion = promotion
        self._spill = spill
        self._eviction = eviction
        self._health = health

    def take_in(self) -> None:
        """All that has ended, but for scans."""
        ops = self._inbox.ops
        while ops:
            self._take_in(*ops.popleft())

    def take_in_scans(self) -> None:
        """A part of what scans have found: a large root would stop the engine for seconds."""
        if self._inbox.scans:
            self._take_in(*self._inbox.scans.popleft())
        if not self._residency.go_on():
            self._sweep()

    def overdue(self, tier: LowerTier, op: Op) -> None:
        """The op's deadline has passed, or it was found out before."""
        if op.given_up:
            return
        self._give_up(tier, op)
        if tier.cancel(op):
            self._residency.slots.unpin(op.slots)
        if self._health.too_late(tier, op.kind):
            self._leave_alone(tier, op.kind)

    # Parts ------------------------------------------------------------------

    def _take_in(self, tier: LowerTier, op: Op) -> None:
        tier.returned(op)
        tier.measure(op)
        if op.usage is not None:
            tier.used = op.usage.nbytes
        if self._health.judge(tier, op):
            self._leave_alone(tier, op.kind)
        # What was asked in an earlier epoch, or is no longer waited for,
        # changes nothing any more; only its pins end here.
        if op.epoch == self._residency.epoch and not op.given_up:
            self._apply(tier, op)
        elif op.findings is not None:
            self._residency.later(op.findings.give_back())
        self._residency.slots.unpin(op.slots)
        if op.kind is OpKind.REMOVE:
            tier.removing = False
            tier.stale |= op.removed < len(op.keys)
        elif op.kind is OpKind.SCAN and (op.usage is not None or op.error is not None):
            tier.scanning, tier.scan_seconds = False, op.seconds
            tier.unseen |= op.error is not None
        if op.kind not in (OpKind.CONTAINS, OpKind.PROBE):
            self._eviction.enforce(tier)
        if op.kind in (OpKind.WRITE, OpKind.REMOVE):
            self._spill.resume(tier)

    def _sweep(self) -> None:
        """One step of forgetting what a scan did not find: of one tier, for the same reason."""
        tier = next((tier for tier in self._residency.lower if tier.sweep is not None), None)
        if tier is not None and tier.sweep is not None and next(tier.sweep, _SWEPT) is _SWEPT:
            tier.sweep = None
            self._eviction.enforce(tier)

    def _apply(self, tier: LowerTier, op: Op) -> None:
        if op.kind is OpKind.CONTAINS:
            self._lookups.answered(tier, op, op.found)
        elif op.kind is OpKind.READ:
            self._promotion.landed(tier, op)
        elif op.kind is OpKind.WRITE:
            self._spill.written(tier, op)
        elif op.kind is OpKind.SCAN:
            self._residency.take_in(tier, op.findings or Findings(), complete=op.error is None)

    def _give_up(self, tier: LowerTier, op: Op) -> None:
        """Whoever waits for the op waits no longer."""
        op.given_up = True
        if op.epoch == self._residency.epoch:
            if op.kind is OpKind.READ:
                self._promotion.give_up(op)
            elif op.kind is OpKind.CONTAINS:
                self._lookups.answered(tier, op, [False] * len(op.keys))

    def _leave_alone(self, tier: LowerTier, failed: OpKind) -> None:
        """The tier keeps failing: whoever waits for what it has not begun waits no longer."""
        self._spill.give_up(tier)
        for op in tier.unbegun_for_requests() if failed is not OpKind.WRITE else ():
            if tier.cancel(op):
                self._give_up(tier, op)
                self._residency.slots.unpin(op.slots)
