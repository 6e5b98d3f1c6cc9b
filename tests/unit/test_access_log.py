"""The log that the users of a root keep: its bytes, its files, and what a kill leaves of them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers import log_files
from kvtiers.tiers.access_log import (
    Decoder,
    Encoder,
    Header,
    Kind,
    Record,
    bodies,
    framed,
    records_of,
)
from kvtiers.tiers.base import ALIGNMENT, ChunkKey, Namespace
from kvtiers.tiers.log_files import LogReader, LogWriter, fence, segment_numbers, segment_path

OWNER = {"host": "here", "pid": 7}
TOLD = [Kind.COMING, Kind.THERE, Kind.USED, Kind.GONE]


@st.composite
def some_records(draw):
    width = draw(st.integers(1, 64))
    digest = st.binary(min_size=width, max_size=width)
    return Record(
        draw(st.sampled_from(TOLD)),
        draw(st.sampled_from(["ab" * 16, "cd" * 16, "x"])),
        tuple(draw(st.lists(digest, min_size=1, max_size=5, unique=True))),
        draw(st.integers(-1, 2**31 - 6)),
        draw(st.none() | digest),
        draw(st.integers(0, 2**31)) * ALIGNMENT,
        draw(st.binary(min_size=8, max_size=8)),
    )


@given(st.lists(some_records(), max_size=6))
def test_records_are_read_as_they_were_written(records):
    header = Header(3 * ALIGNMENT, ALIGNMENT, OWNER)
    encoder = Encoder()
    data = encoder.header(header) + encoder.records(records)
    assert Decoder().feed(data) == ([header, *records], len(data))


@given(st.lists(some_records(), min_size=1, max_size=4), st.data())
def test_of_a_torn_or_flipped_tail_the_whole_records_before_it_are_read(records, data):
    encoder = Encoder()
    parts = [encoder.records([record]) for record in records]
    whole = b"".join(parts)
    cut = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        broken = whole[:cut]
    else:
        broken = whole[:cut] + bytes([whole[cut] ^ 0x20]) + whole[cut + 1 :]
    found, used = Decoder().feed(broken)
    assert found == records[: len(found)]
    assert used <= cut
    assert len(found) >= sum(len(b"".join(parts[: i + 1])) <= cut for i in range(len(parts)))


def test_what_a_later_release_wrote_is_passed_over():
    record = Record(Kind.USED, "ns", (b"h",))
    strange = framed(b"\xf0 from the future")
    data = strange + Encoder().records([record])
    assert Decoder().feed(data) == ([record], len(data))
    assert len(list(bodies(data))) == 3  # and the namespace's name


def chunk(number: int, tenant: str = "", parent: bytes | None = None, position: int | None = None):
    place = number if position is None else position
    return ChunkKey(Namespace("ns"), bytes([number] * 4), place, tenant, parent)


def test_neighbours_are_told_as_one_run():
    keys = [chunk(0), chunk(1, parent=b"\0" * 4), chunk(2), chunk(9), chunk(10, tenant="t")]
    told = records_of(Kind.COMING, keys, ALIGNMENT, {"t": b"tttttttt"})
    assert [(len(r.hashes), r.start, r.tenant) for r in told] == [
        (3, 0, bytes(8)),
        (1, 9, bytes(8)),
        (1, 10, b"tttttttt"),
    ]


def test_what_follows_another_parent_is_another_run():
    told = records_of(Kind.USED, [chunk(0), chunk(1, parent=b"else")], 0, {})
    assert [(r.hashes, r.parent) for r in told] == [((b"\0" * 4,), None), ((b"\1" * 4,), b"else")]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "w-1"
    path.mkdir()
    return str(path)


def coming(*numbers: int) -> Record:
    return Record(Kind.COMING, "ns", tuple(bytes([n] * 4) for n in numbers), 0, None, ALIGNMENT)


def told(reader: LogReader, folder: str) -> list[Record]:
    """What it reads, without the times."""
    read = reader.read(folder)
    return [replace(record, at=0.0) for record in read if isinstance(record, Record)]


def test_a_reader_follows_a_writer_over_segments(folder, monkeypatch):
    monkeypatch.setattr(log_files, "SEGMENT_BYTES", 400)
    writer, reader, found = LogWriter(folder, OWNER, ALIGNMENT), LogReader(), []
    for number in range(40):
        writer.append([coming(number)])
        if number % 3 == 0:
            found += told(reader, folder)
    found += told(reader, folder)
    assert found == [coming(number) for number in range(40)]
    assert len(segment_numbers(folder)) > 3
    assert told(reader, folder) == []


def test_a_reader_goes_on_where_a_snapshot_ended(folder):
    writer, first = LogWriter(folder, OWNER, ALIGNMENT), LogReader()
    writer.append([coming(1)])
    first.read(folder)
    writer.append([coming(2)])
    assert told(LogReader(first.number, first.offset), folder) == [coming(2)]


def test_a_writer_whose_append_broke_goes_on_in_a_new_segment(folder, monkeypatch):
    """What it announced counts, as nobody can tell whether it was read."""
    writer, reader = LogWriter(folder, OWNER, ALIGNMENT), LogReader()
    writer.append([coming(1)])
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:-3]))
        with pytest.raises(OSError, match="part of a record"):
            writer.append([coming(2, 3)])
    writer.append([coming(4)])
    found = reader.read(folder)
    records = [replace(r, at=0.0) for r in found if isinstance(r, Record)]
    assert records == [coming(1), coming(4)]
    assert found[-2] == Header(3 * ALIGNMENT, ALIGNMENT, OWNER)
    assert writer.announced == 4 * ALIGNMENT


def test_a_fenced_writer_can_neither_append_nor_begin_a_segment(folder):
    writer, reader = LogWriter(folder, OWNER, ALIGNMENT), LogReader()
    writer.append([coming(1)])
    fence(folder)
    fence(folder)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            writer.append([coming(2)])
    assert told(reader, folder + ".over") == [coming(1)]


def test_records_say_when_they_were_written_down_also_to_who_reads_on(folder, monkeypatch):
    now = [100.5]
    monkeypatch.setattr(log_files.time, "time", lambda: now[0])
    writer, first = LogWriter(folder, OWNER, ALIGNMENT), LogReader()
    writer.append([coming(1)])
    first.read(folder)
    now[0] = 90.25  # a clock was set
    writer.append([coming(2), Record(Kind.WANTED, nbytes=7)])
    at = [(r.kind, r.at) for r in LogReader().read(folder) if isinstance(r, Record)]
    assert at == [(Kind.COMING, 100.5), (Kind.COMING, 90.25), (Kind.WANTED, 90.25)]
    rest = LogReader(first.number, first.offset).read(folder)
    assert [r.at for r in rest if isinstance(r, Record)] == [90.25, 90.25]


def test_a_log_is_for_its_owner_only(folder):
    LogWriter(folder, OWNER, ALIGNMENT).append([coming(1)])
    assert os.stat(segment_path(folder, 1)).st_mode & 0o077 == 0
