"""Chunks in a Redis, for commands that look at them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtiers.tiers.examine import Content
from kvtiers.tiers.named_ledger import Ledger
from kvtiers.tiers.redis_about import AboutBook, facts_in
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_keys import Keys
from kvtiers.tiers.redis_protocol import ReplyError
from kvtiers.tiers.redis_scan import Scanner
from kvtiers.tiers.redis_start import make_client
from kvtiers.tools.places import Lying, Place, PlaceError

if TYPE_CHECKING:
    from kvtiers.tiers.redis_client import Session

_NO_TOUCH = [b"CLIENT", b"NO-TOUCH", b"ON"]
_WOULD_RENEW = (
    "{} is older than Redis 7.2, or does not let this user say CLIENT NO-TOUCH, and would take "
    "reading a chunk for a use of it: all chunks would look equally young, and be evicted in no "
    "good order. Use --renew-use if that does no harm."
)


class RedisPlace(Place):
    """The chunks below a prefix of one server.

    Args:
        config: of a tier there.
        renew_use: read although the server takes that for a use of what is read.

    """

    def __init__(self, config: RedisConfig, *, renew_use: bool = False) -> None:
        self.name, self.config = f"{config.url} ({config.key_prefix}*)", config
        self._renew_use = renew_use
        self._keys = Keys(config.key_prefix)
        # With one connection, what is asked of the connection holds for all calls.
        self._client = make_client(config.model_copy(update={"pool_size": 1}))
        self._value = bytearray()

    def chunks(self) -> Iterator[Lying]:
        """See ``Place.chunks``. All names are in memory, and no payload."""
        with self._session() as session:
            _quietly(session)
        scanner = Scanner(self._client, self._keys, Ledger(None), AboutBook(self._keys, ()), 0)
        for entry in scanner.scan():
            if entry.key is not None:
                yield Lying(entry.key, entry.where, entry.nbytes, entry.last_used)

    def facts(self, namespace_id: str) -> Mapping[str, Any]:
        """See ``Place.facts``."""
        with self._session() as session:
            [reply] = session.ask([[b"GET", self._keys.about(namespace_id)]])
            return facts_in(reply) or {}

    @contextlib.contextmanager
    def opened(self, lying: Lying) -> Iterator[Content]:
        """See ``Place.opened``. One value is in memory.

        Raises:
            PlaceError: the server would take it for a use.

        """
        with self._session() as session:
            if not (_quietly(session) or self._renew_use):
                raise PlaceError(_WOULD_RENEW.format(self.name))
            value = self._read(session, self._keys.chunk(lying.key))
        if value is None:
            raise FileNotFoundError(lying.where)
        yield _Value(value)

    def _read(self, session: Session, name: bytes) -> memoryview | None:
        """The value; None if it went, or was stored anew, meanwhile."""
        [nbytes] = session.ask([[b"STRLEN", name]])
        if isinstance(nbytes, ReplyError):
            raise nbytes
        assert isinstance(nbytes, int)
        if len(self._value) < nbytes:
            self._value = bytearray(nbytes)
        value = memoryview(self._value)[:nbytes]
        return value if session.get_into(name, [value]) == nbytes else None

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        """A connection, on which a server's refusal is an OSError as any other failure."""
        try:
            with self._client.session() as session:
                yield session
        except ReplyError as error:
            raise OSError(str(error)) from None

    def remove(self, lying: Lying) -> None:
        """See ``Place.remove``."""
        with self._session() as session:
            [reply] = session.ask([[b"UNLINK", self._keys.chunk(lying.key)]])
            if isinstance(reply, ReplyError):
                raise reply

    def close(self) -> None:
        """See ``Place.close``."""
        self._client.close()


@dataclass(frozen=True)
class _Value:
    value: memoryview

    @property
    def nbytes(self) -> int:
        """See ``Content``."""
        return self.value.nbytes

    def read(self, start: int, end: int) -> memoryview:
        """See ``Content``."""
        return self.value[start:end]


def _quietly(session: Session) -> bool:
    """Ask the server not to take what follows for uses; False if it can't."""
    [reply] = session.ask([_NO_TOUCH])
    return not isinstance(reply, ReplyError)
