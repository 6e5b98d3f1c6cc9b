"""Keeps the bound of a root for all who use it, while it holds the root's lease.

It reads what the writers log into an index, feeds a policy with it, evicts in that
policy's order, and grants the writers what is free. Nothing here lists the root, but for
``keeper_listing``. One thread calls it, but for ``grant``, ``short_of`` and ``usage``.

What it must never do is lose sight of a file. So

- a chunk is counted from its announcement, which comes before the file, until it was
  seen not to be there while nobody may make it appear;
- whoever may not write any more is fenced first, and its log read to the end afterwards;
- a log is deleted only once a snapshot that contains it has been published, which
  nobody can whose lease is over.

A second keeper, thought dead and still at it, can only unlink files (which the first then
finds gone) and fence writers (who begin anew).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtiers.policies import Policy, PolicyRequest, Run, TierInfo
from kvtiers.tiers import keeper_listing, keeper_snapshot
from kvtiers.tiers.access_log import NO_TENANT, Header, Kind, Record
from kvtiers.tiers.base import ChunkKey, Namespace, Usage
from kvtiers.tiers.fs_layout import Layout
from kvtiers.tiers.keeper_ledger import KeeperLedger, Writer
from kvtiers.tiers.keeper_listing import Listed
from kvtiers.tiers.lease import SNAPSHOT, Beat, Inherited, Lease, LeaseView
from kvtiers.tiers.log_files import OVER, LogReader, fence, segment_numbers, segment_path
from kvtiers.tiers.owner import has_ended
from kvtiers.tiers.pace import Pace
from kvtiers.tiers.root_index import Facts, unpacked

logger = logging.getLogger(__name__)

WRITER = "w-"
BEAT_SECONDS = 4.0
# A writer that logs nothing for as long is fenced, for the room it was promised.
SILENT_SECONDS = 600.0
_LISTING_SECONDS = 24 * 3600.0
_SWEEP_SECONDS = 3600.0
_VICTIMS_AT_ONCE = 128
# Snapshots are written after so much log, or after a quarter of their own length if
# that is more, and for dead writers' folders not more often than this.
_SNAPSHOT_LOG_BYTES = 4 << 20
_SNAPSHOT_SECONDS = 60.0
# What this process's writer may announce more than it does, as others see it, if this
# process is thought dead and goes on.
_AHEAD = 64 << 20


@dataclass(frozen=True)
class Terms:
    """What a keeper is to keep.

    Attributes:
        tier: what its policy is told of the tier, with the capacity.
        headroom: share of the capacity to keep free: it evicts when half of that is taken.
        unit: bytes of one chunk of this process, of which room is kept always.
        make_policy: builds the policy that says what goes first.

    """

    tier: TierInfo
    headroom: float
    unit: int
    make_policy: Callable[[Sequence[TierInfo], Callable[[], float]], Policy]


class Keeper:
    """The holder of a root's lease at work.

    Attributes:
        evicted: chunks that it deleted to keep the bound.

    Args:
        layout: of the root.
        lease: held, or looked at.
        inherited: what earlier holders left.
        terms: what to keep. The capacity is set.
        clock: seconds, monotonic.
        pace: what its long loops rest by.
        rebuild: start from a listing of the root, though there is a snapshot.

    """

    def __init__(
        self,
        layout: Layout,
        lease: Lease | LeaseView,
        inherited: Inherited,
        terms: Terms,
        clock: Callable[[], float],
        pace: Pace,
        *,
        rebuild: bool = False,
    ) -> None:
        assert terms.tier.capacity is not None
        self._layout = layout
        self._lease = lease
        self._terms = terms
        self._clock = clock
        self._pace = pace
        self._name = terms.tier.name
        self._policy = terms.make_policy([terms.tier], clock)
        self._books = KeeperLedger(terms.tier.capacity)
        self._limits = dict(inherited.limits)
        self._from_snapshot = inherited.snapshot and not rebuild
        self._begun = False
        self._listing: Iterator[Listed] | None = None
        self._unheard: list[tuple[float, bytes]] = []
        self._listed_at = self._swept_at = clock()
        self._snapshot_at = clock()
        self._snapshot_bytes = 0
        self._log_bytes = 0
        self._stuck: set[bytes] = set()
        self._short = 0
        self._beat = Beat()
        self._beat_at = float("-inf")
        self.evicted = 0

    # Any thread -----------------------------------------------------------------

    def usage(self) -> Usage:
        """What lies under the root, as far as is known. Waits for no lock."""
        index = self._books.index
        writers = list(self._books.writers.values())
        # Its own log, too, is read only once in a while.
        unread = sum(max(0, writer.limit - writer.seen) for writer in writers if writer.own)
        chunks = index.chunks + unread // max(1, self._terms.unit)
        return Usage(index.nbytes + unread, chunks, self._books.capacity)

    def owns(self, writer_id: str) -> None:
        """The writer is one of this process: it asks itself, and is not thought dead."""
        with self._books.lock:
            self._writer(writer_id).own = True

    def grant(self, writer_id: str, announced: int, chunks: int, nbytes: int) -> int:
        """A writer of this process wants to announce so many chunks of that size.

        Args:
            writer_id: it.
            announced: bytes that it has announced in all.
            chunks: how many more it wants to.
            nbytes: size of each.

        Returns:
            How many it may, from the first.

        Raises:
            LeaseLostError, OSError: what it may could not be published.

        """
        with self._books.lock:
            writer = self._writer(writer_id)
            granted = self._books.grant(writer, announced, chunks, nbytes)
            if granted and writer.limit > writer.shown:
                # The next holder must know, should this process be thought dead meanwhile.
                writer.shown = writer.limit + min(_AHEAD, self._books.capacity // 16)
                self._publish()
            return granted

    def short_of(self, nbytes: int) -> None:
        """The file system had no room for so many bytes, whatever the bound says."""
        with self._books.lock:
            self._short += nbytes

    def is_crowded(self) -> bool:
        """Whether there is something to evict."""
        return bool(self._short) or self._excess() > 0

    @property
    def knows_all(self) -> bool:
        """Whether all that lies under the root is counted."""
        return self._books.open

    # A round --------------------------------------------------------------------

    def round(self) -> bool:
        """Do what there is to do. Returns whether more may follow soon.

        Raises:
            LeaseLostError: somebody else keeps the bound now.
            OSError: the root can't be read or written.

        """
        self._lease.check()
        if not self._begun:
            self._begin()
        busy = self._fold()
        self._fence_dead()
        busy |= self._list_some()
        busy |= self._evict()
        self._books.raise_limits()
        self._publish_if_new()
        self._save_if_due()
        self._sweep_if_due()
        return busy or not self._books.open

    def preview(self) -> tuple[int, int]:
        """Chunks and bytes that would be evicted now; changes nothing.

        For a keeper whose lease publishes nothing, instead of ``round``.
        """
        self._begin()
        while not self._books.open:
            self._fold()
            self._list_some()
        excess, chunks, nbytes = self._excess(), 0, 0
        for chunk in self._policy.victims(self._name, excess):
            if nbytes >= excess:
                break
            if isinstance(chunk, bytes) and self._removable(chunk):
                chunks, nbytes = chunks + 1, nbytes + self._facts(chunk).nbytes
        return chunks, nbytes

    def resign(self) -> None:
        """Leave the lease to others at once. Raises LeaseLostError, or OSError."""
        self._lease.check()
        if self._books.open:
            self._fold()
            if self._log_bytes and self._books.index.chunks < 100_000:
                self._save()
        self._publish(resigned=True)

    def _begin(self) -> None:
        for writer_id, limit in self._limits.items():
            writer = self._writer(writer_id)
            writer.limit = writer.shown = limit
        # Before the index is loaded: contenders wait for a sign of life.
        self._publish()
        self._lease.forget_earlier()
        found = None
        if self._from_snapshot:
            found = keeper_snapshot.read(f"{self._lease.folder}/{SNAPSHOT}", self._breathe)
        if found is None:
            self._listing = keeper_listing.folders(self._layout)
        else:
            self._load(found)
            self._fold()
            self._books.open = True
        self._swept_at = float("-inf")
        self._begun = True

    def _load(self, found: keeper_snapshot.Snapshot) -> None:
        index = self._books.index
        for namespace in found.namespaces:
            index.id_of(namespace, b"")
        for chunk, facts in found.chunks:
            self._books.count(chunk, facts)
            self._breathe()
        for writer_id, position in found.writers.items():
            writer = self._writer(writer_id)
            writer.reader = LogReader(position.number, position.offset)
            writer.seen, writer.unit = position.announced, position.unit
        now = time.time()
        for run, used in self._runs_of(reversed([chunk for chunk, _ in found.chunks])):
            self._policy.on_found(run, self._name, max(0.0, now - used))
            self._breathe()

    def _runs_of(self, chunks: Iterator[bytes]) -> Iterator[tuple[Run, float]]:
        """Stretches of neighbours among chunks, in their order, and when each was used."""
        ids: list[bytes] = []
        first = last = Facts(0)
        for chunk in chunks:
            facts = self._facts(chunk)
            if ids and (
                facts.parent != ids[-1][2:]
                or (facts.nbytes, facts.position) != (last.nbytes, last.position + 1)
                or ids[-1][:2] != chunk[:2]
            ):
                yield self._run(ids, first), first.used
                ids = []
            if not ids:
                first = facts
            ids.append(chunk)
            last = facts
        if ids:
            yield self._run(ids, first), first.used

    def _facts(self, chunk: bytes) -> Facts:
        packed = self._books.index.get(chunk)
        return Facts(0) if packed is None else unpacked(packed)

    def _run(self, ids: Sequence[bytes], first: Facts) -> Run:
        parent = ids[0][:2] + first.parent if first.parent else None
        tenant = "" if first.tenant == NO_TENANT else first.tenant.hex()
        return Run(tuple(ids), max(0, first.position), first.nbytes, 0, parent, tenant)

    def _breathe(self) -> None:
        """In long loops: let the engine's thread run, and be seen alive."""
        if self._pace.rest() and self._clock() >= self._beat_at + BEAT_SECONDS / 2:
            self._publish()

    # Logs -----------------------------------------------------------------------

    def _writer(self, writer_id: str) -> Writer:
        with self._books.lock:
            writer = self._books.writers.get(writer_id)
            if writer is None:
                writer = self._books.writers[writer_id] = Writer(LogReader(), self._clock())
            return writer

    def _fold(self) -> bool:
        """Read what was logged since. Returns whether there was anything."""
        folders = self._folders()
        moved = False
        for writer_id, over in folders.items():
            writer = self._writer(writer_id)
            if writer.over:
                continue
            moved |= self._read(writer, self._path(writer_id, over))
            if over:
                self._end(writer)
        for writer_id in [name for name in self._books.writers if name not in folders]:
            # Somebody emptied the root, or a keeper before us had deleted it already.
            self._forget(writer_id)
        return moved

    def _folders(self) -> dict[str, bool]:
        """Writers there are folders of, and whether each was fenced."""
        names = [name for name in os.listdir(self._layout.keeping) if name.startswith(WRITER)]
        return {name.removesuffix(OVER): name.endswith(OVER) for name in sorted(names)}

    def _path(self, writer_id: str, over: bool) -> str:
        return f"{self._layout.keeping}/{writer_id}" + (OVER if over else "")

    def _read(self, writer: Writer, folder: str) -> bool:
        before = writer.reader.number, writer.reader.offset
        for record in writer.reader.read(folder):
            if isinstance(record, Header):
                writer.begins(record)
            else:
                self._apply(writer, record)
            self._breathe()
        after = writer.reader.number, writer.reader.offset
        if after == before:
            return False
        self._log_bytes += after[1] - (before[1] if after[0] == before[0] else 0)
        writer.moved_at = self._clock()
        return True

    def _apply(self, writer: Writer, record: Record) -> None:
        if record.kind is Kind.SHORT:
            self.short_of(record.nbytes)
            return
        ids = [self._books.index.id_of(record.namespace, digest) for digest in record.hashes]
        if record.kind is Kind.COMING:
            self._coming(writer, ids, record)
            return
        self._books.settled(writer, ids)
        if record.kind is Kind.USED:
            self._used(ids, record)
        elif record.kind is Kind.GONE:
            self._look_at(ids)
        else:
            self._look_at([chunk for chunk in ids if chunk not in self._books.index])

    def _coming(self, writer: Writer, ids: Sequence[bytes], record: Record) -> None:
        facts = self._facts_of(ids, record, record.nbytes)
        packed = {chunk: fact.packed() for chunk, fact in zip(ids, facts, strict=True)}
        self._books.coming(writer, packed, record.nbytes)
        run = self._run(ids, facts[0])
        self._policy.admit(run, self._name)
        self._policy.on_insert(run, self._name)

    @staticmethod
    def _facts_of(ids: Sequence[bytes], record: Record, nbytes: int) -> list[Facts]:
        now, parent, facts = time.time(), record.parent or b"", []
        for offset, chunk in enumerate(ids):
            position = record.start + offset if record.start >= 0 else -1
            facts.append(Facts(nbytes, now, position, record.tenant, parent))
            parent = chunk[2:]
        return facts

    def _used(self, ids: Sequence[bytes], record: Record) -> None:
        """Tell the policy, and take in what was read though nobody had announced it."""
        self._look_at([chunk for chunk in ids if chunk not in self._books.index])
        for chunk, facts in zip(ids, self._facts_of(ids, record, 0), strict=True):
            known = self._books.index.get(chunk)
            if known is not None:
                self._books.count(chunk, facts.over(unpacked(known)).packed())
        nbytes = max((self._facts(chunk).nbytes for chunk in ids), default=0)
        if nbytes:
            first = self._facts_of(ids[:1], record, nbytes)[0]
            run = self._run(ids, first)
            request = PolicyRequest("", (run,), tenant=run.tenant)
            self._policy.on_request(request)
            self._policy.on_access(run, request, self._name)
            self._policy.on_start(request)
            self._policy.on_finish(request)

    def _look_at(self, ids: Sequence[bytes]) -> None:
        """See for each of these whether its file is there, and count it or not."""
        gone: list[bytes] = []
        for chunk in ids:
            try:
                status = os.lstat(self._file(chunk))
            except (FileNotFoundError, NotADirectoryError):
                if chunk in self._books.index and not self._books.is_pending(chunk):
                    gone.append(chunk)
                continue
            if chunk not in self._books.index:
                facts = Facts(status.st_size, status.st_mtime)
                self._books.count(chunk, facts.packed())
                age = max(0.0, time.time() - status.st_mtime)
                self._policy.on_found(self._run([chunk], facts), self._name, age)
        self._uncount(gone)

    def _uncount(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self._books.uncount(chunk)
        if chunks:
            self._policy.on_remove(chunks, self._name)

    def _file(self, chunk: bytes) -> str:
        namespace, digest = self._books.index.name_of(chunk)
        return self._layout.place(ChunkKey(Namespace(namespace), digest)).path

    # Writers that are over ---------------------------------------------------------

    def _fence_dead(self) -> None:
        """Take back what was promised to writers that ended, or are silent for long."""
        now = self._clock()
        for writer_id, writer in list(self._books.writers.items()):
            if writer.over or writer.own:
                continue
            if has_ended(writer.owner) or now >= writer.moved_at + SILENT_SECONDS:
                folder = self._path(writer_id, False)
                fence(folder)
                # What was appended before that moment counts, and nothing can follow.
                self._read(writer, folder + OVER)
                self._end(writer)

    def _end(self, writer: Writer) -> None:
        pending = list(writer.pending)
        writer.over = True
        self._books.end(writer)
        self._look_at(pending)

    def _forget(self, writer_id: str) -> None:
        writer = self._books.writers[writer_id]
        if not writer.over:
            self._end(writer)
        with self._books.lock:
            del self._books.writers[writer_id]

    # Listing ----------------------------------------------------------------------

    def _list_some(self) -> bool:
        """Go on comparing the root with the index, for a while. Returns whether any is left."""
        if self._listing is None:
            if self._clock() < self._listed_at + _LISTING_SECONDS:
                return False
            self._listing = keeper_listing.folders(self._layout)
        end = self._clock() + BEAT_SECONDS / 2
        try:
            for listed in self._listing:
                self._compare(listed)
                self._breathe()
                if self._clock() >= end:
                    return True
        except OSError:
            # What was not seen must not pass for seen.
            self._listing = keeper_listing.folders(self._layout)
            raise
        self._listed()
        return False

    def _compare(self, listed: Listed) -> None:
        index = self._books.index
        known = index.folder(listed.namespace, listed.first_byte)
        # Not believed at once: a file may have appeared since its folder was listed.
        self._look_at([chunk for chunk in known if chunk[2:] not in listed.entries])
        for digest in listed.entries:
            chunk = index.id_of(listed.namespace, digest)
            status = listed.status(digest) if chunk not in index else None
            if status is not None:
                self._books.count(chunk, Facts(*status).packed())
                self._unheard.append((status[1], chunk))

    def _listed(self) -> None:
        """The listing is through: tell the policy, last used first, and begin to grant."""
        self._unheard.sort(reverse=True)
        now = time.time()
        for used, chunk in self._unheard:
            if chunk in self._books.index:
                run = self._run([chunk], self._facts(chunk))
                self._policy.on_found(run, self._name, max(0.0, now - used))
            self._breathe()
        self._unheard, self._listing = [], None
        self._listed_at = self._clock()
        first, self._books.open = not self._books.open, True
        if first:
            # The next holder needs not list it again.
            self._log_bytes = max(self._log_bytes, _SNAPSHOT_LOG_BYTES)

    # Eviction -----------------------------------------------------------------------

    def _excess(self) -> int:
        """Bytes to evict to get from above the high watermark to the low one."""
        capacity = self._books.capacity
        unit = max(self._terms.unit, *(w.unit for w in self._books.writers.values()), 0)
        high = min(capacity * (1 - self._terms.headroom / 2), capacity - unit)
        low = min(capacity * (1 - self._terms.headroom), high)
        taken = self._books.taken()
        return int(taken - low) if taken > high else 0

    def _evict(self) -> bool:
        """Keep the bound, and drop what the policy no longer wants kept."""
        if not self._books.open:
            return False
        expired = [c for c in self._policy.expired(self._name) if self._removable(c)]
        self._remove([chunk for chunk in expired if isinstance(chunk, bytes)])
        with self._books.lock:
            nbytes = self._books.index.nbytes
            some = max(int(nbytes * self._terms.headroom / 2), self._terms.unit)
            # A few per cent at once: others may fill the same disk, or have emptied it since.
            short, self._short = min(self._short, some), 0
        need = max(self._excess(), short)
        while need > 0:
            freed = self._remove(self._coldest(need))
            if not freed:
                break
            short -= freed
            need = max(self._excess(), short)
        return need > 0

    def _coldest(self, need: int) -> list[bytes]:
        chosen: list[bytes] = []
        for chunk in self._policy.victims(self._name, need):
            if isinstance(chunk, bytes) and self._removable(chunk):
                chosen.append(chunk)
                need -= self._facts(chunk).nbytes
            if need <= 0 or len(chosen) >= _VICTIMS_AT_ONCE:
                break
        return chosen

    def _removable(self, chunk: object) -> bool:
        return (
            isinstance(chunk, bytes)
            and chunk in self._books.index
            and chunk not in self._stuck
            and not self._books.is_pending(chunk)
        )

    def _remove(self, chunks: Sequence[bytes]) -> int:
        """Delete these. Returns the bytes that are counted no longer."""
        gone: list[bytes] = []
        for chunk in chunks:
            if self._unlink(chunk):
                gone.append(chunk)
            self._breathe()
        freed = sum(self._facts(chunk).nbytes for chunk in gone)
        self._uncount(gone)
        self._lease.check()
        return freed

    def _unlink(self, chunk: bytes) -> bool:
        namespace, digest = self._books.index.name_of(chunk)
        place = self._layout.place(ChunkKey(Namespace(namespace), digest))
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

    # What others see ------------------------------------------------------------------

    def _publish_if_new(self) -> None:
        with self._books.lock:
            beat = self._next_beat()
            if beat != self._beat or self._clock() >= self._beat_at + BEAT_SECONDS:
                self._publish()

    def _publish(self, *, resigned: bool = False) -> None:
        with self._books.lock:
            beat = self._next_beat(resigned=resigned)
            self._lease.publish(beat)
            self._beat, self._beat_at = beat, self._clock()

    def _next_beat(self, *, resigned: bool = False) -> Beat:
        index = self._books.index
        shown = {
            name: writer.shown for name, writer in self._books.writers.items() if not writer.over
        }
        return Beat(
            capacity=self._books.capacity,
            nbytes=index.nbytes,
            chunks=index.chunks,
            limits=shown,
            resigned=resigned,
        )

    def _save_if_due(self) -> None:
        waited = self._clock() >= self._snapshot_at + _SNAPSHOT_SECONDS
        dead = any(writer.over for writer in self._books.writers.values())
        much = self._log_bytes >= max(_SNAPSHOT_LOG_BYTES, self._snapshot_bytes // 4)
        if self._books.open and ((dead and waited) or much):
            self._save()

    def _save(self) -> None:
        """Publish a snapshot, then delete the logs that are in it."""
        writers = self._books.writers
        positions = {
            name: keeper_snapshot.Position(
                writer.reader.number, writer.reader.offset, writer.seen, writer.unit
            )
            for name, writer in writers.items()
            if not writer.over
        }
        over = [name for name, writer in writers.items() if writer.over]
        path = f"{self._lease.folder}/{SNAPSHOT}"
        self._lease.check()
        self._snapshot_bytes = keeper_snapshot.write(
            f"{path}.new", self._books.index.namespaces(), positions, self._order(), self._breathe
        )
        os.rename(f"{path}.new", path)
        self._snapshot_at, self._log_bytes = self._clock(), 0
        for name in over:
            shutil.rmtree(self._path(name, True), ignore_errors=True)
            self._forget(name)
        for name, position in positions.items():
            self._drop_segments(self._path(name, False), position.number)

    def _order(self) -> Iterator[tuple[bytes, bytes]]:
        """Every chunk, the first to be evicted first; those that the policy forgot to name, too."""
        index = self._books.index
        named: set[bytes] = set()
        for chunk in self._policy.victims(self._name, self._books.capacity):
            facts = index.get(chunk) if isinstance(chunk, bytes) else None
            if isinstance(chunk, bytes) and facts is not None and chunk not in named:
                named.add(chunk)
                yield chunk, facts
        for chunk in index if len(named) < index.chunks else ():
            facts = index.get(chunk) if chunk not in named else None
            if facts is not None:
                yield chunk, facts

    @staticmethod
    def _drop_segments(folder: str, below: int) -> None:
        for number in segment_numbers(folder):
            if number < below:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(segment_path(folder, number))

    def _sweep_if_due(self) -> None:
        if self._clock() >= self._swept_at + _SWEEP_SECONDS:
            self._swept_at = self._clock()
            keeper_listing.sweep(self._layout)
