"""What a use of a prefix is told apart by: the classes of which hazards are learned.

A class is a stratum, which has a hazard by age of its own, and features, which make that
hazard higher or lower, differently by age. All features are such as a live engine knows at
the end of a request; those that are not known yet are NaN, and count as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, nan
from typing import Final

# Strata. The first is the parent of the others: what is known of all.
ANY, OWN, OWN_ENDED, SHARED, REPEATED, LEFT = range(6)
STRATA: Final = 6
FAMILIES: Final = ((OWN, OWN_ENDED), (SHARED, REPEATED), (LEFT,))
"""Strata that have their features, and what these do, in common."""

FEATURES: Final = 24
"""Features of a class. Families with fewer leave the last ones 0."""

OUTPUT: Final = slice(6, 12)
"""The features that are not known before a request has ended."""

_OUTPUTS = (16, 45, 150, 350, 800)
_UNIT = 8.0


@dataclass(slots=True)
class UseClass:
    """A stratum, and the value of each feature; those that are left out are 0."""

    stratum: int
    features: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known of a session when a request of it ended.

    Attributes:
        number: requests of the session before this one.
        gap: seconds since the one before, negative if there was none.
        pace: average binary logarithm of such gaps.
        new_chunks: chunks that no earlier request had.
        chunks: of the prompt.
        message_tokens: of the prompt, beyond the last prompt and its output; None in turn 0.
        output_tokens: -1 if the request has not ended.
        ended: the model gave the turn back to the user.
        agent: the session is of an agent that works for another.

    """

    number: int
    gap: float
    pace: float
    new_chunks: int
    chunks: int
    message_tokens: int | None
    output_tokens: int = -1
    ended: bool = False
    agent: bool = False


def own(turn: Turn, repeated: bool) -> UseClass:
    """The class of what only this session asked for, or that was asked for again as it was."""
    if repeated:
        return shared(turn.number + 1, turn.gap, REPEATED)
    number, gap, output = turn.number, turn.gap, turn.output_tokens
    message = -1 if turn.message_tokens is None else turn.message_tokens
    return UseClass(
        OWN_ENDED if turn.ended else OWN,
        [
            *(number == n for n in range(4)),
            number >= 8,
            _log(number),
            *(nan if output < 0 else output < most for most in _OUTPUTS),
            nan if output < 0 else _log(output),
            _log(gap / _UNIT),
            turn.pace,
            0 <= gap < 15,
            0 <= gap < 45,
            gap > 180,
            _log(turn.chunks),
            _log(turn.new_chunks),
            turn.new_chunks <= 1,
            _log(message / _UNIT),
            0 <= message < 40,
            # The prompt is shorter than what the session had: it began anew.
            turn.message_tokens is not None and message < 0,
            turn.agent,
        ],
    )


def shared(uses: int, gap: float, stratum: int = SHARED) -> UseClass:
    """The class of what several sessions asked for."""
    return UseClass(stratum, [_log(uses), uses <= 1, uses <= 3, gap < 0, _log(gap / _UNIT)])


def left(turn: Turn, kept: int, now_chunks: int) -> UseClass:
    """The class of what a session went on without: an edit, a compaction.

    Args:
        turn: the one that had asked for it.
        kept: chunks at the head of that prompt that the next one has too.
        now_chunks: of the next prompt.

    """
    chunks = max(1, turn.chunks)
    shrunk = min(3.0, _log(4 * now_chunks / chunks))
    return UseClass(
        LEFT, [_log(turn.number), kept / chunks, _log(chunks), shrunk, turn.ended, not kept]
    )


def _log(x: float) -> float:
    return log2(1 + x) if x > 0 else 0.0
