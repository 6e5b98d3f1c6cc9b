"""Keeps the bound of a root for all who use it, while it holds the root's lease.

It reads what the writers log into an index, feeds a policy with it, evicts in that
policy's order, and grants the writers what is free. Nothing here lists the root, but for
``keeper_listing``. One thread calls it, but for ``grant``, ``owns``, ``short_of`` and
``usage``.

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
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvtiers.policies import Policy, TierInfo
from kvtiers.tiers import keeper_listing, keeper_snapshot
from kvtiers.tiers.base import Usage
from kvtiers.tiers.fs_files import FULL
from kvtiers.tiers.fs_layout import Layout
from kvtiers.tiers.keeper_chunks import KeptChunks
from kvtiers.tiers.keeper_ledger import KeeperLedger
from kvtiers.tiers.keeper_listing import Listed
from kvtiers.tiers.keeper_logs import WriterLogs
from kvtiers.tiers.lease import SNAPSHOT, Beat, Inherited, Lease, LeaseView
from kvtiers.tiers.pace import Pace

BEAT_SECONDS = 4.0
_LISTING_SECONDS = 24 * 3600.0
_SWEEP_SECONDS = 3600.0
# Snapshots are written after so much log, or after a quarter of their own length if
# that is more, and for dead writers' folders not more often than this.
_SNAPSHOT_LOG_BYTES = 4 << 20
_SNAPSHOT_SECONDS = 60.0
# One of that many chunks is written within a second, at the end of an engine.
_SNAPSHOT_AT_END_CHUNKS = 100_000
# What this process's writer may announce more than it does, as others see it, should
# this process be thought dead and go on.
_AHEAD = 64 << 20
# Of what stores wait for, at most this part of the capacity is made free at once.
_WANTED_PART = 4
# Whoever waited waits again soon: a burst of stores takes several grants.
_HURRY_SECONDS = 2.0


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
        self._books = KeeperLedger(terms.tier.capacity)
        policy = terms.make_policy([terms.tier], clock)
        self._chunks = KeptChunks(layout, self._books, policy, terms.tier.name, self._breathe)
        self._logs = WriterLogs(
            layout.keeping, self._books, self._chunks, clock, self.short_of, self._breathe
        )
        self._limits = dict(inherited.limits)
        self._from_snapshot = inherited.snapshot and not rebuild
        self._begun = False
        self._listing: Iterator[Listed] | None = None
        self._listed_at = self._saved_at = clock()
        self._swept_at = float("-inf")
        self._snapshot_bytes = 0
        self._evicted_before = 0
        self._short = 0
        self._wanted_at = float("-inf")
        self._beat = Beat()
        self._beat_at = float("-inf")

    # Any thread -----------------------------------------------------------------

    @property
    def evicted(self) -> int:
        """Chunks that were deleted to keep the bound."""
        return self._chunks.evicted

    @property
    def knows_all(self) -> bool:
        """Whether all that lies under the root is counted."""
        return self._books.open

    @property
    def hurries(self) -> bool:
        """Whether stores wait for grants, or did a moment ago."""
        return self._clock() < self._wanted_at + _HURRY_SECONDS

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
            self._logs.writer(writer_id).own = True

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
            writer = self._logs.writer(writer_id)
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

    # A round --------------------------------------------------------------------

    def round(self) -> bool:
        """Do what there is to do. Returns whether more may follow soon.

        Raises:
            LeaseLostError: somebody else keeps the bound now.
            OSError: the root can't be read or written.

        """
        with self._holding():
            if not self._begun:
                self._begin()
            busy = self._logs.fold()
            if self._books.wanted():
                self._wanted_at = self._clock()
            self._logs.fence_dead()
            busy |= self._list_some()
            if self._books.open:
                busy |= self._evict()
            self._books.raise_limits()
            self._publish_if_new()
            self._save_if_due()
            self._sweep_if_due()
            return busy or not self._books.open

    def preview(self) -> tuple[int, int]:
        """Chunks and bytes that would be evicted now; changes nothing.

        For a keeper that has only looked at the lease, instead of ``round``.
        """
        self._see_all()
        victims = list(self._chunks.victims(self._excess()))
        return len(victims), sum(map(self._chunks.bytes_of, victims))

    def make_room(self) -> int:
        """Delete some of what there is too much of. Returns how many chunks.

        As ``preview``, where a file system is so full that no lease can be written there. A
        holder of the lease finds the files gone.
        """
        self._see_all()
        self._chunks.evict(self._excess())
        return self.evicted

    def _see_all(self) -> None:
        self._begin()
        while not self._books.open:
            self._logs.fold()
            self._list_some()
        self._logs.pass_over_dead()
        # What was evicted since it was logged is in the logs still.
        self._chunks.look_at(list(self._books.index))

    def resign(self) -> None:
        """Leave the lease to others at once. Raises LeaseLostError, or OSError."""
        with self._holding():
            if self._books.open:
                self._logs.fold()
                # What was evicted is in no log, and would count for the next holder.
                unsaved = self._logs.unsaved or self._chunks.evicted > self._evicted_before
                if unsaved and self._books.index.chunks <= _SNAPSHOT_AT_END_CHUNKS:
                    self._save()
            self._publish(resigned=True)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Raise LeaseLostError first, or where what is missing was in a folder that is closed."""
        self._lease.check()
        try:
            yield
        except FileNotFoundError:
            self._lease.check()
            raise

    def _begin(self) -> None:
        for writer_id, limit in self._limits.items():
            writer = self._logs.writer(writer_id)
            writer.limit = writer.shown = limit
        # Before the index is loaded: contenders wait for a sign of life.
        try:
            self._publish()
        except OSError as error:
            if error.errno not in FULL:
                raise
            # Room for it is made below.
        self._lease.forget_earlier()
        found = None
        if self._from_snapshot:
            found = keeper_snapshot.read(f"{self._lease.folder}/{SNAPSHOT}", self._breathe)
        if found is None:
            self._listing = keeper_listing.folders(self._layout)
        else:
            self._chunks.load(found)
            for writer_id, position in found.writers.items():
                self._logs.begin(writer_id, position, found.pending.get(writer_id, ()))
            self._logs.fold()
            self._books.open = True
        self._begun = True

    def _breathe(self) -> None:
        """In long loops: let the engine's thread run, and be seen alive."""
        if self._pace.rest() and self._clock() >= self._beat_at + BEAT_SECONDS / 2:
            self._publish()

    def _list_some(self) -> bool:
        """Go on comparing the root with the index, for a while. Returns whether any is left."""
        if self._listing is None:
            if self._clock() < self._listed_at + _LISTING_SECONDS:
                return False
            self._listing = keeper_listing.folders(self._layout)
        end = self._clock() + BEAT_SECONDS / 2
        try:
            for listed in self._listing:
                self._chunks.compare(listed)
                self._breathe()
                if self._clock() >= end:
                    return True
        except OSError:
            # What was not seen must not pass for seen.
            self._listing = keeper_listing.folders(self._layout)
            raise
        self._chunks.listed()
        self._listing, self._listed_at = None, self._clock()
        if not self._books.open:
            # The next holder needs not list it again.
            self._logs.unsaved += _SNAPSHOT_LOG_BYTES
            self._books.open = True
        return False

    # Eviction -------------------------------------------------------------------

    def _excess(self) -> int:
        """Bytes to evict to get from above the high watermark to the low one."""
        capacity = self._books.capacity
        units = [writer.unit for writer in list(self._books.writers.values())]
        unit = max(self._terms.unit, *units, 0)
        high = min(capacity * (1 - self._terms.headroom / 2), capacity - unit)
        low = min(capacity * (1 - self._terms.headroom), high)
        # What stores wait for is made room for at once, though not for all of a great deal.
        taken = self._books.taken() + min(self._books.wanted(), capacity // _WANTED_PART)
        return int(taken - low) if taken > high else 0

    def _evict(self) -> bool:
        """Drop what is expired, and what there is no room for. False if that was all."""
        self._chunks.expire()
        short = self._take_short()
        need = max(self._excess(), short)
        while need > 0:
            freed = self._chunks.evict(need)
            if not freed:
                break
            self._lease.check()
            short -= freed
            need = max(self._excess(), short)
        return need > 0

    def _take_short(self) -> int:
        """Bytes to evict because the file system is full.

        A few per cent at once: others may fill the same disk, or have made room since.
        """
        with self._books.lock:
            some = int(self._books.index.nbytes * self._terms.headroom / 2)
            short, self._short = min(self._short, max(some, self._terms.unit)), 0
            return short

    # What others see ------------------------------------------------------------

    def _publish_if_new(self) -> None:
        with self._books.lock:
            if self._next_beat() != self._beat or self._clock() >= self._beat_at + BEAT_SECONDS:
                self._publish()

    def _publish(self, *, resigned: bool = False) -> None:
        with self._books.lock:
            beat = replace(self._next_beat(), resigned=resigned)
            self._lease.publish(beat)
            self._beat, self._beat_at = beat, self._clock()

    def _next_beat(self) -> Beat:
        writers = self._books.writers.items()
        return Beat(
            capacity=self._books.capacity,
            nbytes=self._books.index.nbytes,
            chunks=self._books.index.chunks,
            limits={name: writer.shown for name, writer in writers if not writer.over},
        )

    def _save_if_due(self) -> None:
        waited = self._clock() >= self._saved_at + _SNAPSHOT_SECONDS
        much = self._logs.unsaved >= max(_SNAPSHOT_LOG_BYTES, self._snapshot_bytes // 4)
        if self._books.open and (much or (waited and self._logs.ended())):
            self._save()

    def _save(self) -> None:
        """Publish a snapshot, then delete the logs that are in it."""
        positions, ended = self._logs.positions(), self._logs.ended()
        path = f"{self._lease.folder}/{SNAPSHOT}"
        self._lease.check()
        self._snapshot_bytes = keeper_snapshot.write(
            f"{path}.new",
            self._books.index.namespaces(),
            positions,
            self._logs.pending(),
            self._chunks.in_order(),
            self._breathe,
        )
        os.rename(f"{path}.new", path)
        self._evicted_before = self._chunks.evicted
        self._saved_at = self._clock()
        self._logs.saved(positions, ended)

    def _sweep_if_due(self) -> None:
        if self._clock() >= self._swept_at + _SWEEP_SECONDS:
            self._swept_at = self._clock()
            keeper_listing.sweep(self._layout)
