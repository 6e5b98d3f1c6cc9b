"""What a policy raised, for people: what it was, and where in the policy's own code."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from types import CodeType

_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as text, which always finds its way from one process to another.

    Attributes:
        what: its type and message, in a line.
        where: file, line and function.

    """

    what: str
    where: str


def fault_of(error: BaseException, module: str) -> Fault:
    """What was raised, and the innermost place of it in the package of ``module``.

    If the package had no part in it, as where it gave a wrong answer, the innermost of all.
    """
    frames = [
        (frame.f_code, line, str(frame.f_globals.get("__name__")))
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [each for each in frames if _package(each[2]) == _package(module)]
    code, line, _ = (own or frames)[-1]
    return Fault(told(error), _place(code, line))


def told(error: BaseException) -> str:
    """An exception's type and message, in a line."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line}, in {code.co_qualname}"


def _package(module: str) -> str:
    return module.partition(".")[0]
