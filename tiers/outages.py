"""What the log says of a tier that is left alone, or not stored in, and of its return.

One line when it is left alone (why, and for how long at first), one when it is used again
(after how long). A tier that flaps for hours would fill the log with such pairs, so after
one has been said the next waits a while, and then tells how many were not.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# Between the first lines of two such pairs, for one tier.
_QUIET_SECONDS = 600.0


class Outages:
    """Those of one tier. The hierarchy's thread only.

    Args:
        begins: what to say when one begins, with a place for the name; the reason follows.
        ends: and when it ends, with places for the name and for how long it took.
        name: of the tier.

    """

    def __init__(self, begins: str, ends: str, name: str) -> None:
        self._begins = begins
        self._ends = ends
        self._name = name
        self._since: float | None = None
        self._said = False
        self._unsaid = 0
        self._quiet_until = float("-inf")

    def begins(self, why: str, now: float) -> None:
        """The tier is left alone, or still is after it was probed."""
        if self._since is None:
            self._since, self._said = now, False
            self._unsaid += 1
        if self._said or now < self._quiet_until:
            return
        before = self._unsaid - 1
        logger.warning(
            f"{self._begins}: %s%s",
            self._name,
            why,
            f" (and {before} times more since that was last said)" if before else "",
        )
        self._said, self._unsaid, self._quiet_until = True, 0, now + _QUIET_SECONDS

    def ends(self, now: float) -> None:
        """The tier answers again."""
        if self._said and self._since is not None:
            logger.info(self._ends, self._name, now - self._since)
        self._since, self._said = None, False
