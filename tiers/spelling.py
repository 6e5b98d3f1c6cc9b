"""What a word that nobody knows, as it is written, was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_NO_SEPARATORS = str.maketrans("", "", "-_ ")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the nearest spelling, with a space before it; "" without one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def meant(word: str, known: Collection[str]) -> str | None:
    """The one known word that ``word`` is, or is but for case, hyphens, underscores and spaces."""
    if word in known:
        return word
    found = {each for each in known if _bare(each) == _bare(word)}
    return found.pop() if len(found) == 1 else None


def _bare(word: str) -> str:
    return word.lower().translate(_NO_SEPARATORS)
