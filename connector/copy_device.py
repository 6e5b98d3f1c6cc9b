"""Copies between a KV cache on a GPU and the arena, by vLLM's own worker.

vLLM's worker moves bytes with the GPU's copy engine, pins the host memory, and
orders copies against the model's kernels; none of that is done again here. It
expects the shared region that it creates itself, so the arena is dressed up as one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch
from kvtiers.connector.layout import RowLayout, arena_bytes
from kvtiers.tiers.arena import Arena
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister


def create_device_worker(
    kv_caches: CanonicalKVCaches, layout: RowLayout, arena: Arena
) -> CPUOffloadingWorker:
    """VLLM's worker over the arena.

    Its ``shutdown`` unpins the arena and lets go of it; closing it is the caller's.

    Raises:
        ValueError: the arena's slots are too small for a chunk.

    """
    region = ArenaRegion(arena, layout)
    try:
        return CPUOffloadingWorker(
            kv_caches=kv_caches,
            blocks_per_chunk=layout.blocks_per_chunk,
            num_cpu_chunks=arena.slots,
            mmap_region=region,
            canonical_layout=layout.canonical,
        )
    except BaseException:
        region.cleanup()
        raise


class ArenaRegion:
    """The arena with what vLLM's worker reads from a ``SharedOffloadRegion``.

    Public names and ``_base`` and ``_row_stride`` are those of vLLM 0.32 and 0.33.

    Args:
        arena: the memory.
        layout: which part of each row is this rank's.

    Raises:
        ValueError: the arena's slots are too small for a chunk.

    """

    def __init__(self, arena: Arena, layout: RowLayout) -> None:
        self._base: torch.Tensor | None = arena_bytes(arena, layout)
        self._row_stride = arena.slot_bytes
        self._layout = layout
        self._views: list[torch.Tensor] = []
        self.num_chunks = arena.slots
        self.total_size_bytes = arena.slots * arena.slot_bytes
        self.page_size = mmap.PAGESIZE
        self.rank = layout.rank
        self.cpu_page_size = layout.area_bytes
        self.is_pinned = False
        self.pinned_addresses: list[int] = []

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor's bytes of every row: ``(num_chunks, tensor_page_size)``, int8.

        Called once per KV-cache tensor, in order.
        """
        return self._next_view(tensor_page_size)

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """As ``create_next_worker_view``, in the area that the ranks share."""
        return self._next_view(tensor_page_size)

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """Offset and length of the rank's area in every row, in bytes, rounded out to pages."""
        area = self._layout.places[0].offset
        for row in range(0, self.total_size_bytes, self._row_stride):
            start = row + area
            end = start + self.cpu_page_size
            first = start - start % self.page_size
            yield first, -(-end // self.page_size) * self.page_size - first

    def cleanup(self) -> None:
        """Unpin, and drop every reference to the arena. May be called twice."""
        for address in reversed(self.pinned_addresses):
            host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False
        self._views.clear()
        self._base = None

    def _next_view(self, nbytes: int) -> torch.Tensor:
        place = self._layout.places[len(self._views)]
        if nbytes != place.page_bytes * self._layout.blocks_per_chunk:
            raise ValueError(
                f"vLLM wants {nbytes} bytes a row for KV cache tensor {len(self._views)}, the "
                f"layout has {self._layout.blocks_per_chunk} pages of {place.page_bytes}"
            )
        assert self._base is not None
        size, stride = (self.num_chunks, nbytes), (self._row_stride, 1)
        view = self._base.as_strided(size, stride, place.offset)
        self._views.append(view)
        return view
