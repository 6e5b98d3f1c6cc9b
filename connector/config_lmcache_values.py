"""LMCache's words as they are written: how their values are read, and what became of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.connector import config_lmcache_words as lmcache
from kvtiers.policies import POLICIES
from kvtiers.tiers.spelling import did_you_mean

_GIB = 1 << 30
_FILE_URL = "file://"


@dataclass(frozen=True)
class Use:
    """What became of a word.

    Attributes:
        of: the word, as it was written.
        origin: where it stands.
        sets: path of the value that it sets; "" if it sets none.
        why_not: what does its job, if it sets none.
        option: the one in the word's mapping that this is about, if it is.

    """

    of: str
    origin: str
    sets: str = ""
    why_not: str = ""
    option: str = ""

    @property
    def word(self) -> str:
        """The word or its option, as an error or a list names it."""
        return f"{self.of}.{self.option}" if self.option else self.of

    @property
    def place(self) -> str:
        """The origin of the value that it sets."""
        is_variable = self.origin.endswith(f" {self.word}")
        return self.origin if is_variable else f"{self.word} in {self.origin}"


def said_of(uses: Iterable[Use]) -> str:
    """One sentence that lists every value which LMCache's words set; "" without one."""
    listed = "; ".join(f"{use.sets} by {use.place}" for use in uses if use.sets)
    return f"Set by LMCache's words: {listed}." if listed else ""


def missed_of(uses: Iterable[Use]) -> str:
    """One sentence that lists every word without effect, by reason; "" without one."""
    by_reason: dict[str, list[str]] = {}
    for use in uses:
        if use.why_not:
            by_reason.setdefault(use.why_not, []).append(use.word)
    listed = "; ".join(f"{', '.join(words)} ({why})" for why, words in by_reason.items())
    return f"Words of LMCache's that set nothing in kvtiers: {listed}." if listed else ""


@dataclass(frozen=True)
class Word:
    """One of LMCache's words, as it was written.

    Attributes:
        name: its spelling in the tables.
        key: its spelling where it stands.
        value: what stands there; of a variable, its text.
        origin: where it stands, such as ``file /etc/lmcache.yaml:3``.
        folder: relative paths are relative to it.

    """

    name: str
    key: str
    value: Any
    origin: str
    folder: Path

    def use(self, sets: str = "", why_not: str = "", option: str = "") -> Use:
        """What became of it, or of one of its options."""
        return Use(self.key, self.origin, sets, why_not, option)


@dataclass(frozen=True)
class Reader:
    """Reads one kind of value.

    Attributes:
        read: raises ValueError, TypeError or OverflowError for what is none.
        wanted: what it must be.

    """

    read: Callable[[Any], Any]
    wanted: str


def _truth(value: object) -> bool:
    text = str(value).strip().lower()
    if text not in ("true", "1", "false", "0"):
        raise ValueError
    return text in ("true", "1")


def _number(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value) if isinstance(value, str) else value
    if not number >= 0:  # so that it stops NaN too
        raise ValueError
    return number


def _bytes(value: object) -> int:
    return int(_number(value) * _GIB)


def _some_bytes(value: object) -> int:
    return _bytes(value) or _refuse()


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _names(value: object) -> list[str]:
    """A list, or what LMCache makes of a text: parts between commas."""
    parts = value if isinstance(value, list) else _text(value).split(",")
    return [part for each in parts if (part := _text(each).strip())]


def _folders(value: object) -> list[str]:
    folders = [part.removeprefix(_FILE_URL) for part in _names(value)]
    return folders if all(part and "://" not in part for part in folders) else _refuse()


def _options(value: object) -> dict[str, Any]:
    options = json.loads(value or "{}") if isinstance(value, str) else value
    if not isinstance(options, dict):
        raise TypeError
    return {str(key): item for key, item in options.items()}


def _policy(value: object) -> str:
    """Of kvtiers', or of LMCache's, in small letters."""
    name = _text(value).lower()
    known = [*POLICIES.names(), *(each.lower() for each in lmcache.POLICIES)]
    if name not in known:
        raise ValueError(did_you_mean(name, known))
    return name


def _refuse() -> Any:
    raise ValueError


TRUTH = Reader(_truth, "it must be true or false")
GIB = Reader(_bytes, "it must be a number of GiB without a unit, as LMCache counts, such as 20")
SOME_GIB = Reader(
    _some_bytes,
    "it must be a number of GiB above 0 without a unit, as LMCache counts, such as 20; all KV "
    "comes and goes through that memory",
)
WHOLE = Reader(_whole, "it must be a whole number")
TEXT = Reader(_text, "it must be a text, in quotes")
NAMES = Reader(_names, "it must be a list of names")
FOLDERS = Reader(_folders, "it must be a folder, such as /nvme/kv or file:///nvme/kv")
OPTIONS = Reader(_options, "it must be a mapping of keys")
POLICY = Reader(_policy, f"it must be one of {', '.join(lmcache.POLICIES)}, or a policy of kvtiers")
