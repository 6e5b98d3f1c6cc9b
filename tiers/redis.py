"""The Redis tier: one key a chunk, in a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvtiers.tiers.at_rest import AtRestTier, check_capacity
from kvtiers.tiers.base import (
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    TierConfigError,
    Usage,
    WriteOutcome,
)
from kvtiers.tiers.named_ledger import Ledger
from kvtiers.tiers.redis_about import AboutBook
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_keys import Keys
from kvtiers.tiers.redis_protocol import MisconfiguredError, Reply, ReplyError, pack_around
from kvtiers.tiers.redis_scan import Scanner
from kvtiers.tiers.redis_start import greet, make_client, tls_context

if TYPE_CHECKING:
    from kvtiers.tiers.redis_client import Session

_FULL = "OOM"
_OTHER_TYPE = "WRONGTYPE"
_OF_CLUSTERS = frozenset({"MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN", "TRYAGAIN"})


class RedisTier(AtRestTier):
    """Chunks as values below ``key_prefix``; see ``redis_keys`` for where.

    A value is a chunk as ``format`` lays it out, verified on every read; a damaged one
    is deleted and counts as corrupt. ``SET … NX`` makes a chunk visible whole or not at
    all. Several engines may use one server: what the others write is found by lookups,
    and counted by the next ``scan``. So is what the server drops by itself.

    The server's own clock of the last use (``OBJECT IDLETIME``) orders chunks. It costs
    nothing: reads renew it, and a scan does not. It counts seconds, so chunks of one
    prefix that were used in one go are of one age, and right after an engine's restart
    a prefix may lose its head before its tail. Servers that evict by frequency (LFU)
    keep no such clock: there all chunks that a scan finds are of one age.

    Nothing is sent at construction. Only one server is supported: no Redis Cluster,
    no Sentinel.

    Args:
        config: see ``RedisConfig``.
        payload_bytes: size of each chunk, a multiple of ``ALIGNMENT``.

    Raises:
        TierConfigError: redis-py is missing, a certificate can't be loaded, or
            ``capacity`` is below one chunk.

    """

    Config: ClassVar[type[RedisConfig]] = RedisConfig
    shared: ClassVar[bool] = True
    persistent: ClassVar[bool] = True
    config: RedisConfig

    def __init__(self, config: RedisConfig, payload_bytes: int) -> None:
        super().__init__(config, payload_bytes)
        check_capacity("redis", config.capacity, self.chunk_bytes)
        tls_context(config)
        self._keys = Keys(config.key_prefix)
        self._lasting = () if config.ttl is None else (b"EX", b"%d" % config.ttl)
        self._client = make_client(config)
        self._ledger = Ledger(config.capacity)
        self._book = AboutBook(self._keys, self._lasting)
        self._scanner = Scanner(
            self._client, self._keys, self._ledger, self._book, self.chunk_bytes
        )

    def probe(self) -> str | None:
        """See ``Tier.probe``. Takes ``deadline`` and ``connect_timeout`` at most.

        Raises:
            TierConfigError: the server will not have us; or it is away, and ``required``.

        """
        try:
            greet(self._client, self._keys, self.config)
        except MisconfiguredError as error:
            raise TierConfigError(f"The redis tier can't be used: {error}.") from error
        except OSError as error:
            if self.config.required:
                raise TierConfigError(
                    f"The redis tier is required, but {error}. Start the server, correct 'url', "
                    "or set 'required' to false to start without it."
                ) from error
            return str(error)
        return None

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See ``Tier.contains``. Is no use of the chunks."""
        if not keys:
            return []
        with self._client.session() as session:
            usable = self._usable(session, keys)
            replies = session.ask([[b"EXISTS", self._keys.chunk(key)] for key in keys])
        return [
            self._checked(reply) == 1
            and usable[key.namespace.id]
            and not self._unreadable.hides(key)
            for key, reply in zip(keys, replies, strict=True)
        ]

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``. A hit is a use, in the server's own books."""
        outcomes: list[ReadOutcome] = []
        if not keys:
            return outcomes
        try:
            with self._client.session() as session:
                for key, payload in zip(keys, buffers, strict=True):
                    outcomes.append(self._read(session, key, payload))
                missed = [k for k, o in zip(keys, outcomes, strict=True) if o is ReadOutcome.MISS]
                self._uncount(session, missed)
        except (OSError, ReplyError) as error:
            self._log_error("read", error)
        return outcomes + [ReadOutcome.FAILED] * (len(keys) - len(outcomes))

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        """See ``Tier.write``. A full server (OOM) is ``REFUSED``, as is the bound."""
        outcomes: list[WriteOutcome] = []
        if not keys:
            return outcomes
        try:
            with self._client.session() as session:
                usable = self._usable(session, keys, create=True)
                # Also a use of those that are there.
                there = session.ask([[b"TOUCH", self._keys.chunk(key)] for key in keys])
                for key, payload, found in zip(keys, buffers, there, strict=True):
                    if not usable[key.namespace.id]:
                        outcomes.append(WriteOutcome.REFUSED)
                    elif found == 1 and self._unreadable.must_leave(key):
                        outcomes.append(WriteOutcome.TAKEN)
                    elif found == 1 and not self._unreadable.may_replace(key):
                        outcomes.append(WriteOutcome.EXISTS)
                    else:
                        outcomes.append(self._write(session, key, payload))
        except (OSError, ReplyError) as error:
            self._log_error("write", error)
        return outcomes + [WriteOutcome.FAILED] * (len(keys) - len(outcomes))

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See ``Tier.remove``. Works for namespaces whose chunks are refused too."""
        if not keys:
            return 0
        with self._client.session() as session:
            return self._delete(session, [self._keys.chunk(key) for key in keys])

    def scan(self) -> Iterator[Entry]:
        """See ``Tier.scan``. Also counts what it finds.

        Safe beside all other calls; what they do meanwhile is neither lost nor
        counted twice.
        """
        return self._scanner.scan()

    def namespaces(self, most: int) -> list[Namespace]:
        """See ``Tier.namespaces``. Of so many keys as a fleet's server may hold, not of all."""
        return self._scanner.namespaces(most)

    def usage(self) -> Usage:
        """See ``Tier.usage``. Chunks of others count once they are scanned."""
        return self._ledger.usage()

    def close(self) -> None:
        """See ``Tier.close``."""
        self._client.close()

    def _usable(
        self, session: Session, keys: Sequence[ChunkKey], *, create: bool = False
    ) -> dict[str, bool]:
        """Whether chunks of each namespace may be used; see ``AboutBook.accepts``."""
        namespaces = {key.namespace.id: key.namespace for key in keys}
        accepts = self._book.accepts
        return {n: accepts(session, space, create=create) for n, space in namespaces.items()}

    # One chunk --------------------------------------------------------------------

    def _read(self, session: Session, key: ChunkKey, payload: memoryview) -> ReadOutcome:
        name, metadata = self._keys.chunk(key), self._tail_buffer()
        try:
            if not self._book.accepts(session, key.namespace):
                return ReadOutcome.MISS
            nbytes = session.get_into(name, (payload, metadata))
        except ReplyError as error:
            if error.code == _OTHER_TYPE:
                return self._corrupt(session, name, "no chunk: another type of value")
            self._log_error("read", error)
            return ReadOutcome.FAILED
        if nbytes is None:
            return ReadOutcome.MISS
        defect = self._defect(nbytes, metadata, key, payload)
        if defect is None:
            return ReadOutcome.HIT
        if defect.foreign:
            self._log_foreign(name.decode(), defect)
            return ReadOutcome.UNREADABLE
        return self._corrupt(session, name, defect.value)

    def _corrupt(self, session: Session, name: bytes, why: str) -> ReadOutcome:
        """Delete a value that is not what it claims to be, so that it can be stored anew."""
        self._log_once(why, f"{name.decode()}: {why}. It counts as a miss, and is deleted.")
        self._delete(session, [name])
        return ReadOutcome.CORRUPT

    def _write(self, session: Session, key: ChunkKey, payload: memoryview) -> WriteOutcome:
        name = self._keys.chunk(key)
        try:
            with self._ledger.changing((name,), session.until):
                return self._store(session, name, key, payload)
        except ReplyError as error:
            self._log_error("write", error)
            return WriteOutcome.REFUSED if error.code == _FULL else WriteOutcome.FAILED

    def _store(
        self, session: Session, name: bytes, key: ChunkKey, payload: memoryview
    ) -> WriteOutcome:
        if not self._ledger.reserve(self.chunk_bytes):
            return WriteOutcome.REFUSED
        reserved = self.chunk_bytes
        try:
            metadata = self._tail_buffer()
            stored = self._packed(key, payload, metadata)
            unless = () if self._unreadable.may_replace(key) else (b"NX",)
            head, tail = pack_around((b"SET", name), self.chunk_bytes, (*unless, *self._lasting))
            session.send([head, stored, metadata, tail], answers=1)
            if self._checked(session.reply()) is None:
                return WriteOutcome.EXISTS
            self._unreadable.discard(key)
            self._ledger.present(name, self.chunk_bytes, reserved=reserved)
            reserved = 0
            return WriteOutcome.STORED
        finally:
            self._ledger.release(reserved)

    def _delete(self, session: Session, names: Sequence[bytes]) -> int:
        """Delete and uncount. Returns how many were there; raises what the server says."""
        with self._ledger.changing(names, session.until):
            # Without waiting until the memory is free, which takes long for megabytes.
            replies = session.ask([[b"UNLINK", name] for name in names])
            for name, reply in zip(names, replies, strict=True):
                if isinstance(reply, int):
                    self._ledger.absent(name)
        return sum(self._checked(reply) == 1 for reply in replies)

    def _uncount(self, session: Session, missed: Sequence[ChunkKey]) -> None:
        """Forget chunks that the server dropped by itself: it was restarted, or evicts."""
        names = [name for key in missed if self._ledger.knows(name := self._keys.chunk(key))]
        if not names:
            return
        with self._ledger.changing(names, session.until):
            # Once more, since another thread may have stored them meanwhile.
            replies = session.ask([[b"EXISTS", name] for name in names])
            for name, reply in zip(names, replies, strict=True):
                if reply == 0:
                    self._ledger.absent(name)

    # Small things -----------------------------------------------------------------

    @staticmethod
    def _checked(reply: Reply) -> Reply:
        """The reply, unless it is an error: that is raised."""
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def _log_error(self, doing: str, error: Exception) -> None:
        code = error.code if isinstance(error, ReplyError) else type(error).__name__
        also = ""
        if code in _OF_CLUSTERS:
            also = " That is how a Redis Cluster answers, which this release does not support."
        self._log_once((doing, code), f"Could not {doing} a chunk: {str(error).rstrip('.')}.{also}")
