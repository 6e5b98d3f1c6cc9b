"""What kvtiers relies on in vLLM, as data.

Two readers: ``check_runtime`` looks at the vLLM that is imported, so that an
engine refuses to start instead of failing in the middle of a request;
``check_sources`` reads a folder of ``.py`` files, so that CI notices what a
release changes without installing it. Orders of calls and attributes of
instances are visible to the second only.

A new reliance on vLLM is a new line here, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvtiers.connector.contract_kinds import (
    Class,
    DuckType,
    Either,
    Entry,
    Function,
    Lacks,
    Method,
    Named,
    Order,
    Problem,
    Says,
    overridden,
)
from kvtiers.connector.contract_sources import SourceTree

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFF = f"{_V1}.offloading"
_BASE = "vllm.v1.kv_offload.base"
_SCHED = "vllm.v1.core.sched.scheduler"
_OFF_SCHED = f"{_OFF}.scheduler"
_ENGINE = "vllm.v1.engine.core"

# 0.33 moved the bodies behind methods that take the manager's lock.
_BUILD_META = (
    "OffloadingConnectorScheduler._build_connector_meta",
    "OffloadingConnectorScheduler.build_connector_meta",
)
_UPDATE_OUTPUT = (
    "OffloadingConnectorScheduler._update_connector_output",
    "OffloadingConnectorScheduler.update_connector_output",
)
_RESET = (
    "OffloadingConnectorScheduler._reset_cache",
    "OffloadingConnectorScheduler.reset_cache",
)
_ALLOC = ("OffloadingConnectorScheduler.update_state_after_alloc",)

CONNECTOR = Class(
    f"{_V1}.offloading_connector",
    "OffloadingConnector",
    "TieredKVConnector is a subclass of it",
    attributes="connector_scheduler connector_worker _connector_metadata _kv_cache_config "
    "_kv_cache_manager _vllm_config _role",
    subclassed=True,
    methods=(
        Method("__init__", "vllm_config role kv_cache_config", "built by super().__init__"),
        overridden("on_new_request", "request", "promotions start on arrival"),
        overridden(
            "get_num_new_matched_tokens",
            "request num_computed_tokens",
            "load or recompute is decided here",
        ),
        overridden(
            "_max_loadable_tokens", "request num_computed_tokens", "truncates a load to what pays"
        ),
        overridden(
            "update_state_after_alloc",
            "request blocks num_external_tokens",
            "accesses are counted here, once per admission",
        ),
        overridden("build_connector_meta", "scheduler_output", "the end of a scheduler step"),
        overridden(
            "bind_connector_metadata",
            "connector_metadata",
            "the heat probe learns of a step before the model runs",
        ),
        overridden(
            "update_connector_output",
            "connector_output",
            "failed stores are invalidated before vLLM completes them",
        ),
        overridden(
            "get_transfer_results",
            "finished_req_ids",
            "names the requests whose load failed, for every kind of model",
        ),
        overridden("get_finished", "finished_req_ids", "base of get_transfer_results"),
        overridden("build_connector_worker_meta", "", "carries bad slots to the scheduler"),
        overridden("request_finished_all_groups", "request block_ids", "the policy's on_finish"),
        overridden("request_finished", "request block_ids", "the same for one group"),
        overridden("reset_cache", "", "moves to a private epoch of the namespace"),
        overridden("get_kv_connector_stats", "", "metrics of the tiers"),
        overridden("take_events", "", "a step's output is here: how long it took"),
        overridden("build_kv_connector_stats", "data", "metrics of the tiers"),
        overridden(
            "build_prom_metrics",
            "vllm_config metric_types labelnames per_engine_labelvalues",
            "metrics of the tiers",
        ),
        overridden("get_handshake_metadata", "", "workers tell the scheduler of their arena views"),
        overridden("set_xfer_handshake_metadata_pp_aware", "metadata", "the other end of it"),
        overridden("bind_kv_cache_manager", "kv_cache_manager", "what the GPU tier holds"),
        overridden("has_pending_push_work", "", "keeps an idle engine stepping while jobs run"),
        overridden("register_kv_caches", "kv_caches", "the worker's caches"),
        overridden("handle_preemptions", "kv_connector_metadata", "flushes before block reuse"),
        overridden("start_load_kv", "forward_context", "submits stores, then loads"),
        overridden("shutdown", "", "closes tiers and arena"),
    ),
)

OFFLOAD_SCHEDULER = Class(
    _OFF_SCHED,
    "OffloadingConnectorScheduler",
    "the connector reads its jobs and requests",
    attributes="manager _jobs _req_status _current_batch_allocated_block_ids "
    "_current_batch_load_jobs _current_batch_jobs_to_flush _stale_job_threshold config",
    methods=(
        Method(
            "_reachable_store_block_mask",
            "group_config start_chunk_idx end_chunk_idx final_segment_end_chunk_idx "
            "reachable_boundaries",
            "of a window, what ends at max_tokens is offered too",
        ),
    ),
)

ENTRIES: tuple[Entry, ...] = (
    CONNECTOR,
    OFFLOAD_SCHEDULER,
    Class(
        _OFF_SCHED,
        "TransferJobStatus",
        "keys and owner of a job that failed",
        fields="req_id pending_count keys is_store",
    ),
    Class(
        _OFF_SCHED,
        "RequestOffloadState",
        "keys of a request, and whether it still has jobs",
        fields="req req_context transfer_jobs group_states num_locally_computed_tokens",
    ),
    Class(
        _OFF_SCHED,
        "RequestGroupState",
        "what is recomputed after a failed load is stored; what was turned away is offered again",
        fields="offload_keys block_ids next_stored_chunk_idx",
    ),
    Class(
        f"{_OFF}.worker",
        "OffloadingConnectorWorker",
        "our worker is behind it, failed jobs are told by its load jobs",
        attributes="worker _load_jobs",
    ),
    Class(
        f"{_OFF}.common",
        "OffloadingWorkerMetadata",
        "ours adds failed jobs and heat to it",
        fields="completed_jobs transfer_stats",
        built=True,
        methods=(
            overridden("aggregate", "other", "reports of several workers are merged"),
            Method("mark_completed", "job_id", "a worker's report of a job"),
        ),
    ),
    Class(
        f"{_OFF}.common",
        "OffloadingConnectorMetadata",
        "a step's jobs, as the worker gets them",
        fields="load_jobs store_jobs jobs_to_flush",
    ),
    Class(f"{_OFF}.common", "TransferJob", "what a job copies", fields="req_id src_spec dst_spec"),
    Class(
        f"{_V1}.base",
        "KVConnectorTransferResults",
        "how a failed load is reported",
        fields="finished_sending finished_recving failed_recving",
    ),
    Class(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        "how worker metadata reaches the scheduler",
        fields="kv_connector_worker_meta failed_recving finished_recving",
    ),
    Class(f"{_V1}.base", "KVConnectorMetadata", "what build_connector_meta answers with"),
    Class(
        f"{_V1}.base",
        "KVConnectorHandshakeMetadata",
        "base class of what workers tell at start",
    ),
    Class(
        f"{_V1}.base",
        "KVConnectorWorkerMetadata",
        "type of what workers report",
        methods=(overridden("aggregate", "other", "reports of several workers are merged"),),
        subclassed=True,
    ),
    Class(
        f"{_V1}.base",
        "KVConnectorRole",
        "scheduler and worker build different halves",
        fields="SCHEDULER WORKER",
    ),
    Class(
        "vllm.config.kv_transfer",
        "KVTransferConfig",
        "our configuration, and the failure policy we set",
        fields="kv_load_failure_policy kv_connector_extra_config engine_id kv_connector kv_role",
    ),
    Class(
        "vllm.v1.request",
        "Request",
        "what is known of a request when it arrives",
        attributes="request_id block_hashes num_tokens num_prompt_tokens num_output_tokens "
        "kv_transfer_params kv_hints cache_salt lora_request session_id skip_reading_prefix_cache "
        "is_finished get_finished_reason num_preemptions num_computed_tokens status",
    ),
    Class(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "which requests a step starts, preempts and ends",
        fields="scheduled_new_reqs scheduled_cached_reqs preempted_req_ids finished_req_ids "
        "num_scheduled_tokens total_num_scheduled_tokens",
    ),
    Class(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        "what a step computes of a request that it starts",
        fields="req_id num_computed_tokens",
    ),
    Class(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        "what a step computes of the others",
        fields="req_ids num_computed_tokens",
    ),
    Class("vllm.v1.request", "RequestStatus", "who computes a prompt now", fields="RUNNING"),
    Class(
        _BASE,
        "OffloadingSpec",
        "ours makes the manager and the worker",
        attributes="config extra_config blocks_per_chunk tokens_per_hash tokens_per_block "
        "replicated_layout offload_prompt_only kv_events_config",
        subclassed=True,
        methods=(
            Method("__init__", "config", "called by super().__init__"),
            overridden("get_manager", "", "our manager"),
            overridden("get_worker", "kv_caches", "our worker"),
            overridden("build_metric_definitions", "extra_config", "metrics of the tiers"),
        ),
    ),
    Class(
        _BASE,
        "OffloadingManager",
        "ours adapts the hierarchy",
        subclassed=True,
        methods=(
            overridden("lookup", "key req_context", "answers from the directory"),
            overridden("get_load_source", "key req_context", "tells which tier served a hit"),
            overridden("prepare_load", "keys req_context", "pins slots"),
            overridden("touch", "keys req_context", "recency from vLLM"),
            overridden("complete_load", "keys req_context", "unpins slots"),
            overridden("prepare_store", "keys req_context", "admits and evicts"),
            overridden("complete_store", "keys req_context success", "publishes chunks"),
            overridden("on_new_request", "req_context", "per-request store policy"),
            overridden("on_request_finished", "req_context", "drops per-request state"),
            overridden("take_events", "", "KV events of the CPU tier"),
            overridden("on_schedule_end", "context", "starts what the step asked for"),
            overridden("has_pending_work", "", "keeps an idle engine stepping"),
            overridden("reset_cache", "", "forgets everything"),
            overridden("get_stats", "", "metrics of the tiers"),
            overridden("shutdown", "", "closes the hierarchy"),
        ),
    ),
    Class(
        _BASE,
        "OffloadingWorker",
        "ours copies between the caches and the arena",
        subclassed=True,
        methods=(
            overridden("submit_store", "job_id src_spec dst_spec", "GPU to arena"),
            overridden("submit_load", "job_id src_spec dst_spec", "arena to GPU", "expedited"),
            overridden("get_finished", "", "completions"),
            overridden("wait", "job_ids", "fences block reuse"),
            overridden("shutdown", "", "stops the copies"),
        ),
    ),
    Class(
        _BASE,
        "TransferResult",
        "how our worker reports a job",
        fields="job_id success transfer_size transfer_time",
        built=True,
    ),
    Class(
        _BASE,
        "ReqContext",
        "what the manager is told of a request",
        fields="req_id kv_transfer_params kv_hints",
        methods=(
            Method("get_offload_key_position", "key", "a chunk's place in its prefix"),
            Method("get_state", "cls", "our state of a request"),
            Method("set_state", "val", "our state of a request"),
        ),
    ),
    Class(_BASE, "LookupResult", "answers of lookup", fields="MISS HIT HIT_PENDING RETRY"),
    Class(
        _BASE,
        "OffloadPolicy",
        "chunks below the store threshold are offered again",
        fields="CHUNK_LEVEL REQUEST_LEVEL",
    ),
    Class(
        _BASE,
        "RequestOffloadingContext",
        "answer of on_new_request",
        fields="policy",
        built=True,
    ),
    Class(
        _BASE,
        "PrepareStoreOutput",
        "answer of prepare_store",
        fields="keys_to_store store_spec evicted_keys",
        built=True,
    ),
    Class(
        _BASE,
        "OffloadingEvent",
        "KV events of the CPU tier",
        fields="keys medium removed",
        built=True,
    ),
    Class(_BASE, "Medium", "KV events of the CPU tier", fields="CPU"),
    Class(
        _BASE,
        "ScheduleEndContext",
        "argument of on_schedule_end",
        fields="new_req_ids preempted_req_ids",
    ),
    Class(_BASE, "LoadStoreSpec", "type of a job's two ends"),
    Class(
        _BASE,
        "BlockIDsLoadStoreSpec",
        "base of both of vLLM's ends of a job",
        attributes="block_ids",
        methods=(Method("__init__", "block_ids", "called by super().__init__"),),
    ),
    Class(
        _BASE,
        "GPULoadStoreSpec",
        "which blocks a job copies, per group",
        attributes="block_ids group_sizes block_indices",
    ),
    Class(
        "vllm.v1.kv_offload.cpu.common",
        "CPULoadStoreSpec",
        "which arena slots a job copies; vLLM's own CPU worker reads it",
        attributes="block_ids",
        methods=(Method("__init__", "block_ids", "made by prepare_load and prepare_store"),),
    ),
    Class(_BASE, "CanonicalKVCaches", "the worker's caches", fields="tensors group_data_refs"),
    Class(_BASE, "CanonicalKVCacheTensor", "one cache tensor", fields="tensor page_size_bytes"),
    Class(
        _BASE,
        "CanonicalKVCacheRef",
        "where a layer's page lies",
        fields="tensor_idx page_size_bytes mapping",
    ),
    Class(
        _BASE,
        "CanonicalPageMapping",
        "the canonical layout, copied run by run",
        fields="canonical_page_size_bytes local_page_size_bytes runs num_writers writer_index "
        "parallelism_agnostic",
        methods=(Method("is_writer", "block_id", "one of several equal ranks writes"),),
    ),
    Class(
        _BASE,
        "CopyRun",
        "one strided copy of a canonical page",
        fields="local_offset canonical_offset fragment_size num_fragments local_stride "
        "canonical_stride",
    ),
    Class(_BASE, "OffloadingMetricMetadata", "type of all three below", fields="documentation"),
    Class(
        _BASE,
        "OffloadingCounterMetadata",
        "definition of a counter",
        fields="documentation labelnames",
        built=True,
    ),
    Class(
        _BASE,
        "OffloadingGaugeMetadata",
        "definition of a gauge",
        fields="documentation labelnames",
        built=True,
    ),
    Class(
        _BASE,
        "OffloadingHistogramMetadata",
        "definition of a histogram",
        fields="documentation labelnames buckets",
        built=True,
    ),
    Named(_BASE, "OffloadKey", "type of vLLM's keys"),
    Function(_BASE, Method("make_offload_key", "block_hash group_idx", "keys from block hashes")),
    Function(_BASE, Method("get_offload_block_hash", "key", "block hash of a key")),
    Function(_BASE, Method("get_offload_group_idx", "key", "KV-cache group of a key")),
    Class(
        f"{_OFF}.metrics",
        "OffloadingConnectorStats",
        "how metrics reach vLLM's endpoint",
        methods=(
            Method("increase_counter", "counter_name counter_increase_value labelvalues", "metric"),
            Method("set_gauge", "gauge_name gauge_value labelvalues", "metric"),
            Method("observe_histogram", "histogram_name histogram_value labelvalues", "metric"),
            Method("aggregate", "other", "metrics of a step are merged"),
            Method("is_empty", "", "nothing to report"),
        ),
    ),
    Class(
        f"{_OFF}.metrics",
        "OffloadPromMetrics",
        "makes the Prometheus objects from the spec's definitions",
        methods=(
            Method(
                "__init__", "vllm_config metric_types labelnames per_engine_labelvalues", "metrics"
            ),
        ),
    ),
    Class(
        "vllm.v1.kv_offload.factory",
        "OffloadingSpecFactory",
        "finds our spec by name",
        methods=(
            Method("register_spec", "name module_path class_name", "registers our spec"),
            Method("get_spec_cls", "extra_config", "vLLM looks it up twice"),
            Method("create_spec", "config", "called by OffloadingConnector.__init__"),
        ),
    ),
    Class(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        "finds our connector by name",
        methods=(
            Method("register_connector", "name module_path class_name", "the plugin's register()"),
        ),
    ),
    Function(
        "vllm.config.vllm",
        Method("get_current_vllm_config_or_none", "", "the policy above MultiConnector"),
    ),
    Class(
        "vllm.v1.kv_cache_interface",
        "MambaSpec",
        "layers that keep a state, for which chunks of several blocks are refused",
    ),
    Class(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec",
        "layers that see the whole prefix, whose attention can be measured",
    ),
    Class(
        "vllm.v1.kv_cache_interface",
        "KVCacheGroupSpec",
        "which layers share a block table",
        fields="layer_names kv_cache_spec",
    ),
    Function(
        f"{_OFF}.config",
        Method("build_offloading_config", "vllm_config kv_cache_config", "facts of a namespace"),
    ),
    Function(
        f"{_OFF}.config",
        Method("get_offloading_group_ids", "kv_cache_config", "groups that have chunks"),
    ),
    Function(
        f"{_OFF}.canonical_mapping",
        Method("canonical_format_id", "kv_cache_layout", "names the canonical format"),
    ),
    Class(
        "vllm.v1.kv_offload.config",
        "OffloadingConfig",
        "facts of a namespace, size of a chunk",
        fields="groups worker_kv_bytes_per_block enable_kv_cache_events extra_config engine_id "
        "model cache parallel replicated_layout canonical_layout kv_cache_layout",
    ),
    Class(
        "vllm.v1.kv_offload.config",
        "OffloadingGroupConfig",
        "facts of a namespace",
        fields="tokens_per_block layer_names group_id",
    ),
    Class(
        "vllm.v1.kv_offload.config",
        "OffloadingCacheConfig",
        "facts of a namespace",
        fields="tokens_per_hash blocks_per_chunk",
    ),
    Class(
        "vllm.v1.kv_offload.config",
        "OffloadingParallelConfig",
        "facts of a namespace, and which slot is this worker's",
        fields="rank world_size tp_size pp_size pcp_size dcp_size data_parallel_index "
        "is_parallelism_agnostic",
    ),
    Class(
        "vllm.v1.metrics.cache_hit_source",
        "CacheHitSource",
        "tells which tier served a hit",
        fields="HOST DISK EXTERNAL_UNSPECIFIED",
    ),
    Class(
        "vllm.v1.core.block_pool",
        "BlockPool",
        "what the GPU holds already is not promoted",
        methods=(
            Method("get_cached_block", "block_hash kv_cache_group_ids", "a look into the GPU tier"),
            Method("get_usage", "", "whether offload_threshold is passed"),
            Method("touch", "blocks", "soft pins: out of the queue of what is evicted next"),
            Method("free_blocks", "ordered_blocks", "and back in, at its end"),
        ),
        runtime=False,
    ),
    Class(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        "holds the block pool",
        attributes="block_pool",
        runtime=False,
    ),
    Function(
        "vllm.v1.attention.backends.cpu_attn",
        Method(
            "_get_attn_isa",
            "dtype block_size head_size kv_cache_dtype",
            "CPU kernels lay out keys by instruction set: part of the namespace",
        ),
        runtime=False,
    ),
    Class(
        "vllm.v1.kv_offload.cpu.gpu_worker",
        "CPUOffloadingWorker",
        "copies between GPU and arena",
        methods=(
            Method(
                "__init__",
                "kv_caches blocks_per_chunk num_cpu_chunks mmap_region canonical_layout",
                "our worker on CUDA is a thin layer over it",
            ),
        ),
        runtime=False,
    ),
    Function(
        "vllm.v1.kv_offload.cpu.host_register",
        Method("host_unregister", "ptr", "undoes the pinning that vLLM's worker did"),
        runtime=False,
    ),
    Function(
        "vllm.distributed.parallel_state",
        Method("get_inner_dp_world_group", "", "the workers of one engine meet in it"),
    ),
    Function(
        "vllm.distributed.parallel_state",
        Method("get_world_group", "", "the same, where there is no data parallelism"),
    ),
    Class(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager",
        "what a worker loads is noticed here, since nobody tells a connector",
        methods=(Method("_load_adapter", "lora_request", "reads an adapter's files; wrapped"),),
        runtime=False,
    ),
    Class(
        "vllm.lora.request",
        "LoRARequest",
        "which adapter a request has",
        fields="lora_name lora_int_id lora_path load_inplace",
        runtime=False,
    ),
    Class(
        "vllm.platforms.interface",
        "Platform",
        "which copy worker and which kernels this machine has",
        attributes="device_type is_cuda_alike is_xpu",
    ),
    DuckType(
        "vllm.v1.kv_offload.cpu.gpu_worker",
        frozenset({"region", "mmap_region", "self._mmap_region"}),
        frozenset(
            [
                "_base",
                "_row_stride",
                "cleanup",
                "cpu_page_size",
                "create_next_canonical_view",
                "create_next_worker_view",
                "is_pinned",
                "iter_worker_slot_ranges",
                "page_size",
                "pinned_addresses",
                "rank",
                "total_size_bytes",
            ]
        ),
        "our arena stands in for SharedOffloadRegion",
    ),
)

CALL_ORDER: tuple[Entry, ...] = (
    Says(
        "a data-parallel engine's process says so in its title",
        "vllm.v1.engine.core",
        ("EngineCoreProc.run_engine_core",),
        "the engines that share a host's memory are counted by it",
        text="process_title = f'EngineCore_DP{dp_rank}'",
    ),
    Says(
        "an adapter's name and path are in a block's hash, its content is not",
        "vllm.v1.core.kv_cache_utils",
        ("_gen_lora_extra_hash_keys",),
        "the connector puts the content into its keys",
        text="[('lora', lora_request.lora_name, lora_request.lora_path)]",
    ),
    Says(
        "transfers must be reported as good",
        f"{_OFF}.worker",
        ("OffloadingConnectorWorker.get_finished",),
        "vLLM's worker takes the engine down otherwise, so ours keeps failed jobs aside",
        text="assert transfer_result.success",
    ),
    Says(
        "every store completes as good",
        _OFF_SCHED,
        _UPDATE_OUTPUT,
        "failed stores have no channel: the connector invalidates them before super()",
        text="self.manager.complete_store(job_status.keys, req_status.req_context)",
    ),
    Order(
        "the failure policy is read after the connector exists",
        _SCHED,
        ("Scheduler.__init__",),
        "the connector's __init__ sets kv_load_failure_policy to recompute",
        before="KVConnectorFactory.create_connector",
        after="kv_transfer_config.kv_load_failure_policy",
    ),
    Says(
        "the failure policy decides",
        _SCHED,
        ("Scheduler.__init__",),
        "a failed load must be recomputed, not end the request",
        text="self.recompute_kv_load_failures = kv_load_failure_policy == 'recompute'",
    ),
    Order(
        "workers are asked for handshake metadata after the scheduler exists",
        "vllm.v1.engine.core",
        ("EngineCore.__init__",),
        "the scheduler's half makes the arena before the workers' answers arrive",
        before="Scheduler",
        after="get_kv_connector_handshake_metadata|_set_kv_connector_handshake_metadata",
    ),
    Order(
        "handshake metadata goes from the workers to the connector",
        "vllm.v1.engine.core",
        ("EngineCore._set_kv_connector_handshake_metadata", "EngineCore.__init__"),
        "the scheduler's half learns of the workers' views before the first step",
        before="get_kv_connector_handshake_metadata",
        after="set_xfer_handshake_metadata_pp_aware",
    ),
    Order(
        "a hit is looked up before blocks are allocated for it",
        _SCHED,
        ("Scheduler.schedule",),
        "the load decision comes before the access is counted",
        before="connector.get_num_new_matched_tokens",
        after="connector.update_state_after_alloc",
    ),
    Order(
        "the step's metadata comes last",
        _SCHED,
        ("Scheduler.schedule",),
        "all loads of a step are known when its jobs are built",
        before="connector.update_state_after_alloc",
        after="_build_kv_connector_meta",
    ),
    Order(
        "a failed load is handled before the connector hears of the step",
        _SCHED,
        ("Scheduler.update_from_output",),
        "vLLM asks again for a failed request, so its keys must miss by then",
        before="_handle_failed_recving",
        after="_update_from_kv_xfer_finished",
    ),
    Order(
        "the connector hears of the step before its requests go on",
        _SCHED,
        ("Scheduler._update_from_kv_xfer_finished",),
        "bad slots are invalidated before a finished load is used",
        before="connector.update_connector_output",
        after="kv_connector_output.finished_recving",
    ),
    Order(
        "events are taken of every step, after its output",
        _SCHED,
        ("Scheduler.update_from_output",),
        "a step's time ends there",
        before="_update_from_kv_xfer_finished",
        after="connector.take_events",
    ),
    Order(
        "stores are built after the step's requests are known",
        _OFF_SCHED,
        _BUILD_META,
        "a step's blocks are bound to chunks before they are stored",
        before="_update_req_states",
        after="_build_partial_tail_store_jobs|_build_store_jobs",
    ),
    Order(
        "requests end after their last store",
        _OFF_SCHED,
        _BUILD_META,
        "per-request state is dropped in on_request_finished",
        before="_build_store_jobs",
        after="manager.on_request_finished",
    ),
    Order(
        "flushed stores are submitted before they are waited for",
        f"{_OFF}.worker",
        ("OffloadingConnectorWorker.handle_preemptions",),
        "our worker's wait must find them",
        before="worker.submit_store",
        after="worker.wait",
    ),
    Order(
        "deferred stores go before loads",
        f"{_OFF}.worker",
        ("OffloadingConnectorWorker.start_kv_transfers",),
        "a load must not overwrite blocks whose store is still to be submitted",
        before="worker.submit_store",
        after="worker.submit_load",
    ),
    Order(
        "blocks are flushed before a step loads or computes (model runner V1)",
        "vllm.v1.worker.gpu_model_runner",
        ("GPUModelRunner.execute_model",),
        "a reused block must not be stored with its new content",
        before="handle_preemptions",
        after="maybe_get_kv_connector_output",
    ),
    Order(
        "blocks are flushed before a step loads or computes (model runner V2)",
        "vllm.v1.worker.gpu.kv_connector",
        ("ActiveKVConnector.pre_forward",),
        "a reused block must not be stored with its new content",
        before="kv_connector.handle_preemptions",
        after="_start_load_kv",
    ),
    Order(
        "results are taken before worker metadata (model runner V1)",
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        ("KVConnectorModelRunnerMixin._get_kv_connector_output",),
        "a failed request and its bad slots travel in one report",
        before="kv_connector.get_transfer_results",
        after="kv_connector.build_connector_worker_meta",
    ),
    Order(
        "results are taken before worker metadata (model runner V2)",
        "vllm.v1.worker.gpu.kv_connector",
        ("ActiveKVConnector.post_forward",),
        "a failed request and its bad slots travel in one report",
        before="kv_connector.get_transfer_results",
        after="kv_connector.build_connector_worker_meta",
    ),
    Says(
        "reports of stale jobs are told by the threshold",
        _OFF_SCHED,
        _UPDATE_OUTPUT,
        "the connector releases their quarantined slots on the same test",
        text="job_id < self._stale_job_threshold",
    ),
    Order(
        "a reset flushes the jobs in flight, then empties the manager",
        _OFF_SCHED,
        _RESET,
        "slots of jobs in flight are quarantined in the manager's reset_cache",
        before="_current_batch_jobs_to_flush.update",
        after="manager.reset_cache",
    ),
    Order(
        "a reset makes the jobs in flight stale",
        _OFF_SCHED,
        _RESET,
        "the threshold tells quarantined jobs from new ones",
        before="manager.reset_cache",
        after="_stale_job_threshold",
    ),
    Says(
        "sleep clears caches, as a pause does",
        _ENGINE,
        ("EngineCore.sleep",),
        "what was stored before must not be served with the weights that come after",
        text="clear_prefix_cache = level >= 1",
    ),
    Says(
        "a pause that clears caches resets all of them",
        _ENGINE,
        ("EngineCore._finish_pause",),
        "the connector hears of new weights in no other way",
        text="self._reset_caches()",
    ),
    Says(
        "resetting all caches resets the connector",
        _ENGINE,
        ("EngineCore._reset_caches",),
        "the connector hears of new weights in no other way",
        text="self.reset_prefix_cache(reset_running_requests=reset_running_requests, "
        "reset_connector=reset_connector)",
    ),
    Says(
        "copies under way end before the device's memory is taken away",
        "vllm.v1.worker.gpu_worker",
        ("Worker.sleep",),
        "a store that still reads it would store what is not KV any more",
        text="torch.accelerator.synchronize()",
    ),
)

SCHEDULE_END = Either(
    "on_schedule_end and the step's stores",
    {
        "0.32": Order(
            "", _OFF_SCHED, _BUILD_META, "", "manager.on_schedule_end", "_build_store_jobs"
        ),
        "0.33": Order(
            "", _OFF_SCHED, _BUILD_META, "", "_build_store_jobs", "manager.on_schedule_end"
        ),
    },
    "the manager starts the step's promotions there and takes nothing of the stores for granted",
)
STALE_JOBS = Either(
    "reports of jobs that a reset made stale",
    {
        "0.32": Lacks("", _OFF_SCHED, _UPDATE_OUTPUT, "", "manager.on_reset_flushed"),
        "0.33": Order(
            "", _OFF_SCHED, _UPDATE_OUTPUT, "", "_reset_fence", "manager.on_reset_flushed"
        ),
    },
    "0.32 skips them, so the connector counts them itself; 0.33 calls on_reset_flushed",
)
EARLY_RETURN = Either(
    "blocks that another connector loads into",
    {
        "0.32": Order(
            "",
            _OFF_SCHED,
            _ALLOC,
            "",
            "num_external_tokens",
            "_current_batch_allocated_block_ids",
        ),
        "0.33": Order(
            "",
            _OFF_SCHED,
            _ALLOC,
            "",
            "_current_batch_allocated_block_ids",
            "num_external_tokens",
        ),
    },
    "0.32 forgets them under MultiConnector, so the connector adds them itself",
)
RELEASE_DIFFERENCES = (SCHEDULE_END, STALE_JOBS, EARLY_RETURN)

CONTRACT: tuple[Entry, ...] = (*ENTRIES, *CALL_ORDER, *RELEASE_DIFFERENCES)


def check_runtime(contract: Iterable[Entry] = CONTRACT) -> list[Problem]:
    """Hold the imported vLLM against the contract. Milliseconds once it is imported."""
    return [problem for entry in contract for problem in entry.at_runtime()]


def check_sources(root: Path, contract: Iterable[Entry] = CONTRACT) -> list[Problem]:
    """Hold the ``.py`` files below ``root/vllm`` against the contract."""
    tree = SourceTree(root)
    return [problem for entry in contract for problem in entry.in_sources(tree)]
