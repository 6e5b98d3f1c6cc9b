"""kvtiers believing whatever it reads: what ``benchmarks.verification`` compares with.

Named by ``kv_connector_module_path``, so that vLLM imports it in its own processes, and
nobody comes by it otherwise. Not an option of kvtiers: nobody should run without.
"""

from __future__ import annotations

from typing import Any

from kvtiers.connector.connector import TieredKVConnector
from kvtiers.tiers.at_rest import AtRestTier

__all__ = ["TieredKVConnector"]


def _believe(*_: Any) -> None:
    """Nothing is ever wrong with what was read."""


AtRestTier._defect = _believe  # type: ignore[method-assign]
