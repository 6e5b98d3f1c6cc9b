"""Uses our adapter as LMCache does, without LMCache: for tests of what it promises."""

from __future__ import annotations

import contextlib
import random
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtiers.connector.lmcache import Completion, TieredL2

PIECE = 64 * 1024
SMALL = {"piece_size": "64KiB", "staging": "4MiB"}
WAIT = 30.0


def keys(count: int, prompt: str = "a", salt: str = "") -> list[str]:
    """LMCache's names of the objects of one prompt."""
    tail = f"@{salt}" if salt else ""
    return [f"org/model@00000001@0@{prompt.encode().hex()}{i:08x}{tail}" for i in range(count)]


def contents(count: int, nbytes: int = 3 * PIECE + 1000, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(nbytes) for _ in range(count)]


class Client:
    """Uses an adapter as LMCache does: its descriptor, and nothing that would wait."""

    def __init__(self, **params: Any) -> None:
        self.adapter = TieredL2(**params)
        self.completed: dict[int, Completion] = {}

    def wait(self, *ids: int) -> list[Completion]:
        """Until these are complete. Fails if one completes twice."""
        deadline = time.monotonic() + WAIT
        while not set(ids) <= self.completed.keys():
            left = deadline - time.monotonic()
            assert left > 0, "a batch does not end"
            if select.select([self.adapter.event_fd()], [], [], left)[0]:
                self.take(self.adapter.drain_completions())
        return [self.completed[number] for number in ids]

    def take(self, drained: Sequence[Completion]) -> None:
        for completion in drained:
            assert completion[0] not in self.completed, "complete twice"
            self.completed[completion[0]] = completion

    def set(self, names: Sequence[str], data: Sequence[bytes]) -> bool:
        sources = [memoryview(item) for item in data]
        return self.wait(self.adapter.submit_batch_set(names, sources))[0][1]

    def get(self, names: Sequence[str], nbytes: Sequence[int]) -> list[bytes | None]:
        """What each object was loaded as, None for a miss."""
        targets = [bytearray(size) for size in nbytes]
        views = [memoryview(target) for target in targets]
        number = self.adapter.submit_batch_get(names, views)
        loaded = self.wait(number)[0][3]
        assert loaded is not None
        return [bytes(t) if yes else None for t, yes in zip(targets, loaded, strict=True)]

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self.wait(self.adapter.submit_batch_exists(names))[0][3]
        assert found is not None
        return found

    def delete(self, names: Sequence[str]) -> list[bool]:
        deleted = self.wait(self.adapter.submit_batch_delete(names))[0][3]
        assert deleted is not None
        return deleted


Make = Callable[..., Client]


@contextlib.contextmanager
def restarts() -> Iterator[Make]:
    """Makes adapters, and closes them at the end; each ends the one before, as a restart does."""
    made: list[Client] = []

    def start(**params: Any) -> Client:
        if made:
            made[-1].adapter.close()
        made.append(Client(**{**SMALL, **params}))
        return made[-1]

    yield start
    for client in made:
        client.adapter.close()


def scanned(client: Client) -> Client:
    """The client, once its adapter has taken in what its tiers held at the start.

    What is removed while a tier is looked through may be taken for held afterwards.
    """
    hierarchy = client.adapter._hierarchy
    wait_for(lambda: not (hierarchy.behind() or any(t.scanning for t in hierarchy._lower)))
    return client


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fs(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "fs", "path": str(path), "capacity": "64MiB", **options}


def files(root: Path) -> list[Path]:
    return sorted(root.glob("v1/*/??/*.kv"))


def damage(path: Path, offset: int = 1000) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
