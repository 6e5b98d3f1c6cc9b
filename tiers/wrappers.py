"""Tiers around a tier: what should be slow or broken need not be built so.

For tests, the simulator, and for trying a configuration against a bad day.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from kvtiers.policies import Policy, TierInfo
from kvtiers.tiers.base import ChunkKey, Entry, Namespace, ReadOutcome, Tier, Usage, WriteOutcome

T = TypeVar("T")


class WrapperTier(Tier):
    """Forwards every call to ``inner``; derive from it to change some."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner.config, inner.payload_bytes)
        self.inner = inner
        # A wrapper is as shared and as persistent as what it wraps, which is
        # known per instance only; the interface declares both per class.
        vars(self).update(
            shared=inner.shared,
            persistent=inner.persistent,
            on_disk=inner.on_disk,
            keeps_itself=inner.keeps_itself,
        )

    def probe(self) -> str | None:
        """See ``Tier.probe``."""
        return self.inner.probe()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``."""
        return self.inner.contains(keys)

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``."""
        return self.inner.read(keys, buffers)

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``."""
        return self.inner.write(keys, buffers)

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``."""
        return self.inner.remove(keys)

    def scan(self) -> Iterator[Entry]:
        """See ``Tier.scan``."""
        return self.inner.scan()

    @property
    def chunk_bytes(self) -> int:
        """See ``Tier.chunk_bytes``."""
        return self.inner.chunk_bytes

    def usage(self) -> Usage:
        """See ``Tier.usage``."""
        return self.inner.usage()

    def keep(
        self,
        info: TierInfo,
        make_policy: Callable[[Sequence[TierInfo], Callable[[], float]], Policy],
        *,
        stores: bool,
    ) -> None:
        """See ``Tier.keep``."""
        self.inner.keep(info, make_policy, stores=stores)

    def served_elsewhere(self, keys: Sequence[ChunkKey]) -> None:
        """See ``Tier.served_elsewhere``."""
        self.inner.served_elsewhere(keys)

    def namespaces(self, most: int) -> list[Namespace]:
        """See ``Tier.namespaces``."""
        return self.inner.namespaces(most)

    def close(self) -> None:
        """See ``Tier.close``."""
        self.inner.close()


class LatencyTier(WrapperTier):
    """Behaves as if ``inner`` were at the far end of a link.

    Latencies of calls on several threads overlap. Bytes share the link: one
    call's transfer starts when those before it are through.

    Args:
        inner: the tier to slow down.
        call_seconds: added to each ``contains``, ``read``, ``write``, ``remove``.
        bytes_per_second: of the link, None if it has no limit.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.

    """

    def __init__(
        self,
        inner: Tier,
        call_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._call_seconds = call_seconds
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._link_free_at = 0.0

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``."""
        self._wait(0)
        return self.inner.contains(keys)

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``. Only hits travel."""
        outcomes = self.inner.read(keys, buffers)
        self._wait(outcomes.count(ReadOutcome.HIT))
        return outcomes

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``. Only what was stored travels."""
        outcomes = self.inner.write(keys, buffers)
        self._wait(outcomes.count(WriteOutcome.STORED))
        return outcomes

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``."""
        self._wait(0)
        return self.inner.remove(keys)

    def _wait(self, chunks: int) -> None:
        seconds = self._call_seconds
        if chunks and self._bytes_per_second is not None:
            with self._lock:
                now = self._clock()
                start = max(now, self._link_free_at)
                transfer = chunks * self.payload_bytes / self._bytes_per_second
                self._link_free_at = start + transfer
                seconds += self._link_free_at - now
        if seconds > 0:
            self._sleep(seconds)


class Fault(enum.Enum):
    """What ``FaultyTier`` can do instead of, or before, asking the tier inside.

    There is none that answers a hit with other bytes: to promise that a hit is
    verified is the one thing that a tier may not break.
    """

    ERROR = "error"
    """The call raises OSError."""
    STALL = "stall"
    """The call waits until ``FaultyTier.release``, then goes on."""
    FAILED = "failed"
    """The chunk's outcome is FAILED; not there for ``contains`` and ``remove``."""
    MISS = "miss"
    """The chunk is not there, and there is no room for it (REFUSED)."""
    CORRUPT = "corrupt"
    """A read finds the chunk damaged and drops it; FAILED for a write."""


_READ = {
    Fault.FAILED: ReadOutcome.FAILED,
    Fault.MISS: ReadOutcome.MISS,
    Fault.CORRUPT: ReadOutcome.CORRUPT,
}
_WRITE = {
    Fault.FAILED: WriteOutcome.FAILED,
    Fault.MISS: WriteOutcome.REFUSED,
    Fault.CORRUPT: WriteOutcome.FAILED,
}


class FaultyTier(WrapperTier):
    """Breaks on cue.

    A fault is drawn for every chunk of a call, in order: from ``script`` while it
    lasts, by ``rates`` afterwards. ERROR and STALL of one chunk concern the call.

    Args:
        inner: the tier that answers where no fault is drawn.
        script: faults to draw first, None for a chunk that goes well.
        rates: probability of each fault afterwards.
        calls: the methods that faults are drawn for.
        seed: makes ``rates`` repeatable, for calls from one thread.

    Attributes:
        stalling: set once a call has begun to wait.

    """

    def __init__(
        self,
        inner: Tier,
        script: Iterable[Fault | None] = (),
        rates: Mapping[Fault, float] | None = None,
        calls: Iterable[str] = ("contains", "read", "write", "remove"),
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        self.stalling = threading.Event()
        self._released = threading.Event()
        self._faults = itertools.chain(script, _by_chance(rates or {}, seed))
        self._calls = frozenset(calls)
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``."""
        faults = self._draw("contains", keys)
        answers = iter(self.inner.contains(_sound(keys, faults)))
        return [fault is None and next(answers) for fault in faults]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``."""
        faults = self._draw("read", keys)
        damaged = [k for k, fault in zip(keys, faults, strict=True) if fault is Fault.CORRUPT]
        if damaged:
            self.inner.remove(damaged)
        outcomes = iter(self.inner.read(_sound(keys, faults), _sound(buffers, faults)))
        return [next(outcomes) if fault is None else _READ[fault] for fault in faults]

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``."""
        faults = self._draw("write", keys)
        outcomes = iter(self.inner.write(_sound(keys, faults), _sound(buffers, faults)))
        return [next(outcomes) if fault is None else _WRITE[fault] for fault in faults]

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``."""
        return self.inner.remove(_sound(keys, self._draw("remove", keys)))

    def close(self) -> None:
        """Let stalled calls go, and close the tier inside."""
        self.release()
        self.inner.close()

    def release(self) -> None:
        """Let calls that stall go on, now and from now on."""
        self._released.set()

    def _draw(self, call: str, keys: Sequence[ChunkKey]) -> list[Fault | None]:
        """A fault for each chunk, after waiting or raising where one says so."""
        if call not in self._calls:
            return [None] * len(keys)
        with self._lock:
            faults = [next(self._faults) for _ in keys]
        if Fault.STALL in faults:
            self.stalling.set()
            self._released.wait()
        if Fault.ERROR in faults:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return [None if fault is Fault.STALL else fault for fault in faults]


def _by_chance(rates: Mapping[Fault, float], seed: int) -> Iterator[Fault | None]:
    """Faults without end, drawn by their rates; None where none is."""
    choice = random.Random(seed)  # noqa: S311 - faults, not secrets
    faults = [*rates, None]
    weights = [*rates.values(), 1.0 - sum(rates.values())]
    while True:
        yield choice.choices(faults, weights)[0]


def _sound(items: Sequence[T], faults: Sequence[Fault | None]) -> list[T]:
    """What belongs to chunks without a fault."""
    return [item for item, fault in zip(items, faults, strict=True) if fault is None]
