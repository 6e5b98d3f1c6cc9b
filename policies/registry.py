"""Finds tiers and policies by name through entry points.

Our own come in by the same door as a stranger's, and nothing is imported before
it is asked for, so that an optional dependency stays optional.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class UnknownNameError(ValueError):
    """No such name in the registry; the text lists what there is."""


class DuplicateNameError(ValueError):
    """Two installed packages claim one name; the text names both."""


class Registry(Generic[T]):
    """The implementations that installed packages offer under one entry point group.

    Args:
        group: entry point group, such as ``kvtiers.tiers``.
        kind: what one of them is called in error texts, such as "tier".
        base: class that each of them must derive from.

    """

    def __init__(self, group: str, kind: str, base: type[T]) -> None:
        self.group = group
        self.kind = kind
        self._base = base

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            other = points.get(point.name)
            # One distribution can be seen twice (an editable install and its
            # build folder): only different targets are a conflict.
            if other is not None and other.value != point.value:
                raise DuplicateNameError(
                    f"Two packages offer a {self.kind} named '{point.name}': "
                    f"{_origin(other)} and {_origin(point)}. Uninstall one of them."
                )
            points[point.name] = point
        return points

    def names(self) -> list[str]:
        """Known names, sorted."""
        return sorted(self._points)

    def get(self, name: str) -> type[T]:
        """The class behind ``name``.

        Raises:
            UnknownNameError: nothing is registered under that name.
            ImportError: it is, but one of its dependencies is not installed, or
                its module lacks the class or raises something.
            TypeError: what is registered is not a subclass of the base class, or
                lacks methods that one must have.

        """
        try:
            point = self._points[name]
        except KeyError:
            raise UnknownNameError(self._unknown(name)) from None
        cls = self._load(point)
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            raise TypeError(
                f"The {self.kind} '{name}' from {_origin(point)} is not a subclass of "
                f"{self._base.__module__}.{self._base.__qualname__}."
            )
        if missing := getattr(cls, "__abstractmethods__", None):
            raise TypeError(
                f"The {self.kind} '{name}' from {_origin(point)} lacks methods that every "
                f"{self.kind} must have: {', '.join(sorted(missing))}."
            )
        return cls

    def _load(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except ImportError as error:
            raise ImportError(
                f"The {self.kind} '{point.name}' from {_origin(point)} needs a package that is not "
                f"installed: {error}.{_advice(point)}"
            ) from error
        except Exception as error:  # a stranger's module may raise anything
            text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: ")
            raise ImportError(
                f"The {self.kind} '{point.name}' from {_origin(point)} cannot be loaded: {text}."
            ) from error

    def _unknown(self, name: str) -> str:
        known = self.names()
        text = f"Unknown {self.kind} '{name}'. Known: {', '.join(known) or 'none'}."
        by_lower_case = {each.lower(): each for each in known}
        close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
        if close:
            text += f" Did you mean '{by_lower_case[close[0]]}'?"
        return text


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an unknown package"
    return f"{point.value} ({package})"


def _advice(point: EntryPoint) -> str:
    """What to install, if the package has an extra of the entry point's name."""
    if point.dist is None or point.name not in (
        point.dist.metadata.get_all("Provides-Extra") or ()
    ):
        return ""
    return f" Try: pip install '{point.dist.name}[{point.name}]'."
