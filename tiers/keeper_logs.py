"""The writers of a root, as their keeper follows them: what they log, and when they are over."""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtiers.tiers.access_log import Header, Kind, Record
from kvtiers.tiers.keeper_chunks import KeptChunks
from kvtiers.tiers.keeper_ledger import KeeperLedger, Writer
from kvtiers.tiers.keeper_snapshot import Position
from kvtiers.tiers.log_files import OVER, WRITER, LogReader, fence, segment_numbers, segment_path
from kvtiers.tiers.owner import has_ended

logger = logging.getLogger(__name__)

# A writer that logs nothing for as long is fenced, for the room it was promised.
SILENT_SECONDS = 600.0


class WriterLogs:
    """Follows every writer of a root. The keeper's thread only, but for ``writer``.

    Attributes:
        unsaved: bytes of logs that were read since ``saved``.

    Args:
        folder: where the writers' folders are.
        books: what is counted and promised.
        chunks: told of what the logs say.
        clock: seconds, monotonic.
        short_of: called with the bytes that a writer found no room for.
        breathe: called in long loops.

    """

    def __init__(
        self,
        folder: str,
        books: KeeperLedger,
        chunks: KeptChunks,
        clock: Callable[[], float],
        short_of: Callable[[int], None],
        breathe: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._books = books
        self._chunks = chunks
        self._clock = clock
        self._short_of = short_of
        self._breathe = breathe
        self._unread: set[str] = set()
        self.unsaved = 0

    def writer(self, writer_id: str) -> Writer:
        """The writer of that id, as a new one if it was not known. Any thread."""
        with self._books.lock:
            writer = self._books.writers.get(writer_id)
            if writer is None:
                writer = self._books.writers[writer_id] = Writer(LogReader(), self._clock())
            return writer

    def begin(self, writer_id: str, position: Position, pending: Iterable[bytes]) -> None:
        """So much of the writer's log is known from a snapshot, and what it may yet store."""
        writer = self.writer(writer_id)
        writer.reader = LogReader(position.number, position.offset)
        writer.seen, writer.unit = position.announced, position.unit
        self._books.expect(writer, pending)

    def fold(self) -> bool:
        """Read what was logged since. Returns whether there was anything."""
        folders = self._folders()
        reading: list[Writer] = []
        ended: list[Writer] = []
        moved = False
        for writer_id, over in folders.items():
            writer = self.writer(writer_id)
            if writer.over:
                continue
            reading.append(writer)
            # What one writer's folder is in the way of must not stop the others.
            with self._aside(writer_id):
                moved |= self._read(writer, self._path(writer_id, over))
                if over:
                    ended.append(writer)
        self._apply_in_order(reading)
        for writer in ended:
            self._end(writer)
        for writer_id in [name for name in self._books.writers if name not in folders]:
            # Somebody emptied the root, or a keeper before us had deleted it already.
            self._forget(writer_id)
        return moved

    def fence_dead(self) -> None:
        """Take back what was promised to writers that ended, or are silent for long."""
        now = self._clock()
        for writer_id, writer in list(self._books.writers.items()):
            if writer.over or writer.own:
                continue
            if has_ended(writer.owner) or now >= writer.moved_at + SILENT_SECONDS:
                folder = self._path(writer_id, False)
                with self._aside(writer_id):
                    fence(folder)
                    # What was appended before that moment counts; of what follows no file
                    # appears.
                    self._read(writer, folder + OVER)
                    self._apply_in_order([writer])
                    self._end(writer)

    def pass_over_dead(self) -> None:
        """Count as if writers that ended had been fenced; for those who change nothing."""
        for writer in list(self._books.writers.values()):
            if not writer.over and has_ended(writer.owner):
                self._end(writer)

    def positions(self) -> dict[str, Position]:
        """How much of each log was read, but for those that can be deleted."""
        return {
            name: Position(writer.reader.number, writer.reader.offset, writer.seen, writer.unit)
            for name, writer in self._books.writers.items()
            if not writer.over
        }

    def pending(self) -> dict[str, list[bytes]]:
        """What each writer has announced and not said to be there or gone."""
        writers = self._books.writers.items()
        return {name: list(writer.pending) for name, writer in writers if writer.pending}

    def ended(self) -> list[str]:
        """Writers that are over, and of whom nothing is left to be read."""
        return [name for name, writer in self._books.writers.items() if writer.over]

    def saved(self, positions: dict[str, Position], ended: list[str]) -> None:
        """A snapshot with this much was published: delete the logs that are in it."""
        self.unsaved = 0
        for name in ended:
            shutil.rmtree(self._path(name, True), ignore_errors=True)
            self._forget(name)
        for name, position in positions.items():
            folder = self._path(name, False)
            for number in segment_numbers(folder):
                if number < position.number:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(segment_path(folder, number))

    def _folders(self) -> dict[str, bool]:
        """Writers there are folders of, and whether each was fenced."""
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if _is_writer(entry)]
        except FileNotFoundError:
            return {}  # nobody has begun to keep it, or somebody emptied the root
        return {name.removesuffix(OVER): name.endswith(OVER) for name in sorted(names)}

    @contextlib.contextmanager
    def _aside(self, writer_id: str) -> Iterator[None]:
        """Say once of a writer that its log can't be read; what it was promised still counts."""
        try:
            yield
        except OSError as error:
            if writer_id not in self._unread:
                self._unread.add(writer_id)
                logger.warning("Cannot follow the log in %s: %s", self._folder, error)

    def _path(self, writer_id: str, over: bool) -> str:
        return f"{self._folder}/{writer_id}" + (OVER if over else "")

    def _read(self, writer: Writer, folder: str) -> bool:
        before = writer.reader.number, writer.reader.offset
        writer.told.extend(writer.reader.read(folder))
        after = writer.reader.number, writer.reader.offset
        if after == before:
            return False
        self.unsaved += after[1] - (before[1] if after[0] == before[0] else 0)
        writer.moved_at = self._clock()
        return True

    def _apply_in_order(self, writers: Sequence[Writer]) -> None:
        """Apply what was read of these, merged by when it was written down.

        After a change of keepers it may be an hour's worth of each. A writer's own order
        holds, whatever its clock does. What fails is applied again at the next call.
        """
        heads = [(_time_of(w.told[0]), n, w) for n, w in enumerate(writers) if w.told]
        heapq.heapify(heads)
        while heads:
            at, n, writer = heads[0]
            self._apply(writer, writer.told[0])
            writer.told.popleft()
            if writer.told:
                heapq.heapreplace(heads, (max(at, _time_of(writer.told[0])), n, writer))
            else:
                heapq.heappop(heads)
            self._breathe()

    def _apply(self, writer: Writer, record: Record | Header) -> None:
        if isinstance(record, Header):
            writer.begins(record)
            return
        if record.kind is Kind.SHORT:
            self._short_of(record.nbytes)
            return
        if record.kind is Kind.WANTED:
            writer.wanted = record.nbytes
            return
        try:
            ids = self._chunks.ids(record)
        except OverflowError:
            return  # made up: no root has as many
        if record.kind is Kind.COMING:
            self._chunks.coming(writer, ids, record)
            return
        self._books.settled(writer, ids)
        if record.kind is Kind.USED:
            self._chunks.used(ids, record)
        elif record.kind is Kind.GONE:
            # Another may have stored it since: logs of two writers have no common order.
            self._chunks.look_at(ids)
        else:
            self._chunks.look_at_unknown(ids)

    def _end(self, writer: Writer) -> None:
        pending = list(writer.pending)
        writer.over = True
        self._books.end(writer)
        self._chunks.look_at(pending)

    def _forget(self, writer_id: str) -> None:
        writer = self._books.writers[writer_id]
        if not writer.over:
            self._end(writer)
        with self._books.lock:
            del self._books.writers[writer_id]


def _time_of(record: Record | Header) -> float:
    return record.at if isinstance(record, Record) else 0.0


def _is_writer(entry: os.DirEntry[str]) -> bool:
    """Whether it is a writer's folder; what is behind a link is nobody's of this root."""
    return entry.name.startswith(WRITER) and entry.is_dir(follow_symlinks=False)
