"""LMCache's batches, carried out on a hierarchy: LMCache as one more engine in front of it.

Everything here runs on one thread, the hierarchy's engine, and never blocks on a
tier. What belongs to LMCache is touched here only, and only while its batch is under
way: an object is copied into slots of the arena before it is stored, and out of them
once all of it has been read and verified. So the arena is a staging area. It costs one
copy, and buys what LMCache's interface lacks: a batch can end at its deadline while a
tier still hangs in it, as the tier then holds on to slots and not to LMCache's memory.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from kvtiers.connector.lmcache_pieces import (
    Bytes,
    Prefixes,
    StoredObject,
    fill,
    gather,
    length_in,
    tail_of,
)
from kvtiers.policies import PolicyRequest, Run
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.requests import Lookup

logger = logging.getLogger(__name__)

# Of the arena: one load's portion, all that are under way, and the largest object.
_PORTION = 4
_UNDER_WAY = 2
# A tier that fails a read may say that it has the chunk when it is asked again, and is
# left alone after five failures in a row: as many attempts reach the tier below it.
_ATTEMPTS = 6
_NOT_FINAL = frozenset({Lookup.PENDING, Lookup.UNKNOWN})


class JobKind(enum.Enum):
    """Which of LMCache's calls a batch came by."""

    SET = "set"
    GET = "get"
    EXISTS = "exists"
    DELETE = "delete"


@dataclass(eq=False, slots=True)
class Job:
    """One batch.

    Attributes:
        id: what LMCache knows it by.
        kind: what to do.
        keys: LMCache's names of the objects.
        buffers: their bytes, for ``SET`` and ``GET``.
        deadline: when it ends at the latest, unless it gets on.
        answers: per key, whether it was stored, loaded, found or deleted; None while
            that is open.
        error: why not all of it went well, "" if it did.
        staged: pieces of the object in its turn that a store is done with.

    """

    id: int
    kind: JobKind
    keys: Sequence[str]
    buffers: Sequence[Bytes] = ()
    deadline: float = float("inf")
    answers: list[bool | None] = field(default_factory=list)
    error: str = ""
    staged: int = 0

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.keys)

    @property
    def open(self) -> bool:
        """Whether an answer is still to come."""
        return None in self.answers

    def settle(self, error: str) -> None:
        """Whatever is open did not go well."""
        if self.open:
            self.error = self.error or error
            self.answers = [answer is True for answer in self.answers]


@dataclass(eq=False, slots=True)
class _Portion:
    """Neighbouring objects of a batch that are promoted together, as one request.

    Attributes:
        job: the batch.
        indices: which of its objects.
        run: all of their pieces.
        sizes: pieces of each object.
        attempt: how many times it was tried before.
        name: of the request, "" before it begins.
        begun: when that was.
        read: pieces that some tier was known to hold.

    """

    job: Job
    indices: list[int]
    run: Run
    sizes: list[int]
    attempt: int = 0
    name: str = ""
    begun: float = 0.0
    read: set[bytes] = field(default_factory=set)

    def objects(self) -> Iterator[tuple[int, list[bytes]]]:
        """Index of each object in the batch, and the ids of its pieces."""
        ids = iter(self.run.chunks)
        for index, size in zip(self.indices, self.sizes, strict=True):
            yield (
                index,
                [piece for piece in itertools.islice(ids, size) if isinstance(piece, bytes)],
            )


class Jobs:
    """Batches under way. One thread.

    Args:
        hierarchy: of pieces, with the arena for staging.
        slots: of the arena.
        clock: seconds, monotonic; the hierarchy's.
        patience: seconds that a batch may go without getting on.

    """

    def __init__(
        self, hierarchy: Hierarchy, slots: int, clock: Callable[[], float], patience: float
    ) -> None:
        self._hierarchy = hierarchy
        self._slots = slots
        self._clock = clock
        self._patience = patience
        self._prefixes = Prefixes()
        self._sets: deque[Job] = deque()
        self._lookups: dict[str, Job] = {}
        self._waiting: deque[_Portion] = deque()
        self._under_way: list[_Portion] = []
        self._open: dict[Job, None] = {}
        self._unwanted: list[tuple[Job, int, tuple[bytes, ...]]] = []
        self._removing: list[tuple[Job, int]] = []
        self._names = (f"lmcache-{number}" for number in itertools.count())
        self._too_large = False

    @property
    def busy(self) -> bool:
        """Whether a batch is under way, so that time matters."""
        return bool(self._open)

    @property
    def behind(self) -> bool:
        """Whether ``step`` has work at once, though nothing came in."""
        return self._hierarchy.behind()

    def add(self, job: Job) -> None:
        """Take a batch in. ``step`` returns it when it is done."""
        job.deadline = self._clock() + self._patience
        self._open[job] = None
        if job.kind is JobKind.SET:
            self._sets.append(job)
        elif job.kind is JobKind.EXISTS:
            self._look(job)
        else:
            self._waiting += self._portions(job)

    def step(self) -> list[Job]:
        """Take in what tiers answered, go on with what waits. Returns batches that are done."""
        self._hierarchy.tick()
        self._answer_lookups()
        self._store()
        self._load()
        self._begin_removals()
        self._end_removals()
        self._hierarchy.tick()
        done = [job for job in self._open if not job.open]
        for job in done:
            del self._open[job]
        return done

    def abandon(self, why: str) -> list[Job]:
        """End every batch as it is. LMCache's memory is not touched any more."""
        done = list(self._open)
        for job in done:
            job.settle(why)
        self._open.clear()
        self._unwanted.clear()
        self._removing.clear()
        self._sets.clear()
        self._waiting.clear()
        self._under_way.clear()
        return done

    # Lookups ------------------------------------------------------------------

    def _look(self, job: Job) -> None:
        self._prefixes.learn(job.keys)
        name = next(self._names)
        self._hierarchy.begin(PolicyRequest(name))
        self._hierarchy.ask(name, [tail_of(key) for key in job.keys])
        self._lookups[name] = job

    def _answer_lookups(self) -> None:
        for name, job in list(self._lookups.items()):
            held = [self._hierarchy.holds(tail_of(key)) for key in job.keys]
            # What one tier has need not wait for what the others say.
            if all(held) or not self._hierarchy.waits(name):
                job.answers[:] = held
                self._hierarchy.end(name)
                del self._lookups[name]

    # Stores -------------------------------------------------------------------

    def _store(self) -> None:
        """Copy objects into the arena, in order, while there is room for them."""
        while self._sets:
            job = self._sets[0]
            if self._clock() >= job.deadline:
                job.settle("no tier took it in time")
            while job.open and self._store_next(job):
                pass
            if job.open:
                return
            self._sets.popleft()

    def _store_next(self, job: Job) -> bool:
        """Go on with the first object that is not stored; False if it has to wait for room."""
        index = job.answers.index(None)
        item = self._object(job, index)
        if not self._hierarchy.reachable():
            job.settle("every tier is left alone for now")
        elif not self._fits(item):
            job.error = "an object is larger than half of 'staging'"
            job.answers[index] = False
        elif job.staged < len(item.pieces):
            return self._stage(job, index, item)
        else:
            job.staged = 0
            job.answers[index] = all(map(self._hierarchy.holds, item.pieces))
            if not job.answers[index]:
                job.error = "there was no room for it, or the policy did not admit it"
        return True

    def _stage(self, job: Job, index: int, item: StoredObject) -> bool:
        """Store what there is room for of an object, from its head; False if that is nothing."""
        if self._hierarchy.holds(item.pieces[job.staged]):
            job.staged += 1
            return True
        room = self._hierarchy.room()
        if not room:
            return False
        run = self._prefixes.run_of([item], self._hierarchy.chunk_bytes)
        taken = self._hierarchy.reserve("", [run.tail(job.staged).head(room)])
        position = {piece: number for number, piece in enumerate(item.pieces)}
        for piece, slot in taken:
            memory = self._hierarchy.memory(slot)
            fill(memory, job.buffers[index], position[piece], len(item.pieces))
        self._hierarchy.stored([piece for piece, _ in taken])
        job.staged = min(job.staged + room, len(item.pieces))
        job.deadline = self._clock() + self._patience
        return True

    def _fits(self, item: StoredObject) -> bool:
        fits = len(item.pieces) <= max(1, self._slots // _UNDER_WAY)
        if not fits and not self._too_large:
            self._too_large = True
            logger.warning(
                "An object of %d bytes is larger than half of 'staging' and is not cached, nor "
                "is any other of that size. Raise 'staging' of the adapter.",
                item.nbytes,
            )
        return fits

    # Loads and deletions ------------------------------------------------------

    def _object(self, job: Job, index: int) -> StoredObject:
        return StoredObject.of(
            job.keys[index], len(job.buffers[index]), self._hierarchy.chunk_bytes
        )

    def _portions(self, job: Job) -> list[_Portion]:
        """Cut a batch where its objects are no neighbours, or too many for the arena."""
        groups: list[list[tuple[int, StoredObject]]] = []
        most = max(1, self._slots // _PORTION)
        for index, key in enumerate(job.keys):
            if job.kind is JobKind.DELETE:
                # Its size is in its last piece, and only that can be found without it.
                item = StoredObject(key, 0, (tail_of(key),))
            else:
                item = self._object(job, index)
            if not self._fits(item):
                job.answers[index] = False
                continue
            last = groups[-1] if groups else None
            if (
                last is not None
                and (len(last) + 1) * len(item.pieces) <= most
                and self._prefixes.follows(last[-1][1], item)
            ):
                last.append((index, item))
            else:
                groups.append([(index, item)])
        return [self._portion(job, group) for group in groups]

    def _portion(
        self, job: Job, group: Sequence[tuple[int, StoredObject]], attempt: int = 0
    ) -> _Portion:
        objects = [item for _, item in group]
        run = self._prefixes.run_of(objects, self._hierarchy.chunk_bytes)
        sizes = [len(item.pieces) for item in objects]
        return _Portion(job, [index for index, _ in group], run, sizes, attempt)

    def _load(self) -> None:
        for portion in list(self._under_way):
            self._advance(portion)
        while self._waiting and self._may_begin(self._waiting[0]):
            portion = self._waiting.popleft()
            if self._clock() >= portion.job.deadline:
                portion.job.settle("no tier had it in time")
            if portion.job.open:
                self._begin(portion)

    def _may_begin(self, portion: _Portion) -> bool:
        """Reads of one portion go on while those of the one before it are copied out."""
        pieces = sum(len(other.run) for other in self._under_way)
        return not pieces or pieces + len(portion.run) <= self._slots // _UNDER_WAY

    def _begin(self, portion: _Portion) -> None:
        portion.name, portion.begun = next(self._names), self._clock()
        run = portion.run
        request = PolicyRequest(portion.name, (run,), self._clock(), run.tenant)
        # As if only the last chunks were needed: each object is worth having by itself.
        self._hierarchy.begin(request, windowed=frozenset({run.group}))
        self._under_way.append(portion)
        self._advance(portion)

    def _advance(self, portion: _Portion) -> None:
        """Take out what has landed, once nothing more is to come."""
        lookup, name = self._hierarchy.lookup, portion.name
        answers = {p: lookup(name, p) for p in portion.run.chunks if isinstance(p, bytes)}
        portion.read.update(piece for piece in answers if answers[piece] is Lookup.PENDING)
        if not _NOT_FINAL.isdisjoint(answers.values()):
            return
        hits = {piece for piece, answer in answers.items() if answer is Lookup.HIT}
        broken = self._take_out(portion, hits)
        self._under_way.remove(portion)
        self._retry(portion, broken)

    def _take_out(self, portion: _Portion, hits: Container[bytes]) -> list[int]:
        """Copy what is whole to where LMCache wants it. Returns what is not."""
        name, job = portion.name, portion.job
        broken: list[int] = []
        unwanted: list[tuple[int, int]] = []
        # A batch that has ended meanwhile has its memory back.
        open_ones = [each for each in portion.objects() if job.answers[each[0]] is None]
        for index, pieces in open_ones:
            slots = self._hierarchy.load(name, [piece for piece in pieces if piece in hits])
            memory = [self._hierarchy.memory(slot) for slot in slots if slot >= 0]
            nbytes = length_in(memory[-1]) if pieces[-1] in hits and memory else None
            if nbytes is not None and self._is_unwanted(job, index, nbytes):
                unwanted.append((index, nbytes))
            elif len(memory) < len(pieces):
                broken.append(index)
            else:
                gather(job.buffers[index], memory)
                job.answers[index] = True
                job.deadline = self._clock() + self._patience
        self._hierarchy.admitted(name, {})
        self._hierarchy.loaded(name)
        self._hierarchy.end(name)
        for index, nbytes in unwanted:
            self._remove(job, index, nbytes)
        return broken

    @staticmethod
    def _is_unwanted(job: Job, index: int, nbytes: int) -> bool:
        """Whether an object of that size is to go: deleted, or in the way of another layout."""
        return job.kind is JobKind.DELETE or nbytes != len(job.buffers[index])

    def _remove(self, job: Job, index: int, nbytes: int) -> None:
        """Drop an object of the size that its last piece tells."""
        stored = StoredObject.of(job.keys[index], nbytes, self._hierarchy.chunk_bytes)
        self._unwanted.append((job, index, stored.pieces))

    def _begin_removals(self) -> None:
        """Once no store of a piece is under way: it would bring the piece back, or seem to."""
        for entry in list(self._unwanted):
            job, index, pieces = entry
            if not self._hierarchy.storing(pieces) or self._clock() >= job.deadline:
                self._hierarchy.remove(pieces)
                self._unwanted.remove(entry)
                self._removing.append((job, index))

    def _end_removals(self) -> None:
        """Answered when the tiers have done it: or they would drop what is stored next.

        Or when they do not do it in time.
        """
        late = self._hierarchy.removing()
        for job, index in list(self._removing):
            if not late or self._clock() >= job.deadline:
                job.answers[index] = job.kind is JobKind.DELETE
                self._removing.remove((job, index))

    def _retry(self, portion: _Portion, indices: Sequence[int]) -> None:
        """What one tier did not give after all may come from the next one."""
        job, now = portion.job, self._clock()
        over = now >= min(job.deadline, portion.begun + self._patience)
        pieces = dict(portion.objects())
        again: list[tuple[int, StoredObject]] = []
        for index in indices:
            # What no tier said it has was not read, and is nowhere.
            if over or portion.attempt + 1 == _ATTEMPTS or portion.read.isdisjoint(pieces[index]):
                job.answers[index] = False
                continue
            nbytes = len(job.buffers[index]) if job.buffers else 0
            again.append((index, StoredObject(job.keys[index], nbytes, tuple(pieces[index]))))
        # One by one: what is left of a run need not be neighbours any more.
        for entry in reversed(again):
            self._waiting.appendleft(self._portion(job, [entry], portion.attempt + 1))
