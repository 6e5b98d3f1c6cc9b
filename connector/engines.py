"""How many engines of a server share this host's memory.

vLLM tells the engines of a mixture of experts. Those of a dense model it starts as if
each were alone (``ParallelConfig.reconfigure_for_independent_dp_rank``), but for their
processes' titles: so they are counted, as children of one parent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TITLE = re.compile(rb"EngineCore_DP\d+")
_PROC = Path("/proc")


def engines_on_host(parallel_config: Any, pid: int | None = None) -> int:
    """Engines of this server on this host; at least 1.

    All of them are started before the first has read its model, so by then they have
    their titles.

    Args:
        parallel_config: vLLM's.
        pid: of the engine or of one of its workers, this process by default.

    """
    told = int(getattr(parallel_config, "data_parallel_size_local", 1) or 1)
    return max(1, told, _siblings(os.getpid() if pid is None else pid))


def _siblings(pid: int) -> int:
    """Engines beside the one that ``pid`` is, or is a worker of; 0 outside of any."""
    while pid > 1:
        parent = _parent(pid)
        if _is_engine(pid):
            return sum(_parent(other) == parent and _is_engine(other) for other in _pids())
        pid = parent
    return 0


def _pids() -> Iterator[int]:
    return (int(path.name) for path in _PROC.glob("[0-9]*"))


def _parent(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        # The name, in parentheses, may hold anything.
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_engine(pid: int) -> bool:
    try:
        return _TITLE.search((_PROC / str(pid) / "cmdline").read_bytes()) is not None
    except OSError:
        return False
