"""A server process that a block of code needs, on this host, and gone afterwards."""

from __future__ import annotations

import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Service(ABC):
    """One process of its own, started by ``start`` and ended by ``stop``.

    A context manager, which calls both. ``kill``, or ``stop``, and ``start`` may be
    called inside it, to take the server away and bring it back under the same address.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it answers. If it does not, nothing of it is left."""

    def stop(self) -> None:
        """End it."""
        self.kill()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it at once; what it held is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait()


def free_port() -> int:
    """A port of this host that nobody listens on, just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
