"""The demo's redis-server, and what tests do to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis
from kvtiers.tools import redis_server


class RedisServer(redis_server.RedisServer):
    """A real redis-server that can be made to hang, and looked into.

    Args:
        folder: see the base.
        arguments: see the base.
        password: what ``arguments`` demand of clients.

    """

    def __init__(self, folder: Path, arguments: Sequence[str] = (), password: str = "") -> None:
        super().__init__(folder, arguments)
        self._password = password

    def pause(self) -> None:
        """Let it hang: connections stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """End a ``pause``."""
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def limited(self, policy: str, nbytes: int) -> Iterator[None]:
        """It may use so much memory inside, and does by its policy with what goes beyond."""
        with self.client() as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", nbytes)
            try:
                yield
            finally:
                client.config_set("maxmemory", 0)

    def used(self) -> int:
        """Bytes of memory that it uses now."""
        with self.client() as client:
            return int(client.info("memory")["used_memory"])

    def client(self) -> redis.Redis:
        """A plain client on the unix socket, for looking behind a tier's back."""
        return redis.Redis(unix_socket_path=str(self.socket), password=self._password or None)
