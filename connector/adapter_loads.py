"""Notices on a worker when vLLM loads a LoRA adapter, and what it then holds.

vLLM loads adapters when told to, at their first use, and again after it ran out of
room for them, and has no hook for any of it. So the one method that reads their files
is wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from kvtiers.connector.adapters import AdapterReader, content_of


class LoadedAdapters:
    """What this worker has loaded. Runs on the worker's thread."""

    def __init__(self) -> None:
        self._reader = AdapterReader()
        self._loaded: dict[int, bytes | None] = {}
        self._news: dict[int, bytes | None] = {}

    def around(self, lora: Any, load: Callable[[], Any]) -> Any:
        """Load an adapter, and note what was loaded.

        Files that are the same before and after are what was read in between.
        """
        before = self._reader.read(lora)
        model = load()
        after = self._reader.read(lora)
        # One of the hub's does not change, but may have been fetched by this load.
        fetched = before.value is None and not os.path.exists(os.path.expanduser(lora.lora_path))
        content = content_of(lora, after) if fetched or before == after else None
        number = lora.lora_int_id
        if number not in self._loaded or self._loaded[number] != content:
            self._loaded[number] = self._news[number] = content
        return model

    def take(self) -> dict[int, bytes | None]:
        """What holds something else than at the last call, by vLLM's number of the adapter."""
        news, self._news = self._news, {}
        return news


# Of the connector that this process has now.
_current = LoadedAdapters()


def watch_loads() -> LoadedAdapters:
    """Note what vLLM loads in this process from now on."""
    global _current
    from vllm.lora.worker_manager import WorkerLoRAManager

    _current = LoadedAdapters()
    original = WorkerLoRAManager._load_adapter  # noqa: SLF001 - in the contract
    if not hasattr(original, "watched"):

        @wraps(original)
        def load(self: Any, lora_request: Any) -> Any:
            return _current.around(lora_request, lambda: original(self, lora_request))

        load.watched = True  # type: ignore[attr-defined]
        WorkerLoRAManager._load_adapter = load  # noqa: SLF001 - in the contract
    return _current
