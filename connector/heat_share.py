"""Heat that engines tell each other, through a tier that they share.

A side log of the tier: an entry is stored like a chunk, under a name that all engines of
a namespace know, the hour and a number. A store does not replace what is there, so each
number has one writer, and who reads goes on until a number is missing. So any tier can
carry it, with its checksums, its encryption and its bound; an entry takes a chunk's space,
and is evicted like one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvtiers.connector.heat_log import Measured
from kvtiers.connector.heat_records import Prompt, decode, encode
from kvtiers.policies import Run
from kvtiers.tiers import Namespace
from kvtiers.tiers.base import ChunkKey, ReadOutcome, Tier, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer

logger = logging.getLogger(__name__)

# Of prompts, ours that wait to be told, and others' that wait to be taken.
_MOST_PROMPTS = 256
# An entry has a chunk's size, so they are few.
_WRITE_SECONDS = 600.0
_READ_SECONDS = 60.0
_HOUR = 3600
# Entries of an hour that are read, and others' that are stepped over to write one.
_MOST_ENTRIES = 256
_MOST_TRIES = 16

_NO_ENTRY = frozenset({ReadOutcome.MISS, ReadOutcome.FAILED})
_SOMEBODYS = frozenset({WriteOutcome.EXISTS, WriteOutcome.TAKEN})


class HeatShare:
    """One engine's part. ``note`` and ``take`` are the scheduler's thread's, and never block.

    Args:
        tier: the one that carries it.
        namespace: of the engine, now: one that is private is told nobody.
        writes: False for an engine that only reads the tier.
        clock: seconds since the epoch.
        spent: seconds of the processor that the calling thread has had.

    Attributes:
        seconds: that the thread that exchanges has had, so far.

    """

    def __init__(
        self,
        tier: Tier,
        namespace: Callable[[], Namespace],
        *,
        writes: bool = True,
        clock: Callable[[], float] = time.time,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._tier, self._namespace, self._writes = tier, namespace, writes
        self._clock, self._spent = clock, spent
        self.seconds = 0.0
        self._ours: deque[Prompt] = deque(maxlen=_MOST_PROMPTS)
        self._others: deque[Prompt] = deque(maxlen=_MOST_PROMPTS)
        # The number of the first entry that was not read, by hour.
        self._next: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False

    def start(self) -> None:
        """Exchange from now on, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="kvtiers-heat-share", daemon=True)
        self._thread.start()

    def note(self, run: Run, measured: Measured) -> None:
        """One of our prompts, with all its chunks."""
        names = tuple(chunk for chunk in run.chunks if isinstance(chunk, bytes))
        if len(names) == len(run):
            self._ours.append(Prompt(names, measured))

    def take(self) -> Iterator[Prompt]:
        """Others' prompts that came since."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._others.popleft()

    def forget(self) -> None:
        """Other weights attend to other things."""
        self._ours.clear()
        self._others.clear()

    def close(self, timeout: float = 5.0) -> None:
        """Tell the rest, within ``timeout`` seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    # On the thread ----------------------------------------------------------

    def _run(self) -> None:
        write_at = self._clock() + _WRITE_SECONDS
        while True:
            stopping = self._stop.is_set()
            due = stopping or self._clock() >= write_at
            if due:
                write_at = self._clock() + _WRITE_SECONDS
            try:
                self.exchange(tell=due)
            except Exception as error:  # noqa: BLE001  # a tier's fault must not end the engine
                self._warn(error)
            self.seconds = self._spent()
            if stopping:
                return
            self._stop.wait(_READ_SECONDS)

    def _warn(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("Attention heat is not shared, its tier failed: %s", error)

    def exchange(self, *, tell: bool) -> None:
        """Read what others have told since, and write down what is ours."""
        # In this order, or what was measured after a reset might go where it means nothing.
        ours = [self._ours.popleft() for _ in range(len(self._ours))] if tell else []
        namespace = self._namespace()
        if not namespace.shareable:
            return
        hour = int(self._clock()) // _HOUR
        self._next = {at: self._next.get(at, 0) for at in (hour - 1, hour)}
        for at in self._next:
            self._read(namespace, at)
        if ours and self._writes:
            self._write(namespace, hour, ours)

    def _read(self, namespace: Namespace, hour: int) -> None:
        buffer = aligned_buffer(self._tier.payload_bytes)
        while self._next[hour] < _MOST_ENTRIES:
            (outcome,) = self._tier.read([_key(namespace, hour, self._next[hour])], [buffer])
            if outcome in _NO_ENTRY or self._namespace() != namespace:
                return
            self._next[hour] += 1
            if outcome is ReadOutcome.HIT:
                # Else it is damaged, or meant for others.
                with contextlib.suppress(ValueError):
                    self._others.extend(decode(bytes(buffer)))

    def _write(self, namespace: Namespace, hour: int, ours: list[Prompt]) -> None:
        buffer = aligned_buffer(self._tier.payload_bytes)
        entry = encode(ours, len(buffer))
        buffer[: len(entry)] = entry
        for _ in range(_MOST_TRIES):
            number = self._next[hour]
            (outcome,) = self._tier.write([_key(namespace, hour, number)], [buffer])
            if outcome is WriteOutcome.STORED:
                self._next[hour] += 1
            if outcome not in _SOMEBODYS:
                return
            # Others were first: read theirs, and try the number after.
            self._read(namespace, hour)
            if self._next[hour] == number:
                return


def _key(namespace: Namespace, hour: int, number: int) -> ChunkKey:
    text = f"kvtiers attention heat {hour} {number}".encode()
    # As long as the name of a chunk, whose last four bytes are its KV-cache group.
    return ChunkKey(namespace, hashlib.blake2b(text, digest_size=32).digest() + bytes(4))
