"""Takes a server's address apart, and secrets out of it before anybody can print them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

DEFAULT_PORT = 6379
TLS_SCHEMES = frozenset({"rediss", "valkeys"})
UNIX_SCHEME = "unix"
SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")

_EXAMPLES = "such as redis://host:6379/0, rediss://host for TLS, or unix:///path/to/redis.sock"
_HIDDEN = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_IN_QUERY = re.compile(r"([?&](?:password|username)=)[^&#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        tls: whether to speak TLS.
        host, port: for TCP.
        path: of a unix socket; "" for TCP.

    """

    tls: bool = False
    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""


def without_secrets(url: str) -> tuple[str, str | None, str | None]:
    """The URL without user and password, then these two, decoded.

    What can't be told apart is cut out, and leaves a mark that ``parse`` refuses: an
    error's text shows the URL, and must not show half of a password.
    """
    url = _IN_QUERY.sub(rf"\1{_HIDDEN}", url)
    scheme, separator, rest = url.partition("://")
    if not separator or ("@" in rest and not _SCHEME.fullmatch(scheme)):
        return (f"{_HIDDEN}@{url.rpartition('@')[2]}" if "@" in url else url), None, None
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, host = authority.rpartition("@")
    if authority and "@" in rest[len(authority) :]:
        # A password with a character in it that ends the host's part of a URL.
        return f"{scheme}://{_HIDDEN}@{rest.rpartition('@')[2]}", None, None
    if at:
        name, colon, password = user.partition(":")
        clean = f"{scheme}://{host}{rest[len(authority) :]}"
        return clean, unquote(name) or None, unquote(password) if colon else None
    return url, None, None


def parse(url: str) -> tuple[Address, int | None]:
    """The address, and the database if the URL names one.

    Args:
        url: as ``without_secrets`` gives it.

    Raises:
        ValueError: what is wrong, and how to write it.

    """
    if _HIDDEN in url:
        raise ValueError(
            "its user or password can't be told from the rest. Set 'username' and 'password' "
            "beside 'url', or write '/', '?', '#' and '@' in them as %2F, %3F, %23 and %40"
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"it must be a URL, {_EXAMPLES}") from error
    if "://" not in url or parts.scheme not in SCHEMES:
        raise ValueError(f"it must begin with one of {', '.join(SCHEMES)} and '://', {_EXAMPLES}")
    if parts.fragment:
        raise ValueError(f"it must end before the '#', {_EXAMPLES}")
    database = _from_query(parts.query)
    if parts.scheme == UNIX_SCHEME:
        path = unquote(parts.netloc + parts.path)
        if not path.startswith("/"):
            raise ValueError("it must name the socket in full, such as unix:///run/redis.sock")
        return Address(path=path), database
    if parts.path.strip("/"):
        if database is not None:
            raise ValueError("it names the database twice. Leave the '?db=' out")
        database = _database(parts.path.strip("/"))
    return _host(parts.netloc, tls=parts.scheme in TLS_SCHEMES), database


def _host(authority: str, *, tls: bool) -> Address:
    host, port = authority, ""
    if authority.startswith("["):
        host, _, port = authority[1:].partition("]")
        if port and not port.startswith(":"):
            raise ValueError(f"it must have its port after a colon, {_EXAMPLES}")
        port = port.removeprefix(":")
    elif ":" in authority:
        host, _, port = authority.partition(":")
    if not host:
        raise ValueError(f"it must name a host, {_EXAMPLES}")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("its port must be a number from 1 to 65535")
    return Address(tls=tls, host=unquote(host), port=int(port or DEFAULT_PORT))


def _from_query(query: str) -> int | None:
    given = dict(parse_qsl(query, keep_blank_values=True))
    database = given.pop("db", None)
    if given:
        raise ValueError(
            f"it can carry no '{next(iter(given))}'. Options are set beside 'url', under the "
            "names that the documentation lists; only 'db' may stand after the '?'"
        )
    return None if database is None else _database(database)


def _database(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("its database must be a number, such as the 0 in redis://host/0")
    return int(text)


def separated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with what the URL says of user and password as options of their own.

    Raises:
        ValueError: one of them is given twice, and differs.

    """
    options = dict(given)
    url = options.get("url")
    if not isinstance(url, str):
        return options
    options["url"], *found = without_secrets(url)
    for key, value in zip(("username", "password"), found, strict=True):
        if value is not None and options.get(key) is not None:
            raise ValueError(
                f"the {key} stands in 'url' and in '{key}'. Leave it out of one of them"
            )
        if value is not None:
            options[key] = value
    return options
