"""What a soak runs on: a Redis, a folder, and two servers that share both."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import processes
from kvtiers.tools.server import VllmServer
from redis_server import RedisServer
from serving import server

DEADLINE = 1.0
"""Seconds that a tier has for a load."""
ROOT_BYTES = 32 << 20
_DISK_BYTES = 64 << 20
_KILL_SECONDS = 60.0
_LAST_SECONDS = 1.0
_LOG_TAIL = 8000


class Replica:
    """A server that may be killed and started again.

    Attributes:
        name: for the report.
        lives: how often it was started.
        up: whether it is to answer now.

    """

    def __init__(self, name: str, made: VllmServer) -> None:
        self.name = name
        self.server = made
        self.lives = 0
        self.up = False

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.server.start()
        self.lives += 1
        self.up = True

    def stop(self) -> None:
        """Let it drain and end."""
        self.up = False
        self.server.stop()

    def kill(self) -> list[int]:
        """End all its processes at once. Returns who still has its memory mapped."""
        session = self.server.pid
        self.up = False
        arenas = processes.arenas(session)
        for pid in processes.of_session(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        processes.wait_for_end(session, _KILL_SECONDS)
        self.server.stop()
        return processes.mapped_by(arenas)

    def last_words(self) -> str:
        """The end of its log. One that is still starting is ended, and tells where it was."""
        process = self.server._process
        if not self.up and process is not None:
            for pid in processes.of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            time.sleep(_LAST_SECONDS)
        log = self.server._log
        text = log.read_text(errors="replace") if log.exists() else ""
        return f"The end of {log}:\n{text[-_LOG_TAIL:]}\n"

    def died(self) -> bool:
        """Whether it ended though nobody ended it."""
        return self.up and not any("EngineCore" in c for c in self.running().values())

    def running(self) -> dict[int, str]:
        """Its living processes."""
        return processes.of_session(self.server.pid) if self.up else {}


class Disk:
    """The folder of the filesystem tier, on a small file system of its own if one can be mounted.

    Args:
        path: a folder, made if it is not there.

    Attributes:
        mounted: whether it is one. Otherwise it can't be filled, and only who is not root
            can make it unwritable.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "root"
        self.mounted = False

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        options = f"size={_DISK_BYTES},mode=700"
        self.mounted = self._mount("-t", "tmpfs", "-o", options, "kvtiers-soak", str(self.path))
        return self

    def __exit__(self, *_: object) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)

    def _mount(self, *arguments: str) -> bool:
        command = ["mount", *arguments]
        with contextlib.suppress(OSError):
            return not subprocess.run(command, capture_output=True, check=False).returncode
        return False

    def set_writable(self, writable: bool) -> bool:
        """Returns whether that could be done."""
        if self.mounted:
            how = "remount,rw" if writable else "remount,ro"
            return self._mount("-o", how, str(self.path))
        if os.geteuid() == 0 or not self.root.exists():
            return False
        self.root.chmod(0o700 if writable else 0o500)
        return True

    def chunks(self) -> list[Path]:
        """Files of chunks."""
        return [path for path in self.root.glob("v1/*/??/*.kv") if path.is_file()]

    def temporary(self) -> list[Path]:
        """Files that somebody writes, or wrote when he died."""
        return list(self.root.glob("v1/.keeping/w-*/*.kv.*"))

    def damaged(self) -> list[Path]:
        """Files that were set aside."""
        return list(self.root.glob("v1/*/bad/*"))


@dataclass(frozen=True)
class Scene:
    """All of it.

    Attributes:
        redis: the server.
        disk: the folder.
        replicas: A lives through all of it; B is killed, reset and started again.
        writable: held by who needs a folder that can be written, and who takes that away.

    """

    redis: RedisServer
    disk: Disk
    replicas: tuple[Replica, Replica]
    writable: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def scene(model: Path, folder: Path) -> Iterator[Scene]:
    """Started, and gone at the end."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        disk = stack.enter_context(Disk(folder / "disk"))
        tiers = [
            {"type": "cpu", "capacity": "24MiB"},
            {"type": "redis", "url": redis.url, "deadline": DEADLINE},
            {"type": "fs", "path": str(disk.root), "capacity": ROOT_BYTES, "deadline": DEADLINE},
        ]
        cores = sorted(os.sched_getaffinity(0))
        # A does what is quicker, as by default; B loads whatever is, so that more is loaded.
        ways = {"A": "auto", "B": "always_load"}
        replicas = tuple(
            Replica(
                name,
                server(
                    model,
                    folder / name,
                    extra={"tiers": tiers, "load_or_recompute": way},
                    environment={
                        "VLLM_CPU_OMP_THREADS_BIND": str(cores[index % len(cores)]),
                        # For ``last_words``.
                        "PYTHONFAULTHANDLER": "1",
                    },
                ),
            )
            for index, (name, way) in enumerate(ways.items())
        )
        for replica in replicas:
            stack.callback(replica.stop)
            replica.start()
        assert len(replicas) == 2
        yield Scene(redis, disk, replicas)
