"""A real redis-server of a test's own: no persistence, a folder of its own, killed at the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

_START_SECONDS = 20.0


class RedisServer:
    """Starts Debian's ``redis-server`` on a free port and a unix socket.

    A context manager. ``kill`` and ``start`` may be called inside it, to take the
    server away and bring it back, empty, under the same addresses.

    Args:
        folder: for its socket, log and configuration.
        arguments: further arguments, such as ``["--requirepass", "secret"]``.
        password: what ``arguments`` demand of clients, for the wait until it answers.

    """

    def __init__(self, folder: Path, arguments: Sequence[str] = (), password: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.socket = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.unix_url = f"unix://{self.socket}?db=0"
        self._folder = folder
        self._arguments = arguments
        self._password = password
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
        self.kill()

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._folder), "--logfile", str(self._folder / "redis.log")]
        self._process = subprocess.Popen([*command, *self._arguments], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, self._log()
            assert time.monotonic() < deadline, self._log()
            time.sleep(0.02)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it at once; what it held is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait()

    def pause(self) -> None:
        """Let it hang: connections stay open and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a ``pause``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain client on the unix socket, for looking behind a tier's back."""
        return redis.Redis(unix_socket_path=str(self.socket), password=self._password or None)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def _log(self) -> str:
        log = self._folder / "redis.log"
        return log.read_text(errors="replace") if log.exists() else "redis-server wrote no log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
