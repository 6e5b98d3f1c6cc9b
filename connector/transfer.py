"""What the scheduler and the workers tell each other about copies, and about heat.

These classes are pickled between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from kvtiers.connector.adapters import Contents
from kvtiers.connector.heat import NO_REPORT, NO_STEP, HeatReport, HeatStep
from kvtiers.tiers.arena import ArenaHandle
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

FailedJobs = Mapping[int, tuple[int, ...]]
"""Job id to the arena slots that must not be trusted; empty means all of the job's."""


class ArenaSpec(CPULoadStoreSpec):  # type: ignore[misc]  # vLLM is untyped
    """The arena side of a copy job: which slots, and which KV-cache group each is for.

    vLLM's own specs leave the groups to be inferred from the GPU side, which is
    wrong as soon as the GPU side lacks a block. Here they are spelled out.

    Args:
        slots: arena slots in order of group, then of position in the prefix.
        group_chunks: how many of ``slots`` belong to each offloaded group.

    Raises:
        ValueError: the group sizes do not add up to the number of slots.

    """

    def __init__(self, slots: Sequence[int], group_chunks: Sequence[int]) -> None:
        super().__init__(list(slots))
        self.group_chunks = tuple(group_chunks)
        if sum(self.group_chunks) != len(slots):
            raise ValueError(
                f"group_chunks {self.group_chunks} add up to {sum(self.group_chunks)} chunks, "
                f"but {len(slots)} slots were given"
            )

    def groups(self) -> Iterator[NDArray[np.int32]]:
        """The slots of each offloaded group, in group order."""
        end = 0
        for chunks in self.group_chunks:
            start, end = end, end + chunks
            yield self.block_ids[start:end]


@dataclass
class TieredMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped
    """vLLM's copies of a step, and what to measure in it."""

    heat: HeatStep = NO_STEP

    @classmethod
    def extend(cls, metadata: OffloadingConnectorMetadata, heat: HeatStep) -> TieredMetadata:
        """What a worker gets: vLLM's own metadata plus what it does not know of."""
        return cls(
            load_jobs=metadata.load_jobs,
            store_jobs=metadata.store_jobs,
            jobs_to_flush=metadata.jobs_to_flush,
            heat=heat,
        )


@dataclass
class TieredWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]  # vLLM is untyped
    """vLLM's report of finished jobs, and which of them failed.

    vLLM counts a job as done once every rank has reported it, possibly in
    different steps, so whoever reads ``failed_jobs`` keeps them until then.

    Attributes:
        failed_jobs: see ``FailedJobs``. Only jobs that ``completed_jobs`` counts.
        adapters: LoRA adapters that hold something else than was last reported.
        heat: what was measured, what that took, and what computing prompts did.

    """

    failed_jobs: FailedJobs = field(default_factory=dict)
    adapters: Contents = field(default_factory=dict)
    heat: HeatReport = NO_REPORT

    @classmethod
    def extend(
        cls,
        metadata: OffloadingWorkerMetadata,
        failed_jobs: FailedJobs,
        adapters: Contents | None = None,
        heat: HeatReport = NO_REPORT,
    ) -> TieredWorkerMetadata:
        """What a rank reports: vLLM's own metadata plus what it does not know of."""
        return cls(
            completed_jobs=metadata.completed_jobs,
            transfer_stats=metadata.transfer_stats,
            failed_jobs=failed_jobs,
            adapters=adapters or {},
            heat=heat,
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredWorkerMetadata:
        """Sum over ranks: a slot that one rank distrusts is distrusted.

        ``other`` may be vLLM's own class, which is then taken to have no failures.
        """
        merged = super().aggregate(other)
        if not isinstance(other, TieredWorkerMetadata):
            return self.extend(merged, self.failed_jobs, self.adapters, self.heat)
        return self.extend(
            merged,
            _union(self.failed_jobs, other.failed_jobs),
            _agreed(self.adapters, other.adapters),
            self.heat + other.heat,
        )


def _union(ours: FailedJobs, theirs: FailedJobs) -> FailedJobs:
    merged = dict(ours)
    for job_id, slots in theirs.items():
        known = merged.get(job_id, slots)
        merged[job_id] = tuple(sorted({*known, *slots})) if known and slots else ()
    return merged


def _agreed(ours: Contents, theirs: Contents) -> Contents:
    """Ranks that loaded different files have loaded nothing that has a name."""
    merged = {**ours, **theirs}
    differing = {number for number in ours.keys() & theirs.keys() if ours[number] != theirs[number]}
    return {**merged, **dict.fromkeys(differing)}


@dataclass
class WorkerReport(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is untyped
    """What a worker tells the scheduler once, after it registered its KV cache.

    Attributes:
        arena: where the arena is, how many slots it has and of which size.
        canonical: chunks are in vLLM's canonical layout.
        portable: chunks mean the same whatever the tensor parallelism of the reader.

    """

    arena: ArenaHandle
    canonical: bool
    portable: bool
