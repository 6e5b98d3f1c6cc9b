import contextlib
import errno
import json
import logging
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers.base import (
    ChunkKey,
    Namespace,
    ReadOutcome,
    TierConfigError,
    Usage,
    WriteOutcome,
)
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.fs_layout import Layout, hash_of
from kvtiers.tiers.fs_ledger import Ledger
from kvtiers.tiers.fs_namespace import explain_mismatch
from kvtiers.tiers.fs_quarantine import Stuck
from pydantic import ValidationError

PAYLOAD_BYTES = 8192
CHUNK_BYTES = PAYLOAD_BYTES + METADATA_BYTES
FACTS = {"model": "tiny", "dtype": "bfloat16", "shape": (2, 3)}
NAMESPACE = Namespace("ab" * 16, FACTS)


def open_tier(root: Path, **options) -> FsTier:
    return FsTier(FsTier.Config(path=root, **options), PAYLOAD_BYTES)


@pytest.fixture
def tier(tmp_path):
    return open_tier(tmp_path / "root")


def key(number: int, namespace: Namespace = NAMESPACE, position: int = -1) -> ChunkKey:
    return ChunkKey(namespace, bytes([number]) * 36, position)


def filled(value: int) -> memoryview:
    buffer = aligned_buffer(PAYLOAD_BYTES)
    buffer[:] = bytes([value]) * PAYLOAD_BYTES
    return buffer


def write(tier, *keys):
    return tier.write(keys, [filled(k.hash[0]) for k in keys])


def read(tier, *keys):
    return tier.read(keys, [aligned_buffer(PAYLOAD_BYTES) for _ in keys])


def path(tier, k) -> Path:
    return Path(Layout(tier.config.path).place(k).path)


def files_in(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


# Construction -------------------------------------------------------------------


def test_the_default_path_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FsTier.Config().path == tmp_path / "kvtiers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FsTier.Config().path == tmp_path / ".cache" / "kvtiers"
    assert FsTier.Config(path="~/kv").path == tmp_path / "kv"


def test_a_relative_cache_home_is_ignored_as_xdg_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FsTier.Config().path == tmp_path / ".cache" / "kvtiers"


def test_a_misspelt_option_is_refused():
    with pytest.raises(ValidationError, match="capcity"):
        FsTier.Config(capcity=1)


def test_a_capacity_below_one_chunk_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(TierConfigError, match=r"'capacity' of 8192 bytes .* 12288 bytes"):
        open_tier(tmp_path, capacity=8192)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_path_that_is_a_file_is_refused(tmp_path, below):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TierConfigError, match=r"'path' '.*file.*' is not a folder"):
        open_tier(file / below)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder root can't write")
def test_an_unwritable_path_is_refused_with_the_systems_reason():
    with pytest.raises(TierConfigError, match=r"cannot write in its 'path' '/proc/self/kv' \(\["):
        open_tier(Path("/proc/self/kv"))


def test_a_file_system_without_room_for_one_chunk_is_refused(tmp_path):
    with pytest.raises(TierConfigError, match=r"'path' .* bytes free, and one chunk takes \d{18}"):
        FsTier(FsTier.Config(path=tmp_path), 2**59)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill_disk(folder: Path) -> None:
    with (folder / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("direct", ["auto", True])
def test_a_disk_full_of_our_chunks_serves_hits_and_takes_chunks_once_some_go(
    small_disk, caplog, direct
):
    write(open_tier(small_disk), key(1), key(2))
    fill_disk(small_disk)
    tier = open_tier(small_disk, direct=direct)
    assert re.search(r"'path' .* has 0 bytes free, and one chunk takes 12288", caplog.text)
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert write(tier, key(3)) == [WriteOutcome.REFUSED]
    tier.remove([key(2)])
    assert write(tier, key(3)) == [WriteOutcome.STORED]


def test_a_disk_out_of_inodes_by_our_chunks_serves_hits(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=10", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        write(open_tier(tmp_path), *[key(n) for n in range(8)])
        with contextlib.suppress(OSError):
            for n in range(10):
                (tmp_path / f"others{n}").touch()
        assert read(open_tier(tmp_path), key(0)) == [ReadOutcome.HIT]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_full_of_other_things_is_refused(small_disk):
    tier = open_tier(small_disk)
    write(tier, key(1))
    tier.remove([key(1)])
    fill_disk(small_disk)
    with pytest.raises(TierConfigError, match="has 0 bytes free, and one chunk takes 12288"):
        open_tier(small_disk)


def test_folders_and_files_are_for_the_owner_only(tmp_path):
    old = os.umask(0)
    try:
        tier = open_tier(tmp_path / "root")
        write(tier, key(1))
    finally:
        os.umask(old)
    for found in [tmp_path / "root", *(tmp_path / "root").rglob("*")]:
        wanted = 0o700 if found.is_dir() else 0o600
        assert stat.S_IMODE(found.stat().st_mode) == wanted, found


# O_DIRECT -------------------------------------------------------------------------


@pytest.fixture
def no_direct(monkeypatch):
    """A file system that refuses O_DIRECT when a file is opened."""
    real = os.open

    def refuse(name, flags, *args, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


def test_auto_does_without_direct_where_it_does_not_work(tmp_path, no_direct):
    tier = open_tier(tmp_path)
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_demanding_direct_where_it_does_not_work_is_refused(tmp_path, no_direct):
    with pytest.raises(TierConfigError, match="'direct' is true, but"):
        open_tier(tmp_path, direct=True)


def test_a_file_that_refuses_direct_is_read_and_written_buffered(tier, request):
    request.getfixturevalue("no_direct")
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_an_unaligned_buffer_works_all_the_same(tier):
    skewed = memoryview(bytearray(PAYLOAD_BYTES + 4097))[1 : PAYLOAD_BYTES + 1]
    skewed[:] = b"s" * PAYLOAD_BYTES
    assert tier.write([key(1)], [skewed]) == [WriteOutcome.STORED]
    skewed[:] = bytes(PAYLOAD_BYTES)
    assert tier.read([key(1)], [skewed]) == [ReadOutcome.HIT]
    assert skewed == b"s" * PAYLOAD_BYTES


# What may lie in a chunk's place -----------------------------------------------------


def truncate(file: Path) -> None:
    os.truncate(file, CHUNK_BYTES - 100)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def drop_metadata(file: Path) -> None:
    os.truncate(file, PAYLOAD_BYTES)


def lose_blocks(file: Path) -> None:
    """What a crash without fsync leaves: the right size, and holes."""
    os.truncate(file, 0)
    os.truncate(file, CHUNK_BYTES)


def swap_in_another_chunk(file: Path) -> None:
    shutil.copy(file.parent.parent / "02" / ("02" * 36 + ".kv"), file)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_link(file: Path) -> None:
    """To a whole chunk, even: what is behind a link is not ours."""
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


DAMAGES = [
    truncate,
    empty,
    drop_metadata,
    lose_blocks,
    swap_in_another_chunk,
    make_folder,
    make_fifo,
    make_link,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("direct", [True, False])
def test_whatever_lies_in_a_chunks_place_is_corrupt_then_out_of_the_way(tmp_path, direct, damage):
    tier = open_tier(tmp_path, direct="auto" if direct else False)
    write(tier, key(1), key(2))
    damage(path(tier, key(1)))
    assert read(tier, key(1), key(2)) == [ReadOutcome.CORRUPT, ReadOutcome.HIT]
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


@pytest.mark.parametrize("damage", [truncate, empty, drop_metadata, make_folder, make_fifo])
def test_a_write_replaces_what_cannot_be_the_chunk(tier, damage):
    write(tier, key(1))
    damage(path(tier, key(1)))
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_a_chunk_of_another_namespace_under_this_ones_name_is_corrupt(tier):
    foreign = Namespace("cd" * 16)
    write(tier, key(1), key(1, foreign))
    shutil.copy(path(tier, key(1, foreign)), path(tier, key(1)))
    assert read(tier, key(1)) == [ReadOutcome.CORRUPT]


@pytest.mark.parametrize("damage", [empty, make_folder])
def test_what_is_no_chunk_is_kept_aside_but_only_the_last_few(tier, damage):
    keys = [key(n) for n in range(7)]
    write(tier, *keys)
    for k in keys:
        damage(path(tier, k))
    assert read(tier, *keys) == [ReadOutcome.CORRUPT] * 7
    bad = tier.config.path / "v1" / NAMESPACE.id / "bad"
    assert {file.name for file in bad.iterdir()} == {path(tier, k).name for k in keys[3:]}
    entries = list(tier.scan())
    assert [entry.key for entry in entries] == [None] * 4
    assert {entry.where for entry in entries} == {str(bad / path(tier, k).name) for k in keys[3:]}
    assert tier.usage() == Usage(0, 0, None)


def test_a_chunk_stored_anew_is_not_set_aside_for_its_predecessor(tier):
    """Two readers found the damage; the slower one comes after a new write."""
    write(tier, key(1))
    damaged = path(tier, key(1)).open("rb")
    tier.remove([key(1)])
    write(tier, key(1))
    tier._files.quarantine(Layout(tier.config.path).place(key(1)), os.fstat(damaged.fileno()))
    damaged.close()
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_each_kind_of_damage_is_logged_once(tier, caplog):
    write(tier, key(1), key(2), key(3))
    for number, damage in ((1, empty), (2, empty), (3, lose_blocks)):
        damage(path(tier, key(number)))
    read(tier, key(1), key(2), key(3))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert str(path(tier, key(1))) in caplog.text


# Failures -----------------------------------------------------------------------------


def test_an_error_of_the_file_system_is_a_value_and_logged_once(tier, caplog):
    write(tier, key(2))
    folder = path(tier, key(1)).parent
    folder.touch()
    assert read(tier, key(1), key(2), key(1)) == [
        ReadOutcome.FAILED,
        ReadOutcome.HIT,
        ReadOutcome.FAILED,
    ]
    assert len(caplog.records) == 1
    assert write(tier, key(1)) == [WriteOutcome.FAILED]
    assert tier.contains([key(1)]) == [False]
    assert tier.remove([key(1)]) == 0
    assert tier.usage().chunks == 1


@pytest.fixture
def break_file(monkeypatch):
    """Makes one file fail to open with an error, until another takes its place."""
    real = os.open

    def break_it(file: Path, reason: int) -> None:
        broken = file.stat().st_ino

        def fail(name, *args, **options):
            if str(name) == str(file) and os.stat(name).st_ino == broken:
                raise OSError(reason, os.strerror(reason))
            return real(name, *args, **options)

        monkeypatch.setattr(os, "open", fail)

    return break_it


def test_a_write_replaces_a_chunk_that_could_not_be_read(tier, break_file):
    write(tier, key(1), key(2))
    break_file(path(tier, key(1)), errno.EIO)
    assert read(tier, key(1), key(2)) == [ReadOutcome.FAILED, ReadOutcome.HIT]
    assert write(tier, key(1), key(2)) == [WriteOutcome.STORED, WriteOutcome.EXISTS]
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert write(tier, key(1)) == [WriteOutcome.EXISTS]
    assert tier.usage() == Usage(2 * CHUNK_BYTES, 2, None)


def test_an_error_of_the_device_that_comes_again_is_the_files_own(tier, break_file):
    write(tier, key(1))
    break_file(path(tier, key(1)), errno.EIO)
    assert read(tier, key(1), key(1)) == [ReadOutcome.FAILED, ReadOutcome.CORRUPT]
    assert tier.contains([key(1)]) == [False]
    assert tier.usage() == Usage(0, 0, None)


def test_an_error_of_the_device_that_passes_costs_nothing(tier, break_file, monkeypatch):
    write(tier, key(1))
    for _ in range(3):
        break_file(path(tier, key(1)), errno.EIO)
        assert read(tier, key(1)) == [ReadOutcome.FAILED]
        monkeypatch.undo()
        assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert write(tier, key(1)) == [WriteOutcome.EXISTS]


def test_a_chunk_we_may_not_read_is_out_of_the_way_at_once(tier, break_file):
    write(tier, key(1))
    break_file(path(tier, key(1)), errno.EACCES)
    assert read(tier, key(1)) == [ReadOutcome.CORRUPT]
    assert tier.contains([key(1)]) == [False]
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_a_process_out_of_descriptors_costs_no_chunk(tier, break_file):
    write(tier, key(1))
    break_file(path(tier, key(1)), errno.EMFILE)
    assert read(tier, key(1), key(1), key(1)) == [ReadOutcome.FAILED] * 3
    assert tier.contains([key(1)]) == [True]


@pytest.mark.parametrize("damage", [truncate, lose_blocks])
@pytest.mark.parametrize("call", [read, write])
def test_a_damaged_file_that_cannot_be_moved_fails_writes_until_it_can(tier, damage, call):
    write(tier, key(1))
    file = path(tier, key(1))
    damage(file)
    if subprocess.run(["chattr", "+i", file], check=False, capture_output=True).returncode:
        pytest.skip("may not make a file immutable here")
    try:
        if call is read or damage is lose_blocks:
            assert read(tier, key(1)) == [ReadOutcome.CORRUPT]
        assert write(tier, key(1)) == [WriteOutcome.FAILED]
        assert files_in(file.parent.parent / "tmp") == []
    finally:
        subprocess.run(["chattr", "-i", file], check=True)
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    list(tier.scan())
    assert tier.usage() == Usage(CHUNK_BYTES, 1, None)


def test_only_so_many_paths_are_remembered_as_stuck():
    stuck = Stuck()
    for n in range(5000):
        stuck.add(str(n))
    assert "4999" in stuck
    assert "0" not in stuck


def test_a_write_that_stops_half_way_leaves_nothing(tier):
    write(tier, key(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD_BYTES, hard))
    try:
        assert write(tier, key(1)) == [WriteOutcome.FAILED]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    assert files_in(tier.config.path / "v1" / NAMESPACE.id / "tmp") == []
    assert tier.usage() == Usage(CHUNK_BYTES, 1, None)


def test_a_full_file_system_refuses_and_leaves_nothing(small_disk):
    tier = open_tier(small_disk)
    keys = [key(n) for n in range(8)]
    outcomes = write(tier, *keys)
    assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.REFUSED}
    stored = outcomes.count(WriteOutcome.STORED)
    assert read(tier, *keys).count(ReadOutcome.HIT) == stored == tier.usage().chunks
    assert files_in(small_disk / "v1" / NAMESPACE.id / "tmp") == []


def test_a_refused_write_gives_its_reservation_back(tmp_path):
    tier = open_tier(tmp_path, capacity=CHUNK_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        write(tier, key(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert write(tier, key(1)) == [WriteOutcome.STORED]


def test_a_mount_that_became_read_only_still_serves_hits(tier, monkeypatch):
    write(tier, key(1))

    def read_only(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    assert read(tier, key(1)) == [ReadOutcome.HIT]


def test_a_root_emptied_under_a_running_engine_heals(tier):
    write(tier, key(1))
    shutil.rmtree(tier.config.path)
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    assert write(tier, key(1), key(2)) == [WriteOutcome.STORED] * 2
    assert sorted(e.key.hash for e in tier.scan()) == [key(1).hash, key(2).hash]
    assert tier.usage().chunks == 2


def test_a_writer_who_comes_second_leaves_nothing(tier):
    """Another engine stores the chunk between our lookup and our rename."""
    other = open_tier(tier.config.path)

    class Slow(FsTier):
        def _write_file(self, *args):
            super()._write_file(*args)
            write(other, key(1))

    slow = Slow(tier.config, PAYLOAD_BYTES)
    assert write(slow, key(1)) == [WriteOutcome.EXISTS]
    assert files_in(tier.config.path / "v1" / NAMESPACE.id / "tmp") == []
    assert slow.usage().chunks == 0
    assert write(slow, key(1)) == [WriteOutcome.EXISTS]


KILLED_BEFORE_THE_RENAME = f"""
import os, signal, sys
from pathlib import Path
from kvtiers.tiers.base import ChunkKey, Namespace
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.fs import FsTier
tier = FsTier(FsTier.Config(path=Path(sys.argv[1])), {PAYLOAD_BYTES})
os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
key = ChunkKey(Namespace("{NAMESPACE.id}"), bytes([1]) * 36)
tier.write([key], [aligned_buffer({PAYLOAD_BYTES})])
"""


def test_a_writer_that_is_killed_leaves_an_orphan_that_a_later_scan_sweeps(tier):
    command = [sys.executable, "-c", KILLED_BEFORE_THE_RENAME, str(tier.config.path)]
    assert subprocess.run(command, check=False).returncode == -9
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    [orphan] = files_in(tier.config.path)
    assert list(tier.scan()) == []
    assert orphan.exists()
    os.utime(orphan, (time.time() - 3700,) * 2)
    assert list(tier.scan()) == []
    assert not orphan.exists()


# Namespaces ----------------------------------------------------------------------------


def facts_file(tier) -> Path:
    return tier.config.path / "v1" / NAMESPACE.id / "namespace.json"


def test_the_facts_are_written_once_beside_the_chunks(tier):
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    assert not facts_file(tier).exists()
    write(tier, key(1))
    assert json.loads(facts_file(tier).read_text()) == {**FACTS, "shape": [2, 3]}
    before = facts_file(tier).stat()
    again = open_tier(tier.config.path)
    assert write(again, key(1), key(2)) == [WriteOutcome.EXISTS, WriteOutcome.STORED]
    assert facts_file(tier).stat().st_ino == before.st_ino


def test_a_namespace_whose_facts_differ_is_refused_and_explained(tier, caplog):
    write(tier, key(1))
    other = Namespace(NAMESPACE.id, {**FACTS, "dtype": "float16"})
    tier = open_tier(tier.config.path)
    assert read(tier, key(1, other)) == [ReadOutcome.MISS]
    assert tier.contains([key(1, other)]) == [False]
    assert write(tier, key(2, other)) == [WriteOutcome.REFUSED]
    assert "dtype: stored 'bfloat16', here 'float16'" in caplog.text
    assert "model" not in caplog.text
    assert len(caplog.records) == 1
    # An operator's tool can still clean it up.
    assert tier.remove([key(1, other)]) == 1


def test_a_mismatch_is_explained_fact_by_fact():
    text = explain_mismatch({"a": 1, "b": 2, "same": [0]}, {"a": 3, "c": None, "same": [0]})
    assert text.splitlines() == [
        "  a: stored 1, here 3",
        "  b: stored 2, unknown here",
        "  c: not stored, here None",
    ]
    assert explain_mismatch({"a": 1}, {"a": 1}) == ""


def facts_text(text: str):
    return lambda file: file.write_text(text)


def facts_bytes(file: Path) -> None:
    file.write_bytes(bytes(range(256)))


def facts_sparse(file: Path) -> None:
    os.truncate(file, 2**40)


FACTS_DAMAGES = {
    "empty": facts_text(""),
    "cut short": facts_text("{"),
    "a list": facts_text("[]"),
    "no facts": facts_text("{}"),
    "holes": facts_text("\x00" * 64),
    "deep": facts_text("[" * 200_000),
    "deep in a fact": facts_text('{"model": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    "a long number": facts_text('{"model": ' + "9" * 5000 + "}"),
    "binary": facts_bytes,
    "huge": facts_sparse,
    "a FIFO": make_fifo,
    "a link": make_link,
}


@pytest.mark.parametrize("damage", FACTS_DAMAGES.values(), ids=FACTS_DAMAGES.keys())
def test_a_damaged_facts_file_is_written_anew_and_its_chunks_are_used(tier, caplog, damage):
    write(tier, key(1))
    damage(facts_file(tier))
    tier = open_tier(tier.config.path)
    assert tier.contains([key(1)]) == [True]
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert json.loads(facts_file(tier).read_text())["model"] == "tiny"
    assert stat.S_ISREG(facts_file(tier).lstat().st_mode)
    assert len(caplog.records) == 1


def test_a_folder_in_the_place_of_the_facts_harms_no_chunk(tier, caplog):
    write(tier, key(1))
    make_folder(facts_file(tier))
    tier = open_tier(tier.config.path)
    assert tier.contains([key(1)]) == [True]
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert write(tier, key(1), key(2)) == [WriteOutcome.EXISTS, WriteOutcome.STORED]
    assert [record.getMessage().count("cannot be written anew") for record in caplog.records] == [1]


def test_facts_that_can_be_neither_read_nor_written_fail_and_harm_no_chunk(tier, monkeypatch):
    """A mount with a hiccup: once it is back, the facts are compared."""
    write(tier, key(1))
    real = os.open

    def fail(name, *args, **options):
        if "namespace.json" in str(name):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return real(name, *args, **options)

    tier = open_tier(tier.config.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert tier.contains([key(1)]) == [False]
        assert read(tier, key(1)) == [ReadOutcome.FAILED]
        assert write(tier, key(2)) == [WriteOutcome.FAILED]
    other = Namespace(NAMESPACE.id, {**FACTS, "dtype": "float16"})
    assert read(tier, key(1, other)) == [ReadOutcome.MISS]
    assert read(open_tier(tier.config.path), key(1)) == [ReadOutcome.HIT]


def test_a_caller_that_knows_only_the_id_is_not_compared(tier):
    write(tier, key(1))
    tier = open_tier(tier.config.path)
    assert read(tier, key(1, Namespace(NAMESPACE.id))) == [ReadOutcome.HIT]
    assert json.loads(facts_file(tier).read_text())["model"] == "tiny"


# Links in the place of folders ------------------------------------------------------------


def all_files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in files_in(folder)}


@pytest.mark.parametrize("part", [".", "01"], ids=["namespace", "chunks"])
@pytest.mark.parametrize("before", [True, False], ids=["while it runs", "before it starts"])
def test_nothing_behind_a_link_is_read_written_listed_or_removed(tier, tmp_path, part, before):
    write(tier, key(1))
    folder = (tier.config.path / "v1" / NAMESPACE.id / part).resolve()
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    lies_there = all_files(elsewhere)
    if not before:
        tier = open_tier(tier.config.path)
    other = ChunkKey(NAMESPACE, bytes([1]) * 35)
    assert read(tier, key(1)) == [ReadOutcome.FAILED]
    assert write(tier, key(1), other) == [WriteOutcome.FAILED] * 2
    assert tier.remove([key(1)]) == 0
    assert [(entry.key, entry.where) for entry in tier.scan()] == [(None, str(folder))]
    assert tier.usage().chunks == 0
    assert all_files(elsewhere) == lies_there


def test_a_damaged_file_behind_a_link_stays(tier, tmp_path):
    write(tier, key(1))
    empty(path(tier, key(1)))
    elsewhere = path(tier, key(1)).parent.rename(tmp_path / "elsewhere")
    path(tier, key(1)).parent.symlink_to(elsewhere)
    read(tier, key(1))
    tier._files.quarantine(Layout(tier.config.path).place(key(1)))
    assert len(files_in(elsewhere)) == 1


@pytest.mark.parametrize("name", ["tmp", "bad"])
def test_no_old_file_behind_a_link_is_swept(tier, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for n in range(8):
        (elsewhere / str(n)).touch()
        os.utime(elsewhere / str(n), (1, 1))
    write(tier, key(1), key(2))
    link = tier.config.path / "v1" / NAMESPACE.id / name
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(elsewhere)
    empty(path(tier, key(1)))
    assert read(tier, key(1)) == [ReadOutcome.CORRUPT]
    assert read(tier, key(1)) == [ReadOutcome.MISS]
    wanted = WriteOutcome.FAILED if name == "tmp" else WriteOutcome.STORED
    assert write(tier, key(3)) == [wanted]
    assert str(link) in {entry.where for entry in tier.scan() if entry.key is None}
    assert len(files_in(elsewhere)) == 8


def test_the_root_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    tier = open_tier(tmp_path / "root")
    assert write(tier, key(1)) == [WriteOutcome.STORED]
    assert read(tier, key(1)) == [ReadOutcome.HIT]
    assert [entry.key for entry in tier.scan()] == [key(1)]


# Scan and accounting --------------------------------------------------------------------


def test_scan_finds_every_namespace_and_what_is_no_chunk(tier):
    foreign = Namespace("cd" * 16)
    write(tier, key(1), key(1, foreign))
    base = tier.config.path / "v1"
    strangers = [
        base / "stray",
        base / NAMESPACE.id / "notes.txt",
        base / NAMESPACE.id / "01" / "readme",
        base / NAMESPACE.id / "01" / ("02" * 36 + ".kv"),
        base / NAMESPACE.id / "01" / ("01" * 65 + ".kv"),
        base / NAMESPACE.id / "01" / "01 02.kv",
        base / NAMESPACE.id / "01" / "01AB.kv",
    ]
    for stranger in strangers:
        stranger.write_bytes(b"x")
    entries = list(open_tier(tier.config.path).scan())
    chunks = [entry for entry in entries if entry.key is not None]
    assert {entry.key for entry in chunks} == {key(1), key(1, foreign)}
    assert {Path(entry.where) for entry in chunks} == {
        path(tier, key(1)),
        path(tier, key(1, foreign)),
    }
    assert {entry.nbytes for entry in chunks} == {CHUNK_BYTES}
    assert {Path(entry.where) for entry in entries if entry.key is None} == set(strangers)


def test_scan_knows_the_facts_of_namespaces_that_were_used_before(tier):
    write(tier, key(1))
    assert [entry.key.namespace.facts for entry in tier.scan()] == [FACTS]
    assert [e.key.namespace.facts for e in open_tier(tier.config.path).scan()] == [{}]


def test_usage_and_bound_know_what_was_there_once_it_is_scanned(tier):
    write(tier, key(1), key(2), key(3))
    tier = open_tier(tier.config.path, capacity=4 * CHUNK_BYTES)
    assert tier.usage() == Usage(0, 0, 4 * CHUNK_BYTES)
    list(tier.scan())
    assert tier.usage() == Usage(3 * CHUNK_BYTES, 3, 4 * CHUNK_BYTES)
    assert write(tier, key(4), key(5)) == [WriteOutcome.STORED, WriteOutcome.REFUSED]


def test_changes_before_the_scan_are_not_counted_twice(tier):
    write(tier, key(1), key(2))
    tier = open_tier(tier.config.path)
    write(tier, key(3))
    tier.remove([key(1)])
    assert tier.usage().chunks >= 0
    list(tier.scan())
    list(tier.scan())
    assert tier.usage() == Usage(2 * CHUNK_BYTES, 2, None)


def test_a_scan_abandoned_half_way_leaves_a_sound_count(tier):
    write(tier, *[key(n) for n in range(10)])
    tier = open_tier(tier.config.path)
    scan = tier.scan()
    seen = [next(scan) for _ in range(4)]
    scan.close()
    assert tier.usage().chunks == len(seen)
    list(tier.scan())
    assert tier.usage().chunks == 10


def test_a_scan_counts_what_others_stored_and_deleted(tier):
    other = open_tier(tier.config.path)
    write(tier, key(1), key(2))
    other.remove([key(1)])
    write(other, key(3))
    shutil.rmtree(path(tier, key(2)).parent)
    list(tier.scan())
    assert tier.usage() == Usage(CHUNK_BYTES, 1, None)


@given(
    listed=st.lists(st.sampled_from("abcdef"), unique=True),
    events=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2))),
)
def test_a_count_is_exact_whenever_files_come_and_go_during_a_listing(listed, events):
    """The listing shows, of each file that changes meanwhile, either state."""
    ledger = Ledger(None)
    folder = ledger.folder("f")
    there: set[str] = set()

    def change(name: str) -> None:
        if name in there:
            there.remove(name)
            folder.removed(name, 5)
        else:
            there.add(name)
            assert ledger.reserve(5)
            folder.added(name, 5)

    for name in listed:
        change(name)
    for name, when in events:
        if when == 0:
            change(name)
    shown = set(there)
    with folder.listing() as counted:
        for name, when in events:
            if when == 1:
                # The listing passes this name before or after the change.
                change(name)
                shown = shown ^ {name} if len(events) % 2 else shown
        counted.update(dict.fromkeys(shown, 5))
    for name, when in events:
        if when == 2:
            change(name)
    assert ledger.usage() == Usage(5 * len(there), len(there), None)


def test_a_listing_that_fails_changes_no_count():
    ledger = Ledger(None)
    ledger.reserve(5)
    ledger.folder("f").added("a", 5)
    with pytest.raises(OSError, match="broken"), ledger.folder("f").listing():
        raise OSError("broken")
    assert ledger.usage() == Usage(5, 1, None)


def test_scans_beside_writers_and_removers_end_with_the_truth(tier):
    done = threading.Event()

    def churn(thread: int) -> None:
        mine = [key(64 * thread + n) for n in range(4)]
        for _ in range(40):
            write(tier, *mine)
            tier.remove(mine[1:])

    def scan() -> None:
        while not done.is_set():
            list(tier.scan())

    scanner = threading.Thread(target=scan)
    scanner.start()
    churners = [threading.Thread(target=churn, args=(thread,)) for thread in range(3)]
    for thread in churners:
        thread.start()
    for thread in churners:
        thread.join()
    done.set()
    scanner.join()
    assert tier.usage() == Usage(3 * CHUNK_BYTES, 3, None)


@given(st.binary(min_size=1, max_size=64))
def test_a_files_name_spells_its_hash(digest):
    place = Layout(Path("/r")).place(ChunkKey(NAMESPACE, digest))
    assert hash_of(Path(place.folder).name, place.name) == digest


# Times of use -----------------------------------------------------------------------------


def used(tier, *keys) -> list[int]:
    return [path(tier, k).stat().st_mtime_ns for k in keys]


@pytest.mark.parametrize("call", [write, read], ids=["write", "read"])
def test_in_one_call_the_head_stays_youngest(tier, call):
    keys = [key(n) for n in (9, 3, 7, 1)]
    write(tier, *reversed(keys))
    if call is write:
        tier.remove(keys)
    call(tier, *keys)
    times = used(tier, *keys)
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 4


def test_known_positions_count_more_than_the_order_of_the_call(tier):
    keys = [key(n, position=position) for n, position in ((1, 5), (2, 0), (3, 2))]
    write(tier, *keys)
    five, zero, two = used(tier, *keys)
    assert zero > two > five


@pytest.mark.parametrize("call", [write, read], ids=["a second write", "a hit"])
def test_a_use_renews_the_time(tier, call):
    write(tier, key(1))
    os.utime(path(tier, key(1)), (1, 1))
    call(tier, key(1))
    [entry] = tier.scan()
    assert entry.last_used > time.time() - 60


def test_a_lookup_is_no_use(tier):
    write(tier, key(1))
    os.utime(path(tier, key(1)), (1, 1))
    assert tier.contains([key(1)]) == [True]
    assert used(tier, key(1)) == [10**9]


# Whose KV lies there --------------------------------------------------------------


def test_the_newest_namespaces_are_told_with_their_facts(tier):
    spaces = [Namespace(f"{n:032x}", {"n": n}) for n in range(4)]
    for age, space in enumerate(spaces):
        write(tier, key(1, space))
        os.utime(tier._layout.facts(space.id), (1000 - age, 1000 - age))
    assert [(s.id, s.facts) for s in tier.namespaces(3)] == [(s.id, s.facts) for s in spaces[:3]]


def test_what_names_no_facts_is_no_namespace(tier):
    write(tier, key(1))
    base = Path(tier._layout.base)
    (base / "empty").mkdir()
    (base / "file").touch()
    (base / "damaged").mkdir()
    (base / "damaged" / "namespace.json").write_text("{")
    assert [space.id for space in tier.namespaces(9)] == [NAMESPACE.id]
