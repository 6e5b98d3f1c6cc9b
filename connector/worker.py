"""Turns every failure of a copy into a value.

vLLM asserts that each copy job is accepted and succeeds: one failed transfer takes
the engine down. A cache may fail without harm as long as nobody trusts the bytes.
So jobs always succeed as far as vLLM's worker can tell, and the failures travel
beside it, in the worker metadata, to the scheduler, which forgets the chunks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvtiers.connector.transfer import ArenaSpec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

logger = logging.getLogger(__name__)


class TieredWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped
    """A copy engine that cannot fail, as seen by vLLM, and a list of what did fail.

    All methods run on the worker's thread.

    Args:
        engine: does the copies; may raise, refuse, or report failure.
        blocks_per_chunk: blocks in an arena slot.

    Attributes:
        failures: how many jobs failed, by kind. Never reset.

    """

    def __init__(self, engine: OffloadingWorker, blocks_per_chunk: int) -> None:
        self.failures: Counter[str] = Counter()
        self._engine = engine
        self._blocks_per_chunk = blocks_per_chunk
        self._running: set[int] = set()
        # Jobs that the engine will not report.
        self._dropped: list[TransferResult] = []
        self._distrusted: dict[int, tuple[int, ...]] = {}
        self._reported: dict[int, tuple[int, ...]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaSpec) -> bool:
        """Copy blocks to the arena, leaving out groups whose chunks are not whole."""
        try:
            partial = _partial_groups(src_spec, dst_spec, self._blocks_per_chunk)
            if partial:
                slots = _slots_of(dst_spec, partial)
                self._distrust(job_id, slots, f"store of {len(slots)} chunks with missing blocks")
                src_spec, dst_spec = _without(src_spec, dst_spec, partial)
        except Exception as error:  # noqa: BLE001  # a cache's fault must not end the engine
            return self._drop(job_id, "store refused", error)
        if partial and not len(dst_spec.block_ids):
            self._dropped.append(TransferResult(job_id, True))
            return True
        return self._submit(
            job_id, "store", lambda: self._engine.submit_store(job_id, src_spec, dst_spec)
        )

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy from the arena to blocks. ``expedited`` is vLLM 0.33's."""
        if (src_spec.block_ids < 0).any():
            # The scheduler's word for chunks that are not in the arena any more.
            # vLLM's own engine would take the number for an address.
            return self._drop(job_id, "load of chunks that are gone")
        options = {"expedited": True} if expedited else {}
        return self._submit(
            job_id,
            "load",
            lambda: self._engine.submit_load(job_id, src_spec, dst_spec, **options),
        )

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, each once, all of them successful."""
        finished, self._dropped = self._dropped, []
        for result in self._engine_results():
            # A job that was dropped has been reported already.
            if result.job_id not in self._running:
                continue
            self._running.discard(result.job_id)
            if result.success:
                finished.append(result)
            else:
                self._distrust(result.job_id, (), "copy reported as failed")
                finished.append(TransferResult(result.job_id, True))
        for result in finished:
            if result.job_id in self._distrusted:
                self._reported[result.job_id] = self._distrusted.pop(result.job_id)
        return finished

    def take_failed(self) -> dict[int, tuple[int, ...]]:
        """What failed among the jobs that ``get_finished`` returned since the last call.

        Job id to the arena slots that must not be trusted; empty means all of the
        job: all its slots if it was a store, all its blocks if it was a load.
        """
        failed, self._reported = self._reported, {}
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Block until the jobs have ended."""
        try:
            self._engine.wait(job_ids)
        except Exception as error:  # noqa: BLE001  # a cache's fault must not end the engine
            for job_id in sorted(job_ids & self._running):
                self._distrust(job_id, (), "wait", error)

    def shutdown(self) -> None:
        """Stop the engine. Jobs that still run are not reported any more."""
        try:
            self._engine.shutdown()
        except Exception as error:  # noqa: BLE001  # the rest of vLLM must still shut down
            self._count("shutdown", None, error)

    def _submit(self, job_id: int, what: str, submit: Callable[[], bool]) -> bool:
        self._running.add(job_id)
        try:
            accepted = submit()
        except Exception as error:  # noqa: BLE001  # a cache's fault must not end the engine
            return self._drop(job_id, what, error)
        return True if accepted else self._drop(job_id, f"{what} not accepted")

    def _engine_results(self) -> list[TransferResult]:
        try:
            results: list[TransferResult] = self._engine.get_finished()
        except Exception as error:  # noqa: BLE001  # a cache's fault must not end the engine
            self._count("results", None, error)
            # Results may be lost with the exception, and a job that is never reported
            # hangs its request. Its copy must have ended before its memory is reused.
            self.wait(set(self._running))
            return [TransferResult(job_id, False) for job_id in sorted(self._running)]
        return results

    def _drop(self, job_id: int, what: str, error: Exception | None = None) -> bool:
        """Fail a job that the engine will not report. True, for vLLM."""
        self._running.discard(job_id)
        self._distrust(job_id, (), what, error)
        self._dropped.append(TransferResult(job_id, True))
        return True

    def _distrust(
        self, job_id: int, slots: tuple[int, ...], what: str, error: Exception | None = None
    ) -> None:
        self._distrusted[job_id] = slots
        self._count(what, job_id, error)

    def _count(self, what: str, job_id: int | None, error: Exception | None) -> None:
        kind = f"{what}: {type(error).__name__}" if error else what
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            logger.error(
                "KV copy failed, the chunks count as not cached (%s, job %s). "
                "Further failures of this kind are only counted.",
                kind,
                job_id,
                exc_info=error,
            )


def _partial_groups(src: GPULoadStoreSpec, dst: ArenaSpec, blocks_per_chunk: int) -> set[int]:
    """Groups with blocks missing: vLLM 0.32 leaves null blocks out of a chunk's list.

    All blocks after the missing one would be copied to the wrong place.
    """
    groups = zip(src.group_sizes, src.block_indices, dst.group_chunks, strict=True)
    return {
        group
        for group, (size, index, chunks) in enumerate(groups)
        if size != chunks * blocks_per_chunk or (size and index % blocks_per_chunk)
    }


def _slots_of(dst: ArenaSpec, groups: set[int]) -> tuple[int, ...]:
    return tuple(
        int(slot) for group, slots in enumerate(dst.groups()) if group in groups for slot in slots
    )


def _without(
    src: GPULoadStoreSpec, dst: ArenaSpec, groups: set[int]
) -> tuple[GPULoadStoreSpec, ArenaSpec]:
    """The job without those groups, which stay in it as empty ones."""
    blocks: list[int] = []
    end = 0
    for group, size in enumerate(src.group_sizes):
        start, end = end, end + size
        if group not in groups:
            blocks += src.block_ids[start:end].tolist()
    kept = set(range(len(src.group_sizes))) - groups
    sizes = [size if group in kept else 0 for group, size in enumerate(src.group_sizes)]
    chunks = [count if group in kept else 0 for group, count in enumerate(dst.group_chunks)]
    return (
        GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=src.block_indices),
        ArenaSpec(_slots_of(dst, kept), chunks),
    )
