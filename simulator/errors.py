"""What the simulator refuses, in the words of its user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SimulatorError(ValueError):
    """What was asked for can't be simulated; the text is one paragraph that says what to change."""


class TraceError(SimulatorError):
    """A trace can't be read; the text names the file, and the row where there is one."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the nearest spelling, with a space before it; "" without one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
