"""A chunk's file is not what its name says: a miss for that chunk, and no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine import BLOCK, chunk_files, cpu, fs
from fault_cases import DEADLINE, case
from fault_trial import Row, Trial
from faulty_bench import Bench
from kvtiers.tiers import ChunkKey, Namespace
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES, Metadata, pack, unpack

HIT = 2
"""The chunk with this position is damaged; those before it are whole."""


def remove(files: list[Path]) -> None:
    files[HIT].unlink()


def truncate(files: list[Path]) -> None:
    os.truncate(files[HIT], files[HIT].stat().st_size // 2)


def empty(files: list[Path]) -> None:
    os.truncate(files[HIT], 0)


def flip_in_payload(files: list[Path]) -> None:
    flip(files[HIT], 5000)


def flip_in_metadata(files: list[Path]) -> None:
    flip(files[HIT], files[HIT].stat().st_size - METADATA_BYTES + 60)


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)


def put_another_chunk(files: list[Path]) -> None:
    files[HIT].write_bytes(files[HIT - 1].read_bytes())


def put_another_namespace(files: list[Path]) -> None:
    data = bytearray(files[HIT].read_bytes())
    payload, block = memoryview(data)[:-METADATA_BYTES], aligned_buffer(METADATA_BYTES)
    found = metadata(files[HIT])
    pack(ChunkKey(Namespace("f" * 32), found.hash, found.position), payload, 0.0, block)
    data[-METADATA_BYTES:] = block
    files[HIT].write_bytes(data)


def put_a_directory(files: list[Path]) -> None:
    files[HIT].unlink()
    files[HIT].mkdir()
    (files[HIT] / "something").touch()


DAMAGE: dict[str, Callable[[list[Path]], None]] = {
    "file-missing": remove,
    "file-truncated": truncate,
    "file-payload-bit": flip_in_payload,
    "file-metadata-bit": flip_in_metadata,
    "file-wrong-key": put_another_chunk,
    "file-wrong-namespace": put_another_namespace,
    "file-zero-length": empty,
    "file-directory": put_a_directory,
}


def metadata(file: Path) -> Metadata:
    found = unpack(memoryview(file.read_bytes())[-METADATA_BYTES:])
    assert isinstance(found, Metadata)
    return found


@pytest.fixture(scope="module")
def bench(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("files")
    with Bench(llama, folder, [cpu(), fs(folder / "fs", deadline=DEADLINE)]) as bench:
        yield bench


@case(*DAMAGE)
def test_a_damaged_file_costs_its_chunk_and_is_stored_anew(bench: Bench, row: Row) -> None:
    trial = Trial(bench, row)
    root = bench.folder / "fs"
    before = set(chunk_files(root).values())
    question = trial.stored_below()
    files = sorted(set(chunk_files(root).values()) - before, key=lambda f: metadata(f).position)
    with trial.watching():
        DAMAGE[row.case.id](files)
        assert trial.ask(question) == HIT * BLOCK
    trial.recovers(question)
