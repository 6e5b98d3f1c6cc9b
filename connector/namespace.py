"""Names what must be equal for the bytes of a chunk to mean the same.

What is in vLLM's block hash already, and therefore not here (read in
``v1/core/kv_cache_utils.py`` of 0.32.0 and 0.33.0): the token ids of the whole
prefix, ``cache_salt`` (in the first block, so in all that follow), the LoRA
adapter's name and path, the hash and offset of each multimodal item, a digest of
prompt embeddings, and the seed of the first block's parent. What is not: a LoRA
adapter's content (``adapters`` puts it into each key), the weights, what the engine
does with images and adapters, and everything about how a block lies in memory.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from kvtiers.tiers.base import Namespace

FORMAT_VERSION = 1
"""Of the chunk's payload as kvtiers lays it out. Raise it with any change."""

_SEEDED_BY_VLLM = frozenset({"sha256", "sha256_cbor"})

# Not the model but where it came from and what wrote its configuration.
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "_attn_implementation"}
)

# Facts of one rank's share. They follow from the TP size and the model, which
# holds the total, so a portable namespace leaves them out.
_RANK_FACTS = frozenset(
    {
        "block_stride_alignment",
        "dcp_sharded",
        "max_tp_shards",
        "num_head_slots",
        "num_kv_heads",
        "page_size_padded",
        "state_content_bytes",
    }
)

# Of vLLM's MultiModalConfig: what changes an item's embeddings.
_MEDIA_OPTIONS = (
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_rate",
)

# Methods of speculation that look the drafts up in the text, so that the KV is the model's own.
_DRAFTS_WITHOUT_A_MODEL = frozenset({"ngram", "ngram_gpu", "suffix"})

# Rotary embeddings whose angles do not depend on max_model_len. LongRoPE's do.
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "mrope", "yarn"})


def build_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    offloading: Any,
    *,
    weights: str | None,
    weights_version: str | None = None,
    portable: bool = False,
    kernel: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Namespace:
    """The namespace of the chunks that one engine makes.

    Args:
        vllm_config: vLLM's ``VllmConfig`` or anything with its attributes, as
            are the next two.
        kv_cache_config: ``KVCacheConfig`` of the engine.
        offloading: ``OffloadingConfig``, vLLM's summary of both.
        weights: ``Fingerprint.value``. None makes a namespace of this engine
            alone: ``shareable`` is False and its id is like no other's.
        weights_version: the user's name for the weights, if given.
        portable: the payload is canonical, equal for every TP size.
        kernel: ``kernel_facts()``; what the attention kernels do to the layout.
        environ: for the hash seed, ``os.environ`` in a live engine.

    """
    facts: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "weights": weights,
        "weights_version": weights_version,
        "model": _model_facts(vllm_config.model_config),
        "media": _media_facts(vllm_config.model_config),
        "speculative": _speculative_facts(getattr(vllm_config, "speculative_config", None)),
        "adapters": _adapter_facts(vllm_config),
        "cache": _cache_facts(vllm_config, offloading),
        "groups": list(_group_facts(kv_cache_config, offloading, portable)),
        "layout": _layout_facts(offloading, portable),
        "kernel": dict(kernel or {}),
        "hash": _hash_facts(vllm_config, environ or {}),
    }
    if weights is None:
        facts["engine"] = offloading.engine_id
    plain = json.loads(_canonical(facts))
    digest = hashlib.sha256(_canonical(plain).encode()).hexdigest()[:32]
    return Namespace(id=digest, facts=plain, shareable=weights is not None)


def shareable_hash(vllm_config: Any, environ: Mapping[str, str]) -> str | None:
    """Why the keys of this engine mean nothing to another one, and what to set.

    None if they do: then equal prompts get equal keys in every replica and
    after a restart.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm in _SEEDED_BY_VLLM or "PYTHONHASHSEED" in environ:
        return None
    return (
        f"prefix_caching_hash_algo={algorithm!r} starts from a random seed in every process, so "
        "no other engine and no later start of this one can find its chunks. Use "
        "--prefix-caching-hash-algo sha256, or set the same PYTHONHASHSEED in the environment "
        "of all engines that share the tier"
    )


def kernel_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """How this machine's attention kernels arrange the inside of a block.

    vLLM's CPU kernels store keys in the tile order of the instruction set they
    run on (AMX, AVX-512, NEON, …), under one and the same layout name, so hosts
    of different kinds must not share chunks. Needs vLLM; call it in the engine.
    """
    from vllm.platforms import current_platform

    facts: dict[str, Any] = {"device": current_platform.device_type}
    if current_platform.device_type != "cpu":
        return facts
    facts["machine"] = platform.machine()
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        # Without the name of the instruction set only this very host is safe.
        return {**facts, "host": platform.node()}
    cache_dtype = vllm_config.cache_config.cache_dtype
    facts["isa"] = sorted(
        {
            _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype)
            for spec in _attention_specs(kv_cache_config)
        }
    )
    return facts


def explain_mismatch(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """One line for each fact that differs: ``cache.block_size: 128 here, 16 there``."""
    here, there = dict(_flatten(ours)), dict(_flatten(theirs))
    absent = "(absent)"
    return [
        f"{name}: {here.get(name, absent)} here, {there.get(name, absent)} there"
        for name in sorted(here.keys() | there.keys())
        if here.get(name, absent) != there.get(name, absent)
    ]


def _model_facts(model: Any) -> dict[str, Any]:
    config = {
        key: value for key, value in model.hf_config.to_dict().items() if key not in _NOT_THE_MODEL
    }
    facts: dict[str, Any] = {
        "architecture": getattr(model, "architecture", None),
        "config": hashlib.sha256(_canonical(config).encode()).hexdigest()[:32],
        "hf_overrides": getattr(model, "hf_overrides", None),
        "dtype": model.dtype,
        "quantization": getattr(model, "quantization", None),
        "quantization_config": getattr(model, "quantization_config", None),
        "model_impl": getattr(model, "model_impl", None),
        "disable_sliding_window": getattr(model, "disable_sliding_window", None),
    }
    if not set(_rope_types(config)) <= _FIXED_ROPES:
        facts["max_model_len"] = model.max_model_len
    return facts


def _media_facts(model: Any) -> dict[str, Any] | None:
    """How an engine prepares images and the like: vLLM hashes what a request says of it only."""
    media = getattr(model, "multimodal_config", None)
    facts = {name: getattr(media, name, None) for name in _MEDIA_OPTIONS}
    if facts["video_pruning_rate"]:
        facts["video_pruning_method"] = getattr(media, "video_pruning_method", None)
    return {name: value for name, value in facts.items() if value} or None


def _adapter_facts(vllm_config: Any) -> dict[str, Any] | None:
    """What an engine makes of a LoRA adapter, where that is not what its files say."""
    lora = getattr(vllm_config, "lora_config", None)
    modules = getattr(lora, "target_modules", None)
    dtype = getattr(lora, "lora_dtype", None)
    facts: dict[str, Any] = {}
    if modules is not None:
        facts["target_modules"] = sorted(modules)
    if dtype not in {None, "auto", vllm_config.model_config.dtype}:
        facts["dtype"] = dtype
    return facts or None


def _rope_types(config: Any) -> Iterator[str]:
    """All kinds of rotary embedding named anywhere in a model's configuration."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in {"rope_type", "type"} and isinstance(value, str):
                yield value
            elif key in {"rope_parameters", "rope_scaling"} or isinstance(value, Mapping):
                yield from _rope_types(value)


def _speculative_facts(speculative: Any) -> dict[str, Any] | None:
    """A drafter adds layers of its own and, from 0.33 on, tokens to the hash."""
    method = getattr(speculative, "method", None)
    if speculative is None or method in _DRAFTS_WITHOUT_A_MODEL:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    return {
        "method": method,
        "draft": _model_facts(draft) if draft is not None else None,
    }


def _cache_facts(vllm_config: Any, offloading: Any) -> dict[str, Any]:
    cache = vllm_config.cache_config
    attention = getattr(vllm_config, "attention_config", None)
    return {
        "block_size": cache.block_size,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "dtype": cache.cache_dtype,
        # Two of them are four bits wide, which is all that the spec says.
        "indexer_dtype": getattr(attention, "indexer_kv_dtype", "auto"),
        "dtype_skip_layers": getattr(cache, "kv_cache_dtype_skip_layers", None),
        "mamba_dtype": getattr(cache, "mamba_cache_dtype", None),
        "mamba_ssm_dtype": getattr(cache, "mamba_ssm_cache_dtype", None),
    }


def _group_facts(kv_cache_config: Any, offloading: Any, portable: bool) -> Iterator[dict[str, Any]]:
    for group in offloading.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        yield {
            "id": group.group_id,
            "tokens_per_block": group.tokens_per_block,
            "layers": list(group.layer_names),
            "spec": _spec_facts(spec, portable),
        }


def _spec_facts(spec: Any, portable: bool) -> dict[str, Any]:
    """What a spec says beyond its defaults: a field that a release adds changes no id."""
    hidden = _RANK_FACTS if portable else frozenset()
    facts: dict[str, Any] = {"kind": type(spec).__name__}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name == "kv_cache_specs":
            facts["layers"] = {
                layer: _spec_facts(inner, portable) for layer, inner in value.items()
            }
        elif field.name not in hidden and value != field.default:
            facts[field.name] = value
    return facts


def _layout_facts(offloading: Any, portable: bool) -> dict[str, Any]:
    """Where a byte of a layer lies in the payload.

    vLLM numbers its canonical format. Nothing numbers the direct one, so there
    the release stands for it, and the cache is cold after an upgrade.
    """
    facts: dict[str, Any] = {"kv_cache_layout": offloading.kv_cache_layout, "portable": portable}
    if portable:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
            canonical_format_id,
        )

        return {**facts, "canonical_format": canonical_format_id(offloading.kv_cache_layout)}
    from kvtiers.connector.compat import vllm_version

    parallel = offloading.parallel
    return {
        **facts,
        "vllm": ".".join(vllm_version().split(".")[:2]),
        "ranks": parallel.world_size,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "worker_bytes_per_block": offloading.worker_kv_bytes_per_block,
    }


def _hash_facts(vllm_config: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """The seed goes in as a digest: a secret one protects against planted collisions."""
    seed = environ.get("PYTHONHASHSEED")
    return {
        "algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
        "seed": None if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:16],
        "lookahead_tokens": getattr(vllm_config, "num_hash_lookahead_tokens", 0),
    }


def _attention_specs(kv_cache_config: Any) -> Iterator[Any]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for inner in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if hasattr(inner, "head_size"):
                yield inner


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """JSON's types, the same in every process: no addresses, no order of a set."""
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_canonical(inner) for inner in value)
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"kind": type(value).__name__, **{n: _plain(getattr(value, n)) for n in names}}
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return _stable_repr(value)


def _stable_repr(value: Any) -> str:
    text = str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


def _flatten(facts: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(facts, Mapping):
        for key, value in facts.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(facts, list) and any(isinstance(item, Mapping) for item in facts):
        for index, item in enumerate(facts):
            yield from _flatten(item, f"{prefix}[{index}]")
    else:
        yield prefix, json.dumps(facts)
