"""What the simulator refuses, in the words of its user."""

from __future__ import annotations


class SimulatorError(ValueError):
    """What was asked for can't be simulated; the text is one paragraph that says what to change."""


class TraceError(SimulatorError):
    """A trace can't be read; the text names the file, and the place in it where there is one."""


def in_line(path: str, line: int) -> str:
    """A place in a file of lines, which count from 1, as in editors."""
    return f"{path}, line {line}"


def in_message(path: str, message: int) -> str:
    """A place in a file of messages, which count from 1."""
    return f"{path}, message {message}"


def in_row(path: str, row: int) -> str:
    """A place in a table, whose rows count from 0, as in pandas and pyarrow."""
    return f"{path}, row {row} (counted from 0)"
