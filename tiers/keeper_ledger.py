"""What lies under a root and what its writers may still add: the keeper's two books as one.

The index says what is counted, a ``Writer`` what it was promised. Both change together
under one lock, since grants to this process's own writer are made on its threads.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtiers.tiers.access_log import Header, Record
from kvtiers.tiers.grants import LARGE, Standing, additions
from kvtiers.tiers.log_files import LogReader
from kvtiers.tiers.root_index import RootIndex

# Of the capacity, writers that store nothing may hold this part, all together.
_IDLE_PART = 8


@dataclass(eq=False)
class Writer:
    """One writer of the root, as the keeper knows it.

    Attributes:
        reader: follows its log.
        told: what was read of it and is still to be applied.
        owner: which process it is.
        unit: bytes of one of its chunks; 0 if it stores none, or said nothing yet.
        seen: bytes that it has announced, as far as its log was read.
        limit: bytes that it may announce in all.
        shown: the limit as published; more than ``limit`` only for this process's own
            writer, which asks the keeper itself.
        recent: bytes it announced since the last grants.
        wanted: bytes that it waits to announce, and was not granted since.
        pending: chunks that it has announced and not said to be there or gone.
        moved_at: when its log last grew, on the keeper's clock.
        over: it may write no more.
        own: it is this process's.

    """

    reader: LogReader
    moved_at: float
    told: deque[Record | Header] = field(default_factory=deque)
    owner: Mapping[str, Any] = field(default_factory=dict)
    unit: int = 0
    seen: int = 0
    limit: int = 0
    shown: int = 0
    recent: int = 0
    wanted: int = 0
    pending: set[bytes] = field(default_factory=set)
    over: bool = False
    own: bool = False

    def begins(self, header: Header) -> None:
        """A segment of its log begins; announcements that failed are in its sum."""
        self.owner, self.unit = header.owner, header.unit
        self.recent += max(0, header.announced - self.seen)
        self.seen = max(self.seen, header.announced)


class KeeperLedger:
    """Bytes counted and bytes promised, against a capacity. Any thread may call.

    Attributes:
        index: every chunk that is counted. Changed by the keeper's thread only.
        writers: by id.
        open: grants are made: what lies there is known.

    Args:
        capacity: bytes that files may take.

    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.index = RootIndex()
        self.writers: dict[str, Writer] = {}
        self.open = False
        self.lock = threading.RLock()
        self._pending: Counter[bytes] = Counter()

    def promised(self) -> int:
        """Bytes that writers may announce, or have announced unseen."""
        with self.lock:
            return sum(max(0, writer.limit - writer.seen) for writer in self.writers.values())

    def taken(self) -> int:
        """Bytes that are counted or promised."""
        with self.lock:
            return self.index.nbytes + self.promised()

    def wanted(self) -> int:
        """Bytes that writers wait for."""
        with self.lock:
            return sum(writer.wanted for writer in self.writers.values())

    def coming(self, writer: Writer, chunks: Mapping[bytes, bytes], nbytes: int) -> None:
        """The writer announced these: id to facts."""
        with self.lock:
            writer.seen += nbytes * len(chunks)
            writer.recent += nbytes * len(chunks)
            writer.wanted = max(0, writer.wanted - nbytes * len(chunks))
            for chunk, facts in chunks.items():
                self.index.put(chunk, facts)
            self.expect(writer, chunks)

    def expect(self, writer: Writer, chunks: Iterable[bytes]) -> None:
        """The writer may make files of these appear."""
        for chunk in chunks:
            if chunk not in writer.pending:
                writer.pending.add(chunk)
                self._pending[chunk] += 1

    def settled(self, writer: Writer, chunks: Iterable[bytes]) -> None:
        """The writer said what became of these."""
        for chunk in chunks:
            if chunk in writer.pending:
                writer.pending.discard(chunk)
                self._pending[chunk] -= 1
                if not self._pending[chunk]:
                    del self._pending[chunk]

    def is_pending(self, chunk: bytes) -> bool:
        """Whether somebody may be about to make the chunk's file appear."""
        return chunk in self._pending

    def count(self, chunk: bytes, facts: bytes) -> None:
        """A chunk is there, or something new is known of it."""
        with self.lock:
            self.index.put(chunk, facts)

    def uncount(self, chunk: bytes) -> int:
        """A chunk is not there. Returns the bytes it took."""
        with self.lock:
            return self.index.pop(chunk)

    def end(self, writer: Writer) -> None:
        """The writer may write no more, and all of its log was read."""
        with self.lock:
            self.settled(writer, list(writer.pending))
            writer.limit = writer.shown = writer.seen
            writer.wanted = 0

    def raise_limits(self) -> None:
        """Grant what is free to those who have little left."""
        with self.lock:
            if not self.open:
                return
            standing = {
                name: _standing(writer)
                for name, writer in self.writers.items()
                if writer.unit and not writer.own and not writer.over
            }
            free, idle = self.capacity - self.taken(), self.capacity // _IDLE_PART
            most_idle = min(LARGE, idle // max(1, len(standing)))
            for name, more in additions(free, standing, most_idle).items():
                writer = self.writers[name]
                writer.limit += more
                writer.shown = writer.limit
                writer.wanted = max(0, writer.wanted - more)
            for writer in self.writers.values():
                writer.recent = 0

    def grant(self, writer: Writer, announced: int, chunks: int, nbytes: int) -> int:
        """Let this process's writer announce up to ``chunks`` more. Returns how many."""
        with self.lock:
            # It asks under its own lock, so what it has left it does not use meanwhile.
            writer.limit = max(announced, writer.seen)
            free = self.capacity - self.taken()
            granted = min(chunks, max(0, free) // nbytes) if self.open else 0
            writer.limit += granted * nbytes
            return granted


def _standing(writer: Writer) -> Standing:
    return Standing(writer.limit - writer.seen, writer.unit, writer.recent, writer.wanted)
