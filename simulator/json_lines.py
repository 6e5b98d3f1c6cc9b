"""Lines of JSON, each an object, with what is wrong told by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtiers.simulator.errors import TraceError, in_line

# No time or length is larger.
_MOST = 1e18


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file.

    Attributes:
        path: of the file.
        count: which line of the file it is, from 1, lines of nothing counted.
        value: the object.

    """

    path: str
    count: int
    value: dict[str, Any]

    @property
    def place(self) -> str:
        """The file and the line, as an error begins."""
        return in_line(self.path, self.count)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of at least 0 that a float can hold; ``default`` where there is none."""
        value = self.value.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        if not 0 <= value <= _MOST:
            raise self.wrong(key, f"a number from 0 to {_MOST:g}", value)
        return value

    def name(self, key: str, default: str = "") -> str | int:
        """A text or a whole number; ``default`` where there is none."""
        value = self.value.get(key)
        if value is None:
            return default
        if isinstance(value, str | int):
            return value
        raise self.wrong(key, "a text or a whole number", value)

    def listed(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """A list of nothing but ``kind``."""
        value = self.value.get(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.wrong(key, "a list of ids", value)
        return value

    def wrong(self, key: str, wanted: str, value: object) -> TraceError:
        """What to raise for a value that isn't what it must be."""
        text = "missing" if key not in self.value else f"{value!r:.60}"
        return TraceError(f"{self.place}: '{key}' must be {wanted}; it is {text}.")


def read_lines(path: str) -> Iterator[Line]:
    """The lines of a file.

    Raises:
        TraceError: a line is no JSON object.

    """
    for count, value in read_values(path):
        if not isinstance(value, dict):
            raise TraceError(f"{in_line(path, count)}: it must be a JSON object, in braces.")
        yield Line(path, count, value)


def read_values(path: str) -> Iterator[tuple[int, Any]]:
    """What a file's lines hold, whatever it is, and which lines; those of nothing hold none.

    Raises:
        TraceError: a line is no JSON.

    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for count, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                # Without the line's end, after which a line that is cut off would be at column 1.
                yield count, json.loads(text.rstrip())
            except json.JSONDecodeError as error:
                # Its own text counts lines, within this one.
                raise TraceError(
                    f"{in_line(path, count)}: it is no JSON: {error.msg} (column {error.colno})."
                ) from None
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{in_line(path, count)}: it is no JSON: {error}.") from None


def begins_with_key(head: bytes, key: str) -> bool:
    """Whether a file begins with an object that has ``key``.

    Args:
        head: the beginning of the file, which may end within the first line.
        key: what to look for.

    """
    text = head.decode("utf-8", errors="replace").lstrip()
    line, newline, _ = text.partition("\n")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        # A line longer than the beginning: what keys it has can still be seen.
        return not newline and text.startswith("{") and f'"{key}"' in text
    return isinstance(value, dict) and key in value
