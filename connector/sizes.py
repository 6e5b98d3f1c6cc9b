"""Sizes as people write them, and the wholes that shares are taken of.

A capacity is a number of bytes (``8GiB``, ``20 GB``, ``1073741824``) or a share
(``25%``, ``0.25``) of something that only the serving machine knows: free memory,
or the size of a file system. ``Capacity`` keeps what was written until then.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtiers.tiers.units import read_percent, read_size
from pydantic import ByteSize

EXAMPLES = "8GiB, 20GB, 1073741824, 25% or 0.25"

_FRACTION = re.compile(r"\s*(0?\.\d+|1\.0*)\s*")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A number of bytes or a share of a whole; exactly one of the two is set.

    Attributes:
        nbytes: bytes.
        share: part of the whole, above 0 and at most 1.
        at_most: bytes that a share never exceeds, None for no bound.

    """

    nbytes: int | None = None
    share: float | None = None
    at_most: int | None = None

    @classmethod
    def parse(cls, value: object) -> Capacity:
        """Read what stands in a configuration.

        An integer is bytes, a fraction up to 1 is a share, a text is either. ``g``
        and ``GB`` are powers of ten, ``Gi`` and ``GiB`` are powers of two.

        Raises:
            ValueError: it is neither; the text says what is.

        """
        if isinstance(value, Capacity):
            return value
        if isinstance(value, bool):
            raise _refusal()
        if isinstance(value, int):
            return cls._of_bytes(value)
        if isinstance(value, float):
            return cls._of_float(value)
        if isinstance(value, str):
            return cls._of_text(value)
        raise _refusal()

    @classmethod
    def _of_bytes(cls, nbytes: int) -> Capacity:
        if nbytes <= 0:
            raise _refusal()
        return cls(nbytes=nbytes)

    @classmethod
    def _of_float(cls, value: float) -> Capacity:
        # JSON writers turn large integers into floats such as 8e9.
        if value > 1 and value.is_integer():
            return cls(nbytes=int(value))
        return cls._of_share(value)

    @classmethod
    def _of_share(cls, share: float) -> Capacity:
        if not 0 < share <= 1:
            raise _refusal()
        return cls(share=share)

    @classmethod
    def _of_text(cls, text: str) -> Capacity:
        if (share := read_percent(text)) is not None:
            return cls._of_share(share)
        if match := _FRACTION.fullmatch(text):
            return cls._of_share(float(match[1]))
        if (nbytes := read_size(text)) is None:
            raise _refusal()
        return cls._of_bytes(nbytes)

    def resolve(self, total_bytes: int) -> int:
        """How many bytes it is, where ``total_bytes`` is the whole of a share."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.share is not None
        nbytes = int(total_bytes * self.share)
        return nbytes if self.at_most is None else min(nbytes, self.at_most)

    def __str__(self) -> str:
        """As a person would write it."""
        if self.nbytes is not None:
            return format_bytes(self.nbytes)
        assert self.share is not None
        text = f"{self.share * 100:g}%"
        return text if self.at_most is None else f"{text}, at most {format_bytes(self.at_most)}"


def format_bytes(nbytes: int) -> str:
    """Such as ``8 GB`` where that is exact, else the nearest ``7.5 GiB``."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if nbytes and nbytes % 10**power == 0:
            return f"{nbytes // 10**power} {unit}"
    return ByteSize(nbytes).human_readable(separator=" ").replace(".0 ", " ")


def _refusal() -> ValueError:
    return ValueError(
        f"it is neither a size above 0 nor a share of at most 100%; write for example {EXAMPLES}"
    )


def file_system_bytes(path: str) -> int:
    """Size of the file system that holds ``path``, or will once it is made."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    stat = os.statvfs(place)
    return stat.f_frsize * stat.f_blocks
