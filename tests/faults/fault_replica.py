"""A replica without vLLM: the hierarchy, its own threads, and a real filesystem tier.

In the test's own process, or in one of its own that is killed at a point it names:

    python fault_replica.py ROOT POINT

There it stores, loads or evicts, stops for ever amid one such call with half of it done,
and says so with a line on standard output.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from kvtiers.policies import PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import Namespace
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.requests import Lookup

CHUNK = 64 << 10
FILE = CHUNK + METADATA_BYTES
NAMESPACE = Namespace("fa" * 16, {"model": "none"})
DEADLINE = 1.0
ARENA = 64
"""Slots."""
LENGTH = 8
"""Chunks of a prompt."""
BOUND = 4 * LENGTH
"""Chunks; of a root that is to be too small."""
_SECONDS = 60.0


def prompt(name: str) -> Run:
    """One whose chunks' bytes follow from their names."""
    return Run(tuple(_digest(f"{name}{index}") for index in range(LENGTH)), 0, CHUNK, 0)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def truth(key: bytes) -> bytes:
    """The only right content of a chunk."""
    return hashlib.shake_128(key).digest(CHUNK)


def gc(root: Path, chunks: int) -> int:
    """What ``kvtiers gc`` does, in this process."""
    from kvtiers.tools.cli import main

    return main(["gc", str(root), "--capacity", str(chunks * FILE)])


class Replica:
    """An engine's way of using a hierarchy.

    Args:
        root: of the filesystem tier, shared with others.
        capacity: in chunks, for the whole root.

    """

    def __init__(self, root: Path, capacity: int) -> None:
        config = FsTier.Config(path=root, capacity=capacity * FILE, deadline=DEADLINE)
        self.cpu = CpuTier(CpuTier.Config(capacity=ARENA * CHUNK), CHUNK)
        self.tier = FsTier(config, CHUNK)
        self.h = Hierarchy(
            self.cpu,
            {"fs": self.tier},
            lambda infos, clock: LruPolicy(infos, clock=clock),
            NAMESPACE,
        )
        self.counts: dict[str, int] = {}
        self.asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.h.close()

    def ask(self, run: Run) -> int:
        """As a request: load what is there, and compare it; compute and store the rest.

        Returns how many chunks were loaded.
        """
        self.asked += 1
        name = str(self.asked)
        self.h.begin(PolicyRequest(name, (run,)))
        end = time.monotonic() + _SECONDS
        while self.h.waits(name):
            assert time.monotonic() < end, "the request waits for ever"
            self.h.tick()
            time.sleep(0.001)
        keys = [key for key in run.chunks if isinstance(key, bytes)]
        found = self._leading_hits(name, keys)
        slots = self.h.load(name, found)
        self.h.admitted(name, {})
        for key, slot in zip(found, slots, strict=True):
            assert self.h.memory(slot) == truth(key), "a hit with wrong bytes"
        self.h.loaded(name)
        self._store(name, run.tail(len(found)))
        self.h.end(name)
        self.h.tick()
        return len(found)

    def _leading_hits(self, name: str, keys: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for key in keys:
            if self.h.lookup(name, key) is not Lookup.HIT:
                break
            found.append(key)
        return found

    def _store(self, name: str, run: Run) -> None:
        taken = self.h.reserve(name, [run]) if len(run) else []
        for key, slot in taken:
            self.h.memory(slot)[:] = truth(key)
        self.h.stored([key for key, _ in taken])

    def settle(self) -> None:
        """Wait for stores."""
        end = time.monotonic() + _SECONDS
        while not self.h.idle():
            assert time.monotonic() < end, "stores are still under way"
            self.h.tick()
            time.sleep(0.001)

    def forget(self) -> None:
        """Empty the arena."""
        self.settle()
        self.h.spoil(range(ARENA))

    def figures(self) -> dict[str, int]:
        """Counters since the start, as "tier counter"."""
        for stats in self.h.stats():
            for name, count in stats.counts.items():
                key = f"{stats.name} {name}"
                self.counts[key] = self.counts.get(key, 0) + count
        return dict(self.counts)


# In a process of its own ------------------------------------------------------------------


@contextmanager
def killed_at(point: str, root: Path) -> Iterator[None]:
    """Another replica comes to this point and is killed there, when the block begins."""
    command = [sys.executable, __file__, str(root), point]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == f"{point}\n", f"it did not come to its {point}: {line!r}"
    finally:
        process.kill()
        process.wait()
    yield


def _stop_at(point: str) -> None:
    """Never returns: who called waits until somebody kills the process."""
    # Several threads may come here at once, and each says it in one piece.
    os.write(sys.stdout.fileno(), f"{point}\n".encode())
    time.sleep(1e6)


def _amid_a_store(point: str) -> None:
    write = os.pwritev

    def half(descriptor: int, buffers: Sequence[memoryview], offset: int, *rest: Any) -> int:
        write(descriptor, [buffers[0][: buffers[0].nbytes // 2]], offset, *rest)
        _stop_at(point)
        return 0

    os.pwritev = half


def _amid_a_load(point: str) -> None:
    read = os.preadv

    def half(descriptor: int, buffers: Sequence[memoryview], offset: int, *rest: Any) -> int:
        read(descriptor, [buffers[0][: buffers[0].nbytes // 2]], offset, *rest)
        _stop_at(point)
        return 0

    os.preadv = half


def _amid_gc(point: str) -> None:
    unlink, left = os.unlink, [4]

    def some(path: str, *rest: Any, **options: Any) -> None:
        if os.fspath(path).endswith(".kv"):
            left[0] -= 1
            if not left[0]:
                _stop_at(point)
        unlink(path, *rest, **options)

    os.unlink = some


_POINTS = {"store": _amid_a_store, "load": _amid_a_load, "gc": _amid_gc}


def main() -> None:
    """See the module's text."""
    root, point = Path(sys.argv[1]), sys.argv[2]
    if point == "command":
        _amid_gc(point)
        gc(root, BOUND)
        return
    with Replica(root, capacity=BOUND) as replica:
        _POINTS[point](point)
        # More than the bound has room for.
        for number in range(1000):
            replica.ask(prompt(f"{point}{number}"))
            replica.settle()


if __name__ == "__main__":
    main()
