"""What the outcome of a call says of its tier: figures, the breaker, the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtiers.tiers.base import ReadOutcome, WriteOutcome
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.workers import Op, OpKind

logger = logging.getLogger(__name__)


class Health:
    """Judges ops as they come back. One thread: the hierarchy's.

    Args:
        chunk_bytes: size of a chunk's payload.
        clock: what deadlines are measured on.

    """

    def __init__(self, chunk_bytes: int, clock: Callable[[], float]) -> None:
        self._chunk_bytes = chunk_bytes
        self._clock = clock

    def judge(self, tier: LowerTier, op: Op) -> None:
        """An op came back, once."""
        if op.error is not None:
            _log_once(tier, op)
        failures = op.reads.count(ReadOutcome.FAILED) + op.writes.count(WriteOutcome.FAILED)
        if op.error is not None or failures:
            tier.counts["failures"] += max(1, failures)
            if op.kind is not OpKind.SCAN:
                # Nobody waits for a scan: it is tried again, and says nothing of the rest.
                _failed(tier, op.kind)
        elif self._clock() >= op.deadline and not op.given_up:
            # Right, but too late: between two steps nobody looked at the clock.
            self.too_late(tier, op.kind)
        elif not op.given_up and op.kind is not OpKind.SCAN:
            _answers(tier, op.kind)
            speed = {OpKind.READ: tier.reads, OpKind.WRITE: tier.writes}.get(op.kind)
            if speed is not None:
                speed.observe(len(op.keys) * self._chunk_bytes, op.seconds)

    def too_late(self, tier: LowerTier, kind: OpKind) -> None:
        """A call of that kind has missed its deadline."""
        tier.counts["timeouts"] += 1
        _failed(tier, kind)


def _answers(tier: LowerTier, kind: OpKind) -> None:
    if not tier.breaker.closed():
        tier.unseen = True
        logger.info("The %s tier answers (again), and is used.", tier.name)
    tier.breaker.success(kind)


def _failed(tier: LowerTier, kind: OpKind) -> None:
    if tier.breaker.failure(kind):
        tier.counts["breaker_opened"] += 1
        logger.warning(
            "The %s tier keeps failing or is too slow: it is left alone for now and "
            "probed again by itself.",
            tier.name,
        )


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
