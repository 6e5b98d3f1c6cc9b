"""Copies between a KV cache in CPU memory and the arena, at once, on the caller's thread.

vLLM's own worker copies with CUDA or XPU only. The meaning of a job (groups, partial
first and last chunks, taking turns at pages that several ranks hold) is that of
its ``transfer_async``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import torch
from kvtiers.connector.layout import RowLayout, TensorPlace, arena_bytes
from kvtiers.connector.strided import BoundPiece, Ids, Piece, fold, page_runs
from kvtiers.tiers.arena import Arena
from kvtiers.tiers.populate import Populator
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CopyRun,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped
    """Copies synchronously; ``get_finished`` hands out what ``submit_*`` has done.

    Copies use torch's threads, so they are as parallel as the model's own kernels.

    Args:
        kv_caches: this rank's KV cache, in CPU memory.
        layout: where its bytes go in a row.
        arena: at least ``layout.row_bytes`` per slot. Not closed by ``shutdown``.
        populator: told of the slots that are used, and closed by ``shutdown``.

    Raises:
        ValueError: the cache is not in CPU memory, or the arena's slots are too
            small; from ``submit_*``: the job does not fit the cache or the arena.
            Nothing was copied then.

    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: RowLayout,
        arena: Arena,
        populator: Populator | None = None,
    ) -> None:
        memory = arena_bytes(arena, layout)
        tensors = [_as_pages(tensor) for tensor in kv_caches.tensors]
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._num_blocks = min(len(tensor) for tensor in tensors)
        self._slots = arena.slots
        # The pieces hold addresses only; these keep what lies there from being unmapped.
        self._owners = [*tensors, memory]
        self._groups = [
            [
                BoundPiece(
                    piece,
                    self._num_blocks,
                    memory.data_ptr(),
                    arena.slots,
                    arena.slot_bytes,
                    layout.blocks_per_chunk,
                )
                for piece in fold(_pieces(refs, tensors, layout))
            ]
            for refs in kv_caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []
        self._populator = populator

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        """Copy blocks into the arena; done when this returns True."""
        began = time.perf_counter()
        nbytes = 0
        for pieces, blocks, pages in self._paired(src_spec, dst_spec):
            for bound in pieces:
                # Ranks that hold the same bytes take turns.
                mine = pages % bound.piece.writers == bound.piece.writer
                for run in page_runs(blocks[mine], pages[mine], self._blocks_per_chunk):
                    bound.store(run)
                    nbytes += run.length * bound.nbytes
        return self._finish(job_id, nbytes, began)

    def submit_load(
        self,
        job_id: int,
        src_spec: BlockIDsLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002  # vLLM 0.33's; every copy here is done at once
    ) -> bool:
        """Copy from the arena into blocks; done when this returns True."""
        began = time.perf_counter()
        nbytes = 0
        for pieces, blocks, pages in self._paired(dst_spec, src_spec):
            runs = page_runs(blocks, pages, self._blocks_per_chunk)
            for bound in pieces:
                for run in runs:
                    bound.load(run)
                nbytes += len(blocks) * bound.nbytes
        return self._finish(job_id, nbytes, began)

    def get_finished(self) -> list[TransferResult]:
        """The jobs done since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a submitted job is a finished one."""

    def shutdown(self) -> None:
        """Let go of the KV cache and the arena; every later job is an error."""
        if self._populator is not None:
            self._populator.close()
        self._groups = []
        self._owners = []

    def _finish(self, job_id: int, nbytes: int, began: float) -> bool:
        seconds = time.perf_counter() - began
        self._finished.append(TransferResult(job_id, True, nbytes, seconds))
        return True

    def _paired(
        self, gpu: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec
    ) -> list[tuple[list[BoundPiece], Ids, Ids]]:
        """Per group its pieces, the job's blocks, and the page that belongs to each."""
        if len(gpu.group_sizes) != len(self._groups):
            raise ValueError(
                f"a job for {len(gpu.group_sizes)} KV cache groups; there are {len(self._groups)}"
            )
        _check_ids("block", gpu.block_ids, self._num_blocks)
        _check_ids("arena slot", host.block_ids, self._slots)
        if self._populator is not None and len(host.block_ids):
            self._populator.expect(int(host.block_ids.max()))
        pairs = pair_pages(gpu, host, self._blocks_per_chunk)
        return [(group, *pair) for group, pair in zip(self._groups, pairs, strict=True)]


def pair_pages(
    gpu: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, blocks_per_chunk: int
) -> Iterator[tuple[Ids, Ids]]:
    """Match the blocks of a job with pages of the arena, group by group.

    Pages are numbered across the arena, as in ``PageRun``: the same on every rank.

    Raises:
        ValueError: the arena side has more or fewer chunks than the blocks need.

    """
    blocks_end = slots_end = 0
    for size, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        # A group's first block may lie inside its first chunk.
        skip = index % blocks_per_chunk if size else 0
        blocks_start, blocks_end = blocks_end, blocks_end + size
        slots_start, slots_end = slots_end, slots_end - (-(size + skip) // blocks_per_chunk)
        rows = host.block_ids[slots_start:slots_end].astype(np.int64)
        pages = (rows[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)).ravel()
        yield gpu.block_ids[blocks_start:blocks_end], pages[skip : skip + size]
    if slots_end != len(host.block_ids):
        raise ValueError(
            f"the job's blocks take {slots_end} chunks, but it names {len(host.block_ids)} slots"
        )


def _check_ids(what: str, ids: NDArray[np.int32], limit: int) -> None:
    # A negative index would silently address from the end.
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        raise ValueError(f"a job names {what} {ids.min()} to {ids.max()}; there are {limit}")


def _as_pages(cache: CanonicalKVCacheTensor) -> torch.Tensor:
    """The tensor as ``(num_blocks, page_size_bytes)`` bytes, without a copy."""
    tensor = cache.tensor
    if tensor.device.type != "cpu":
        raise ValueError(f"the KV cache is on {tensor.device}, not in CPU memory")
    if tensor.dtype is torch.int8 and tensor.shape[1:] == (cache.page_size_bytes,):
        return tensor
    return tensor.view(torch.int8).view(-1, cache.page_size_bytes)


def _pieces(
    refs: list[CanonicalKVCacheRef], tensors: list[torch.Tensor], layout: RowLayout
) -> list[Piece]:
    """A group's pieces in the order that folds best: layer after layer."""
    layers = [_layer_pieces(ref, tensors[ref.tensor_idx], layout) for ref in refs]
    return [piece for run in zip_longest(*layers) for piece in run if piece is not None]


def _layer_pieces(ref: CanonicalKVCacheRef, tensor: torch.Tensor, layout: RowLayout) -> list[Piece]:
    place = layout.places[ref.tensor_idx]
    if layout.canonical:
        turn = (ref.mapping.num_writers, ref.mapping.writer_index)
        return [_run_piece(run, tensor, place, turn) for run in ref.mapping.runs]
    whole = CopyRun(0, 0, ref.page_size_bytes, 1, ref.page_size_bytes, ref.page_size_bytes)
    return [_run_piece(whole, tensor, place, (1, 0))]


def _run_piece(
    run: CopyRun, tensor: torch.Tensor, place: TensorPlace, turn: tuple[int, int]
) -> Piece:
    fragments = ((run.num_fragments, run.local_stride, run.canonical_stride),)
    return Piece(
        block_at=tensor.data_ptr() + run.local_offset,
        block_stride=tensor.stride(0),
        row_at=place.offset + run.canonical_offset,
        page_stride=place.page_bytes,
        nbytes=run.fragment_size,
        repeats=fragments if run.num_fragments > 1 else (),
        writers=turn[0],
        writer=turn[1],
    )
