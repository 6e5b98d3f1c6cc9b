"""What the simulator refuses, in the words of its user."""

from __future__ import annotations


class SimulatorError(ValueError):
    """What was asked for can't be simulated; the text is one paragraph that says what to change."""


class TraceError(SimulatorError):
    """A trace can't be read; the text names the file, and the row where there is one."""
