"""Engines at one shared root, without threads: each does a step when a test says so.

A test can also stop one in the middle of a step, before any call of the file system: for
good (a kill), or to let others go on and to continue then (a process that was stopped).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvtiers.policies import TierInfo
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import membership
from kvtiers.tiers.base import ALIGNMENT, ChunkKey, Namespace, ReadOutcome, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.fs_layout import Layout
from kvtiers.tiers.keeper import Terms
from kvtiers.tiers.pace import Pace
from kvtiers.tiers.root_keeping import RootKeeping

PAYLOAD = ALIGNMENT
FILE = 2 * ALIGNMENT
NAMESPACE = Namespace("ab" * 16, {"model": "tiny"})

# Calls before which an engine can be stopped.
_CALLS = ("open", "write", "rename", "mkdir", "unlink", "listdir", "rmdir", "stat", "lstat")


class Killed(BaseException):
    """The process ends here. No handler of the code under test may catch it."""


class Clock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(number: int, namespace: Namespace = NAMESPACE, prompt: int = 0) -> ChunkKey:
    """Chunk ``number`` of a prompt; its parent is the one before."""
    digest = _hash(prompt, number)
    parent = _hash(prompt, number - 1) if number else None
    return ChunkKey(namespace, digest, number, f"tenant{prompt}", parent)


def _hash(prompt: int, number: int) -> bytes:
    return bytes([(7 * prompt + number) % 256, prompt]) + number.to_bytes(4, "big") * 4


def files_of(root: Path) -> list[Path]:
    """Every chunk's file under the root, by a walk of our own."""
    return sorted(root.rglob("*.kv"))


def bytes_of(root: Path) -> int:
    """What all chunks' files take."""
    return sum(file.stat().st_size for file in files_of(root))


class Engine:
    """One engine's tier at a root, with its background at hand.

    Args:
        root: shared with others.
        capacity: in chunks.
        clock: of all engines.
        stores: False for one that only reads.

    """

    def __init__(
        self, root: Path, capacity: int, clock: Callable[[], float], stores: bool = True
    ) -> None:
        self.root = root
        self.capacity = capacity
        config = FsTier.Config(path=root, capacity=capacity * FILE, direct=False)
        self.tier = FsTier(config, PAYLOAD)
        info = TierInfo("fs", capacity * FILE, True, True)
        terms = Terms(info, config.headroom, FILE, lambda infos, c: LruPolicy(infos, clock=c))
        self.keeping = RootKeeping(Layout(root), terms, stores=stores, clock=clock, pace=Pace(1.0))
        self.tier._keeping = self.keeping
        self.tier._ledger.lift()

    @property
    def keeps(self) -> bool:
        """Whether it takes itself for the holder of the lease."""
        return self.keeping._keeper is not None

    def step(self) -> None:
        """What its thread does once."""
        self.keeping.step()

    def write(self, *keys: ChunkKey) -> list[WriteOutcome]:
        """Store chunks; refuses at once for want of a grant."""
        with mock.patch.object(membership, "WAIT_SECONDS", 0.0):
            return self.tier.write(keys, [filled(k) for k in keys])

    def read(self, *keys: ChunkKey) -> list[ReadOutcome]:
        """Load chunks, and check that a hit holds what was stored."""
        buffers = [aligned_buffer(PAYLOAD) for _ in keys]
        outcomes = self.tier.read(keys, buffers)
        for k, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            assert outcome is not ReadOutcome.HIT or buffer == filled(k)
        return outcomes

    def counted(self) -> set[str]:
        """Files that it counts as the keeper."""
        keeper = self.keeping._keeper
        assert keeper is not None
        return {keeper._chunks._place(chunk).path for chunk in keeper._books.index}

    def close(self) -> None:
        """An orderly end."""
        self.keeping._stopping.set()
        self.tier.close()


def filled(k: ChunkKey) -> memoryview:
    """The chunk's payload, which follows from its key."""
    buffer = aligned_buffer(PAYLOAD)
    buffer[:] = (k.hash * PAYLOAD)[:PAYLOAD]
    return buffer


@contextmanager
def before_call(count: int, then: Callable[[], None]) -> Iterator[None]:
    """Run ``then`` before this thread's ``count``-th call of the file system, once."""
    left, thread = [count], threading.get_ident()

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= threading.get_ident() == thread
            if left[0] == 0 and threading.get_ident() == thread:
                left[0] -= 1
                then()
            return real(*args, **options)

        return call

    with mock.patch.multiple(os, **{name: wrapped(getattr(os, name)) for name in _CALLS}):
        yield


@contextmanager
def torn_write(count: int) -> Iterator[None]:
    """Kill at this thread's ``count``-th write, when a part of it is written."""
    real, left, thread = os.write, [count], threading.get_ident()

    def write(descriptor: int, data: bytes) -> int:
        left[0] -= threading.get_ident() == thread
        if left[0] == 0 and threading.get_ident() == thread:
            real(descriptor, data[: len(data) // 2])
            raise Killed
        return real(descriptor, data)

    with mock.patch.object(os, "write", write):
        yield


def run_killed(action: Callable[[], object], count: int, torn: bool = False) -> bool:
    """Do it, and kill it on the way. False if it ended before."""

    def kill() -> None:
        raise Killed

    try:
        with torn_write(count) if torn else before_call(count, kill):
            action()
    except Killed:
        return True
    return False


def settled(engines: Sequence[Engine], steps: int = 3) -> None:
    """A few steps of each."""
    for _ in range(steps):
        for engine in engines:
            engine.step()
