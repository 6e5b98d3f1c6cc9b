"""vLLM's own tiering on a CPU: the rival that kvtiers is measured against.

vLLM 0.32's ``TieringOffloadingSpec`` lacks just one thing on a CPU, a copy worker:
its own copies with CUDA or XPU. The one given to it here is kvtiers' own, over
vLLM's shared region and in vLLM's own arrangement of the bytes, so that both sides
of a comparison copy alike and everything else (manager, lookups, promotion,
filesystem tier, threads) is vLLM's.

Named by ``spec_module_path``, so vLLM imports it in the scheduler and the workers.
"""

from __future__ import annotations

from kvtiers.connector.copy_cpu import CpuCopyWorker
from kvtiers.connector.layout import plan_row
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class RegionArena:
    """vLLM's shared region, as far as the copy worker looks at an arena."""

    def __init__(self, region: SharedOffloadRegion, chunk_bytes: int) -> None:
        self.memory = memoryview(region.mmap_obj)
        self.slots = region.num_chunks
        self.slot_bytes = chunk_bytes


class RegionCopyWorker(CpuCopyWorker):
    """The copy worker, and the region that nobody else would remove from /dev/shm."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, spec: TieringOnCpuSpec, region: SharedOffloadRegion
    ) -> None:
        parallel = spec.config.parallel
        layout = plan_row(
            kv_caches, spec.blocks_per_chunk, parallel.rank, parallel.world_size, canonical=False
        )
        arena = RegionArena(region, spec.kv_bytes_per_chunk)
        super().__init__(kv_caches, layout, arena)  # type: ignore[arg-type]
        self._region = region

    def shutdown(self) -> None:
        super().shutdown()
        self._region.cleanup()


class TieringOnCpuSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is untyped
    """``TieringOffloadingSpec`` with a copy worker for a KV cache in CPU memory."""

    _cpu_worker: OffloadingWorker | None = None

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return RegionCopyWorker(kv_caches, self, region)
        except Exception:
            region.cleanup()
            raise

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """As vLLM's, but without its refusal of platforms other than CUDA and XPU."""
        if self._cpu_worker is None:
            self._cpu_worker = self.create_worker(kv_caches)
        return self._cpu_worker
