"""kvtiers over tiers that take longer for each chunk: what ``benchmarks.slow_tier`` measures.

Named by ``kv_connector_module_path``, so that vLLM imports it in its own processes, and
nothing else does: it changes every engine of the process that imports it. The seconds a
chunk are read from a file before each call, so that a running server's tier can become
slow, and quick again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtiers.connector import stack
from kvtiers.connector.connector import TieredKVConnector
from kvtiers.tiers import ChunkKey, ReadOutcome
from kvtiers.tiers.wrappers import WrapperTier

from benchmarks.record import DELAY_VARIABLE

__all__ = ["TieredKVConnector"]


class Slowed(WrapperTier):
    """Waits before it reads, for as long as the file says."""

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """See ``Tier.read``."""
        time.sleep(float(Path(os.environ[DELAY_VARIABLE]).read_text()) * len(keys))
        return super().read(keys, buffers)


_build = stack._build_tier


def _build_slowed(*args: Any) -> Slowed | None:
    tier = _build(*args)
    return Slowed(tier) if tier is not None else None


stack._build_tier = _build_slowed
