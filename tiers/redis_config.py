"""The options of the Redis tier."""

from __future__ import annotations

from typing import Annotated, Any

from kvtiers.tiers.base import MAX_THREADS
from kvtiers.tiers.encryption import AtRestConfig
from kvtiers.tiers.file_option import FileOption
from kvtiers.tiers.redis_url import Address, parse, separated
from kvtiers.tiers.units import seconds
from pydantic import (
    ConfigDict,
    SecretStr,
    StrictBool,
    field_validator,
    model_validator,
)

# What other programs call our options, for who types it by habit.
_CALLED_HERE = {
    "host": "url",
    "port": "url",
    "db": "database",
    "pass": "password",
    "prefix": "key_prefix",
    "max_connections": "pool_size",
    "socket_timeout": "deadline",
    "socket_connect_timeout": "connect_timeout",
    "timeout": "deadline",
    "cacert": "ssl_ca_certs",
    "cert": "ssl_certfile",
    "key": "ssl_keyfile",
}
_OF_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")


class RedisConfig(AtRestConfig):
    """Options of the Redis tier.

    Attributes:
        url: where the server is: ``redis://host:6379/0``, ``rediss://`` for TLS,
            ``unix:///path?db=0``. ``valkey://`` and ``valkeys://`` mean the first two.
            A user and password in it become ``username`` and ``password``.
        username: of the server's ACL; None for its default user.
        password: never shown again, wherever it was written.
        database: its number; the URL may name it instead. 0 if neither does.
        ssl_ca_certs: file of the authorities to trust, None for the system's.
        ssl_certfile, ssl_keyfile: our certificate and its key, where the server asks.
        ssl_check_hostname: whether the server's certificate must be for ``url``'s host.
        ttl: seconds after which the server drops a chunk, used or not, counted from
            when it was stored; None to keep it until something needs the room.
        key_prefix: what all our keys begin with.
        pool_size: connections at most; None for one more than ``threads``, for scans.
        capacity: bytes that chunks below ``key_prefix`` may take, metadata included;
            None is no bound but the server's own.
        connect_timeout: seconds that connecting may take.
        required: whether the engine must not start while the server is away.

    """

    # An error's text would show all that was given, the password too.
    model_config = ConfigDict(hide_input_in_errors=True)

    type: str = "redis"
    url: str = "redis://127.0.0.1:6379"
    username: str | None = None
    password: SecretStr | None = None
    database: int | None = None
    ssl_ca_certs: FileOption | None = None
    ssl_certfile: FileOption | None = None
    ssl_keyfile: FileOption | None = None
    ssl_check_hostname: StrictBool = True
    ttl: int | None = None
    key_prefix: str = "kvtiers:"
    pool_size: int | None = None
    capacity: int | None = None
    connect_timeout: Annotated[float, seconds("1")] = 1.0
    required: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key in sorted(given.keys() & _CALLED_HERE.keys()):
            raise ValueError(f"'{key}' is not an option here. Set '{_CALLED_HERE[key]}'")
        return separated(given)

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parse(url)
        return url

    @field_validator("database", mode="before")
    @classmethod
    def _numbered(cls, value: object) -> object:
        if value is None or (type(value) is int and value >= 0):
            return value
        raise ValueError("it must be a whole number, 0 or above")

    @field_validator("ttl", mode="before")
    @classmethod
    def _lasting(cls, value: object) -> object:
        if value is None or (type(value) is int and 0 < value < 1 << 40):
            return value
        raise ValueError("it must be a whole number of seconds above 0, without a unit")

    @field_validator("pool_size", mode="before")
    @classmethod
    def _pooled(cls, value: object) -> object:
        if value is None or (type(value) is int and 0 < value <= 4 * MAX_THREADS):
            return value
        raise ValueError(f"it must be a whole number from 1 to {4 * MAX_THREADS}")

    @model_validator(mode="after")
    def _fits_together(self) -> RedisConfig:
        _, in_url = parse(self.url)
        if in_url is not None and self.database not in (None, in_url):
            raise ValueError(
                f"the database is {in_url} in 'url' and {self.database} in 'database'. Leave it "
                "out of one of them"
            )
        asked = [key for key in _OF_TLS if key in self.model_fields_set]
        if asked and not self.address.tls:
            raise ValueError(
                f"'{asked[0]}' is for TLS, and 'url' does not ask for it. Begin 'url' with "
                "rediss://, or leave the option out"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(
                "'ssl_keyfile' is set without 'ssl_certfile', the certificate that it is the key of"
            )
        return self

    @property
    def address(self) -> Address:
        """Where the server listens."""
        return parse(self.url)[0]

    @property
    def database_number(self) -> int:
        """The database that chunks lie in."""
        in_url = parse(self.url)[1]
        return self.database if self.database is not None else in_url or 0

    @property
    def connections(self) -> int:
        """Connections at most."""
        return self.pool_size if self.pool_size is not None else self.threads + 1
