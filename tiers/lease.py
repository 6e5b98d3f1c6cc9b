"""Who keeps a root's bound: one holder at a time, by generation, without a lock.

    lease/000000000007/beat        the holder's last sign of life, with what it publishes
                       snapshot    its index, as it was written last
          000000000006.over/       an earlier generation, sealed by the one that followed

To take the lease is to make the next generation's folder, which only one contender can.
It then renames the folders of earlier generations. As everything a holder publishes goes
into its own folder, by path, one that was thought dead and goes on can publish nothing
any more from that moment, and what it published before is complete and can be relied on.

A contender goes by what it sees itself: a beat that did not change for ``patience``
seconds of its own monotonic clock, a holder that resigned, or one of this host that has
ended. No clock of another host is read, and nothing is left to be released.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvtiers.tiers.fs_files import made, reading
from kvtiers.tiers.fs_layout import private_folder, refuse_link
from kvtiers.tiers.log_files import OVER
from kvtiers.tiers.owner import has_ended

PATIENCE = 15.0
SNAPSHOT = "snapshot"
_BEAT = "beat"
# Some thousand writers. It is read by the processes of engines, and often.
_MOST_BYTES = 1 << 20
_MOST_DIGITS = 18


class LeaseLostError(Exception):
    """A later generation has begun; nothing of this one's counts any more."""


@dataclass(frozen=True)
class Beat:
    """What a holder publishes.

    Attributes:
        owner: who it is.
        count: how often it published; only there to be different each time.
        capacity: the bound that it keeps, in bytes.
        nbytes, chunks: what lies under the root as far as it knows.
        limits: per writer, how many bytes it may announce in all.
        resigned: it holds the lease no longer, by its own will.

    """

    owner: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0
    capacity: int = 0
    nbytes: int = 0
    chunks: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    resigned: bool = False


@dataclass(frozen=True)
class Seen:
    """The lease as somebody sees it.

    Attributes:
        generation: the latest, 0 if there was none.
        beat: what its holder published last, None if nothing that can be read.

    """

    generation: int = 0
    beat: Beat | None = None


@dataclass(frozen=True)
class Inherited:
    """What earlier holders left.

    Attributes:
        limits: per writer, the highest that any of them published.
        snapshot: whether there is one; it lies in the taken generation's folder now.

    """

    limits: Mapping[str, int]
    snapshot: bool


class Lease:
    """One contender's view of a root's lease. One thread at a time.

    Args:
        folder: of the lease.
        owner: who this is.
        clock: seconds, monotonic.
        patience: how long a holder may be silent.

    """

    def __init__(
        self,
        folder: str,
        owner: Mapping[str, Any],
        clock: Callable[[], float],
        patience: float = PATIENCE,
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._clock = clock
        self._patience = patience
        self._seen = Seen()
        self._seen_at = clock()
        self._held = 0
        self._count = 0

    @property
    def folder(self) -> str:
        """Of the generation that is held: what is renamed into it counts, or fails."""
        return self._of(self._held)

    def look(self) -> Seen:
        """The latest generation and its holder's last sign of life. Raises OSError."""
        open_ones = [number for number, over in self._generations() if not over]
        generation = max(open_ones, default=0)
        seen = Seen(generation, self._read(self._of(generation)) if generation else None)
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        return seen

    def is_free(self) -> bool:
        """Whether nobody living holds it, as far as the last looks tell."""
        beat = self._seen.beat
        if not self._seen.generation or (beat is not None and beat.resigned):
            return True
        if beat is not None and has_ended(beat.owner):
            return True
        return self._clock() >= self._seen_at + self._patience

    def take(self) -> Inherited | None:
        """Begin the next generation; None if somebody else did. Raises OSError."""
        private_folder(self._folder)
        mine = max((number for number, _ in _generations(self._names())), default=0) + 1
        try:
            os.mkdir(self._of(mine), 0o700)
        except FileExistsError:
            return None
        if any(number > mine for number, _ in self._generations()):
            # We came so late that the generation we took to be the next is long over. Whoever
            # has a later one may have closed ours meanwhile, and deletes it then.
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self._of(mine))
            return None
        before, self._held, self._count = self._held, mine, 0
        try:
            return self._inherit(mine)
        except FileNotFoundError:
            if os.path.isdir(self.folder):
                raise
            # Somebody else began the next one meanwhile, and has closed ours.
            self._held = before
            return None

    def _inherit(self, mine: int) -> Inherited:
        limits: dict[str, int] = {}
        newest = 0
        for number, over in self._generations():
            if number >= mine:
                continue
            if not over:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._of(number), self._of(number) + OVER)
            sealed = self._of(number) + OVER
            beat = self._read(sealed)
            for writer, limit in beat.limits.items() if beat is not None else ():
                limits[writer] = max(limit, limits.get(writer, 0))
            if os.path.exists(f"{sealed}/{SNAPSHOT}"):
                newest = max(newest, number)
        snapshot = f"{self._of(newest)}{OVER}/{SNAPSHOT}"
        # A folder in its place would be in the way of every later one.
        found = os.path.isfile(snapshot)
        if found:
            os.rename(snapshot, f"{self.folder}/{SNAPSHOT}")
        return Inherited(limits, found)

    def publish(self, beat: Beat) -> None:
        """Show this to everybody. Raises LeaseLostError, or OSError."""
        self._count += 1
        text = json.dumps({**vars(beat), "owner": dict(self._owner), "count": self._count})
        temporary = f"{self.folder}/{_BEAT}.new"
        try:
            with made(temporary) as file:
                file.write(text.encode())
            os.rename(temporary, f"{self.folder}/{_BEAT}")
        except FileNotFoundError as error:
            raise LeaseLostError(str(self._held)) from error

    def check(self) -> None:
        """Raise LeaseLostError if a later generation has begun."""
        if not os.path.isdir(self.folder):
            raise LeaseLostError(str(self._held))

    def forget_earlier(self) -> None:
        """Delete what earlier generations left; once it is published anew."""
        for number, over in self._generations():
            if over and number < self._held:
                shutil.rmtree(self._of(number) + OVER, ignore_errors=True)

    def left_alone(self) -> LeaseView:
        """The latest generation as somebody sees it who changes nothing."""
        return LeaseView(self._of(self.look().generation))

    def _of(self, generation: int) -> str:
        return f"{self._folder}/{generation:012d}"

    def _generations(self) -> list[tuple[int, bool]]:
        """Every generation there is a folder of, and whether it is sealed."""
        return _generations(name for name, is_folder in self._names().items() if is_folder)

    def _names(self) -> dict[str, bool]:
        """What lies beside the generations, too, and whether it is a folder, and no link."""
        refuse_link(self._folder)
        try:
            with os.scandir(self._folder) as entries:
                return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except FileNotFoundError:
            return {}

    @staticmethod
    def _read(folder: str) -> Beat | None:
        try:
            with reading(f"{folder}/{_BEAT}") as file:
                return _understood(json.loads(file.read(_MOST_BYTES)))
        except (FileNotFoundError, ValueError, RecursionError):
            return None


class LeaseView:
    """In the place of a lease, for a keeper that only looks.

    Args:
        folder: of the generation to look at.

    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def check(self) -> None:
        """See ``Lease.check``. There is nothing to lose."""

    def publish(self, beat: Beat) -> None:
        """See ``Lease.publish``. Nobody is told."""

    def forget_earlier(self) -> None:
        """See ``Lease.forget_earlier``. Nothing is deleted."""


def _generations(names: Iterable[str]) -> list[tuple[int, bool]]:
    stems = [(name.removesuffix(OVER), name.endswith(OVER)) for name in names]
    return [(int(stem), over) for stem, over in stems if _is_generation(stem)]


def _is_generation(stem: str) -> bool:
    return stem.isascii() and stem.isdecimal() and len(stem) <= _MOST_DIGITS


def _understood(written: object) -> Beat | None:
    """What was published, None if no holder can have written it."""
    if not isinstance(written, dict):
        return None
    beat = Beat(**{each.name: written[each.name] for each in fields(Beat) if each.name in written})
    numbers = beat.count, beat.capacity, beat.nbytes, beat.chunks
    sound = (
        isinstance(beat.owner, dict)
        and isinstance(beat.limits, dict)
        and isinstance(beat.resigned, bool)
        and all(isinstance(number, int) for number in (*numbers, *beat.limits.values()))
    )
    return beat if sound else None
