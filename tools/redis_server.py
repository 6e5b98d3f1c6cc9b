"""A redis-server of one's own, for the demo and tests: no persistence, gone at the end."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kvtiers.tools.service import Service, free_port

_START_SECONDS = 20.0
_POLL = 0.02


class RedisServerError(RuntimeError):
    """The server did not start; the text says what to do, or has its log."""


class RedisServer(Service):
    """Starts Debian's ``redis-server`` on a free port of this host and on a unix socket.

    Args:
        folder: for its socket, log and configuration; made if it is not there.
        arguments: further arguments, such as ``["--requirepass", "secret"]``.

    Attributes:
        url: over TCP.
        unix_url: over the unix socket.

    """

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.unix_url = f"unix://{self.socket}?db=0"
        self._folder = folder
        self._arguments = arguments

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            RedisServerError: it is not installed, ended, or did not answer in time.

        """
        program = shutil.which("redis-server")
        if program is None:
            raise RedisServerError(
                "redis-server is not installed. Install it (Debian: apt-get install redis-server), "
                "or name a running server: --redis redis://HOST:PORT/0."
            )
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        command += ["--logfile", str(self._folder / "redis.log"), *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - ours
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RedisServerError(f"redis-server did not start. Its log:\n{self._log()}")
            time.sleep(_POLL)

    def _answers(self) -> bool:
        """Whether it says anything at all: one that wants a password says so."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            probe.connect(str(self.socket))
            probe.sendall(b"PING\r\n")
            return bool(probe.recv(64))
        return False

    def _log(self) -> str:
        log = self._folder / "redis.log"
        return log.read_text(errors="replace") if log.exists() else "It wrote none."
