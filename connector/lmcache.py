"""kvtiers behind LMCache: the class that an LMCache server loads as an L2 adapter.

    lmcache server … --l2-adapter '{"type": "native_plugin",
        "module_path": "kvtiers.connector.lmcache", "class_name": "TieredL2",
        "adapter_params": {"tiers": [{"type": "fs", "path": "/data", "capacity": "100GB"}]}}'

Needs neither vLLM nor torch nor LMCache itself: LMCache loads it by name, and asks
for nothing but the methods below. See docs/lmcache.md.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from kvtiers.connector.lmcache_jobs import Job, JobKind, Jobs
from kvtiers.connector.lmcache_pieces import Bytes
from kvtiers.connector.lmcache_stack import build

logger = logging.getLogger(__name__)

Completion: TypeAlias = "tuple[int, bool, str, list[bool] | None]"
"""Id, whether all went well, why not, and the answer for each key."""

# How late a deadline may be noticed. With no batch under way the hierarchy goes on alone.
_BUSY_SECONDS = 0.02
_CLOSE_SECONDS = 10.0


class TieredL2:
    """LMCache's native L2 connector over kvtiers' tiers.

    Batches are handed over from LMCache's threads and carried out on one of our own,
    so no call here waits for a tier, and none raises for what a tier does. Every id
    comes back by ``drain_completions`` exactly once, also after ``close``. A store is
    complete once its bytes are in the staging area, where loads find them from then on;
    the tiers are written behind LMCache's back.

    Args:
        params: the ``adapter_params``; see ``lmcache_stack.build``.

    Raises:
        ConfigError, TierConfigError: they cannot work; the text says what to change.

    """

    def __init__(self, **params: Any) -> None:
        _log_like_lmcache()
        self._wake = threading.Event()
        stack = build(params, self._wake.set)
        self._hierarchy = stack.hierarchy
        self._jobs = Jobs(stack.hierarchy, stack.slots, time.monotonic, stack.patience)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._inbox: deque[Job] = deque()
        self._completions: deque[Completion] = deque()
        self._closing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtiers-lmcache", daemon=True)
        self._thread.start()

    # LMCache's side -----------------------------------------------------------

    def event_fd(self) -> int:
        """Readable while completions wait to be drained."""
        return self._fd

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Store objects. The buffers must not change until the batch is complete."""
        return self._submit(JobKind.SET, keys, buffers)

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Load objects. A buffer is written only if all of its object is there, and sound."""
        return self._submit(JobKind.GET, keys, buffers)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask which objects there are. One may be gone, or turn out damaged, when it is loaded."""
        return self._submit(JobKind.EXISTS, keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Drop objects. The answer says which there were; tiers drop them soon after."""
        return self._submit(JobKind.DELETE, keys)

    def drain_completions(self) -> list[Completion]:
        """What has completed since the last call."""
        with self._lock:
            # Read before the queue is emptied: what comes in between signals anew.
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
            drained = list(self._completions)
            self._completions.clear()
        return drained

    def close(self) -> None:
        """End every batch, write to the tiers what is still staged, and release everything.

        Takes some seconds if a tier is slow. Afterwards nothing touches LMCache's memory.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        with self._lock:
            self._closed = True
            os.close(self._fd)

    def _submit(
        self, kind: JobKind, keys: Sequence[str], buffers: Sequence[memoryview] | None = None
    ) -> int:
        job = Job(next(self._ids), kind, [str(key) for key in keys])
        try:
            job.buffers = [_bytes_of(buffer, kind) for buffer in buffers or ()]
            if buffers is not None and len(job.buffers) != len(job.keys):
                raise ValueError(f"{len(job.keys)} keys and {len(job.buffers)} buffers")
        except (TypeError, ValueError, BufferError) as error:
            job.settle(f"not a batch: {error}")
        with self._lock:
            if not self._closing and job.open:
                self._inbox.append(job)
                self._wake.set()
                return job.id
        job.settle("closed")
        self._complete([job])
        return job.id

    # Our thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(_BUSY_SECONDS if self._jobs.busy else None)
                self._wake.clear()
                self._step()
        except Exception:
            # Ours, not a tier's. LMCache goes on without this adapter.
            logger.exception("kvtiers stopped working: everything is a miss from now on.")
        finally:
            self._end()

    def _step(self) -> None:
        while self._inbox:
            self._jobs.add(self._inbox.popleft())
        self._complete(self._jobs.step())
        if self._jobs.behind:
            self._wake.set()

    def _end(self) -> None:
        """Nothing comes in any more, and what has come in ends."""
        with self._lock:
            self._closing = True
            late = list(self._inbox)
            self._inbox.clear()
        for job in late:
            job.settle("closed")
        self._complete([*self._jobs.abandon("closed"), *late])
        self._hierarchy.close()

    def _complete(self, jobs: Sequence[Job]) -> None:
        done = [(job.id, not job.error, job.error, _answers(job)) for job in jobs]
        if not done:
            return
        with self._lock:
            self._completions += done
            if not self._closed:
                os.eventfd_write(self._fd, 1)


def _answers(job: Job) -> list[bool] | None:
    """Stores have none: LMCache takes a batch of them as one."""
    return None if job.kind is JobKind.SET else [answer is True for answer in job.answers]


def _bytes_of(buffer: memoryview, kind: JobKind) -> Bytes:
    """All of a buffer, whatever its format. Raises ValueError if it can't be used."""
    array = np.frombuffer(buffer, np.uint8)
    if kind is JobKind.GET and not array.flags.writeable:
        raise ValueError("a buffer to load into is read-only")
    return array


def _log_like_lmcache() -> None:
    """Our lines go where LMCache's go: it gives its own loggers handlers, and no other."""
    ours = logging.getLogger("kvtiers")
    theirs = logging.getLogger("lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
