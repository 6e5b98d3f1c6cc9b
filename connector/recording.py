"""Starts the recorder of one engine, if its configuration has ``record``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvtiers.connector import compat
from kvtiers.connector.config import Config
from kvtiers.connector.config_errors import ConfigError
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.recording_format import About, RecordedTier
from kvtiers.tiers.residency import GPU

logger = logging.getLogger(__name__)


def start_recorder(
    config: Config, groups: Sequence[Any], gpu_blocks: int, hierarchy: Hierarchy
) -> Recorder | None:
    """The recorder, None if nothing is to be recorded. Runs in the scheduler's process.

    Args:
        config: with ``record``.
        groups: vLLM's ``GroupOffloadConfig`` of each KV-cache group. The first with full
            attention stands for all: what it lacks of a prefix is computed, whatever others have.
        gpu_blocks: blocks of the GPU's KV cache.
        hierarchy: the tiers.

    Raises:
        ConfigError: the folder can't be used, or pyarrow is not there.

    """
    if config.record is None:
        return None
    full = (group for group in groups if group.sliding_window_size_in_chunks is None)
    group = next(full, groups[0])
    gpu_chunks = gpu_blocks * group.tokens_per_block // group.tokens_per_chunk
    gpu = RecordedTier(GPU, gpu_chunks * hierarchy.chunk_bytes)
    about = About(
        chunk_tokens=group.tokens_per_chunk,
        chunk_bytes=hierarchy.chunk_bytes,
        namespace=hierarchy.namespace.id,
        policy=config.policy.type,
        tiers=(gpu, *(RecordedTier(tier.name, tier.capacity) for tier in hierarchy.policy.tiers)),
        stores_output=not config.offload_prompt_only,
        vllm=compat.vllm_version(),
    )
    folder = config.record.path
    try:
        recorder = Recorder(folder, about, config.record.max_bytes, group.group_idx)
    except ImportError as error:
        raise ConfigError([f"record is set, and can't be done: {error}."]) from error
    except OSError as error:
        raise ConfigError(
            [
                f"record.path is '{folder}', and nothing can be written there: "
                f"{error.strerror or error}. Name a folder that is there for the server's user, or "
                "can be made, or leave 'record' out."
            ]
        ) from error
    logger.info("kvtiers: recording %s in %s", recorder.recording, folder)
    return recorder
