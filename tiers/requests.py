"""What the hierarchy keeps for a request between its arrival and its end."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtiers.policies import PolicyRequest, Run


class Lookup(enum.Enum):
    """Answer to "can this chunk be loaded for this request?"."""

    MISS = "miss"
    """No, and nobody will fetch it for this request: compute it."""
    HIT = "hit"
    """Yes, now."""
    PENDING = "pending"
    """It is on its way into the arena: ask again."""
    UNKNOWN = "unknown"
    """Lower tiers have not answered yet: ask again."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One request.

    Attributes:
        facts: what the policy knows of it.
        windowed: groups that need only the last chunks of a prefix.
        beyond_gpu: what of its runs the GPU did not hold when it arrived.
        considered: the engine has looked at it. Until then what is promoted for it is
            bounded by the prefetch window, and not held.
        weigh_at: when loading is weighed against computing again, while it waits for slots.
        deadline: when waiting ends, set by the first answer that was not final.
        expired: the deadline has passed; every chunk not in the arena is a miss.
        unanswered: key -> lower tiers that still owe an answer.
        asked: keys whose whereabouts were asked.
        wanted: keys to have in the arena together, in order: those to promote, and
            those found there beside them.
        awaited: keys whose read it waits for.
        missed: keys that were answered MISS: not promoted for it any more.
        no_loads: a load failed for it: it computes everything, and loads nothing again.
        held: slots pinned until the request loads, ends or has waited too long.
        hold_until: when the last becomes true.
        source: key -> tier that held it when it was promoted, since it last started.
        served: the same as of when it started: what it was served from.
        started: the engine has run it, and may have preempted it since.
        alone: seconds to compute all of it, None if nobody knows.
        impatient: its wait ends when it would have been computed, before its patience.
        stores: keys may be stored for it. False after a reset it lived through:
            what it computed before belongs to the time before.

    """

    facts: PolicyRequest
    windowed: frozenset[int] = frozenset()
    beyond_gpu: tuple[Run, ...] = ()
    considered: bool = False
    weigh_at: float = 0.0
    deadline: float | None = None
    expired: bool = False
    unanswered: dict[bytes, int] = field(default_factory=dict)
    asked: set[bytes] = field(default_factory=set)
    wanted: dict[bytes, None] = field(default_factory=dict)
    awaited: set[bytes] = field(default_factory=set)
    missed: set[bytes] = field(default_factory=set)
    no_loads: bool = False
    held: set[int] = field(default_factory=set)
    hold_until: float = float("inf")
    source: dict[bytes, str] = field(default_factory=dict)
    served: dict[bytes, str] = field(default_factory=dict)
    started: bool = False
    alone: float | None = None
    impatient: bool = False
    stores: bool = True

    def give_up(self, keys: Iterable[bytes]) -> None:
        """These are misses for this request from now on."""
        for key in keys:
            self.missed.add(key)
            self.wanted.pop(key, None)
            self.awaited.discard(key)
            self.unanswered.pop(key, None)

    def start(self) -> None:
        """The engine runs it. If it is preempted, it may wait, and find, once more."""
        self.started = True
        self.deadline, self.impatient = None, False
        self.expired = False
        self.missed.clear()
        self.served, self.source = self.source, {}
