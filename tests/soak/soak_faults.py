"""What goes wrong in a soak: drawn from a seed, kept up for a while, and undone."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak_fleet import Scene
from soak_load import Gate
from soak_progress import say

Fault = Callable[[Scene, random.Random], contextlib.AbstractContextManager[None]]
"""A context in which something is wrong; left when it is not any more."""

_FILES_AT_ONCE = 8
_REDIS_BYTES = 8 << 20


class NotHereError(RuntimeError):
    """This machine does not let it happen."""


# Redis --------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_killed(scene: Scene, choose: random.Random) -> Iterator[None]:
    """It comes back empty."""
    scene.redis.kill()
    try:
        yield
    finally:
        scene.redis.start()


@contextlib.contextmanager
def redis_hangs(scene: Scene, choose: random.Random) -> Iterator[None]:
    """Connections stay, and nothing is answered."""
    scene.redis.pause()
    try:
        yield
    finally:
        scene.redis.resume()


@contextlib.contextmanager
def redis_emptied(scene: Scene, choose: random.Random) -> Iterator[None]:
    """Everything is deleted, and it goes on."""
    with scene.redis.client() as client:
        client.flushall()
    yield


@contextlib.contextmanager
def redis_full(scene: Scene, choose: random.Random) -> Iterator[None]:
    """It refuses what is stored."""
    with scene.redis.limited("noeviction", _REDIS_BYTES):
        yield


@contextlib.contextmanager
def redis_evicts(scene: Scene, choose: random.Random) -> Iterator[None]:
    """It drops chunks by itself."""
    with scene.redis.limited("allkeys-lru", _REDIS_BYTES):
        yield


@contextlib.contextmanager
def redis_flipped(scene: Scene, choose: random.Random) -> Iterator[None]:
    """A bit of some values changes."""
    with scene.redis.client() as client:
        keys = [key for key in client.keys("kvtiers:v1:*") if not key.endswith(b":about")]
        for key in choose.sample(keys, min(_FILES_AT_ONCE, len(keys))):
            place = choose.randrange(1 << 18)
            byte = client.getrange(key, place, place)
            # Only where it still is, or it would be made.
            if byte and client.exists(key):
                client.setrange(key, place, bytes([byte[0] ^ 1]))
    yield


# The folder ---------------------------------------------------------------------------


@contextlib.contextmanager
def files_deleted(scene: Scene, choose: random.Random) -> Iterator[None]:
    """As somebody does who needs the room."""
    for path in _some(scene, choose):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    yield


@contextlib.contextmanager
def files_flipped(scene: Scene, choose: random.Random) -> Iterator[None]:
    """A bit changes, in the payload or in what vouches for it."""
    for path in _some(scene, choose):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            place = choose.randrange(1 << 18)
            file.seek(place)
            if byte := file.read(1):
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << choose.randrange(8)]))
    yield


@contextlib.contextmanager
def files_cut(scene: Scene, choose: random.Random) -> Iterator[None]:
    """Some end early, some are empty."""
    for path in _some(scene, choose):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            file.truncate(choose.choice([0, choose.randrange(1 << 18)]))
    yield


@contextlib.contextmanager
def files_swapped(scene: Scene, choose: random.Random) -> Iterator[None]:
    """One chunk lies under the name of another, a folder under that of a third."""
    some = _some(scene, choose)
    with contextlib.suppress(FileNotFoundError):
        for path, other in zip(some[::2], some[1::2], strict=False):
            path.replace(other)
        if some:
            some[-1].unlink(missing_ok=True)
            some[-1].mkdir()
    yield


@contextlib.contextmanager
def folder_read_only(scene: Scene, choose: random.Random) -> Iterator[None]:
    """Nothing can be written or removed. An engine would not start on such a folder."""
    with scene.writable:
        if not scene.disk.set_writable(False):
            raise NotHereError
        try:
            yield
        finally:
            if not scene.disk.set_writable(True):
                raise OSError(errno.EROFS, "It could not be made writable again")


@contextlib.contextmanager
def disk_full(scene: Scene, choose: random.Random) -> Iterator[None]:
    """Somebody else's file takes all the room that is left."""
    if not scene.disk.mounted:
        raise NotHereError
    ballast = scene.disk.path / "ballast"
    with scene.writable:
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
            yield
        finally:
            ballast.unlink(missing_ok=True)


def _some(scene: Scene, choose: random.Random) -> Sequence[Path]:
    chunks = sorted(scene.disk.chunks())
    return choose.sample(chunks, min(_FILES_AT_ONCE, len(chunks)))


# Engines ------------------------------------------------------------------------------


@contextlib.contextmanager
def gpu_emptied(scene: Scene, choose: random.Random) -> Iterator[None]:
    """So that prompts come from below again."""
    for replica in scene.replicas:
        if replica.up:
            # False while blocks are in use: then the next time.
            replica.server.post("/reset_prefix_cache", timeout=60)
    yield


@contextlib.contextmanager
def replica_killed(scene: Scene, choose: random.Random) -> Iterator[None]:
    """``kill -9`` of all of one, and a new start."""
    replica = scene.replicas[1]
    left = replica.kill()
    if left:
        raise AssertionError(f"processes {left} have the arena of a killed replica mapped")
    try:
        yield
    finally:
        with scene.writable:
            replica.start()


@contextlib.contextmanager
def replica_reset(scene: Scene, choose: random.Random) -> Iterator[None]:
    """What it stored means nothing any more, until it is started again: with SIGTERM, as it is."""
    replica = scene.replicas[1]
    replica.server.post("/reset_prefix_cache?reset_external=true", timeout=60)
    yield
    replica.stop()
    with scene.writable:
        replica.start()


KINDS: dict[str, Sequence[tuple[Fault, int]]] = {
    "redis": (
        (redis_killed, 2),
        (redis_hangs, 2),
        (redis_emptied, 1),
        (redis_full, 1),
        (redis_evicts, 1),
        (redis_flipped, 2),
    ),
    "folder": (
        (files_deleted, 2),
        (files_flipped, 2),
        (files_cut, 1),
        (files_swapped, 1),
        (folder_read_only, 2),
        (disk_full, 2),
    ),
    "engine": ((gpu_emptied, 12), (replica_killed, 1), (replica_reset, 1)),
}
"""What happens at the same time as the others, and how often each compared with its like."""


@dataclass
class Record:
    """What went wrong on purpose, and what should not have.

    Attributes:
        counts: how often each fault happened.
        under_way: what each kind is doing now, or undoing.
        impossible: faults that this machine does not let happen.
        problems: of faults that could not be done or undone.

    """

    counts: Counter[str] = field(default_factory=Counter)
    under_way: dict[str, str] = field(default_factory=dict)
    impossible: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


class Troublemaker(threading.Thread):
    """Does one fault of its kind after the other.

    Args:
        kind: of ``KINDS``.
        seed: of its choices.
        scene: where.
        gate: when.
        record: what it did.

    """

    def __init__(self, kind: str, seed: int, scene: Scene, gate: Gate, record: Record) -> None:
        super().__init__(name=f"trouble-{kind}", daemon=True)
        self._choose = random.Random(f"{seed}/{kind}")
        self._kind = kind
        self._faults = KINDS[kind]
        self._scene = scene
        self._gate = gate
        self._record = record

    def run(self) -> None:
        """Until the gate ends."""
        faults, weights = zip(*self._faults, strict=True)
        while not self._gate.ended:
            time.sleep(self._choose.uniform(0.2, 2))
            with self._gate.round():
                if not self._gate.ended:
                    self._once(self._choose.choices(faults, weights)[0])

    def _once(self, fault: Fault) -> None:
        self._record.under_way[self._kind] = fault.__name__
        try:
            with fault(self._scene, self._choose):
                self._record.counts[fault.__name__] += 1
                time.sleep(self._choose.uniform(0.2, 4))
        except NotHereError:
            self._record.impossible.add(fault.__name__)
        except Exception as error:
            self._record.problems.append(f"{fault.__name__}: {error!r}")
            say(self._record.problems[-1])
        finally:
            del self._record.under_way[self._kind]
