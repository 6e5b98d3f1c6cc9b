"""``TieredKVConnector``: vLLM's offloading connector over the hierarchy.

What vLLM already does well stays vLLM's: hybrid models, copies on the device,
fences for block reuse and preemption, partial chunks. Here is what it does not
do: survive a failed copy, notice a failed store, keep slots from being reused
while a copy that a reset forgot still writes to them (docs/design/vllm-contract.md).
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtiers.connector import compat
from kvtiers.connector.adapter_loads import LoadedAdapters, watch_loads
from kvtiers.connector.adapters import AdapterBook, Contents
from kvtiers.connector.config import (
    Loaded,
    check_max_tokens,
    load,
    resolve_blocks_per_chunk,
)
from kvtiers.connector.engine_checks import (
    check_chunks,
    check_engine,
    check_nesting,
    check_reports,
)
from kvtiers.connector.favour import ChunkBlocks, GpuFavour, Groups, Prefix
from kvtiers.connector.heat import NO_REPORT, NO_STEP
from kvtiers.connector.heat_probe import HeatProbe
from kvtiers.connector.heat_watch import HeatWatch
from kvtiers.connector.manager import Adapter, RequestKeys, TieredOffloadingManager
from kvtiers.connector.prefill import Span
from kvtiers.connector.recording import start_recorder
from kvtiers.connector.spec import CONTEXT, Context, TieredOffloadingSpec
from kvtiers.connector.transfer import TieredMetadata, TieredWorkerMetadata, WorkerReport
from kvtiers.policies import PolicyRequest
from kvtiers.tiers import Usage
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

_SPEC = {
    "spec_name": TieredOffloadingSpec.__name__,
    "spec_module_path": TieredOffloadingSpec.__module__,
}


class TieredKVConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is untyped
    """One object on the scheduler, one on every worker. See vLLM's ``KVConnectorBase_V1``.

    Raises:
        ConfigError: the configuration cannot work; the text names the key.
        IncompatibleVllmError: this vLLM lacks something kvtiers relies on.

    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        compat.check()
        loaded = load(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
        check_engine(vllm_config)
        check_nesting(vllm_config)
        # Read by the scheduler right after it has made its connector. The default
        # ("fail") ends a request with an empty answer when a load fails.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        super().__init__(
            _with_own_extra(vllm_config, kv_cache_config, loaded), role, kv_cache_config
        )
        self._loaded = loaded
        self._block_pool: Any = None
        self._favour: GpuFavour | None = None
        if role is KVConnectorRole.SCHEDULER and loaded.config.max_tokens is not None:
            self._keep_window_before(loaded.config.max_tokens)
        # Worker side: which request a load job belongs to, and what failed.
        self._load_requests: dict[int, str] = {}
        self._failed_jobs: dict[int, tuple[int, ...]] = {}
        # Scheduler side: jobs in flight at a reset -> reports still due.
        self._reset_fence: dict[int, int] = {}
        self._adapters = AdapterBook()
        self._loaded_adapters: LoadedAdapters | None = None
        if role is KVConnectorRole.WORKER and vllm_config.lora_config is not None:
            self._loaded_adapters = watch_loads()
        self._heat_watch: HeatWatch | None = None
        self._heat_probe: HeatProbe | None = None
        if role is KVConnectorRole.SCHEDULER:
            groups = self.scheduler.config.kv_group_configs
            self._heat_watch = HeatWatch.of_engine(
                loaded.config.heat, vllm_config, kv_cache_config, groups
            )
        else:
            self._heat_probe = HeatProbe.of_worker(loaded.config.heat, vllm_config, kv_cache_config)

    # Start ------------------------------------------------------------------

    @property
    def _manager(self) -> TieredOffloadingManager:
        return self.scheduler.manager  # type: ignore[no-any-return]

    @property
    def _spec(self) -> TieredOffloadingSpec:
        assert self.connector_worker is not None
        return self.connector_worker.spec  # type: ignore[no-any-return]

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Worker side: where the arena is."""
        return self._spec.report

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Scheduler side: the workers have registered their KV caches; open the tiers.

        Raises:
            ConfigError: a tier can't work, or another connector's message came instead.

        """
        reports = [report for report in metadata.values() if isinstance(report, WorkerReport)]
        check_reports(metadata, reports)
        if reports:
            self._manager.open(
                reports[0], self._gpu_usage, self._gpu_fullness, self._prefill_under_way
            )
            if self._heat_watch is not None:
                self._heat_watch.opened(self._manager.hierarchy)
            self._manager.record_with(
                start_recorder(
                    self._loaded.config,
                    self.scheduler.config.kv_group_configs,
                    self._block_pool.num_gpu_blocks,
                    self._manager.hierarchy,
                )
            )

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Scheduler side: vLLM's prefix cache, which is our GPU tier."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._block_pool = kv_cache_manager.block_pool
        config = self.scheduler.config
        self._groups = Groups.of(config)
        blocks = self._block_pool.num_gpu_blocks
        self._chunk_blocks = ChunkBlocks(blocks // self._groups.blocks_per_chunk)
        favour = GpuFavour(
            self._block_pool,
            self._loaded.config.gpu_favour,
            self._to_favour,
            self._groups.windowed,
            min(group.tokens_per_block for group in config.kv_group_configs),
        )
        self._favour = favour if favour.blocks else None

    def _to_favour(self) -> Iterator[Prefix]:
        """What the GPU shall evict last: of requests in the queue, then as the policy says."""
        statuses = self.scheduler._req_status.values()  # noqa: SLF001 - in the contract
        yield from self._groups.prefixes(compat.queued(status.req for status in statuses))
        if self._favour is not None and self._manager.favours:
            chunks = self._favour.blocks // self._groups.blocks_per_chunk
            for run in self._manager.favoured(chunks):
                yield self._chunk_blocks.prefix(run)

    def _gpu_usage(self) -> Usage:
        return compat.gpu_usage(self._block_pool, self._kv_cache_config)

    def _gpu_fullness(self) -> float:
        return compat.gpu_fullness(self._block_pool)

    def _prefill_under_way(self) -> Iterator[Span]:
        # A copy: not only this thread asks.
        statuses = list(self.scheduler._req_status.values())  # noqa: SLF001 - in the contract
        return compat.prefill_left(status.req for status in statuses)

    def _keep_window_before(self, tokens: int) -> None:
        """Have vLLM offer the window that ends where the longest stored prefix does.

        By default it offers of a window only what a prefix as long as the prompt needs,
        and none of that may be stored if the prompt is longer than ``max_tokens``.
        """
        mask = self.scheduler._reachable_store_block_mask  # noqa: SLF001 - in the contract

        def with_boundary(*, reachable_boundaries: tuple[int, ...], **kwargs: Any) -> Any:
            return mask(reachable_boundaries=(*reachable_boundaries, tokens), **kwargs)

        self.scheduler._reachable_store_block_mask = with_boundary  # noqa: SLF001 - in the contract

    # Requests on the scheduler ----------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Look the whole request up in every tier, at once, while it waits in the queue."""
        super().on_new_request(request)
        if request.lora_request is None:
            self._begin(request)
        else:
            self._adapters.ask(request.request_id, request.lora_request)
            self._begin_with_adapter(request)

    def _begin_with_adapter(self, request: Any) -> bool:
        """The same, once it is known what the request's adapter holds. Returns if it is."""
        lora = request.lora_request
        if self._adapters.waits(request.request_id):
            return False
        if self._adapters.asked(request.request_id):
            content = self._adapters.answer(request.request_id)
            self._begin(request, Adapter(lora.lora_int_id, content))
        return True

    def _begin(self, request: Any, adapter: Adapter | None = None) -> None:
        status = self.scheduler._req_status[request.request_id]  # noqa: SLF001 - in the contract
        status.update_offload_keys()
        groups = self.scheduler.config.kv_group_configs
        keys = {
            group.group_idx: state.offload_keys
            for group, state in zip(groups, status.group_states, strict=True)
        }
        windowed = frozenset(
            group.group_idx for group in groups if group.sliding_window_size_in_chunks is not None
        )
        # Of one that asks for the logprobs of its prompt, vLLM computes all tokens.
        reads = not request.skip_reading_prefix_cache
        facts = compat.request_facts(request)
        known = RequestKeys(keys, windowed, adapter, loads=reads, tenant=facts.tenant)
        status.req_context.set_state(known)
        self._learn_blocks(request, known)
        self._manager.begin(
            status.req_context,
            PolicyRequest(
                request_id=facts.request_id,
                tenant=facts.tenant,
                session=facts.session,
                prompt_tokens=facts.prompt_tokens,
                hints=facts.hints,
            ),
            self._leading_gpu_chunks(request),
        )

    def _learn_blocks(self, request: Any, known: RequestKeys) -> None:
        """Which blocks the request's chunks are made of, if the policy may favour some."""
        if self._favour is not None and self._manager.favours:
            for group, keys in known.keys.items():
                hashes = self._groups.of_request(request, group)
                inner = [known.inner(key) for key in keys]
                self._chunk_blocks.learn(inner, hashes, self._groups.blocks_per_chunk)

    def _leading_gpu_chunks(self, request: Any) -> dict[int, int]:
        """Per group, how many chunks from the head vLLM's prefix cache holds."""
        counts: dict[int, int] = {}
        for group in self.scheduler.config.kv_group_configs:
            if group.sliding_window_size_in_chunks is not None:
                continue
            held = 0
            step = group.hashes_per_chunk
            for block_hash in request.block_hashes[step - 1 :: step]:
                if self._block_pool.get_cached_block(block_hash, [group.group_idx]) is None:
                    break
                held += 1
            counts[group.group_idx] = held
        return counts

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded; None while tiers have not answered."""
        if request.lora_request is not None and not self._begin_with_adapter(request):
            return None, False
        if not self._manager.looking(request.request_id):
            return None, False
        self._check_gpu_hit(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]

    def _check_gpu_hit(self, request: Any, num_computed_tokens: int) -> None:
        """VLLM's cache may hold KV of what an adapter was; nothing that builds on it is stored."""
        lora = request.lora_request
        if lora is not None and num_computed_tokens and self._adapters.replaced(lora):
            status = self.scheduler._req_status[request.request_id]  # noqa: SLF001 - in the contract
            self._manager.stop_storing(status.req_context)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks: load what was found."""
        # vLLM 0.32 notes fresh blocks only when this connector loads into them.
        # Under MultiConnector another one may, while a store still reads them.
        self.scheduler._current_batch_allocated_block_ids.update(  # noqa: SLF001 - in the contract
            block.block_id for group in blocks.blocks for block in group if not block.is_null
        )
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        status = self.scheduler._req_status[request.request_id]  # noqa: SLF001 - in the contract
        cached = status.num_locally_computed_tokens + num_external_tokens
        self._manager.admitted(request.request_id, self._gpu_chunks(request.request_id), cached)

    def _gpu_chunks(self, request_id: str) -> dict[int, int]:
        """What the GPU held when the request was admitted."""
        status = self.scheduler._req_status[request_id]  # noqa: SLF001 - in the contract
        return {
            group.group_idx: status.num_locally_computed_tokens // group.tokens_per_chunk
            for group in self.scheduler.config.kv_group_configs
        }

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The copies of this step.

        A prefix-cache reset may preempt a request between two steps, and the next step
        admit it again with a load. vLLM 0.32 takes that load for an older store that
        must be flushed for the preemption, and ends the engine over it.
        """
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._favour is not None:
            self._favour.step(tokens)
        self._manager.step_scheduled(tokens, compat.step_spans(scheduler_output))
        self._offer_again()
        preempted = scheduler_output.preempted_req_ids or ()
        reloading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}  # noqa: SLF001 - in the contract
        told = scheduler_output
        if not reloading.isdisjoint(preempted):
            told = dataclasses.replace(told, preempted_req_ids=set(preempted) - reloading)
        return self._with_heat(super().build_connector_meta(told), scheduler_output)

    def _with_heat(self, metadata: Any, scheduler_output: Any) -> KVConnectorMetadata:
        """The copies of a step, and what to measure in it."""
        if self._heat_watch is None:
            return metadata
        statuses = self.scheduler._req_status  # noqa: SLF001 - in the contract
        step = self._heat_watch.step(scheduler_output, statuses, self._manager.chunks_of)
        return TieredMetadata.extend(metadata, step) if step.prefill else metadata

    def _offer_again(self) -> None:
        """Have vLLM offer what was turned away before the GPU's cache was full enough.

        Full attention only: blocks that a window has left behind belong to others by
        now, and vLLM looks for that only beyond what it has offered.
        """
        for request_id in self._manager.take_offers():
            status = self.scheduler._req_status.get(request_id)  # noqa: SLF001 - in the contract
            groups = self.scheduler.config.kv_group_configs
            for group, state in zip(groups, status.group_states if status else (), strict=False):
                if group.sliding_window_size_in_chunks is None:
                    state.next_stored_chunk_idx = 0

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its last chunks are stored in the next step."""
        answer: tuple[bool, dict[str, Any] | None]
        answer = super().request_finished_all_groups(request, block_ids)
        self._finishing(request)
        return answer

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, where a connector beside ours knows of one KV-cache group only."""
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        self._finishing(request)
        return answer

    def _finishing(self, request: Any) -> None:
        self._adapters.forget(request.request_id)
        status = self.scheduler._req_status.get(request.request_id)  # noqa: SLF001 - in the contract
        if status is not None:
            reason = request.get_finished_reason()
            text = "" if reason is None else str(reason)
            self._manager.finishing(status.req_context, request.num_output_tokens, text)

    # Copies on the worker ---------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before the model runs; ``start_load_kv`` mostly after it."""
        super().bind_connector_metadata(connector_metadata)
        if self._heat_probe is not None:
            self._heat_probe.begin(getattr(connector_metadata, "heat", NO_STEP))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submit this step's copies."""
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        for job_id, job in metadata.load_jobs.items():
            self._load_requests[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended; requests whose load failed are named, for recomputing.

        Not ``get_block_ids_with_load_errors``: with several KV-cache groups that
        ends the engine.
        """
        results = super().get_transfer_results(finished_req_ids)
        worker = self._spec.worker
        failed = worker.take_failed() if worker is not None else {}
        self._failed_jobs.update(failed)
        requests = {self._load_requests[job] for job in failed if job in self._load_requests}
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving | requests,
        )

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Tell the scheduler which jobs have ended or failed, what adapters hold, and heat."""
        metadata = super().build_connector_worker_meta()
        adapters = self._loaded_adapters.take() if self._loaded_adapters is not None else {}
        heat = NO_REPORT if self._heat_probe is None else self._heat_probe.report()
        if metadata is None:
            if adapters or heat:
                return TieredWorkerMetadata(adapters=adapters, heat=heat)
            return None
        for job_id in metadata.completed_jobs:
            self._load_requests.pop(job_id, None)
        failed, self._failed_jobs = self._failed_jobs, {}
        return TieredWorkerMetadata.extend(metadata, failed, adapters, heat)

    def take_events(self) -> Iterable[Any]:
        """Called for every step, last when its output is taken in: it took until now."""
        self._manager.step_executed()
        return super().take_events()  # type: ignore[no-any-return]

    # Ends of copies on the scheduler ----------------------------------------

    def update_connector_output(self, connector_output: Any) -> None:
        """Distrust what failed, before vLLM publishes everything that has ended."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, TieredWorkerMetadata):
            for job_id, slots in metadata.failed_jobs.items():
                self._distrust(job_id, slots)
            if metadata.adapters:
                self._adapters_loaded(metadata.adapters)
            if self._heat_watch is not None:
                for run, heat in self._heat_watch.told(metadata.heat):
                    self._manager.measured(run, heat)
        self._lower_fence(compat.completed_jobs(connector_output))
        super().update_connector_output(connector_output)

    def _distrust(self, job_id: int, slots: tuple[int, ...]) -> None:
        job = self.scheduler._jobs.get(job_id)  # noqa: SLF001 - in the contract
        if job is None:
            # From before a reset, which has dropped its chunks already.
            return
        if job.is_store:
            context = self.scheduler._req_status[job.req_id].req_context  # noqa: SLF001 - in the contract
            self._manager.distrust_store(job.keys, context, slots)
        else:
            self._manager.distrust_load(job.req_id)
            # vLLM takes what it loads for stored. What is recomputed now is not.
            for group_state in self.scheduler._req_status[job.req_id].group_states:  # noqa: SLF001 - in the contract
                group_state.next_stored_chunk_idx = 0

    def _adapters_loaded(self, contents: Contents) -> None:
        """Requests under way with another content compute a mixture from here on."""
        self._adapters.loaded(contents)
        scheduler = self.scheduler
        mixed = {
            name
            for name, status in scheduler._req_status.items()  # noqa: SLF001 - in the contract
            if self._manager.contradicts(status.req_context, contents)
        }
        for name in mixed:
            self._manager.leave_alone(scheduler._req_status[name].req_context)  # noqa: SLF001 - in the contract
        for job_id, job in scheduler._jobs.items():  # noqa: SLF001 - in the contract
            if job.is_store and job.req_id in mixed:
                self._distrust(job_id, ())

    def reset_cache(self) -> bool | None:
        """Serve nothing stored so far. Slots with copies under way stay out of use."""
        for job_id, job in self.scheduler._jobs.items():  # noqa: SLF001 - in the contract
            self._reset_fence[job_id] = job.pending_count
        if self._heat_watch is not None:
            self._heat_watch.forget()
        # vLLM asserts that nothing waits to be flushed, which is so only if a step came
        # since the last reset: a client that resets twice must not end the engine.
        scheduler = self.scheduler
        waiting = scheduler._current_batch_jobs_to_flush  # noqa: SLF001 - in the contract
        scheduler._current_batch_jobs_to_flush = set()  # noqa: SLF001 - in the contract
        done: bool | None = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= waiting  # noqa: SLF001 - in the contract
        if not self._reset_fence:
            self._manager.flushed()
        return done

    def _lower_fence(self, completed: Mapping[int, int]) -> None:
        """VLLM 0.32 ignores reports of jobs from before a reset; their slots wait for them."""
        for job_id in self._reset_fence.keys() & completed.keys():
            self._reset_fence[job_id] -= completed[job_id]
            if self._reset_fence[job_id] <= 0:
                del self._reset_fence[job_id]
                if not self._reset_fence:
                    self._manager.flushed()

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping without requests."""
        return bool(self._reset_fence) or super().has_pending_push_work()

    def shutdown(self) -> None:
        """Close the tiers, the arena, what reads adapters and what logs heat."""
        self._adapters.close()
        if self._heat_watch is not None:
            self._heat_watch.close()
        super().shutdown()

    # Metrics ----------------------------------------------------------------

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """API server process: definitions, from the user's configuration.

        Raises:
            ConfigError: as in ``__init__``.

        """
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        load(extra, os.environ)
        return super().build_prom_metrics(
            _with_extra(vllm_config, {**extra, **_SPEC}),
            metric_types,
            labelnames,
            per_engine_labelvalues,
        )


def _with_own_extra(vllm_config: Any, kv_cache_config: Any, loaded: Loaded) -> Any:
    """VLLM's configuration with the extra configuration that its own code shall see."""
    settings = loaded.config
    extra: dict[str, Any] = {
        **_SPEC,
        "blocks_per_chunk": 1,
        "offload_prompt_only": settings.offload_prompt_only,
        "self_describing_kv_events": settings.self_describing_kv_events,
        # True for "auto" too: the flag only says that the layout may be canonical.
        "canonical_layout": settings.canonical_layout is not False,
        CONTEXT: Context(loaded, vllm_config, kv_cache_config),
    }
    plain = build_offloading_config(_with_extra(vllm_config, extra), kv_cache_config)
    tokens = [group.tokens_per_block for group in plain.groups]
    extra["blocks_per_chunk"] = resolve_blocks_per_chunk(settings, tokens)
    check_chunks(settings, extra["blocks_per_chunk"], kv_cache_config)
    check_max_tokens(settings, max(tokens) * extra["blocks_per_chunk"])
    return _with_extra(vllm_config, extra)


def _with_extra(vllm_config: Any, extra: dict[str, Any]) -> Any:
    """A shallow copy that differs in ``kv_connector_extra_config`` only."""
    transfer = copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = extra
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed
