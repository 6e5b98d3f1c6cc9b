"""Looks for what a replica may leak, at moments when nothing goes on."""

from __future__ import annotations

import http.client
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
from kvtiers.tools.measure import tier_figure
from kvtiers.tools.server import ServerError
from soak_fleet import ROOT_BYTES, Replica, Scene
from soak_load import LIMIT

COUNTS = (
    *("hits", "misses", "bytes_read", "bytes_written", "failures", "timeouts", "corrupt"),
    *("evictions", "dropped", "refused", "breaker_opened"),
)
TIERS = ("gpu", "cpu", "redis", "fs")
_IDLE_SECONDS = 60.0
# What a process may grow by in half of its life: pools fill up, allocators keep what they had.
_MORE_MEMORY = 96 << 20
_MORE_FILES = 24
_MORE_THREADS = 12
_MOST_DAMAGED = 4
"""Files that a namespace keeps aside."""
_WRITERS = 4
"""Threads of the tier, each of which may be in the middle of a file."""


@dataclass(frozen=True)
class Footprint:
    """What the processes of a replica use, the arena left out.

    Attributes:
        memory: bytes of their own.
        files: descriptors.
        threads: of all of them.

    """

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, replica: Replica) -> Footprint:
        """Of a replica that runs."""
        pids = list(replica.running())
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return cls(
            sum(_number(text, "RssAnon") << 10 for text in status),
            sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            sum(_number(text, "Threads") for text in status),
        )

    def beyond(self, first: Footprint) -> Iterator[str]:
        """What has grown too much."""
        if self.memory > first.memory + _MORE_MEMORY:
            yield f"memory grew from {first.memory >> 20} to {self.memory >> 20} MiB"
        if self.files > first.files + _MORE_FILES:
            yield f"open files grew from {first.files} to {self.files}"
        if self.threads > first.threads + _MORE_THREADS:
            yield f"threads grew from {first.threads} to {self.threads}"


class Watch:
    """Looks at a scene now and then, while no request or fault is under way.

    Attributes:
        counts: figures of all tiers and lives: ``(tier, count)``.
        looks: footprint of each life of each replica, in order.

    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._figures: dict[tuple[str, int], Counter[tuple[str, str]]] = {}
        self.looks: dict[str, list[Footprint]] = {}

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Figures as of the last look, over all lives."""
        return sum(self._figures.values(), Counter())

    def look(self) -> list[str]:
        """What is wrong."""
        problems: list[str] = []
        for replica in self._scene.replicas:
            if replica.died():
                problems.append(f"replica {replica.name} is dead")
            elif replica.up:
                problems += _asked(replica, self._of)
        return [*problems, *self._of_folder()]

    def _of(self, replica: Replica) -> Iterator[str]:
        pinned = _settled(replica, lambda text: tier_figure(text, "pinned_chunks", "cpu") or 0)
        if pinned:
            yield f"{pinned:.0f} slots are pinned though nothing goes on"
        metrics = replica.server.get("/metrics")
        life = (replica.name, replica.lives)
        self._figures[life] = Counter(
            {
                (tier, name): int(tier_figure(metrics, f"{name}_total", tier) or 0)
                for tier in TIERS
                for name in COUNTS
            }
        )
        looks = self.looks.setdefault("/".join(map(str, life)), [])
        looks.append(Footprint.of(replica))
        # With the middle of its life: for minutes its allocators keep more and more.
        yield from looks[-1].beyond(looks[len(looks) // 2])

    def _of_folder(self) -> Iterator[str]:
        disk = self._scene.disk
        used = sum(path.stat().st_size for path in disk.chunks() if path.is_file())
        if used > ROOT_BYTES:
            yield f"the folder has {used} bytes of chunks, and may have {ROOT_BYTES}"
        per_namespace = Counter(path.parent for path in disk.damaged())
        if any(count > _MOST_DAMAGED for count in per_namespace.values()):
            yield f"damaged files pile up: {dict(per_namespace)}"
        yield from self._of_temporary()

    def _of_temporary(self) -> Iterator[str]:
        """Nobody writes now, so what is there is of the dead, and they had few threads."""
        left = len(self._scene.disk.temporary())
        dead = self._scene.replicas[1].lives - 1
        if left > dead * _WRITERS:
            yield f"{left} temporary files are left of {dead} replicas that ended"

    def recovered(self) -> list[str]:
        """Tiers that are still left alone, though nothing has been wrong with them for a while."""
        up = [replica for replica in self._scene.replicas if replica.up]
        return [problem for replica in up for problem in _asked(replica, _left_alone)]


def abandoned(before: set[str], killed: bool) -> list[str]:
    """Shared memory that nobody uses any more.

    Args:
        before: what was there before any server was.
        killed: whether one was. Of a killed server without the connector vLLM's own
            queues are left as well: see ``tests/e2e/test_kill.py``.

    """
    vllms = {"psm_", "sem."} if killed else set()
    left = processes.abandoned_since(before) - vllms
    return [f"left in /dev/shm: {kind}" for kind in sorted(left)]


def _asked(replica: Replica, questions: Callable[[Replica], Iterator[str]]) -> list[str]:
    """What is wrong, be it that it does not answer: that is no reason to lose the report."""
    problems: list[str] = []
    try:
        problems.extend(questions(replica))
    except (ServerError, OSError, http.client.HTTPException) as error:
        problems.append(f"does not answer: {error!r}")
    return [f"replica {replica.name}: {problem}" for problem in problems]


def _left_alone(replica: Replica) -> Iterator[str]:
    for tier in ("redis", "fs"):

        def state(text: str, tier: str = tier) -> float:
            return tier_figure(text, "breaker_state", tier) or 0

        if _settled(replica, state):
            yield f"still leaves {tier} alone"


def _settled(replica: Replica, figure: Callable[[str], float]) -> float:
    """The figure once it is 0, or what it still is when enough time has passed."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while True:
        # vLLM tells figures as it steps. Less than a block, so that it stores and finds nothing.
        body = {"model": replica.server.model, "prompt": [1, 2, 3], "max_tokens": 1}
        replica.server.post("/v1/completions", body, timeout=LIMIT)
        value = figure(replica.server.get("/metrics"))
        if not value or time.monotonic() > deadline:
            return value
        time.sleep(0.2)


def _number(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found is not None
    return int(found[1])
