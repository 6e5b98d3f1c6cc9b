"""A connector whose filesystem tier stores slowly, half, or not at all, in a server's engine.

How it behaves is in the variable that ``HOW_VARIABLE`` names, because the engine is
another process and our configuration refuses keys that it does not know.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtiers.connector import stack
from kvtiers.connector.connector import TieredKVConnector
from kvtiers.tiers import ChunkKey, WriteOutcome, fs
from kvtiers.tiers.wrappers import WrapperTier
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

HOW_VARIABLE = "SLOW_DISK"
SLOW = "slow"
"""Each store takes a third of a second before a byte of it is written."""
HALF = "half"
"""Each store writes half of a chunk, and then hangs."""
HUNG = "hung"
"""No store ends."""

_FOREVER = threading.Event()


class SlowDisk(WrapperTier):
    """Stores as ``HOW_VARIABLE`` says."""

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        how = os.environ[HOW_VARIABLE]
        if how == SLOW:
            time.sleep(0.33)
        elif how == HUNG:
            _FOREVER.wait()
        return super().write(keys, buffers)


def _write_half(descriptor: int, payload: memoryview, *_: object) -> None:
    os.write(descriptor, payload[: len(payload) // 2])
    _FOREVER.wait()


class SlowDiskConnector(TieredKVConnector):
    """``TieredKVConnector`` over a ``SlowDisk``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.SCHEDULER:
            build = stack._build_tier
            stack._build_tier = lambda *args: SlowDisk(build(*args))
            if os.environ[HOW_VARIABLE] == HALF:
                fs.transfer_out = _write_half
        super().__init__(vllm_config, role, kv_cache_config)
