from __future__ import annotations

import ast
import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from kv_samples import all_bytes, from_layers, hybrid, model_kv, opaque, register
from kvtiers.connector.copy_cpu import CpuCopyWorker
from kvtiers.connector.copy_device import ArenaRegion, create_device_worker
from kvtiers.connector.layout import plan_row
from kvtiers.connector.transfer import ArenaSpec
from kvtiers.tiers.arena import Arena
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker


class DeviceTensor(torch.Tensor):
    """A CPU tensor that passes for a CUDA one."""

    is_cuda = True


class Event(SimpleNamespace):
    def record(self, stream):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.0


STREAM = SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None)


def copy_batch(src, dst, sizes, is_src_access_order_any):
    """What the copy engine of a GPU does with vLLM's list of addresses."""
    for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def device_worker(caches, layout, arena, monkeypatch):
    """vLLM's own worker over the arena, on this machine's memory in place of a GPU's."""
    for cache in caches.tensors:
        cache.tensor = cache.tensor.as_subclass(DeviceTensor)
    platform = SimpleNamespace(
        is_xpu=lambda: False,
        is_rocm=lambda: False,
        current_stream=lambda: STREAM,
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    worker = create_device_worker(caches, layout, arena)
    for handler in (worker._store_handler, worker._load_handler):
        handler._swap_blocks_batch = copy_batch
        handler._stream_pool = [STREAM] * 4
        handler._event_pool = [Event() for _ in range(8)]
    return worker


def caches_of(kind):
    layers = list(model_kv(2))
    return {
        "hybrid": lambda: hybrid(),
        "opaque": lambda: from_layers(layers, [[0, 2], [1]], opaque(layers, ranks=2, rank=1)),
        "sharded": lambda: register(model_kv(4), 2, 1, "NHD"),
        "replicated": lambda: register(model_kv(1), 2, 1),
    }[kind]()


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize(
    ("kind", "canonical"),
    [
        ("hybrid", False),
        *((kind, how) for kind in ("opaque", "sharded", "replicated") for how in (False, True)),
    ],
)
def test_vllms_worker_and_the_cpu_worker_agree_on_every_byte(
    kind, canonical, per_chunk, monkeypatch
):
    theirs, ours = caches_of(kind), caches_of(kind)
    groups = len(ours.group_data_refs)
    layout = plan_row(ours, per_chunk, 1, 2, canonical)
    sizes = [2 * per_chunk] * groups
    blocks = [5, 2, 7, 0, 3, 6, 1, 4][: sum(sizes)]
    store = GPULoadStoreSpec(blocks, sizes, [0] * groups)
    host = ArenaSpec([6, 1, 4, 3][: 2 * groups], [2] * groups)
    part = [size - per_chunk // 2 for size in sizes]
    load = GPULoadStoreSpec(blocks[::-1][: sum(part)], part, [per_chunk // 2] * groups)

    arenas = [Arena.create(slots=7, slot_bytes=layout.row_bytes + 4096) for _ in range(2)]
    workers = [
        device_worker(theirs, layout, arenas[0], monkeypatch),
        CpuCopyWorker(ours, layout, arenas[1]),
    ]
    sizes_reported = []
    for worker in workers:
        assert worker.submit_store(1, store, host)
        assert worker.submit_load(2, host, load)
        sizes_reported.append([(r.job_id, r.transfer_size) for r in worker.get_finished()])
    assert bytes(arenas[0].memory) == bytes(arenas[1].memory)
    assert any(arenas[0].memory)
    assert all(map(np.array_equal, all_bytes(theirs), all_bytes(ours)))
    assert sizes_reported[0] == sizes_reported[1]

    for worker, arena in zip(workers, arenas, strict=True):
        worker.shutdown()
        arena.close()
        assert arena._mmap.closed


def region_attributes(vllm_sources: Path) -> set[str]:
    """What vLLM's worker reads from, or calls on, the region that it is given."""
    tree = ast.parse((vllm_sources / "v1/kv_offload/cpu/gpu_worker.py").read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("region", "mmap_region", "self._mmap_region")
    }


def make_region():
    layout = plan_row(caches_of("sharded"), 1, 1, 2, canonical=False)
    return ArenaRegion(make_arena(layout), layout)


def make_arena(layout):
    return Arena.create(slots=3, slot_bytes=layout.row_bytes + 4096)


def test_the_region_has_all_that_vllms_worker_reads():
    wanted = region_attributes(Path(vllm.__file__).parent)
    assert {"_base", "_row_stride", "cleanup", "create_next_worker_view"} <= wanted
    assert {name for name in wanted if not hasattr(make_region(), name)} == set()


def test_ranges_to_pin_cover_the_ranks_bytes_in_every_row_and_little_more():
    region = make_region()
    first = region._layout.places[0].offset
    ranges = list(region.iter_worker_slot_ranges())
    assert len(ranges) == region.num_chunks
    for row, (start, length) in enumerate(ranges):
        area = row * region._row_stride + first
        assert start % region.page_size == 0
        assert length % region.page_size == 0
        assert area - region.page_size < start <= area
        end = area + region.cpu_page_size
        assert end <= start + length < end + region.page_size


def test_cleanup_unpins_what_vllm_pinned(monkeypatch):
    region, unpinned = make_region(), []
    monkeypatch.setattr("kvtiers.connector.copy_device.host_unregister", unpinned.append)
    region.pinned_addresses += [4096, 8192]
    region.is_pinned = True
    region.cleanup()
    region.cleanup()
    assert unpinned == [8192, 4096]
    assert not region.is_pinned


def test_cleanup_lets_go_of_the_arena():
    layout = plan_row(caches_of("sharded"), 1, 1, 2)
    arena = make_arena(layout)
    region = ArenaRegion(arena, layout)
    region.create_next_canonical_view(layout.places[0].page_bytes)
    arena.close()
    assert not arena._mmap.closed
    region.cleanup()
    arena.close()
    assert arena._mmap.closed


def test_a_worker_that_cannot_be_made_leaves_nothing_pinned(monkeypatch):
    unpinned = []
    monkeypatch.setattr("kvtiers.connector.copy_device.host_unregister", unpinned.append)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", True)
    monkeypatch.setattr(
        gpu_worker, "pin_mmap_region", lambda region, **how: region.pinned_addresses.append(4096)
    )
    caches = caches_of("sharded")
    layout = plan_row(caches, 1, 1, 2)
    # vLLM's worker accepts tensors on a GPU only.
    with pytest.raises(AssertionError):
        create_device_worker(caches, layout, make_arena(layout))
    assert unpinned == [4096]


def test_a_tensor_that_the_layout_does_not_know_is_refused():
    region = make_region()
    with pytest.raises(ValueError, match="KV cache tensor 0"):
        region.create_next_worker_view(17)


def test_an_arena_with_too_small_slots_is_refused():
    arena = Arena.create(slots=1, slot_bytes=4096)
    big = plan_row(register(model_kv(64)), 1, 0, 1)
    with pytest.raises(ValueError, match=f"takes {big.row_bytes}"):
        ArenaRegion(arena, big)
