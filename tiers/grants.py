"""How much each writer of a root may announce, so that all together stay under the bound.

At every moment: what is counted, and what the writers may still announce, is at most the
capacity. So whatever they do until the next beat, and in whatever order it is heard of,
the bound holds. A limit is absolute and never shrinks, hence a writer may go by any
version of it that it has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Where there is room, a writer may go on for this long without hearing from the holder.
LARGE = 256 << 20
# And for some beats, if it stores faster than that.
_BEATS = 4


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one writer stands.

    Attributes:
        left: bytes it may still announce.
        unit: bytes of one of its chunks.
        recent: bytes it announced since the last grant.
        wanted: bytes that its stores wait for.

    """

    left: int
    unit: int
    recent: int = 0
    wanted: int = 0


def additions(free: int, writers: Mapping[str, Standing], most_idle: int = LARGE) -> dict[str, int]:
    """What to add to each writer's limit.

    At least a chunk for each that has less, the one with least first. Then what its stores
    wait for, as far as it is no more than its part of what is free; and no more than half
    of what is free for all of them together otherwise: a writer that is idle holds what it
    was given. Whole chunks.

    Args:
        free: bytes that nothing lies in and nobody was promised.
        writers: those who may ask.
        most_idle: bytes that are enough for one that announced nothing of late. What it
            holds is lost to all others.

    """
    added: dict[str, int] = {}
    share = free // (2 * len(writers)) if writers else 0
    part = free // max(1, sum(bool(writer.wanted) for writer in writers.values()))
    for name, writer in sorted(writers.items(), key=lambda item: item[1].left):
        enough = max(LARGE, _BEATS * writer.recent) if writer.recent else most_idle
        ahead = min(share, enough)
        aim = max(ahead, min(part, writer.wanted))
        if writer.left >= max(writer.unit, aim // 2):
            continue
        chunks = max(1, (aim - writer.left) // writer.unit)
        more = min(chunks, free // writer.unit) * writer.unit
        if more:
            added[name] = more
            free -= more
    return added
