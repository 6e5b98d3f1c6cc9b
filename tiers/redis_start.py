"""What is checked once, before a Redis tier is used."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from kvtiers.tiers.base import TierConfigError
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_keys import Keys
from kvtiers.tiers.redis_protocol import AwayError, MisconfiguredError, Reply, ReplyError

if TYPE_CHECKING:
    from kvtiers.tiers.redis_client import Client

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


def check_capacity(capacity: int | None, chunk_bytes: int) -> None:
    """Raise TierConfigError if not one chunk fits."""
    if capacity is not None and capacity < chunk_bytes:
        raise TierConfigError(
            f"The redis tier's 'capacity' of {capacity} bytes is less than one chunk takes, "
            f"which is {chunk_bytes} bytes with its metadata. Give it room for many chunks, or "
            "leave the tier out."
        )


def check_certificates(config: RedisConfig) -> None:
    """Raise TierConfigError if a file for TLS can't be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    key = "ssl_ca_certs"
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
        key = "ssl_certfile"
        if config.ssl_certfile is not None:
            # With an empty password, since OpenSSL would ask for one on the terminal.
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except OSError as error:
        also = "" if config.ssl_keyfile is None else f" with 'ssl_keyfile' {config.ssl_keyfile}"
        raise TierConfigError(
            f"The redis tier's '{key}' {getattr(config, key)}{also if key[4:6] == 'ce' else ''} "
            f"can't be used: {error}. Name a readable file in PEM format; a key must not be "
            "encrypted."
        ) from error


def greet(client: Client, keys: Keys) -> None:
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
    with client.session() as session:
        replies = session.ask(commands)
    _refuse_other_kinds(replies[0], client.where)
    for command, reply in zip(commands[1:], replies[1:], strict=True):
        if isinstance(reply, ReplyError):
            _judge(command, reply, client.where)


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
    if reply.code == "READONLY":
        raise MisconfiguredError(
            f"the Redis server at {where} is a read-only replica. Name the primary"
        )
    if reply.code in ("NOPERM", "NOAUTH") or "unknown command" in str(reply):
        name = command[0].decode()
        raise MisconfiguredError(
            f"the Redis server at {where} refuses {name} to this user ({reply}). The tier needs "
            "GET, SET, EXISTS, TOUCH, UNLINK, SCAN, OBJECT and STRLEN on keys below its "
            "'key_prefix'; its server must be Redis 5 or later, or Valkey"
        )
