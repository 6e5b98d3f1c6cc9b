from __future__ import annotations

import ctypes
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import (
    PlainArena,
    all_bytes,
    from_layers,
    hybrid,
    model_kv,
    opaque,
    reference_copy,
    register,
)
from kvtiers.connector.copy_cpu import CpuCopyWorker
from kvtiers.connector.layout import plan_row
from kvtiers.connector.strided import BoundPiece, Piece, fold, page_runs
from kvtiers.connector.transfer import ArenaSpec
from kvtiers.tiers.arena import Arena
from vllm.v1.kv_offload.base import GPULoadStoreSpec

SLOTS = 7
BLOCKS = 8


def caches_of(kind):
    if kind == "hybrid":
        return hybrid(BLOCKS)
    if kind == "opaque":
        layers = list(model_kv(2, blocks=BLOCKS))
        return from_layers(layers, [[0, 2], [1]], opaque(layers, ranks=2, rank=1))
    order, storages, tp = kind
    return register(model_kv(4, blocks=BLOCKS), tp, tp - 1, order, storages)


KINDS = [
    "hybrid",
    "opaque",
    ("HND", "one", 1),
    ("HND", "mixed", 2),
    ("NHD", "one", 2),
    ("NHD", "own", 4),
    ("HND", "own", 8),
]


@st.composite
def jobs(draw, groups, per_chunk):
    """A job of random blocks and slots, its groups starting and ending inside chunks."""
    sizes, indices, chunks = [], [], []
    for _ in range(groups):
        index = draw(st.integers(0, 2 * per_chunk))
        limit = min(BLOCKS // groups, SLOTS // groups * per_chunk - index % per_chunk)
        size = draw(st.integers(0, limit))
        sizes.append(size)
        indices.append(index)
        chunks.append(-(-(size + index % per_chunk) // per_chunk) if size else 0)
    blocks = draw(st.permutations(range(BLOCKS)))[: sum(sizes)]
    slots = draw(st.permutations(range(SLOTS)))[: sum(chunks)]
    return GPULoadStoreSpec(blocks, sizes, indices), ArenaSpec(slots, chunks)


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_store_and_load_move_exactly_the_bytes_that_the_definitions_say(data):
    kind = data.draw(st.sampled_from(KINDS))
    per_chunk = data.draw(st.integers(1, 3))
    canonical = kind != "hybrid" and data.draw(st.booleans())
    caches = caches_of(kind)
    layout = plan_row(caches, per_chunk, rank=1, world_size=2, canonical=canonical)
    arena = PlainArena(SLOTS, layout.row_bytes, fill=0xA5)
    rows = arena.array.reshape(SLOTS, layout.row_bytes)
    worker = CpuCopyWorker(caches, layout, arena)

    gpu, host = data.draw(jobs(len(caches.group_data_refs), per_chunk))
    expected_rows = rows.copy()
    reference_copy(caches, layout, expected_rows, gpu, host.block_ids.tolist(), store=True)
    before = all_bytes(caches)
    assert worker.submit_store(1, gpu, host)
    np.testing.assert_array_equal(rows, expected_rows)
    assert all(map(np.array_equal, all_bytes(caches), before))

    gpu, host = data.draw(jobs(len(caches.group_data_refs), per_chunk))
    expected = caches_of(kind)
    reference_copy(expected, layout, rows, gpu, host.block_ids.tolist(), store=False)
    assert worker.submit_load(2, host, gpu)
    assert all(map(np.array_equal, all_bytes(caches), all_bytes(expected)))
    np.testing.assert_array_equal(rows, expected_rows)


@settings(deadline=None, max_examples=30)
@given(
    case=st.sampled_from([(4, 1), (4, 2), (4, 4), (1, 2), (2, 4)]),
    order=st.sampled_from(["HND", "NHD"]),
    per_chunk=st.integers(1, 2),
    data=st.data(),
)
def test_ranks_together_write_the_row_that_one_rank_writes_and_read_it_back(
    case, order, per_chunk, data
):
    heads, tp = case
    model = model_kv(heads, blocks=BLOCKS)
    blocks = data.draw(st.permutations(range(BLOCKS)))[: 3 * per_chunk]
    slots = data.draw(st.permutations(range(SLOTS)))[:3]
    gpu, host = GPULoadStoreSpec(blocks, [len(blocks)], [0]), ArenaSpec(slots, [3])

    def write(ranks):
        arena = None
        for rank in range(ranks):
            caches = register(model, ranks, rank, order)
            layout = plan_row(caches, per_chunk, rank, ranks)
            assert layout.canonical
            assert layout.portable
            arena = arena or PlainArena(SLOTS, layout.row_bytes)
            CpuCopyWorker(caches, layout, arena).submit_store(1, gpu, host)
        return arena

    alone, together = write(1), write(tp)
    np.testing.assert_array_equal(together.array, alone.array)

    for rank in range(tp):
        empty = register(torch.zeros_like(model), tp, rank, order)
        layout = plan_row(empty, per_chunk, rank, tp)
        CpuCopyWorker(empty, layout, alone).submit_load(1, host, gpu)
        full = register(model, tp, rank, order)
        for loaded, stored in zip(all_bytes(empty), all_bytes(full), strict=True):
            np.testing.assert_array_equal(loaded[blocks], stored[blocks])


@pytest.mark.parametrize("interleave", [1, 2])
def test_token_shards_of_context_parallel_ranks_fit_together(interleave):
    model = model_kv(1, blocks=4)
    rows = []
    for seed_rank in range(2):
        caches = register(model, 2, seed_rank, dcp=2, interleave=interleave)
        layout = plan_row(caches, 1, seed_rank, 2)
        assert not layout.portable
        arena = PlainArena(2, layout.row_bytes)
        gpu, host = GPULoadStoreSpec([3, 1], [2], [0]), ArenaSpec([0, 1], [2])
        CpuCopyWorker(caches, layout, arena).submit_store(1, gpu, host)
        expected = np.zeros((2, layout.row_bytes), np.uint8)
        reference_copy(caches, layout, expected, gpu, [0, 1], store=True)
        np.testing.assert_array_equal(arena.array.reshape(expected.shape), expected)
        rows.append(arena.array != 0)
    assert not (rows[0] & rows[1]).any()


def test_layers_at_equal_distances_are_one_copy_and_others_are_not():
    model = model_kv(4, layers=6)

    def pieces(**how):
        caches = register(model, **how)
        layout = plan_row(caches, 1, how.get("rank", 0), how.get("tp", 1))
        worker = CpuCopyWorker(caches, layout, PlainArena(1, layout.row_bytes))
        return len(worker._groups[0])

    assert pieces() == 1
    assert pieces(tp=2, rank=1) == 1
    assert pieces(tp=4, rank=2, order="NHD") == 1
    assert 1 < pieces(storages="mixed") < 6


def test_a_finished_job_is_handed_out_once_with_its_size():
    caches = register(model_kv(4))
    layout = plan_row(caches, 2, 0, 1)
    worker = CpuCopyWorker(caches, layout, PlainArena(2, layout.row_bytes))
    page = sum(tensor.page_size_bytes for tensor in caches.tensors)
    worker.submit_store(5, GPULoadStoreSpec([0, 1, 2, 3], [4], [0]), ArenaSpec([0, 1], [2]))
    worker.submit_load(6, ArenaSpec([0, 1], [2]), GPULoadStoreSpec([4, 5], [2], [1]))
    worker.wait({5, 6})
    finished = worker.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in finished] == [
        (5, True, 4 * page),
        (6, True, 2 * page),
    ]
    assert all(result.transfer_time > 0 for result in finished)
    assert worker.get_finished() == []


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "slots"),
    [
        ([0, BLOCKS], [2], [0], [0]),
        ([0, -1], [2], [0], [0]),
        ([0, 1], [2], [0], [SLOTS]),
        ([0, 1], [2], [0], [-1]),
        ([0, 1], [2], [0], [0, 1]),
        ([0, 1], [2], [1], [0]),
        ([0, 1], [1, 1], [0, 0], [0, 1]),
    ],
)
def test_a_job_that_does_not_fit_copies_nothing(blocks, sizes, indices, slots):
    caches = register(model_kv(4, blocks=BLOCKS))
    layout = plan_row(caches, 2, 0, 1)
    arena = PlainArena(SLOTS, layout.row_bytes)
    worker = CpuCopyWorker(caches, layout, arena)
    gpu, host = GPULoadStoreSpec(blocks, sizes, indices), ArenaSpec(slots, [len(slots)])
    before = all_bytes(caches)
    with pytest.raises(ValueError, match="job"):
        worker.submit_store(1, gpu, host)
    with pytest.raises(ValueError, match="job"):
        worker.submit_load(2, host, gpu)
    assert not arena.array.any()
    assert all(map(np.array_equal, all_bytes(caches), before))
    assert worker.get_finished() == []


def test_an_arena_with_too_small_slots_is_refused():
    caches = register(model_kv(16, layers=6))
    layout = plan_row(caches, 1, 0, 1)
    with pytest.raises(ValueError, match=f"takes {layout.row_bytes}"):
        CpuCopyWorker(caches, layout, PlainArena(1, layout.row_bytes - 4096))


def test_a_cache_that_is_not_in_cpu_memory_is_refused():
    caches = register(model_kv(4))
    layout = plan_row(caches, 1, 0, 1)
    caches.tensors[1].tensor = caches.tensors[1].tensor.to("meta")
    with pytest.raises(ValueError, match="on meta"):
        CpuCopyWorker(caches, layout, PlainArena(1, layout.row_bytes))


def test_the_cache_and_the_arena_stay_until_shutdown_and_no_longer():
    caches = register(model_kv(4))
    layout = plan_row(caches, 1, 0, 1)
    arena = Arena.create(slots=2, slot_bytes=layout.row_bytes)
    worker = CpuCopyWorker(caches, layout, arena)
    gpu, host = GPULoadStoreSpec([1], [1], [0]), ArenaSpec([1], [1])
    worker.submit_store(1, gpu, host)
    expected = np.zeros((2, layout.row_bytes), np.uint8)
    reference_copy(caches, layout, expected, gpu, [1], store=True)
    assert bytes(arena.slot(1)) == expected[1].tobytes()
    tensor = weakref.ref(caches.tensors[0].tensor)
    del caches
    arena.close()
    assert not arena._mmap.closed
    assert tensor() is not None
    worker.shutdown()
    arena.close()
    assert arena._mmap.closed
    assert tensor() is None
    with pytest.raises(ValueError, match="groups"):
        worker.submit_store(2, gpu, host)


places = st.tuples(st.integers(0, 40), st.integers(0, 40))


def touched(pieces):
    """Every (block byte, row byte) that is copied, in no order."""
    pairs = []
    for piece in pieces:
        starts = [(piece.block_at, piece.row_at)]
        for count, block_gap, row_gap in piece.repeats:
            starts = [(b + i * block_gap, r + i * row_gap) for b, r in starts for i in range(count)]
        pairs += [(b + i, r + i) for b, r in starts for i in range(piece.nbytes)]
    return sorted(pairs)


@given(st.lists(places, max_size=12), st.lists(st.sampled_from([1, 2]), min_size=12, max_size=12))
def test_folding_copies_the_same_bytes(starts, sizes):
    pieces = [Piece(b, 100, r, 50, n) for (b, r), n in zip(starts, sizes, strict=False)]
    folded = fold(pieces)
    assert touched(folded) == touched(pieces)
    assert all(gap > 0 for piece in folded for _, *gaps in piece.repeats for gap in gaps)


def test_folding_finds_nested_regularity():
    pieces = [
        Piece(layer * 1000 + head * 10, 5000, layer * 300 + head * 7, 900, 4)
        for layer in range(5)
        for head in range(3)
    ]
    assert fold(pieces) == [Piece(0, 5000, 0, 900, 4, ((5, 1000, 300), (3, 10, 7)))]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=20), st.integers(1, 4))
def test_runs_cover_the_pairs_in_order_and_stay_in_their_row(pairs, per_chunk):
    blocks = np.array([block for block, _ in pairs], dtype=np.int64)
    pages = np.array([page for _, page in pairs], dtype=np.int64)
    runs = page_runs(blocks, pages, per_chunk)
    assert [(r.block + i, r.page + i) for r in runs for i in range(r.length)] == pairs
    for run in runs:
        assert per_chunk == 1 or run.page % per_chunk + run.length <= per_chunk


def test_neighbouring_blocks_in_neighbouring_pages_are_one_run():
    ids = np.arange(6)
    assert [run.length for run in page_runs(ids + 3, ids, 1)] == [6]
    assert [run.length for run in page_runs(ids + 3, ids + 1, 3)] == [2, 3, 1]


@given(st.integers(0, 7), st.integers(0, 7), st.integers(1, 24))
def test_odd_addresses_and_sizes_are_copied_exactly(block_shift, row_shift, nbytes):
    blocks = np.arange(200, dtype=np.uint8)
    rows = np.zeros(200, dtype=np.uint8)
    piece = Piece(blocks.ctypes.data + block_shift, 40, row_shift, 48, nbytes)
    bound = BoundPiece(piece, 3, rows.ctypes.data, 2, 96, 2)
    (run,) = page_runs(np.array([2]), np.array([3]), 2)
    bound.store(run)
    start = 96 + 48 + row_shift
    expected = np.zeros_like(rows)
    expected[start : start + nbytes] = blocks[80 + block_shift : 80 + block_shift + nbytes]
    np.testing.assert_array_equal(rows, expected)
    ctypes.memset(blocks.ctypes.data, 0, blocks.nbytes)
    bound.load(run)
    assert blocks[80 + block_shift : 80 + block_shift + nbytes].tobytes() == bytes(
        rows[start : start + nbytes]
    )
    assert np.count_nonzero(blocks) == nbytes
