"""What a use of a prefix is told apart by: the classes of which hazards are learned.

A class is a stratum, which has a hazard by age of its own, and a value of each of a few
features, which multiply that hazard by a factor of their own for each octave of age. All
features are such as a live engine knows at the end of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Strata. The first is the parent of the others: what is known of all.
ANY, OWN, OWN_ENDED, SHARED, REPEATED, LEFT = range(6)
STRATA: Final = 6

FEATURES: Final = 7
_UNUSED = 0

_SIZES = {
    # of what one conversation or agent asked for last
    "turn": 8, "gap": 10, "new": 10, "length": 12, "output": 19, "message": 13, "pace": 10,
    # of what several share
    "uses": 10, "last_gap": 10,
    # of what a session went on without
    "left_turn": 8, "kept": 11, "left_length": 12, "shrunk": 11, "left_stop": 2,
}  # fmt: skip


def _offsets() -> tuple[dict[str, int], int]:
    offsets, end = {}, 1
    for name, size in _SIZES.items():
        offsets[name] = end
        end += size
    return offsets, end


_AT, ROWS = _offsets()


def octave(x: float, most: int) -> int:
    """Number of bits of the whole part of ``x``: 0 for less than 1, at most ``most``."""
    return min(int(x).bit_length(), most) if x > 0 else 0


@dataclass(slots=True)
class UseClass:
    """A stratum, and the row of coefficients of each feature's value (0: none)."""

    stratum: int
    rows: list[int] = field(default_factory=lambda: [_UNUSED] * FEATURES)


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

    """

    number: int
    gap: float
    pace: float
    new_chunks: int
    chunks: int
    message_tokens: int | None
    output_tokens: int = -1
    ended: bool = False


def own(turn: Turn, repeated: bool) -> UseClass:
    """The class of what only this session asked for, or that was asked for again as it was."""
    if repeated:
        return shared(turn.number + 1, turn.gap, REPEATED)
    message = 0
    if turn.message_tokens is not None:
        message = 1 if turn.message_tokens < 0 else 2 + octave(turn.message_tokens / 8, 10)
    output = 0 if turn.output_tokens < 0 else 1 + _half_octave(turn.output_tokens)
    rows = [
        _AT["turn"] + octave(turn.number, 7),
        _AT["gap"] + _gap(turn.gap),
        _AT["new"] + octave(turn.new_chunks, 9),
        _AT["length"] + octave(turn.chunks, 11),
        _AT["output"] + output if output else _UNUSED,
        _AT["message"] + message,
        _AT["pace"] + (0 if turn.number == 0 else 1 + min(8, int(turn.pace))),
    ]
    return UseClass(OWN_ENDED if turn.ended else OWN, rows)


def shared(uses: int, gap: float, stratum: int = SHARED) -> UseClass:
    """The class of what several sessions asked for."""
    found = UseClass(stratum)
    found.rows[:2] = _AT["uses"] + octave(uses, 9), _AT["last_gap"] + _gap(gap)
    return found


def left(turn: Turn, kept: int, now_chunks: int) -> UseClass:
    """The class of what a session went on without: an edit, a compaction, another agent.

    Args:
        turn: the one that had asked for it.
        kept: chunks at the head of that prompt that the next one has too.
        now_chunks: of the next prompt.

    """
    found, chunks = UseClass(LEFT), max(1, turn.chunks)
    found.rows[:5] = (
        _AT["left_turn"] + octave(turn.number, 7),
        _AT["kept"] + min(10, 10 * kept // chunks),
        _AT["left_length"] + octave(chunks, 11),
        _AT["shrunk"] + min(10, octave(32 * now_chunks / chunks, 10)),
        _AT["left_stop"] + int(turn.ended),
    )
    return found


def _gap(seconds: float) -> int:
    return 0 if seconds < 0 else min(9, 1 + octave(seconds / 8, 8))


def _half_octave(tokens: int) -> int:
    x = 1 + tokens / 6
    whole = int(x).bit_length() - 1
    return min(17, 2 * whole + (x >= 1.5 * (1 << whole)))
