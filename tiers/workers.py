"""Threads that make a tier's blocking calls, and the calls as values.

The hierarchy hands over an ``Op`` and never waits: finished ops come back
through one deque that it empties when it likes. So a tier that hangs costs its
own threads and nobody else's.
"""

from __future__ import annotations

import enum
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvtiers.tiers.base import ChunkKey, ReadOutcome, Tier, Usage, WriteOutcome
from kvtiers.tiers.findings import Findings

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds for a scan to notice that it is not wanted any more.
_SCAN_GRACE = 0.5


class OpKind(enum.Enum):
    """Which call of the tier an op stands for."""

    CONTAINS = "contains"
    READ = "read"
    WRITE = "write"
    REMOVE = "remove"
    SCAN = "scan"
    PROBE = "probe"
    """``contains``, for nobody: whether a tier that was left alone answers again."""


# Somebody waits for the answer to these.
_URGENT = frozenset({OpKind.CONTAINS, OpKind.READ, OpKind.PROBE})
_CHANGING = frozenset({OpKind.WRITE, OpKind.REMOVE})


@dataclass(eq=False, slots=True)
class Op:
    """One call of a tier.

    Attributes:
        kind: which.
        keys: the chunks it is about.
        buffers: where their bytes are, for reads and writes.
        slots: the arena slots behind ``buffers``.
        request_id: who asked (``CONTAINS``).
        epoch: the hierarchy's epoch when the op was made.
        deadline: on the hierarchy's clock; a call that has not begun by then is
            not made, one that has is given up (but its buffers stay in use).
        started: the tier has been called.
        began: when that was, on the hierarchy's clock.
        given_up: the hierarchy no longer wants the answer, only the buffers back.
        seconds: how long the tier took.
        error: what escaped from the tier, if anything did.
        usage: how full the tier was afterwards, for ops that change that.
        findings: of a scan.
        number: how many ops the tier was handed before it.

    """

    kind: OpKind
    keys: Sequence[ChunkKey] = ()
    buffers: Sequence[memoryview] = ()
    slots: Sequence[int] = ()
    request_id: str = ""
    epoch: int = 0
    deadline: float = float("inf")
    started: bool = False
    began: float = 0.0
    given_up: bool = False
    seconds: float = 0.0
    error: BaseException | None = None
    usage: Usage | None = None
    found: list[bool] = field(default_factory=list)
    reads: list[ReadOutcome] = field(default_factory=list)
    writes: list[WriteOutcome] = field(default_factory=list)
    removed: int = 0
    findings: Findings | None = None
    number: int = 0


class Workers(Protocol):
    """Runs ops of one tier. The hierarchy's tests bring their own, without threads."""

    def submit(self, op: Op) -> None:
        """Queue ``op``; it comes back through the ``done`` callback, once."""

    def cancel(self, op: Op) -> bool:
        """Take a queued op back. False if it has started: then it will come back."""

    def close(self, timeout: float) -> None:
        """Drop what is queued; give running calls up to ``timeout`` seconds."""


class ThreadWorkers:
    """A thread pool for one tier: loads and lookups before stores.

    Half of the threads take no stores, if there are at least two: a store has no deadline
    and may hang, and a burst of loads must not be left with one thread for that.

    Args:
        tier: whose calls to make.
        done: called on a worker thread with each finished op.
        clock: what ``Op.deadline`` is measured on.
        threads: how many.

    """

    def __init__(
        self,
        tier: Tier,
        done: Callable[[Op], None],
        clock: Callable[[], float] = time.monotonic,
        threads: int = 4,
    ) -> None:
        self._tier = tier
        self._done = done
        self._clock = clock
        self._urgent: deque[Op] = deque()
        self._patient: deque[Op] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._scan: threading.Thread | None = None
        # Daemons: a call that hangs in the kernel must not keep the process alive.
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(index < max(1, threads // 2),),
                name=f"kvtiers-{type(tier).__name__}-{index}",
                daemon=True,
            )
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op: Op) -> None:
        """See ``Workers.submit``."""
        if op.kind is OpKind.SCAN:
            self._submit_scan(op)
            return
        with self._changed:
            (self._urgent if op.kind in _URGENT else self._patient).append(op)
            # All: a thread that takes no stores may be the one that wakes.
            self._changed.notify_all()

    def _submit_scan(self, op: Op) -> None:
        # Minutes on a large root: not on a thread that loads wait for.
        args = (self._tier, op, self._done, lambda: self._closing)
        name = f"kvtiers-{type(self._tier).__name__}-scan"
        thread = threading.Thread(target=scan, args=args, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The process may have no more threads. That is no reason to end the engine.
            fail(op, error)
            self._done(op)
        else:
            self._scan = thread

    def cancel(self, op: Op) -> bool:
        """See ``Workers.cancel``."""
        with self._changed:
            for queue in (self._urgent, self._patient):
                if op in queue:
                    queue.remove(op)
                    return True
        return False

    def close(self, timeout: float) -> None:
        """See ``Workers.close``."""
        with self._changed:
            self._closing = True
            self._urgent.clear()
            self._patient.clear()
            self._changed.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._scan is not None:
            # It may be in a listing that takes minutes, and nobody waits for what it finds.
            self._scan.join(min(_SCAN_GRACE, max(0.0, end - time.monotonic())))

    def _run(self, takes_stores: bool) -> None:
        while (op := self._next(takes_stores)) is not None:
            self._perform(op)

    def _next(self, takes_stores: bool) -> Op | None:
        with self._changed:
            while True:
                if self._closing:
                    return None
                if self._urgent:
                    op = self._urgent.popleft()
                    break
                if takes_stores and self._patient:
                    op = self._patient.popleft()
                    break
                self._changed.wait()
            op.began = self._clock()
            op.started = True
            return op

    def _perform(self, op: Op) -> None:
        begun = time.monotonic()
        if self._clock() < op.deadline:
            call(self._tier, op)
        else:
            fail(op, TimeoutError("its deadline passed in the queue"))
        op.seconds = time.monotonic() - begun
        self._done(op)


def scan(tier: Tier, op: Op, done: Callable[[Op], None], stopped: Callable[[], bool]) -> None:
    """Find what the tier holds, as far as it tells, and hand over ``op`` with it."""
    findings = op.findings = Findings()
    begun = time.monotonic()
    try:
        for entry in tier.scan():
            if stopped():
                return
            findings.add(entry)
        op.usage = tier.usage()
        logger.info(
            "%s holds %d chunks, %.2f GiB, of all engines and models that use it",
            type(tier).__name__,
            op.usage.chunks,
            op.usage.nbytes / (1 << 30),
        )
    except BaseException as error:  # noqa: BLE001 - see ``call``
        op.error = error
    findings.sort()
    op.seconds = time.monotonic() - begun
    done(op)


def call(tier: Tier, op: Op) -> None:
    """Make the call that ``op`` stands for; what escapes becomes failed outcomes.

    So does what is no Exception: asyncio's CancelledError, a panic of a library in Rust. A
    thread that ended of it would leave the op's slots in use for ever.
    """
    try:
        if op.kind in (OpKind.CONTAINS, OpKind.PROBE):
            op.found = list(map(bool, _all_of(tier.contains(op.keys), op)))
        elif op.kind is OpKind.READ:
            op.reads = _checked(tier.read(op.keys, op.buffers), op, ReadOutcome)
        elif op.kind is OpKind.WRITE:
            op.writes = _checked(tier.write(op.keys, op.buffers), op, WriteOutcome)
        elif op.kind is OpKind.REMOVE:
            op.removed = operator.index(tier.remove(op.keys))
        if op.kind in _CHANGING:
            op.usage = tier.usage()
            _expect(op.usage, Usage, "usage")
    except BaseException as error:  # noqa: BLE001 - the engine must not die of a tier
        op.usage = None
        fail(op, error)


def fail(op: Op, error: BaseException) -> None:
    """Answer ``op`` with failures for all of its chunks."""
    op.error = error
    if op.kind is OpKind.READ:
        op.reads = [ReadOutcome.FAILED] * len(op.keys)
    elif op.kind is OpKind.WRITE:
        op.writes = [WriteOutcome.FAILED] * len(op.keys)
    elif op.kind is OpKind.CONTAINS:
        op.found = [False] * len(op.keys)


def _all_of(answers: Iterable[T], op: Op) -> list[T]:
    """The answers, one a chunk. What is none is not believed, and is not the engine's to meet."""
    given = list(answers)
    if len(given) != len(op.keys):
        raise RuntimeError(
            f"{op.kind.value}() answered {len(given)} times for {len(op.keys)} chunks"
        )
    return given


def _checked(answers: Iterable[T], op: Op, kind: type[T]) -> list[T]:
    given = _all_of(answers, op)
    for answer in given:
        _expect(answer, kind, op.kind.value)
    return given


def _expect(answer: object, kind: type, name: str) -> None:
    if not isinstance(answer, kind):
        raise TypeError(f"{name}() answered {answer!r:.100}, which is no {kind.__name__}")
