"""What this replica knows of each chunk: where copies of it are.

Kept in columns, a row a chunk, because a lower tier may hold millions and an object for
each stops the scheduler whenever the garbage collector walks them. See
``policies/columns.py`` and docs/design/hierarchy.md.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from kvtiers.policies import Run
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.sharded import ShardedDict

# Chunks that can be looked at, and told to a policy, without being felt.
_PART = 256


class State(enum.IntEnum):
    """Whether the arena holds a chunk."""

    ABSENT = 0
    FILLING = 1
    """The GPU is storing it into a slot."""
    PROMOTING = 2
    """A lower tier is read into a slot."""
    READY = 3
    """All of it is in a slot, and may be loaded."""


_STATES = tuple(State)


class Chunk:
    """One chunk: a handle on its row of the directory, made when somebody asks for it.

    Equal handles are on the same chunk. One whose chunk was forgotten still tells the
    key; nothing else of it means anything.

    Attributes:
        key: prefix hash and group, as the engine names it.
        row: its number in the directory.

    """

    __slots__ = ("_columns", "key", "row")

    def __init__(self, columns: _Columns, row: int, key: bytes) -> None:
        self._columns = columns
        self.row = row
        self.key = key

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Chunk)
            and other._columns is self._columns
            and (other.row, other.key) == (self.row, self.key)
        )

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def position(self) -> int:
        """Index in its prefix, -1 if unknown."""
        return self._columns.position[self.row]

    @property
    def group(self) -> int:
        """KV-cache group."""
        return self._columns.group[self.row]

    @property
    def parent(self) -> bytes | None:
        """Key of the chunk before it, None if first or unknown."""
        return self._columns.parents[self.row]

    @property
    def tenant(self) -> str:
        """Who it belongs to, "" if unknown."""
        return self._columns.tenants.name(self._columns.tenant[self.row])

    @property
    def where(self) -> int:
        """Bit i is set if lower tier i is known to hold a copy."""
        return self._columns.where[self.row]

    @where.setter
    def where(self, bits: int) -> None:
        self._columns.where[self.row] = bits

    @property
    def declined(self) -> int:
        """Bit i is set if the policy let lower tier i go without what the arena has."""
        return self._columns.declined[self.row]

    @declined.setter
    def declined(self, bits: int) -> None:
        self._columns.declined[self.row] = bits

    @property
    def slot(self) -> int:
        """The arena's slot that has, or is getting, a copy; -1 if none."""
        return self._columns.slot[self.row]

    @slot.setter
    def slot(self, slot: int) -> None:
        self._columns.slot[self.row] = slot

    @property
    def state(self) -> State:
        """Whether the arena holds it."""
        return _STATES[self._columns.state[self.row]]

    @state.setter
    def state(self, state: State) -> None:
        self._columns.state[self.row] = state

    def learn(self, position: int, group: int, parent: bytes | None, tenant: str) -> None:
        """Take in what was not known of it yet."""
        columns, row = self._columns, self.row
        if columns.position[row] < 0 <= position:
            columns.position[row], columns.group[row] = position, group
            columns.parents[row] = columns.own(parent)
        if tenant and not columns.tenant[row]:
            columns.tenant[row] = columns.tenants.add(tenant)


class _Tenants:
    """Names by number, as long as some chunk has them. "" is number 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = [""]
        self._chunks: list[int] = [0]
        self._free: list[int] = []

    def name(self, number: int) -> str:
        return self._names[number]

    def add(self, name: str) -> int:
        """The number of a name that one more chunk has."""
        if not name:
            return 0
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._new(name)
        self._chunks[number] += 1
        return number

    def discard(self, number: int) -> None:
        """One chunk less has it."""
        if number:
            self._chunks[number] -= 1
            if not self._chunks[number]:
                del self._numbers[self._names[number]]
                self._names[number] = ""
                self._free.append(number)

    def _new(self, name: str) -> int:
        if self._free:
            number = self._free.pop()
            self._names[number] = name
            return number
        self._names.append(name)
        self._chunks.append(0)
        return len(self._names) - 1


class _Columns:
    """The facts of all chunks; see ``Chunk`` for what each is."""

    __slots__ = (
        "declined", "group", "keys", "parents", "position", "rows", "slot", "state", "table",
        "tenant", "tenants", "where",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rows: ShardedDict[bytes, int] = ShardedDict()
        # Of a row that no chunk has, None.
        self.keys: Objects[bytes | None] = Objects()
        self.parents: Objects[bytes | None] = Objects()
        self.tenants = _Tenants()
        self.table = Table("iHIIibI")
        (
            self.position,
            self.group,
            self.tenant,
            self.where,
            self.slot,
            self.state,
            self.declined,
        ) = self.table.columns

    def own(self, key: bytes | None) -> bytes | None:
        """The same key, as the object that is kept already, if there is one."""
        row = None if key is None else self.rows.get(key)
        return key if row is None else self.keys[row]


class Directory:
    """Chunks by key. Grows, and is given back, in pieces too small to be felt."""

    def __init__(self) -> None:
        self._columns = _Columns()

    def get(self, key: bytes) -> Chunk | None:
        """The chunk, if anything is known of it."""
        row = self._columns.rows.get(key)
        return None if row is None else Chunk(self._columns, row, key)

    def ensure(
        self,
        key: bytes,
        position: int = -1,
        group: int = 0,
        parent: bytes | None = None,
        tenant: str = "",
    ) -> Chunk:
        """The chunk, made if nothing is known of it yet."""
        columns = self._columns
        row = columns.rows.get(key)
        if row is not None:
            chunk = Chunk(columns, row, key)
            chunk.learn(position, group, parent, tenant)
            return chunk
        number = columns.tenants.add(tenant)
        row = columns.table.new(position, group, number, 0, -1, State.ABSENT, 0)
        columns.rows[key] = row
        columns.keys.put(row, key)
        columns.parents.put(row, columns.own(parent))
        return Chunk(columns, row, key)

    def at(self, row: int) -> Chunk:
        """The chunk with that number."""
        key = self._columns.keys[row]
        assert key is not None, f"no chunk has row {row}"
        return Chunk(self._columns, row, key)

    def forget(self, chunk: Chunk) -> None:
        """Drop a chunk of which no tier is known to hold a copy."""
        columns = self._columns
        row = columns.rows.get(chunk.key)
        if row is not None:
            del columns.rows[chunk.key]
            columns.keys[row] = columns.parents[row] = None
            columns.tenants.discard(columns.tenant[row])
            columns.table.free(row)

    def __len__(self) -> int:
        return len(self._columns.rows)

    def parts(self) -> Iterator[list[Chunk]]:
        """All chunks, a few hundred at a time; others may come and go in between."""
        columns = self._columns
        for start in range(0, len(columns.keys), _PART):
            rows = range(start, min(start + _PART, len(columns.keys)))
            named = ((row, columns.keys[row]) for row in rows)
            yield [Chunk(columns, row, key) for row, key in named if key is not None]

    def __iter__(self) -> Iterator[Chunk]:
        for part in self.parts():
            yield from part

    def give_back(self) -> Iterator[None]:
        """Forget everything, step by step. Nobody may use the directory any more."""
        yield from self._columns.rows.give_back()
        yield from self._columns.keys.give_back()
        yield from self._columns.parents.give_back()


def runs_of(chunks: Iterable[Chunk], chunk_bytes: int) -> list[Run]:
    """Group chunks into runs: neighbours of one prefix, head first, per group."""
    runs: list[list[Chunk]] = []
    # By its last chunk, each run that may go on.
    ends: dict[bytes, list[Chunk]] = {}
    for chunk in sorted(chunks, key=lambda c: (c.group, c.position)):
        run = ends.pop(chunk.parent, None) if chunk.parent is not None else None
        if run is None or not _follows(run[-1], chunk):
            run = []
            runs.append(run)
        run.append(chunk)
        ends[chunk.key] = run
    return [_run(run, chunk_bytes) for run in runs]


def _follows(before: Chunk, after: Chunk) -> bool:
    return (
        after.group == before.group
        and after.position == before.position + 1
        and after.parent == before.key
        and after.tenant == before.tenant
    )


def _run(chunks: list[Chunk], chunk_bytes: int) -> Run:
    first = chunks[0]
    return Run(
        tuple(c.key for c in chunks),
        max(first.position, 0),
        chunk_bytes,
        first.group,
        first.parent,
        first.tenant,
    )
