"""What is checked once, before a Redis tier is used."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

from kvtiers.tiers.base import TierConfigError
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_keys import Keys
from kvtiers.tiers.redis_protocol import AwayError, MisconfiguredError, Reply, ReplyError, pack
from kvtiers.tiers.redis_url import Address

if TYPE_CHECKING:
    from kvtiers.tiers.redis_client import Client

_TLS = "expects TLS. Begin 'url' with rediss://"
_PLAIN = "does not speak TLS. Begin 'url' with redis://"

# A server that says so will have us in a moment.
_BUSY = frozenset({"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN"})


def make_client(config: RedisConfig) -> Client:
    """The connections to the server. Raises TierConfigError if redis-py is missing."""
    try:
        from kvtiers.tiers.redis_client import Client
    except ImportError as error:
        raise TierConfigError(
            f"The redis tier needs the package 'redis', which is not there ({error}). Install it "
            "with: pip install 'kvtiers[redis]'"
        ) from error
    return Client(config)


def tls_context(config: RedisConfig) -> ssl.SSLContext:
    """What the files for TLS say. Raises TierConfigError if one can't be used."""
    context = ssl.create_default_context()
    context.check_hostname = config.ssl_check_hostname
    key, file = "ssl_ca_certs", config.ssl_ca_certs
    try:
        if file is not None:
            context.load_verify_locations(file)
        key, file = "ssl_certfile", config.ssl_certfile
        if file is not None:
            # With an empty password, since OpenSSL would ask for one on the terminal.
            context.load_cert_chain(file, config.ssl_keyfile, password="")
    except OSError as error:
        with_key = config.ssl_keyfile is not None and key == "ssl_certfile"
        also = f" with 'ssl_keyfile' {config.ssl_keyfile}" if with_key else ""
        raise TierConfigError(
            f"The redis tier's '{key}' {file}{also} can't be used: {error}. Name a readable file "
            "in PEM format; a key must not be encrypted."
        ) from error
    return context


def greet(client: Client, keys: Keys, config: RedisConfig) -> None:
    """Ask the server whether it does all that a tier needs.

    Raises:
        MisconfiguredError: it answers, and does not.
        AwayError: it does not answer, or not yet.

    """
    trial = keys.probe
    commands: list[list[bytes]] = [
        [b"INFO", b"server"],
        [b"SET", trial, b"", b"EX", b"1"],
        [b"GET", trial],
        [b"EXISTS", trial],
        [b"TOUCH", trial],
        [b"OBJECT", b"IDLETIME", trial],
        [b"SCAN", b"0", b"MATCH", keys.pattern, b"COUNT", b"1"],
        [b"UNLINK", trial],
    ]
    try:
        with client.session() as session:
            replies = session.ask(commands)
    except AwayError as error:
        fault = _tls_fault(config)
        if fault:
            raise MisconfiguredError(f"the Redis server at {client.where} {fault}") from error
        raise
    _refuse_other_kinds(replies[0], client.where)
    for command, reply in zip(commands[1:], replies[1:], strict=True):
        if isinstance(reply, ReplyError):
            _judge(command, reply, client.where)


def _tls_fault(config: RedisConfig) -> str:
    """Whether TLS is why a server that can be reached hangs up; "" if not.

    It says so before it hangs up, but that is lost if we were sending meanwhile. So:
    shake hands, send nothing, and listen.
    """
    address, patience = config.address, config.connect_timeout
    context = tls_context(config)
    if not address.tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if address.path:
        return ""
    try:
        with (
            socket.create_connection((address.host, address.port), patience) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as connection,
        ):
            if not address.tls:
                return _TLS
            connection.recv(1)
    except ssl.SSLError as error:
        told = "ALERT" in str(error.reason)
        if told and address.tls:
            return f"does not trust us over TLS: {error}. Set 'ssl_certfile' and 'ssl_keyfile'"
        return _TLS if told else ""
    except OSError:
        return _PLAIN if address.tls and _answers_plainly(address, patience) else ""
    return ""


def _answers_plainly(address: Address, patience: float) -> bool:
    """Whether Redis's protocol is spoken there without TLS, where a handshake just hangs."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address.host, address.port), patience) as connection,
    ):
        connection.sendall(pack(b"PING"))
        return connection.recv(1) in (b"+", b"-")
    return False


def _refuse_other_kinds(info: Reply, where: str) -> None:
    """Raise MisconfiguredError for what is not one server with its own data."""
    text = info.decode(errors="replace") if isinstance(info, bytes) else ""
    for mode in ("cluster", "sentinel"):
        if f"redis_mode:{mode}" in text:
            raise MisconfiguredError(
                f"the Redis server at {where} is a Redis {mode.capitalize()}, which this release "
                "does not support. Name a server that runs alone, or the primary itself"
            )


def _judge(command: list[bytes], reply: ReplyError, where: str) -> None:
    """Raise for an error that keeps the tier from working; others are met as they come."""
    if reply.code in _BUSY:
        raise AwayError(f"the Redis server at {where} does not answer yet: {reply}")
    if reply.code == "NOAUTH":
        raise MisconfiguredError(f"the Redis server at {where} wants a password. Set 'password'")
    if reply.code == "READONLY":
        raise MisconfiguredError(
            f"the Redis server at {where} is a read-only replica. Name the primary"
        )
    if reply.code == "NOPERM" or "unknown command" in str(reply):
        name = command[0].decode()
        raise MisconfiguredError(
            f"the Redis server at {where} refuses {name} to this user ({reply}). The tier needs "
            "GET, SET, EXISTS, TOUCH, UNLINK, SCAN, OBJECT and STRLEN on keys below its "
            "'key_prefix'; its server must be Redis 5 or later, or Valkey"
        )
