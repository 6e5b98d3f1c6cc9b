"""Engines that kvtiers can't work for, refused at start with what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.config_settings import Settings
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import MambaSpec


def check_engine(vllm_config: Any) -> None:
    """Refuse engines that can't use a prefix cache in tiers.

    Raises:
        ConfigError: naming the option of the engine.

    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            [
                "Prefix caching is switched off, so vLLM computes no hashes by which kvtiers could "
                "find a chunk again. Remove --no-enable-prefix-caching or, where vLLM switched it "
                "off by itself for this model on this device, remove TieredKVConnector from "
                "--kv-transfer-config."
            ]
        )
    nodes = getattr(vllm_config.parallel_config, "nnodes_within_dp", 1)
    if nodes > 1:
        raise ConfigError(
            [
                f"This engine spans {nodes} nodes, and kvtiers' arena is memory of one host. Run "
                "one engine per node (data parallelism), or remove TieredKVConnector from "
                "--kv-transfer-config."
            ]
        )


def check_nesting(vllm_config: Any) -> None:
    """Under MultiConnector the scheduler reads a policy that a connector inside can't set.

    Seen by the workers only, since vLLM's configuration is at hand where they start.

    Raises:
        ConfigError: it would end a request whose load failed.

    """
    outer = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    if outer is None or outer is vllm_config.kv_transfer_config:
        return
    if outer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            [
                f"kv_load_failure_policy is {outer.kv_load_failure_policy!r}, so vLLM would end "
                "a request with an empty answer whenever a load fails. kvtiers sets it to "
                f"'recompute' by itself, but cannot do so inside {outer.kv_connector}: write "
                f'"kv_load_failure_policy": "recompute" beside "kv_connector": '
                f'"{outer.kv_connector}" in --kv-transfer-config.'
            ]
        )


def check_chunks(settings: Settings, blocks_per_chunk: int, kv_cache_config: Any) -> None:
    """Refuse chunks of several blocks for layers of which a chunk has one state.

    vLLM hands over the block with the state and none of those before it, which the worker
    would refuse as a chunk with blocks missing. Nothing would ever be loaded.

    Raises:
        ConfigError: naming the key that says how large a chunk is.

    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if blocks_per_chunk == 1 or not any(isinstance(spec, MambaSpec) for spec in specs):
        return
    given = f"blocks_per_chunk is {blocks_per_chunk}"
    if settings.chunk_size is not None:
        given = f"chunk_size is {settings.chunk_size} tokens, which are {blocks_per_chunk} blocks"
    raise ConfigError(
        [
            f"{given}, but layers of this model keep a state (Mamba, linear attention or a short "
            "convolution), of which vLLM hands over one at the end of a single block. A chunk of "
            "several blocks would never be complete. Leave the key out, or set blocks_per_chunk "
            "to 1."
        ]
    )


def check_reports(metadata: Mapping[Any, Any], reports: Sequence[Any]) -> None:
    """Refuse to go on where another connector's message came in place of our workers'.

    Args:
        metadata: what vLLM passed on from the workers, by rank.
        reports: what of it is ours.

    Raises:
        ConfigError: none of it is.

    """
    if metadata and not reports:
        raise ConfigError(
            [
                "MultiConnector passes on what the workers of one connector say at start, the "
                "first that says anything, so kvtiers did not learn where its arena is. Put "
                'TieredKVConnector before the others in "connectors", or before those that have '
                "such a message, as NixlConnector has."
            ]
        )
