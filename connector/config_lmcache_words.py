"""LMCache's configuration words (release 0.5.6), and what does the work of each here.

Every word that LMCache reads is in exactly one of these tables; a test compares them with
the LMCache that is installed. So a word that somebody wrote for LMCache is either taken
over or told, and none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Counterpart:
    """What one of LMCache's words is here.

    Attributes:
        sets: the keys that it sets, as the configuration reference names them.
        means: how its value is read.

    """

    sets: tuple[str, ...]
    means: str


# The ways in which KV leaves the host, by any of the words for a remote backend.
_REMOTE = ("redis.url", "fs.path", "fs[url].path")

COUNTERPARTS: Mapping[str, Counterpart] = {
    "chunk_size": Counterpart(("chunk_size",), "tokens, in both"),
    "local_cpu": Counterpart(
        ("tiers",),
        "true: as always here; false changes nothing, since all KV comes and goes through the "
        "cpu tier",
    ),
    "max_local_cpu_size": Counterpart(
        ("cpu.capacity",),
        "GiB, though LMCache calls them GB; for each worker there, for the whole engine here",
    ),
    "local_disk": Counterpart(
        ("fs.path",),
        "a folder, also as file://; of several the first; only with max_local_disk_size, as in "
        "LMCache",
    ),
    "max_local_disk_size": Counterpart(
        ("fs.capacity",), "GiB; for each worker there, for the whole engine here; 0 is no disk"
    ),
    "remote_url": Counterpart(
        _REMOTE,
        "redis://, rediss://, unix://, resp:// and valkey:// are a redis tier, fs:// is an fs "
        "tier in a mounted folder, s3:// an fs tier in the bucket",
    ),
    "remote_storage_plugins": Counterpart(
        ("redis.url", "fs.path"), "`redis` and `fs`, with the URL or folder from extra_config"
    ),
    "blocking_timeout_secs": Counterpart(
        ("redis.deadline", "fs.deadline", "fs[url].deadline"),
        "seconds, of the remote backend's tier",
    ),
    "cache_policy": Counterpart(("policy",), "the policy of that name, in any case"),
    "save_decode_cache": Counterpart(("offload_prompt_only",), "its opposite"),
    "extra_config": Counterpart(
        (
            "fs.direct",
            "fs.threads",
            "fs.path",
            "fs[url].storage_options",
            "redis.url",
            "redis.username",
            "redis.password",
            "redis.database",
        ),
        "use_odirect and disk_io_threads of the disk; fs_connector_use_odirect; redis_url, "
        "fs_base_path and remote_storage_plugin.* of plugins; username, password, valkey_username, "
        "valkey_password, valkey_database and tls_enable of resp:// and valkey://; s3_region, "
        "aws_access_key_id and aws_secret_access_key of s3://; nothing else has a counterpart",
    ),
}

# What does the job here, or why nothing does -> the words that it is said of.
_JOBS: Mapping[str, tuple[str, ...]] = {
    "the cpu tier's capacity may be a share of the free memory, such as 50%": (
        "reserve_local_cpu_size",
    ),
    "memory is ordinary pages, taken as it is first used": (
        "local_cpu_use_hugepages",
        "enable_lazy_memory_allocator",
        "lazy_memory_initial_ratio",
        "lazy_memory_expand_trigger_ratio",
        "lazy_memory_step_ratio",
        "lazy_memory_safe_size",
        "numa_mode",
    ),
    "a tier has one folder; join disks with RAID or LVM": (
        "local_disk_path_sharding",
        "gds_path_sharding",
    ),
    "KV is stored as it is": ("remote_serde",),
    "chunks move whole, with all layers, and loads never block a step": (
        "use_layerwise",
        "use_gpu_connector_v3",
        "save_unfull_chunk",
        "enable_async_loading",
        "discard_partial_chunks",
        "lmcache.max_tokens_per_load",
    ),
    "vLLM hashes prefixes; see its --prefix-caching-hash-algo": ("pre_caching_hash_algorithm",),
    "only an equal prefix is reused, never the middle of a prompt": (
        "enable_blending",
        "blend_recompute_ratios",
        "blend_thresholds",
        "blend_check_layers",
        "blend_min_tokens",
        "blend_special_str",
    ),
    "the policy decides what is kept and where, and every hit is loaded": (
        "retrieve_locations",
        "store_location",
        "priority_limit",
        "min_retrieve_tokens",
        "hit_miss_ratio",
        "skip_last_n_tokens",
    ),
    "engines share KV through a redis tier, or an fs tier on a shared mount": (
        "enable_p2p",
        "p2p_host",
        "p2p_init_ports",
        "p2p_lookup_ports",
        "transfer_channel",
    ),
    "tiers run inside the engine, without a server or a controller": (
        "mp_host",
        "mp_port",
        "enable_controller",
        "lmcache_instance_id",
        "controller_pull_url",
        "controller_reply_url",
        "lmcache_worker_ports",
        "lmcache_worker_ids",
        "lmcache_worker_heartbeat_delay_time",
        "lmcache_worker_heartbeat_time",
        "lmcache.mp.host",
        "lmcache.mp.port",
        "lmcache.mp.server_urls",
        "lmcache.mp.lazy_offload",
        "lmcache.mp.transfer_intermediate_tensors",
    ),
    "see offload_prompt_only": ("lmcache.mp.save_decode_cache",),
    "see prefetch_window": ("lmcache.mp.eager_prefetch",),
    "the hand-off from prefill to decode is the work of another connector": (
        "enable_pd",
        "pd_role",
        "pd_buffer_size",
        "pd_buffer_device",
        "pd_peer_host",
        "pd_peer_init_port",
        "pd_peer_alloc_port",
        "pd_peer_query_port",
        "pd_proxy_host",
        "pd_proxy_port",
        "pd_allocation_timeout_sec",
        "pd_shutdown_timeout_sec",
        "pd_condition_poll_interval_sec",
        "pd_max_prefill_len",
        "pd_backend_mode",
        "pd_skip_proxy_notification",
        "pd_bidirectional",
    ),
    "disks are read and written through host memory; see the fs tier": (
        "gds_path",
        "gds_buffer_size",
        "use_gds",
        "gds_backend",
        "nixl_backends",
        "nixl_buffer_size",
        "nixl_buffer_device",
        "maru_path",
        "maru_pool_size",
    ),
    "what each tier did is on vLLM's own /metrics": (
        "internal_api_server_enabled",
        "internal_api_server_host",
        "internal_api_server_port_start",
        "internal_api_server_include_index_list",
        "internal_api_server_socket_path_prefix",
        "enable_chunk_statistics",
        "chunk_statistics_auto_start_statistics",
        "chunk_statistics_auto_exit_timeout_hours",
        "chunk_statistics_auto_exit_target_unique_chunks",
        "chunk_statistics_strategy",
        "audit_actual_remote_url",
    ),
    "no script from outside is run in the engine": (
        "script_allowed_imports",
        "run_script_api_enabled",
    ),
    "all tiers are looked up at once, within each one's deadline": (
        "lookup_timeout_ms",
        "external_lookup_client",
        "lookup_server_worker_ids",
        "enable_scheduler_bypass_lookup",
    ),
    "a pin ends with the copy or the request that it is for": (
        "pin_timeout_sec",
        "pin_check_interval_sec",
    ),
    "packages add tiers and policies by entry point": (
        "runtime_plugin_locations",
        "storage_plugins",
    ),
    "vLLM publishes KV events; see its --kv-events-config": ("enable_kv_events",),
    "Python's garbage collector is left as vLLM has it": ("py_enable_gc",),
    "nothing is configured over the network": ("remote_config_url", "app_id"),
    "only KV is kept": (
        "enable_hidden_state_cache",
        "max_hidden_state_cpu_size",
        "hidden_state_layers",
        "hidden_states_retrieve_mode",
    ),
}

WITHOUT_COUNTERPART: Mapping[str, str] = {
    word: job for job, words in _JOBS.items() for word in words
}
"""Word -> what does its job here. With the keys that LMCache's connectors for vLLM read."""

ALIASES: Mapping[str, str] = {
    "controller_url": "controller_pull_url",
    "enable_xpyd": "enable_pd",
    "external_backends": "storage_plugins",
    "lmcache_worker_port": "lmcache_worker_ports",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_port": "pd_peer_init_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "plugin_locations": "runtime_plugin_locations",
}
"""LMCache's older spellings -> today's."""

POLICIES: tuple[str, ...] = ("FIFO", "LFU", "LRU", "MRU")
"""What ``cache_policy`` may be in LMCache."""

REMOTE_SCHEMES: Mapping[str, str] = {
    "lm": "LMCache's own server keeps KV in its memory; a redis tier is shared in the same way",
    "redis-sentinel": "the redis tier takes one server, and no Sentinel",
    "redis-cluster": "the redis tier takes one server, and no cluster",
    "s3": "only s3://BUCKET.s3.REGION.amazonaws.com names a bucket; see the fs tier's 'path'",
    "plugin": "no such plugin here, or no URL or folder for it in extra_config",
    **dict.fromkeys(
        (
            "audit",
            "azure",
            "bigtable",
            "blackhole",
            "eic",
            "external",
            "hf3fs",
            "infinistore",
            "mock",
            "mooncakestore",
            "sagemaker-hyperpod",
        ),
        "there is no such tier; a redis tier or an fs tier may do its job",
    ),
}
"""Schemes of ``remote_url`` without a counterpart -> what does the job."""

# What LMCache keeps in its cache of encoder outputs is set by the same words behind this.
_ENCODER = "ec_"
_NO_ENCODER = "the outputs of encoders are not kept, only KV"

EXTRA_JOBS: Mapping[str, str] = {
    "valkey_mode": "the redis tier takes one server, and no cluster",
    **dict.fromkeys(("valkey_enable_ttl", "valkey_ttl_sec"), "see the redis tier's 'ttl'"),
    "save_only_first_rank": "the engine's workers share one cpu tier",
}
"""Keys in ``extra_config`` without a counterpart -> what does the job, where something does."""


def today(word: str) -> str:
    """The spelling of ``word`` in the tables."""
    return ALIASES.get(word, word)


def is_known(word: str) -> bool:
    """Whether LMCache reads ``word``."""
    return today(word) in COUNTERPARTS or job_of(word) is not None


def job_of(word: str) -> str | None:
    """What does the job of a word without a counterpart; None if it has one, or is none."""
    if word == _ENCODER.rstrip("_") or _is_encoders(word):
        return _NO_ENCODER
    return WITHOUT_COUNTERPART.get(today(word))


def names() -> list[str]:
    """Every word, today's spellings first."""
    return [*COUNTERPARTS, *WITHOUT_COUNTERPART, *ALIASES]


def _is_encoders(word: str) -> bool:
    return word.startswith(_ENCODER) and today(word.removeprefix(_ENCODER)) in {
        *COUNTERPARTS,
        *WITHOUT_COUNTERPART,
    }
