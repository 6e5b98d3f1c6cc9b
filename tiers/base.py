"""The interface every tier implements.

A tier is a handful of blocking, batched calls on bytes. The hierarchy gives each
tier its threads, its queues (loads before stores), deadlines, byte budget,
circuit breaker and metrics, so a tier's author writes none of that.

    Exceptions a tier may raise
    ├── TierConfigError      at construction: the configuration cannot work
    └── anything else        a programming error; counted as a failure of every
                             chunk of the call, and the tier's breaker hears of it

What can go wrong at run time is a value, not an exception: see ``ReadOutcome``
and ``WriteOutcome``. An ``OSError`` or a connection error that escapes from a
method is treated as ``FAILED`` for the chunks of that call.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvtiers.policies import Policy, TierInfo
from kvtiers.tiers.units import Portion, Share, read_seconds
from pydantic import BaseModel, ConfigDict, field_validator

# Payload buffers start on this boundary and their length is a multiple of it, so
# that O_DIRECT can read into them and write from them.
ALIGNMENT = 4096
# Threads wait for a device, and no device answers faster for more of them than this.
MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for the bytes of a chunk to mean the same.

    Attributes:
        id: hex digest of ``facts``, safe in file names and Redis keys.
        facts: what went into it, for humans and for explaining a mismatch.
        shareable: False for KV that must not outlive or leave this engine.

    """

    id: str
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # A tier that finds a namespace by its id alone must find the same namespace.
    shareable: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Names one chunk in a tier.

    Attributes:
        namespace: what the bytes mean; equal hashes in different namespaces are
            different chunks.
        hash: prefix hash and KV-cache group, opaque, at most 64 bytes.
        position: index of the chunk in its prefix, -1 if unknown.
        tenant: the request's ``cache_salt``, "" if unknown. Already part of
            ``hash``; here for tiers with quotas.
        parent: hash of the chunk before it in its prefix, None if there is none or it is
            unknown. Here for tiers that evict by themselves.

    """

    namespace: Namespace
    hash: bytes
    position: int = field(default=-1, compare=False)
    tenant: str = field(default="", compare=False)
    parent: bytes | None = field(default=None, compare=False)


class ReadOutcome(enum.Enum):
    """What became of one chunk of a ``read``."""

    HIT = "hit"
    """The buffer holds the chunk, verified."""
    MISS = "miss"
    """The tier does not have it. The buffer's content is undefined."""
    CORRUPT = "corrupt"
    """It was there but damaged or not what it claims to be; now out of the way."""
    FAILED = "failed"
    """The tier could not answer (I/O error, connection lost, timed out)."""
    UNREADABLE = "unreadable"
    """It is there for others: encrypted with a key that this engine lacks, or in clear where
    only encrypted chunks are trusted. A miss; it was left as it is."""


class WriteOutcome(enum.Enum):
    """What became of one chunk of a ``write``."""

    STORED = "stored"
    """Readable by everyone from now on."""
    EXISTS = "exists"
    """The tier had it already; nothing was written."""
    REFUSED = "refused"
    """The tier is full."""
    FAILED = "failed"
    """The tier could not answer. Nobody can read a part of the chunk."""
    TAKEN = "taken"
    """Its place has a chunk that others can read and this engine can't; nothing was written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk as ``scan`` finds it.

    Attributes:
        key: None for something that lies in the tier and is no readable chunk
            (a damaged file, an unknown format).
        nbytes: space it takes in the tier, metadata included.
        last_used: seconds since the epoch.
        where: how an operator finds it: a path, a Redis key.

    """

    key: ChunkKey | None
    nbytes: int
    last_used: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is.

    Attributes:
        nbytes: bytes used, metadata included.
        chunks: chunks held.
        limit: bytes it may use, None if unbounded.
        evicted: chunks that a tier which keeps itself has evicted so far, in this process.

    """

    nbytes: int
    chunks: int
    limit: int | None = None
    evicted: int = 0


class TierConfigError(ValueError):
    """The tier cannot work as configured; the text says what to change."""


class TierConfig(BaseModel):
    """Options common to all tiers; a tier's own ``Config`` derives from it.

    Attributes:
        type: the tier's registered name.
        deadline: seconds a lookup in this tier, or a load from it, may take before
            the chunk counts as a miss; above 0 and finite.
        threads: worker threads the hierarchy runs for this tier.
        headroom: share of its capacity that the hierarchy keeps free, 0 to below 1: it
            evicts when half of that is used, until all of it is free. Room for one
            chunk is kept at least. Means nothing without a capacity.
        tenant_quota: the most that each tenant (``cache_salt``) may hold of it; the
            top-level key of that name if not set.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str
    deadline: float = 5.0
    threads: int = 4
    headroom: Share = 0.2
    tenant_quota: Portion = None

    # Validators, and not bounds of the fields, because a tier that declares a field
    # again, for another default, loses its bounds and keeps its validators.

    @field_validator("deadline", mode="before")
    @classmethod
    def _finite(cls, value: object) -> object:
        return read_seconds(value, "5")

    @field_validator("threads", mode="before")
    @classmethod
    def _countable(cls, value: object) -> object:
        if type(value) is int and 1 <= value <= MAX_THREADS:
            return value
        raise ValueError(f"it must be a whole number from 1 to {MAX_THREADS}")

    @field_validator("headroom")
    @classmethod
    def _leaves_something(cls, value: float) -> float:
        if value < 1:
            return value
        raise ValueError("it must be below 1: a tier that is kept free holds nothing")


class Tier(ABC):
    """Stores chunks of one size. See the module's text for who does what.

    ``read`` and ``write`` are called from several threads at once, each with
    other keys; ``contains``, ``remove``, ``scan`` and ``usage`` may run beside
    them. All may block; none may block for ever.

    Args:
        config: an instance of the class's ``Config``.
        payload_bytes: size of each chunk, a multiple of ``ALIGNMENT``.

    Raises:
        TierConfigError: the configuration cannot work here.

    """

    Config: ClassVar[type[TierConfig]] = TierConfig
    shared: ClassVar[bool] = False
    """Other engines may read and write the same tier."""
    persistent: ClassVar[bool] = False
    """What it holds outlives the engine."""
    on_disk: ClassVar[bool] = False
    """Chunks are files of this host's disks and mounts: vLLM counts hits as coming from there."""
    keeps_itself: ClassVar[bool] = False
    """Those who use it keep its bound together: see ``keep``. ``usage`` waits for nothing then."""

    def __init__(self, config: TierConfig, payload_bytes: int) -> None:
        self.config = config
        self.payload_bytes = payload_bytes

    @classmethod
    def variant(cls, options: Mapping[str, object]) -> type[Tier]:  # noqa: ARG003
        """The class that these options ask for; this one, unless a type has several.

        A type whose options differ with what they name (a folder, a URL) has a class, and
        so a ``Config`` of its own, for each. Called before ``Config`` checks the options,
        with what was written, and after it, with what it made of that: the answers must
        be the same.
        """
        return cls

    @property
    def chunk_bytes(self) -> int:
        """Space one chunk takes in the tier, the unit in which its capacity is shared out.

        The payload's size, unless the tier adds so much to it that it matters.
        """
        return self.payload_bytes

    def probe(self) -> str | None:
        """Ask once, before the tier is used, whether it answers; within seconds.

        Returns:
            None if it does. Else why not, a clause for the log: the engine starts
            without the tier, and asks it again by itself.

        Raises:
            TierConfigError: it answers, and can't be used as configured; or it does
                not, and its configuration says that the engine must not start then.

        """
        return None

    @abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether each chunk is there, in one round trip.

        May be wrong: a chunk can vanish afterwards, and need not be verified.
        """

    @abstractmethod
    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """Fill each buffer with its chunk, without an extra copy.

        ``buffers[i]`` is writable, one-dimensional, ``payload_bytes`` long and
        aligned to ``ALIGNMENT``. Only ``HIT`` says anything about its content.
        """

    @abstractmethod
    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """Store each buffer under its key, atomically per chunk.

        A reader sees all of a chunk or nothing, also when the writer is killed.
        The buffers do not change during the call and are not kept after it.
        """

    @abstractmethod
    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Drop chunks; unknown ones are no error. Returns how many were there.

        A reader of a chunk at that moment gets all of it or a miss.
        """

    @abstractmethod
    def scan(self) -> Iterator[Entry]:
        """Everything the tier holds, other namespaces included, in any order."""

    @abstractmethod
    def usage(self) -> Usage:
        """How full it is, as far as is known without a scan."""

    def keep(  # noqa: B027
        self,
        info: TierInfo,
        make_policy: Callable[[Sequence[TierInfo], Callable[[], float]], Policy],
        *,
        stores: bool,
    ) -> None:
        """Begin to keep the tier's bound, in the background; returns at once.

        The hierarchy calls this once, before any other call, on a tier that
        ``keeps_itself``, and then neither scans that tier nor evicts from it. What it
        knows to lie there are hints, which it forgets by and by.

        Args:
            info: the tier as policies see it.
            make_policy: builds a policy that says what goes first, for this one tier. It is
                the tier's own, and called on a thread of the tier's.
            stores: False if this engine only reads: it leaves the bound to others.

        """

    def served_elsewhere(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027
        """These, and what comes before them in their prefixes, were used without this tier.

        The GPU or a nearer tier served them. Said to a tier that ``keeps_itself``, which
        hears of no other use than its own reads; else the chunks used most would go first.
        Called on the hierarchy's thread: it waits for nothing and raises nothing.
        """

    def namespaces(self, most: int) -> list[Namespace]:  # noqa: ARG002
        """Namespaces that lie in the tier, with their facts: the newest that can be told.

        For the log of who starts: it says why what others stored is not shared. So it must
        be cheap, and neither finds all nor looks at chunks. May run beside any other call,
        ``close`` too.

        Args:
            most: how many at most.

        """
        return []

    def close(self) -> None:  # noqa: B027
        """Release connections and files. No other call follows or runs."""
