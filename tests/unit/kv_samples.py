"""Small KV caches as vLLM would register them, and the slow way to copy them."""

from __future__ import annotations

import numpy as np
import torch
from kvtiers.connector.layout import RowLayout
from kvtiers.tiers.base import ALIGNMENT
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    _layer_mapping,
    _opaque_fallback_mapping,
    _RankContext,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

HEAD_SIZE = 8


def model_kv(heads, layers=3, blocks=8, block_size=4, seed=0):
    """The whole model's KV: [layers, blocks, heads, block_size, 2 * HEAD_SIZE] of int16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, blocks, heads, block_size, 2 * HEAD_SIZE)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)


def shard(model, tp, rank):
    """The heads of one rank; ranks share a head where there are fewer heads than ranks."""
    heads = model.shape[2]
    if heads >= tp:
        return model[:, :, rank * heads // tp : (rank + 1) * heads // tp]
    head = rank * heads // tp
    return model[:, :, head : head + 1]


def register(model, tp=1, rank=0, order="HND", storages="one", dcp=1, interleave=1):
    """A rank's KV cache with one group, as vLLM's worker hands it to ours.

    ``storages`` is "one" for layers back to back, "own" for an allocation each,
    "mixed" for layers in no regular order.
    """
    local = shard(model, tp, rank)
    layers = [_physical(layer, order) for layer in local]
    layers = _place(layers, storages)
    views = [layer if order == "HND" else layer.permute(0, 2, 1, 3) for layer in layers]
    context = _RankContext(tp, dcp, 1, interleave, model.shape[2], rank)
    spec = FullAttentionSpec(
        block_size=model.shape[3],
        num_kv_heads=local.shape[2],
        head_size=HEAD_SIZE,
        dtype=torch.int16,
    )
    mappings = [_layer_mapping(spec, view, view.shape[0], context) for view in views]
    assert None not in mappings
    return from_layers(layers, [list(range(len(layers)))], mappings)


def from_layers(layers, groups, mappings):
    """Tensors of shape (blocks, ...) as vLLM's registered form; ``groups`` lists layers."""
    tensors = []
    for layer in layers:
        pages = layer.view(torch.int8).view(len(layer), -1)
        tensors.append(CanonicalKVCacheTensor(pages, pages.shape[1]))
    refs = [
        [CanonicalKVCacheRef(i, tensors[i].page_size_bytes, mappings[i]) for i in group]
        for group in groups
    ]
    return CanonicalKVCaches(tensors, refs)


def opaque(layers, ranks=1, rank=0):
    """Mappings that place whole pages side by side, as vLLM does where it knows no better."""
    return [_opaque_fallback_mapping(layer[0].nbytes, ranks, rank) for layer in layers]


def hybrid(blocks=8, page=48, padded=16):
    """Two groups that overlay two tensors with padded pages, as a hybrid model has."""
    pool = model_kv(1, layers=2, blocks=blocks, block_size=(page + padded) // 32)
    caches = from_layers(list(pool), [[0, 1], [1, 0]], [None, None])
    for group in caches.group_data_refs:
        for ref in group:
            ref.page_size_bytes = page
    return caches


def _physical(layer, order):
    return layer.contiguous() if order == "HND" else layer.permute(0, 2, 1, 3).contiguous()


def _place(layers, storages):
    if storages == "own":
        return [layer.clone() for layer in layers]
    places = list(range(len(layers))) if storages == "one" else [4, 0, 3, 5, 1, 2][: len(layers)]
    pool = torch.zeros((max(places) + 1, *layers[0].shape), dtype=layers[0].dtype)
    for place, layer in zip(places, layers, strict=True):
        pool[place] = layer
    return [pool[place] for place in places]


class PlainArena:
    """Enough of an arena for a copy, in private memory, page-aligned as the real one."""

    def __init__(self, slots, slot_bytes, fill=0):
        self.slots, self.slot_bytes = slots, slot_bytes
        raw = np.full(slots * slot_bytes + ALIGNMENT, fill, dtype=np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        self.array = raw[skip : skip + slots * slot_bytes]
        self.memory = memoryview(self.array)


def all_bytes(caches):
    """Everything that the KV cache's tensors hold, one array per tensor."""
    return [cache.tensor.numpy().copy() for cache in caches.tensors]


def reference_copy(caches, layout: RowLayout, rows, gpu: GPULoadStoreSpec, slots, store):
    """Copy a job fragment by fragment, straight from vLLM's definitions.

    ``rows`` is an array (slots, slot_bytes) that the copy reads or changes.
    """
    per_chunk = layout.blocks_per_chunk
    blocks, chunks = iter(gpu.block_ids.tolist()), iter(slots)
    for refs, size, index in zip(
        caches.group_data_refs, gpu.group_sizes, gpu.block_indices, strict=True
    ):
        slot = None
        for logical in range(index, index + size):
            block, sub = next(blocks), logical % per_chunk
            slot = next(chunks) if slot is None or sub == 0 else slot
            for ref in refs:
                _reference_page(caches, layout, rows, ref, block, slot, sub, store)
    assert next(chunks, None) is None


def _reference_page(caches, layout, rows, ref, block, slot, sub, store):
    page = caches.tensors[ref.tensor_idx].tensor[block].numpy().view(np.uint8)
    start = _page_offset(caches, layout, ref.tensor_idx, sub)
    if not layout.canonical:
        fragments = [(0, 0, ref.page_size_bytes)]
    else:
        turn = slot * layout.blocks_per_chunk + sub
        if store and not ref.mapping.is_writer(turn):
            return
        fragments = [
            (
                run.local_offset + i * run.local_stride,
                run.canonical_offset + i * run.canonical_stride,
                run.fragment_size,
            )
            for run in ref.mapping.runs
            for i in range(run.num_fragments)
        ]
    for local, canonical, size in fragments:
        ours, theirs = (
            slice(local, local + size),
            slice(start + canonical, start + canonical + size),
        )
        if store:
            rows[slot, theirs] = page[ours]
        else:
            page[ours] = rows[slot, theirs]


def _page_offset(caches, layout, tensor, sub):
    def host_page(index):
        if not layout.canonical:
            return caches.tensors[index].page_size_bytes
        refs = [ref for group in caches.group_data_refs for ref in group]
        return max(ref.mapping.canonical_page_size_bytes for ref in refs if ref.tensor_idx == index)

    pages = [host_page(index) for index in range(len(caches.tensors))]
    area = 0 if layout.canonical else layout.rank * sum(pages) * layout.blocks_per_chunk
    return area + sum(pages[:tensor]) * layout.blocks_per_chunk + sub * pages[tensor]
