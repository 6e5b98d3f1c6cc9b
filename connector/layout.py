"""Where each byte of a chunk lies in its arena row.

The arrangement is that of vLLM's CPU offloading worker over its shared region, so
that engines with a CPU and with a GPU understand each other's rows.

- **Direct**: one area per rank, in rank order; an area holds, tensor after tensor,
  the rank's pages of all blocks of the chunk.
- **Canonical**: one area that all ranks share; it holds, tensor after tensor, the
  pages that a single rank without any parallelism would have. Each rank reads and
  writes its share of every page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from kvtiers.tiers.arena import Arena
from kvtiers.tiers.base import ALIGNMENT
from vllm.v1.kv_offload.base import CanonicalKVCaches


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One KV-cache tensor's part of a row.

    Attributes:
        offset: bytes from the start of the row to the page of the chunk's first block.
        page_bytes: bytes per block; the pages of a chunk's blocks follow each other.

    """

    offset: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where each byte of a chunk lies in its row, as one rank sees it.

    Attributes:
        row_bytes: size of a row, a multiple of ``ALIGNMENT``.
        area_bytes: size of one rank's area (direct) or of the shared one (canonical).
        rank: which area is this rank's, counted from 0.
        blocks_per_chunk: blocks in a row.
        places: one entry per tensor of the KV cache, in vLLM's order.
        canonical: the layout, see the module's text.
        portable: the row means the same whatever the parallelism of its writer.

    """

    row_bytes: int
    area_bytes: int
    rank: int
    blocks_per_chunk: int
    places: tuple[TensorPlace, ...]
    canonical: bool
    portable: bool


def plan_row(
    kv_caches: CanonicalKVCaches,
    blocks_per_chunk: int,
    rank: int,
    world_size: int,
    canonical: bool | None = None,
) -> RowLayout:
    """Lay out a row for the KV cache that vLLM registered with a worker.

    Args:
        kv_caches: the tensors of this rank.
        blocks_per_chunk: at least 1.
        rank: this worker's place among those that share the arena.
        world_size: how many workers share the arena.
        canonical: True to require the canonical layout, False for the direct one,
            None for the canonical one where vLLM can map every tensor to it.

    Raises:
        ValueError: an argument is out of range, or the canonical layout was
            required and vLLM has no mapping for a tensor.

    """
    if blocks_per_chunk < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"cannot lay out a row of {blocks_per_chunk} blocks for rank {rank} of {world_size}: "
            "blocks_per_chunk must be at least 1 and the rank below the number of workers"
        )
    unmapped = _unmapped(kv_caches)
    if canonical and unmapped:
        raise ValueError(_explain_unmapped(unmapped, len(kv_caches.tensors)))
    canonical = not unmapped if canonical is None else canonical
    pages = _canonical_pages(kv_caches) if canonical else _direct_pages(kv_caches)
    area_bytes = sum(pages) * blocks_per_chunk
    areas = 1 if canonical else world_size
    start = 0 if canonical else rank * area_bytes
    return RowLayout(
        row_bytes=-(-areas * area_bytes // ALIGNMENT) * ALIGNMENT,
        area_bytes=area_bytes,
        rank=rank,
        blocks_per_chunk=blocks_per_chunk,
        places=_places(start, pages, blocks_per_chunk),
        canonical=canonical,
        portable=canonical and _agnostic(kv_caches),
    )


def arena_bytes(arena: Arena, layout: RowLayout) -> torch.Tensor:
    """The arena as one int8 tensor, which keeps it mapped.

    Raises:
        ValueError: the arena's slots are too small for a chunk.

    """
    if arena.slot_bytes < layout.row_bytes:
        raise ValueError(
            f"the arena's slots have {arena.slot_bytes} bytes, but a chunk of this KV cache "
            f"takes {layout.row_bytes}"
        )
    # torch keeps a reference to what it is given, not a claim on the memory: with the
    # arena's own view, which ``Arena.close`` releases, copies would hit unmapped pages.
    return torch.frombuffer(memoryview(arena.memory), dtype=torch.int8)


def _places(start: int, pages: Sequence[int], blocks_per_chunk: int) -> tuple[TensorPlace, ...]:
    offsets = accumulate((page * blocks_per_chunk for page in pages), initial=start)
    return tuple(TensorPlace(offset, page) for offset, page in zip(offsets, pages, strict=False))


def _direct_pages(kv_caches: CanonicalKVCaches) -> list[int]:
    return [tensor.page_size_bytes for tensor in kv_caches.tensors]


def _canonical_pages(kv_caches: CanonicalKVCaches) -> list[int]:
    pages = [0] * len(kv_caches.tensors)
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            page = ref.mapping.canonical_page_size_bytes
            pages[ref.tensor_idx] = max(pages[ref.tensor_idx], page)
    return pages


def _unmapped(kv_caches: CanonicalKVCaches) -> set[int]:
    """Tensors that some layer uses without a mapping, or that no layer uses."""
    refs = [ref for group in kv_caches.group_data_refs for ref in group]
    lacking = {ref.tensor_idx for ref in refs if ref.mapping is None}
    used = {ref.tensor_idx for ref in refs}
    return lacking | (set(range(len(kv_caches.tensors))) - used)


def _agnostic(kv_caches: CanonicalKVCaches) -> bool:
    return all(
        ref.mapping.parallelism_agnostic for group in kv_caches.group_data_refs for ref in group
    )


def _explain_unmapped(unmapped: set[int], tensors: int) -> str:
    return (
        f"canonical_layout is true, but vLLM has no canonical form for {len(unmapped)} of the "
        f"{tensors} KV cache tensors (the first is number {min(unmapped)}). It has one when the "
        "workers are exactly the tensor- and context-parallel group (no pipeline parallelism) and "
        "the layers of a block are not packed together. Set canonical_layout to false in "
        "kv_connector_extra_config, or leave it out to use it only where it is possible."
    )
