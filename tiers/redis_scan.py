"""Lists what a Redis tier's server holds, and brings its accounting up to date.

No command that a scan uses counts as a use of the keys it sees: STRLEN would, and so
would reading a part of each. So sizes are not asked for key by key. All chunks of a
namespace have one size, and that is asked of a few of them, once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvtiers.policies.sharded import ShardedDict
from kvtiers.tiers.base import ChunkKey, Entry, Namespace
from kvtiers.tiers.named_ledger import Ledger
from kvtiers.tiers.redis_about import AboutBook, facts_in
from kvtiers.tiers.redis_keys import Found, Keys
from kvtiers.tiers.redis_protocol import ProtocolError, Reply, ReplyError

if TYPE_CHECKING:
    from kvtiers.tiers.redis_client import Client, Session

# Buckets of the server's table that one SCAN looks at: about a millisecond of its time.
_AT_ONCE = 1000
# Of so many chunks of a namespace, most will not be damaged.
_SAMPLE = 5
# A quarter of a second of the server's time, in which it gets everything else done too.
_PAGES_OF_FACTS = 256


class Scanner:
    """Walks the keys below one prefix; see ``Tier.scan``.

    Args:
        client: the server.
        keys: how the keys are called.
        ledger: replaced by what is found.
        book: names the namespaces.
        chunk_bytes: size of this tier's own values, for where no other is known.

    """

    def __init__(
        self, client: Client, keys: Keys, ledger: Ledger, book: AboutBook, chunk_bytes: int
    ) -> None:
        self._client = client
        self._keys = keys
        self._ledger = ledger
        self._book = book
        self._chunk_bytes = chunk_bytes
        self._sizes: dict[str, int] = {}

    def scan(self) -> Iterator[Entry]:
        """Every chunk of every namespace, and what is no chunk with key None."""
        # To its end first: until then the server may show a key twice, and the ledger
        # is to be settled even if the caller abandons the scan.
        used: ShardedDict[bytes, float] = ShardedDict()
        strangers: dict[bytes, Entry] = {}
        with self._ledger.scanning() as counted:
            for batch in self._batches():
                chunks = {name: entry for name, entry in batch.items() if entry.key is not None}
                strangers.update({n: entry for n, entry in batch.items() if n not in chunks})
                used.update({name: entry.last_used for name, entry in chunks.items()})
                counted.update({name: entry.nbytes for name, entry in chunks.items()})
        yield from strangers.values()
        for names in used.parts():
            yield from (self._chunk(name, used.pop(name, 0.0)) for name in names)

    def namespaces(self, most: int) -> list[Namespace]:
        """See ``Tier.namespaces``: the last used first. Raises OSError, ``ReplyError``."""
        found: dict[bytes, tuple[int, Namespace]] = {}
        for session, names in islice(self._pages(self._keys.abouts), _PAGES_OF_FACTS):
            idle = session.ask([[b"OBJECT", b"IDLETIME", name] for name in names])
            stored = session.ask([[b"GET", name] for name in names])
            for name, seconds, reply in zip(names, idle, stored, strict=True):
                facts = facts_in(reply)
                if facts is not None:
                    namespace = Namespace(self._keys.parse(name).namespace, facts)
                    found[name] = (seconds if isinstance(seconds, int) else 0, namespace)
        newest = sorted(found.values(), key=lambda each: each[0])
        return [namespace for _, namespace in newest[:most]]

    def _batches(self) -> Iterator[dict[bytes, Entry]]:
        for session, names in self._pages(self._keys.pattern):
            yield self._entries(session, names)

    def _pages(self, pattern: bytes) -> Iterator[tuple[Session, list[bytes]]]:
        """Keys that match, some twice, and the session that found them."""
        cursor = b"0"
        while True:
            page = [b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _AT_ONCE]
            # A session for each page, as a deadline is for one call of the server.
            with self._client.session() as session:
                cursor, names = _page(session.ask([page])[0])
                yield session, names
            if cursor == b"0":
                return

    def _entries(self, session: Session, names: Sequence[bytes]) -> dict[bytes, Entry]:
        now = time.time()
        found = {name: self._keys.parse(name) for name in names}
        shown = [name for name, what in found.items() if not what.about]
        idle = session.ask([[b"OBJECT", b"IDLETIME", name] for name in shown])
        self._learn_sizes(session, found)
        entries = {}
        for name, reply in zip(shown, idle, strict=True):
            # Without a number there are two cases: gone since, and LFU.
            if reply is None or (isinstance(reply, ReplyError) and "no such key" in str(reply)):
                continue
            used = now - reply if isinstance(reply, int) else now
            entries[name] = self._entry(session, name, found[name], used)
        return entries

    def _entry(self, session: Session, name: bytes, what: Found, used: float) -> Entry:
        if what.hash is not None:
            return self._chunk(name, used)
        [reply] = session.ask([[b"MEMORY", b"USAGE", name]])
        nbytes = reply if isinstance(reply, int) else 0
        return Entry(None, nbytes, used, name.decode(errors="replace"))

    def _chunk(self, name: bytes, used: float) -> Entry:
        what = self._keys.parse(name)
        assert what.hash is not None
        key = ChunkKey(self._book.known(what.namespace), what.hash)
        nbytes = self._sizes.get(what.namespace, self._chunk_bytes)
        return Entry(key, nbytes, used, name.decode(errors="replace"))

    def _learn_sizes(self, session: Session, found: Mapping[bytes, Found]) -> None:
        """Ask for the sizes of a few chunks of each namespace that is not this tier's own."""
        samples: dict[str, list[bytes]] = {}
        for name, what in found.items():
            known = what.namespace in self._sizes or self._book.seen(what.namespace)
            if what.hash is not None and not known:
                samples.setdefault(what.namespace, []).append(name)
        for namespace, names in samples.items():
            replies = session.ask([[b"STRLEN", name] for name in names[:_SAMPLE]])
            sizes = [reply for reply in replies if isinstance(reply, int) and reply]
            if sizes:
                self._sizes[namespace] = statistics.mode(sizes)


def _page(reply: Reply) -> tuple[bytes, list[bytes]]:
    """Where to go on, and the keys found. Raises what the server says instead."""
    if isinstance(reply, ReplyError):
        raise reply
    if isinstance(reply, list) and len(reply) == 2:
        cursor, names = reply
        if isinstance(cursor, bytes) and isinstance(names, list):
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise ProtocolError("the server's answer to SCAN is none")
