"""Connections to one Redis server, with a deadline for every call.

redis-py connects, authenticates, speaks TLS and keeps the pool. What is sent and
received for a tier goes straight over its sockets, see ``redis_protocol``.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
import redis.exceptions
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_protocol import (
    AwayError,
    MisconfiguredError,
    Reply,
    ReplyReader,
    pack,
)

# redis-py has no types for what we call of it.
_POOL: Any = redis.BlockingConnectionPool

# Commands that are sent before their replies are read.
_PIPELINE = 1000
# Where a server's error goes on with the arguments of a command that it does not know.
_ECHO = ", with args beginning with"


class _Bounded:
    """Makes all of connecting, the handshake too, end in time.

    redis-py's timeout is for each receipt: a server that sends a byte now and then is in
    time for each of them, and would keep the thread for ever.

    Attributes:
        since: when it was last connected, on ``time.monotonic``.

    """

    since = 0.0

    def connect(self) -> None:
        """See redis-py. Raises its ConnectionError once ``socket_timeout`` has passed."""
        connection: Any = self
        if connection._sock:  # noqa: SLF001 - see ``Session``
            return
        self.since = time.monotonic()
        timer = threading.Timer(connection.socket_timeout, _hang_up, (connection,))
        timer.daemon = True
        timer.start()
        try:
            super().connect()  # type: ignore[misc]
        finally:
            timer.cancel()


class _Plain(_Bounded, redis.Connection):
    """Over TCP."""


class _Tls(_Bounded, redis.SSLConnection):
    """Over TLS."""


class _Unix(_Bounded, redis.UnixDomainSocketConnection):
    """Over a unix socket."""


def _hang_up(connection: Any) -> None:
    """End what another thread is waiting for on the connection."""
    with contextlib.suppress(OSError, AttributeError):
        connection._sock.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 - see ``Session``


class Session:
    """A connection for one call of a tier.

    Args:
        connection: from redis-py's pool, connected.
        until: when the call must be over, on ``time.monotonic``.

    """

    def __init__(self, connection: Any, until: float) -> None:
        self.until = until
        self._connection = connection
        # What redis-py's own parsers do, too: there is no public way to the socket.
        self._socket = connection._sock  # noqa: SLF001
        self._reader = ReplyReader(self._receive)
        self._unanswered = 0

    @property
    def in_step(self) -> bool:
        """Whether every command was answered, so that the connection can be used again."""
        return not self._unanswered

    def get_into(self, name: bytes, parts: Sequence[memoryview]) -> int | None:
        """The value of ``name`` into ``parts``; see ``ReplyReader.read_into``."""
        self.send([pack(b"GET", name)], answers=1)
        try:
            return self._reader.read_into(parts)
        finally:
            self._answered()

    def ask(self, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        """Send small commands together, and return a reply for each; errors among them."""
        replies: list[Reply] = []
        for start in range(0, len(commands), _PIPELINE):
            batch = commands[start : start + _PIPELINE]
            self.send([b"".join(pack(*command) for command in batch)], answers=len(batch))
            replies += [self.reply() for _ in batch]
        return replies

    def reply(self) -> Reply:
        """The next reply."""
        reply = self._reader.read()
        self._answered()
        return reply

    def send(self, parts: Sequence[bytes | memoryview], answers: int) -> None:
        """Send the parts of commands, from where they lie."""
        self._unanswered += answers
        self._socket.settimeout(self._left())
        self._connection.send_packed_command(parts, check_health=False)

    def _answered(self) -> None:
        self._unanswered -= 1

    def _receive(self, target: memoryview) -> int:
        # Between two receipts too: a server that sends a byte now and then is in time
        # for each of them.
        self._left()
        count: int = self._socket.recv_into(target)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left


class Client:
    """A server, and the pool of connections to it. Thread-safe. Connects when asked first.

    Args:
        config: which server, and how to prove who we are.

    """

    def __init__(self, config: RedisConfig) -> None:
        self.where = config.url
        self._config = config
        self._pool = self._new_pool()
        self._hung_at = 0.0

    def _new_pool(self) -> Any:
        config, address = self._config, self._config.address
        options: dict[str, object] = {"host": address.host, "port": address.port}
        kind: Any = _Plain
        if address.path:
            kind, options = _Unix, {"path": address.path}
        elif address.tls:
            kind = _Tls
            options |= {
                "ssl_ca_certs": _text(config.ssl_ca_certs),
                "ssl_certfile": _text(config.ssl_certfile),
                "ssl_keyfile": _text(config.ssl_keyfile),
                "ssl_check_hostname": config.ssl_check_hostname,
            }
        password = config.password
        return _POOL(
            max_connections=config.connections,
            timeout=config.deadline,
            connection_class=kind,
            db=config.database_number,
            username=config.username,
            password=None if password is None else password.get_secret_value(),
            # RESP3 adds nothing that we need, and servers before Redis 6 lack it.
            protocol=2,
            socket_timeout=config.deadline,
            socket_connect_timeout=min(config.connect_timeout, config.deadline),
            **options,
        )

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """A connection for one call.

        Raises:
            AwayError: the server cannot be reached, hangs, or went away meanwhile.
            MisconfiguredError: it will not have us.

        """
        begun = time.monotonic()
        try:
            connection = self._connection()
        except (redis.RedisError, OSError) as error:
            self._note_if_hung(begun, error)
            # Without the cause: its text may show what ``_translated`` cut out.
            raise self._translated(error) from None
        session = Session(connection, begun + self._config.deadline)
        try:
            yield session
        except (redis.RedisError, OSError) as error:
            self._note_if_hung(begun, error)
            raise self._translated(error) from error
        finally:
            if not session.in_step:
                connection.disconnect()
            self._pool.release(connection)

    def _connection(self) -> Any:
        """One that can be used, or so it seems. Raises what redis-py does.

        After a call that hung, those from before it are no good either. They would take a
        deadline each to be found out, where a host vanished without a word.
        """
        # Looks at the connection first: one that died meanwhile is made anew.
        connection = self._pool.get_connection()
        if connection.since < self._hung_at:
            try:
                connection.disconnect()
                connection.connect()
            except BaseException:
                self._pool.release(connection)
                raise
        return connection

    def _note_if_hung(self, begun: float, error: Exception) -> None:
        """A call that began then ended with the error."""
        timed_out = isinstance(error, TimeoutError | redis.TimeoutError)
        # One from before it was known says nothing of the connections made since.
        if timed_out and begun >= self._hung_at:
            self._hung_at = time.monotonic()

    def _translated(self, error: Exception) -> ConnectionError:
        text = f"the Redis server at {self.where}"
        if isinstance(error, AwayError | MisconfiguredError):
            return error
        refusal = _refusal(error)
        if refusal:
            return MisconfiguredError(f"{text} {self._without_password(refusal)}")
        return AwayError(f"{text} does not answer: {str(error).rstrip('.')}")

    def _without_password(self, text: str) -> str:
        """What a server says; one that knows no AUTH repeats what came with it, cut short."""
        password = self._config.password
        text = text.partition(_ECHO)[0]
        return text.replace(password.get_secret_value(), "***") if password else text

    def close(self) -> None:
        """Close all connections."""
        self._pool.disconnect()


def _refusal(error: Exception) -> str:
    """What a server that answers has against us; "" if it does not answer at all."""
    if isinstance(error, redis.AuthenticationError):
        return f"refuses 'username' and 'password': {error}"
    if isinstance(error, redis.exceptions.InvalidResponse):
        return "does not speak Redis's protocol. If it expects TLS, begin 'url' with rediss://"
    if isinstance(error, redis.ResponseError):
        return f"refuses the connection: {error}"
    broken = _broken_tls(error)
    return f"can't be trusted, or does not trust us, over TLS: {broken}" if broken else ""


def _broken_tls(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error at the bottom of what redis-py raised, unless the server just went away."""
    while error is not None:
        gone = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if isinstance(error, ssl.SSLError) and not gone:
            return error
        error = error.__cause__ or error.__context__
    return None


def _text(path: object) -> str | None:
    return None if path is None else str(path)
