"""Sizes and shares as people write them in a configuration."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError

_BYTES = TypeAdapter(ByteSize)
_PERCENT = re.compile(r"\s*(\d*\.?\d+)\s*%\s*")
# Whole bytes, or any number of a larger unit. pydantic ignores what follows the unit.
_SIZE = re.compile(r"\s*(?:\d+\s*[bB]?|\d*\.?\d+\s*(?![bB]\b)[A-Za-z]+)\s*", re.ASCII)


def read_percent(text: str) -> float | None:
    """``20%`` as 0.2; None for what is no percentage."""
    match = _PERCENT.fullmatch(text)
    return float(match[1]) / 100 if match else None


def read_size(text: str) -> int | None:
    """Bytes in ``8GiB``, ``20 GB``, ``4096``; None for what is no size.

    ``g`` and ``GB`` are powers of ten, ``Gi`` and ``GiB`` are powers of two.
    """
    if not _SIZE.fullmatch(text):
        return None
    # Kubernetes writes Gi where everybody else writes GiB.
    spelled = re.sub(r"([KMGTPkmgtp]i)\s*$", r"\1B", text)
    try:
        return int(_BYTES.validate_python(spelled))
    except ValidationError:
        return None


def _share(value: object) -> float:
    share = read_percent(value) if isinstance(value, str) else value
    # No bool, which Python takes for a number.
    if type(share) in (int, float) and 0 <= share <= 1:  # type: ignore[operator]
        return float(share)  # type: ignore[arg-type]
    raise ValueError("it must be a share from 0 to 1, such as 0.2 or 20%")


def _size(value: object) -> int:
    size = read_size(value) if isinstance(value, str) else value
    if type(size) is int and size > 0:
        return size
    raise ValueError("it must be a size, such as 4KiB, 1MiB or 65536")


def _size_or_auto(value: object) -> int | str:
    if value == "auto":
        return "auto"
    try:
        return _size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def read_seconds(value: object, such_as: str) -> int | float:
    """A number of seconds above 0, and finite. Raises ValueError with an example otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise ValueError(f"it must be a number of seconds above 0, without a unit, such as {such_as}")


def seconds(such_as: str) -> BeforeValidator:
    """The same, for a field."""
    return BeforeValidator(lambda value: read_seconds(value, such_as))


def _portion(value: object) -> int | float | None:
    if isinstance(value, str):
        share = read_percent(value)
        value = share if share is not None else read_size(value)
        # None stands for no bound, and a misspelt one must not.
        value = 0 if value is None else value
    if value is None or (type(value) is int and value > 0):
        return value
    if type(value) is float and 0 < value <= 1:
        return value
    raise ValueError("it must be a size or a share of a tier's capacity, such as 10GiB or 20%")


def portion_bytes(portion: float | None, whole: int | None) -> int | None:
    """The bytes of a portion of ``whole``; None for no bound, or for a share of no bound."""
    if isinstance(portion, float):
        return None if whole is None else int(whole * portion)
    return portion


Share = Annotated[float, BeforeValidator(_share)]
"""A number from 0 to 1; a percentage is read too."""

SIZE = BeforeValidator(_size)
"""Among a field's metadata, it says that the field's number is a size."""

Size = Annotated[int, SIZE]
"""A number of bytes above 0; a text with a unit is read too."""

SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
"""The same, or a choice left to the tier."""

PORTION = BeforeValidator(_portion)
"""Among a field's metadata, it says that an int is a size and a float is a share."""

Portion = Annotated[int | float | None, PORTION]
"""A number of bytes, or a share of a whole above 0 and up to 1; None for all of it."""
