"""A TCP proxy that is slow, or lets something happen in the middle of a transfer.

Between a tier and a real server: the server stays what it is, and what happens to a
connection happens to a real one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

_PIECE = 16 * 1024


class TcpProxy:
    """Forwards connections to a port of this host, each over two threads of its own.

    Args:
        target: the port.

    Attributes:
        port: where it listens.
        delay: seconds that each request waits before it is passed on. What is sent
            together, such as a pipeline, is one request.

    """

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self._target = target
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        # What is to happen, and after how many bytes of one message to, or of one from, the server.
        self._up: tuple[int, Callable[[], object]] | None = None
        self._down: tuple[int, Callable[[], object]] | None = None
        self.port = 0
        self.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Take connections, also again after ``close``."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """End all connections, and refuse others."""
        # Or the thread that accepts would keep the port.
        _hang_up(self._listener)
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _hang_up(connection)

    def in_request(self, nbytes: int, then: Callable[[], object]) -> None:
        """Once that many bytes of one request were passed on: ``then``; the rest is lost."""
        self._up = (nbytes, then)

    def in_reply(self, nbytes: int, then: Callable[[], object]) -> None:
        """The same of one reply."""
        self._down = (nbytes, then)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                # As if there were no proxy: connecting seems to work, and then it is over.
                _hang_up(client)
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            _Line(self, client, server)

    def _due(self, upwards: bool, passed: int) -> Callable[[], object] | None:
        with self._lock:
            armed = self._up if upwards else self._down
            if armed is None or passed < armed[0]:
                return None
            if upwards:
                self._up = None
            else:
                self._down = None
            return armed[1]

    def _forget(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._open -= set(sockets)


class _Line:
    """One connection. Of requests and replies, one kind travels at a time."""

    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        # Bytes of the message that travels now: above 0 upwards, below downwards.
        self._travelled = 0
        for source, sink, upwards in ((client, server, True), (server, client, False)):
            threading.Thread(target=self._run, args=(source, sink, upwards), daemon=True).start()

    def _run(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                if upwards and self._travelled <= 0:
                    time.sleep(self._proxy.delay)
                sink.sendall(piece)
                self._count(len(piece), upwards)
        _hang_up(source)
        _hang_up(sink)
        self._proxy._forget(source, sink)

    def _count(self, nbytes: int, upwards: bool) -> None:
        sign = 1 if upwards else -1
        self._travelled = max(self._travelled * sign, 0) * sign + nbytes * sign
        then = self._proxy._due(upwards, abs(self._travelled))
        if then is not None:
            then()
            # Or what a server had sent before would still arrive.
            raise ConnectionAbortedError


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
