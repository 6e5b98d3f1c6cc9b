"""The suite that certifies a tier, and what it can't know of this one."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kvtiers.tiers import (
    TIERS,
    ChunkKey,
    Namespace,
    ReadOutcome,
    Tier,
    TierConfigError,
    WriteOutcome,
)
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers_sqlite import SqliteTier

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

# Rewritten before its import.
from kvtiers.tiers.conformance import TierConformance  # noqa: E402
from kvtiers.tiers.wrappers import LatencyTier  # noqa: E402

CHUNK = 8192
KEYS = [ChunkKey(Namespace("a1" * 16), bytes([n]) * 36, position=n) for n in range(3)]


class TestSqliteTier(TierConformance):
    """How to open the tier, and two doors behind its back: a plain connection of SQLite."""

    bounded = True
    supports_persistence = True

    def open_tier(self, place: Path, chunks: int) -> Tier:
        capacity = chunks * (self.payload_bytes + METADATA_BYTES)
        config = SqliteTier.Config(path=place / "chunks.sqlite", capacity=capacity)
        return SqliteTier(config, self.payload_bytes)

    def peek(self, tier: Tier, key: ChunkKey) -> bytes | None:
        with stored(tier, key) as blob:
            return None if blob is None else blob.read()

    def poke_damage(self, tier: Tier, key: ChunkKey) -> None:
        with stored(tier, key) as blob:
            blob[self.payload_bytes // 2] ^= 0x10


class TestSqliteTierFarAway(TestSqliteTier):
    def wrap(self, tier: Tier) -> Tier:
        return LatencyTier(tier, call_seconds=1e-4, bytes_per_second=1e9)


@contextmanager
def stored(tier: Tier, key: ChunkKey) -> Iterator[sqlite3.Blob | None]:
    """The payload in the database, None if it is not there; changes to it are kept."""
    find = "SELECT id FROM chunks WHERE namespace = ? AND hash = ?"
    with closing(sqlite3.connect(tier.config.path)) as db, db:
        row = db.execute(find, (key.namespace.id, key.hash)).fetchone()
        if row is None:
            yield None
        else:
            with db.blobopen("contents", "payload", row[0]) as blob:
                yield blob


def opened(path: Path, **options: object) -> SqliteTier:
    return SqliteTier(SqliteTier.Config(path=path, **options), CHUNK)


def write(tier: Tier, keys: list[ChunkKey]) -> list[WriteOutcome]:
    return tier.write(keys, [aligned_buffer(CHUNK) for _ in keys])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "chunks.sqlite"


@pytest.fixture
def tier(path: Path) -> Iterator[SqliteTier]:
    tier = opened(path)
    yield tier
    tier.close()


def test_it_is_found_by_its_entry_point() -> None:
    assert TIERS.get("sqlite") is SqliteTier


def test_nobody_else_may_read_it(tier: SqliteTier, path: Path) -> None:
    write(tier, KEYS)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert set(modes) == {"chunks.sqlite", "chunks.sqlite-wal", "chunks.sqlite-shm"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear all, this is no database. " * 100)
    before = (tmp_path / "letter.txt").read_bytes()
    with pytest.raises(TierConfigError, match=r"`path` .*letter\.txt: file is not a database"):
        opened(tmp_path / "letter.txt")
    assert (tmp_path / "letter.txt").read_bytes() == before


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierConfigError, match="It must be a file"):
        opened(tmp_path)


def test_a_capacity_below_one_chunk_is_refused_with_both_figures(path: Path) -> None:
    with pytest.raises(TierConfigError, match=f"8192 bytes.*{CHUNK + METADATA_BYTES} bytes"):
        opened(path, capacity=CHUNK)


def test_chunks_beyond_what_sqlite_stores_are_refused(path: Path) -> None:
    with pytest.raises(TierConfigError, match="blocks_per_chunk"):
        SqliteTier(SqliteTier.Config(path=path), 1 << 31)


def test_the_bound_holds_among_engines(path: Path) -> None:
    capacity = 2 * (CHUNK + METADATA_BYTES)
    one, other = opened(path, capacity=capacity), opened(path, capacity=capacity)
    assert write(one, KEYS[:1]) == [WriteOutcome.STORED]
    assert write(other, KEYS) == [WriteOutcome.EXISTS, WriteOutcome.STORED, WriteOutcome.REFUSED]
    assert one.usage() == other.usage()
    one.close()
    other.close()


def test_a_full_disk_refuses_and_a_reader_goes_on(path: Path) -> None:
    """As SQLite tells it, which has a limit of its own that a connection can set."""

    class OnASmallDisk(SqliteTier):
        def _connect(self) -> sqlite3.Connection:
            db = super()._connect()
            db.execute("PRAGMA max_page_count = 10")
            return db

    tier = OnASmallDisk(SqliteTier.Config(path=path), 1 << 20)
    buffer = aligned_buffer(1 << 20)
    assert tier.write(KEYS[:1], [buffer]) == [WriteOutcome.REFUSED]
    assert tier.usage().chunks == 0
    assert tier.read(KEYS[:1], [buffer]) == [ReadOutcome.MISS]
    tier.close()


def test_a_database_that_is_locked_fails_in_time_and_comes_back(path: Path) -> None:
    tier = opened(path, deadline=0.1)
    write(tier, KEYS[:1])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match="database is locked"):
            write(tier, KEYS[1:])
        assert tier.read(KEYS[:1], [aligned_buffer(CHUNK)]) == [ReadOutcome.HIT]
        other.execute("ROLLBACK")
    assert write(tier, KEYS[1:]) == [WriteOutcome.STORED] * 2
    tier.close()


def test_a_database_that_is_damaged_throughout_fails_with_an_oserror(path: Path) -> None:
    tier = opened(path)
    write(tier, KEYS)
    tier.close()  # so that nothing is cached; connections are made when there is none
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * (path.stat().st_size - 100))
    for call in (
        lambda: tier.contains(KEYS),
        lambda: tier.read(KEYS, [aligned_buffer(CHUNK) for _ in KEYS]),
        lambda: write(tier, KEYS),
        lambda: tier.remove(KEYS),
        lambda: list(tier.scan()),
        tier.usage,
    ):
        with pytest.raises(OSError, match=r"chunks\.sqlite"):
            call()


def test_uses_and_the_order_of_a_prefix_outlive_the_engine(path: Path) -> None:
    tier = opened(path)
    write(tier, KEYS)
    stored = {entry.key: entry.last_used for entry in tier.scan()}
    assert sorted(KEYS, key=stored.__getitem__) == KEYS[::-1]
    tier.read(KEYS[2:], [aligned_buffer(CHUNK)])
    tier.close()
    again = opened(path)
    after = {entry.key: entry.last_used for entry in again.scan()}
    assert [key for key in KEYS if after[key] > stored[key]] == KEYS[2:]
    again.close()


def test_a_scan_goes_through_all_its_portions(
    tier: SqliteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers_sqlite._SCAN_ROWS", 2)
    write(tier, KEYS)
    assert {entry.key for entry in tier.scan()} == set(KEYS)
