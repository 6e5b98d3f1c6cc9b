"""How much of an engine's time measuring may take: some share of computing prompts."""

from __future__ import annotations

from kvtiers.connector.heat import HeatCost

# Seconds that are saved up at most while little is measured, so that a change of load does
# not have all of it spent on a few prompts.
_MOST_SAVED = 1.0


class HeatBudget:
    """An account: computing prompts pays in, measuring takes out. The scheduler's thread only.

    What a measurement takes is known when it has been made. So the account may be overdrawn
    by those under way, and nothing more is measured until that is paid back.

    Args:
        share: of the time of computing prompts, measuring included.

    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = 0.0

    def spent(self, cost: HeatCost) -> None:
        """Of one rank, or of all together."""
        left = self._left + self._share * cost.prefill_s - cost.probe_s
        self._left = min(_MOST_SAVED, left)

    def allows(self) -> bool:
        """Whether one more prompt may be measured. The first may: nothing is known of it."""
        return self._left >= 0
