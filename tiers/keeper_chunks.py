"""The chunks under a root as the keeper counts them, and the order in which they go.

Index and policy change together here, and only here. The keeper's thread only.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

from kvtiers.policies import Policy, PolicyRequest, Run
from kvtiers.policies.sharded import ShardedDict
from kvtiers.tiers.access_log import NO_TENANT, Record
from kvtiers.tiers.base import ALIGNMENT, ChunkKey, Namespace
from kvtiers.tiers.fs_layout import Layout, Place
from kvtiers.tiers.keeper_ledger import KeeperLedger, Writer
from kvtiers.tiers.keeper_listing import Listed
from kvtiers.tiers.keeper_snapshot import Snapshot
from kvtiers.tiers.root_index import Facts, unpacked

logger = logging.getLogger(__name__)

# So many at a time, so that a lease that was lost is noticed between.
_VICTIMS_AT_ONCE = 128


class KeptChunks:
    """What is counted, in the policy's order.

    Attributes:
        evicted: chunks that were deleted to keep the bound.

    Args:
        layout: of the root.
        books: what is counted and promised.
        policy: says what goes first.
        tier: the name under which the policy knows the root.
        breathe: called in long loops.

    """

    def __init__(
        self,
        layout: Layout,
        books: KeeperLedger,
        policy: Policy,
        tier: str,
        breathe: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._books = books
        self._index = books.index
        self._policy = policy
        self._tier = tier
        self._breathe = breathe
        # Counted while the root is listed, and when each was last used: the policy hears
        # of them last used first.
        self._unheard: ShardedDict[bytes, float] = ShardedDict()
        self._stuck: set[bytes] = set()
        self.evicted = 0

    # What is there -----------------------------------------------------------------

    def ids(self, record: Record) -> list[bytes]:
        """The ids of a record's chunks."""
        return [self._index.id_of(record.namespace, digest) for digest in record.hashes]

    def coming(self, writer: Writer, ids: Sequence[bytes], record: Record) -> None:
        """A writer announced these: they count from now on."""
        facts = _facts_of(ids, record, record.nbytes)
        packed = {chunk: fact.packed() for chunk, fact in zip(ids, facts, strict=True)}
        self._books.coming(writer, packed, record.nbytes)
        run = _run(ids, facts[0])
        self._policy.admit(run, self._tier)
        self._policy.on_insert(run, self._tier)

    def used(self, ids: Sequence[bytes], record: Record) -> None:
        """These were read. Takes in what was read though nobody had announced it."""
        self.look_at_unknown(ids)
        for chunk in ids:
            # Used before its turn to be heard of came.
            if self._unheard.pop(chunk, -math.inf) != -math.inf:
                self._policy.on_found(_run([chunk], self._facts(chunk)), self._tier, 0.0)
        for chunk, facts in zip(ids, _facts_of(ids, record, 0), strict=True):
            known = self._index.get(chunk)
            if known is not None:
                self._books.count(chunk, facts.over(unpacked(known)).packed())
        nbytes = max(self._facts(chunk).nbytes for chunk in ids)
        if nbytes:
            run = _run(ids, _facts_of(ids[:1], record, nbytes)[0])
            request = PolicyRequest("", (run,), tenant=run.tenant)
            self._policy.on_request(request)
            self._policy.on_access(run, request, self._tier)
            self._policy.on_start(request)
            self._policy.on_finish(request)

    def look_at_unknown(self, ids: Iterable[bytes]) -> None:
        """See whether those of these are there that are not counted."""
        self.look_at([chunk for chunk in ids if chunk not in self._index])

    def look_at(self, ids: Iterable[bytes]) -> None:
        """See for each of these whether its file is there, and count it or not."""
        gone: list[bytes] = []
        for chunk in ids:
            try:
                status = os.lstat(self._place(chunk).path)
            except (FileNotFoundError, NotADirectoryError):
                if chunk in self._index and not self._books.is_pending(chunk):
                    gone.append(chunk)
                continue
            except OSError:
                continue  # nothing is known: what counted still does
            if chunk not in self._index:
                facts = Facts(status.st_size, status.st_mtime)
                self._books.count(chunk, facts.packed())
                age = max(0.0, time.time() - status.st_mtime)
                self._policy.on_found(_run([chunk], facts), self._tier, age)
        self._uncount(gone)

    def _uncount(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self._books.uncount(chunk)
        if chunks:
            self._policy.on_remove(chunks, self._tier)

    def _facts(self, chunk: bytes) -> Facts:
        packed = self._index.get(chunk)
        return Facts(0) if packed is None else unpacked(packed)

    def _place(self, chunk: bytes) -> Place:
        namespace, digest = self._index.name_of(chunk)
        return self._layout.place(ChunkKey(Namespace(namespace), digest))

    # What to start from -------------------------------------------------------------

    def load(self, found: Snapshot) -> None:
        """Take in what an earlier holder wrote down."""
        for namespace in found.namespaces:
            self._index.id_of(namespace, b"")
        for chunk, facts in found.chunks:
            self._books.count(chunk, facts)
            self._breathe()
        now = time.time()
        for run, used in self._runs(chunk for chunk, _ in reversed(found.chunks)):
            self._policy.on_found(run, self._tier, max(0.0, now - used))
            self._breathe()

    def _runs(self, chunks: Iterable[bytes]) -> Iterator[tuple[Run, float]]:
        """Stretches of neighbours among chunks, in their order, and when each was used."""
        ids: list[bytes] = []
        first = last = Facts(0)
        for chunk in chunks:
            facts = self._facts(chunk)
            if ids and not (
                facts.parent == ids[-1][2:]
                and chunk[:2] == ids[-1][:2]
                and (facts.nbytes, facts.position) == (last.nbytes, last.position + 1)
            ):
                yield _run(ids, first), first.used
                ids = []
            first = facts if not ids else first
            ids.append(chunk)
            last = facts
        if ids:
            yield _run(ids, first), first.used

    def compare(self, listed: Listed) -> None:
        """One folder was listed: count what is there, and only that."""
        try:
            known = self._index.folder(listed.namespace, listed.first_byte)
        except OverflowError as error:
            logger.warning("What lies in %s is not counted: %s", listed.path, error)
            return
        # Not believed at once: a file may have appeared since its folder was listed.
        self.look_at([chunk for chunk in known if chunk[2:] not in listed.entries])
        for digest in listed.entries:
            chunk = self._index.id_of(listed.namespace, digest)
            status = listed.status(digest) if chunk not in self._index else None
            if status is not None:
                self._books.count(chunk, Facts(*status).packed())
                self._unheard[chunk] = status[1]

    def listed(self) -> None:
        """Every folder was listed: the policy hears of what was found."""
        now = time.time()
        for used, chunk in self._last_used_first(self._unheard.pieces()):
            if chunk in self._index:
                run = _run([chunk], self._facts(chunk))
                self._policy.on_found(run, self._tier, max(0.0, now - used))
            self._breathe()
        self._unheard = ShardedDict()

    def _last_used_first(
        self, pieces: Iterable[Mapping[bytes, float]]
    ) -> Iterator[tuple[float, bytes]]:
        """Piece by piece, since to sort a million at once would stop the engine."""
        ordered: list[list[tuple[float, bytes]]] = []
        for piece in pieces:
            ordered.append(sorted(((used, chunk) for chunk, used in piece.items()), reverse=True))
            self._breathe()
        return heapq.merge(*ordered, reverse=True)

    def in_order(self) -> Iterator[tuple[bytes, bytes]]:
        """Every chunk and its facts, the first to be evicted first."""
        named: set[bytes] = set()
        for chunk in self._policy.victims(self._tier, self._books.capacity):
            facts = self._index.get(chunk) if isinstance(chunk, bytes) else None
            if isinstance(chunk, bytes) and facts is not None and chunk not in named:
                named.add(chunk)
                yield chunk, facts
        # What a policy forgets to name must not be forgotten by us.
        for chunk in self._index if len(named) < self._index.chunks else ():
            facts = None if chunk in named else self._index.get(chunk)
            if facts is not None:
                yield chunk, facts

    # What goes ----------------------------------------------------------------------

    def expire(self) -> None:
        """Delete what the policy no longer wants kept."""
        expired = self._policy.expired(self._tier)
        self._remove([chunk for chunk in expired if self._removable(chunk)])

    def evict(self, need: int) -> int:
        """Delete some of the first to go. Returns the bytes that count no longer."""
        return self._remove(list(self.victims(need, _VICTIMS_AT_ONCE)))

    def victims(self, need: int, most: int | None = None) -> Iterator[bytes]:
        """The first to go, for so many bytes, but for those that may be about to appear."""
        for chunk in self._policy.victims(self._tier, need):
            if need <= 0 or most == 0:
                return
            if self._removable(chunk):
                yield chunk
                need -= self.bytes_of(chunk)
                most = None if most is None else most - 1

    def bytes_of(self, chunk: bytes) -> int:
        """What its file takes."""
        return self._facts(chunk).nbytes

    def _removable(self, chunk: object) -> TypeGuard[bytes]:
        if not isinstance(chunk, bytes) or chunk in self._stuck:
            return False
        return chunk in self._index and not self._books.is_pending(chunk)

    def _remove(self, chunks: Sequence[bytes]) -> int:
        gone: list[bytes] = []
        for chunk in chunks:
            if self._unlink(chunk):
                gone.append(chunk)
            self._breathe()
        freed = sum(map(self.bytes_of, gone))
        self._uncount(gone)
        return freed

    def _unlink(self, chunk: bytes) -> bool:
        place = self._place(chunk)
        try:
            place.refuse_links()
            os.unlink(place.path)
        except (FileNotFoundError, NotADirectoryError):
            return True  # what lies behind a link is not ours
        except OSError as error:
            if not self._stuck:
                logger.warning("Cannot evict %s, nor maybe others: %s", place.path, error)
            self._stuck.add(chunk)
            return False
        self.evicted += 1
        return True


def _run(ids: Sequence[bytes], first: Facts) -> Run:
    """A run as policies want it, with the facts of its first chunk."""
    parent = ids[0][:2] + first.parent if first.parent else None
    tenant = "" if first.tenant == NO_TENANT else first.tenant.hex()
    # A file that was cut to nothing takes no room, and policies divide by what a chunk takes.
    nbytes = first.nbytes or ALIGNMENT
    return Run(tuple(ids), max(0, first.position), nbytes, 0, parent, tenant)


def _facts_of(ids: Sequence[bytes], record: Record, nbytes: int) -> list[Facts]:
    """What a record says of each of its chunks."""
    now, parent, facts = time.time(), record.parent or b"", []
    used = min(record.at or now, now)
    for offset, chunk in enumerate(ids):
        position = record.start + offset if record.start >= 0 else -1
        facts.append(Facts(nbytes, used, position, record.tenant, parent))
        parent = chunk[2:]
    return facts
