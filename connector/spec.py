"""What vLLM's offloading asks for: a manager on the scheduler, a copy worker on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtiers.connector import metrics
from kvtiers.connector.config import Loaded
from kvtiers.connector.engines import engines_on_host
from kvtiers.connector.layout import RowLayout, plan_row
from kvtiers.connector.manager import TieredOffloadingManager
from kvtiers.connector.ranks import share_arena
from kvtiers.connector.transfer import WorkerReport
from kvtiers.connector.worker import TieredWorker
from kvtiers.tiers.arena import Arena
from kvtiers.tiers.cpu import make_arena
from kvtiers.tiers.populate import Populator
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

CONTEXT = "kvtiers"
"""Key of ``extra_config`` under which the connector hands the spec its context."""


@dataclass(frozen=True)
class Context:
    """What the spec needs beyond vLLM's ``OffloadingConfig``."""

    loaded: Loaded
    vllm_config: Any
    kv_cache_config: Any


class TieredOffloadingSpec(OffloadingSpec):  # type: ignore[misc]  # vLLM is untyped
    """Built by vLLM in the scheduler process and in every worker process."""

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003 - the same metrics whatever the tiers
    ) -> dict[str, OffloadingMetricMetadata]:
        """See ``metrics``. Runs in the API server's process."""
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.context: Context = config.extra_config[CONTEXT]
        self.arena: Arena | None = None
        self.worker: TieredWorker | None = None
        self.report: WorkerReport | None = None

    def get_manager(self) -> TieredOffloadingManager:
        """Scheduler process. The manager has no tiers before the workers have reported."""
        return TieredOffloadingManager(self.config, self.context)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Worker process: lay out the arena's rows, share the arena, start copying.

        Raises:
            ConfigError: the CPU tier can't be made as configured.

        """
        layout = self._plan(kv_caches)
        parallel = self.config.parallel
        arena = share_arena(
            lambda: self._make_arena(layout.row_bytes, kv_caches),
            layout.row_bytes,
            parallel.world_size,
        )
        self.arena = arena
        self.report = WorkerReport(arena.handle, layout.canonical, layout.portable)
        self.worker = TieredWorker(self._engine(kv_caches, layout, arena), layout.blocks_per_chunk)
        return self.worker

    def _plan(self, kv_caches: CanonicalKVCaches) -> RowLayout:
        wanted = self.context.loaded.config.canonical_layout
        return plan_row(
            kv_caches,
            self.blocks_per_chunk,
            self.config.parallel.rank,
            self.config.parallel.world_size,
            None if wanted == "auto" else wanted,
        )

    def _make_arena(self, chunk_bytes: int, kv_caches: CanonicalKVCaches) -> Arena:
        cpu = self.context.loaded.config.tiers[0]
        options = cpu.with_bytes(
            "tiers[0]",
            chunk_bytes,
            engines_on_host(self.context.vllm_config.parallel_config),
            _untouched_bytes(kv_caches),
        )
        return make_arena(options.capacity, chunk_bytes)  # type: ignore[attr-defined]

    def _engine(
        self, kv_caches: CanonicalKVCaches, layout: RowLayout, arena: Arena
    ) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            from kvtiers.connector.copy_device import create_device_worker

            return create_device_worker(kv_caches, layout, arena)
        from kvtiers.connector.copy_cpu import CpuCopyWorker

        return CpuCopyWorker(kv_caches, layout, arena, Populator(arena))


def _untouched_bytes(kv_caches: CanonicalKVCaches) -> int:
    """KV cache in host memory: the kernel has promised it, but still counts it as free."""
    return sum(
        cache.tensor.shape[0] * cache.page_size_bytes
        for cache in kv_caches.tensors
        if cache.tensor.device.type == "cpu"
    )
