"""Tells which content the LoRA adapter of a request has.

vLLM's block hash has an adapter's name and path and not its content, so the content
becomes part of the keys below vLLM's own cache. It is read from the adapter's files
when a request arrives. What counts is what the workers loaded, maybe earlier or later:
they say so with a step's output (``adapter_loads``), before any store can end of KV
that such a load took part in. So what was stored under another content's key is
dropped before anyone can read it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash
from kvtiers.connector.weights import Fingerprint, local_path, path_fingerprint

logger = logging.getLogger(__name__)

# What an arrival may cost the scheduler: files it knows take a tenth of a millisecond.
_GLANCE_SECONDS = 0.01
# After that long the files count as unreadable, for this request.
_PATIENCE_SECONDS = 5.0

Contents = Mapping[int, bytes | None]
"""vLLM's number of an adapter to what it holds, None if that can't be told."""


class AdapterReader:
    """Fingerprints adapters, and reads their files again only when these have changed.

    For one thread. Here and below, ``lora`` is vLLM's ``LoRARequest``.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Fingerprint]] = {}

    def read(self, lora: Any) -> Fingerprint:
        """Of the files as they are now."""
        path = local_path(os.path.expanduser(lora.lora_path))
        if path is None:
            return Fingerprint(None, f"{lora.lora_path!r} is neither a folder nor in the hub cache")
        before = _signature(path)
        known = self._known.get(path)
        if known is not None and known[0] == before:
            return known[1]
        found = path_fingerprint(path)
        if found.value is not None and _signature(path) != before:
            return Fingerprint(None, f"the files of {path!r} are being changed")
        self._known[path] = (before, found)
        return found


def content_of(lora: Any, found: Fingerprint) -> bytes | None:
    """What goes into the keys: 16 bytes, None without a fingerprint."""
    if found.value is None:
        return None
    # The same files mean something else in the other layout of experts.
    layout = bool(getattr(lora, "is_3d_lora_weight", False))
    return xxhash.xxh3_128_digest(f"{found.value}/{layout}".encode())


def _signature(path: str) -> object:
    """Differs once a file was written, replaced or moved in, by whatever tool.

    A folder that can't be looked into is like no other, not even itself.
    """
    try:
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return object()
    return sorted((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats)


@dataclass(frozen=True, slots=True)
class _Question:
    lora: Any
    found: Future[Fingerprint]
    deadline: float


class AdapterBook:
    """What the adapters of requests hold. Runs on the scheduler's thread.

    Args:
        clock: seconds, monotonic.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reader = AdapterReader()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtiers-adapters")
        self._questions: dict[str, _Question] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._loaded: dict[int, bytes | None] = {}
        self._first: dict[tuple[str, str], bytes] = {}
        self._replaced: set[tuple[str, str]] = set()
        self._warned: set[str] = set()

    def ask(self, request_id: str, lora: Any) -> None:
        """Begin to read the files of a request's adapter, and give that a moment."""
        self._names[lora.lora_int_id] = (lora.lora_name, lora.lora_path)
        found = self._thread.submit(self._reader.read, lora)
        self._questions[request_id] = _Question(lora, found, self._clock() + _PATIENCE_SECONDS)
        try:
            found.exception(_GLANCE_SECONDS)
        except TimeoutError:
            return

    def asked(self, request_id: str) -> bool:
        """Whether there is an answer to be taken, now or later."""
        return request_id in self._questions

    def waits(self, request_id: str) -> bool:
        """Whether ``answer`` is to be asked later. Never blocks."""
        question = self._questions.get(request_id)
        if question is None or question.found.done():
            return False
        return self._clock() < question.deadline

    def answer(self, request_id: str) -> bytes | None:
        """What the request's adapter holds; once, when it does not wait.

        None if that can't be told, or is not what the workers have loaded.
        """
        question = self._questions.pop(request_id)
        lora = question.lora
        content, reason = self._content(question)
        if content is None:
            self._warn(lora, reason)
            return None
        self._note(lora.lora_int_id, content)
        loaded = self._loaded.get(lora.lora_int_id, content)
        # With ``load_inplace`` vLLM loads the files anew for each step.
        if loaded != content and not lora.load_inplace:
            self._warn(lora, "its files are not those that vLLM has loaded; load it again")
            return None
        return content

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._questions.pop(request_id, None)

    def loaded(self, contents: Contents) -> None:
        """What the workers report."""
        self._loaded.update(contents)
        for number, content in contents.items():
            if content is not None:
                self._note(number, content)

    def replaced(self, lora: Any) -> bool:
        """Whether it has had several contents: vLLM's own cache may hold an older one's KV."""
        return (lora.lora_name, lora.lora_path) in self._replaced

    def close(self) -> None:
        """Does not wait for files that are being read."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _content(question: _Question) -> tuple[bytes | None, str]:
        if not question.found.done():
            return None, f"reading its files took more than {_PATIENCE_SECONDS:g} s"
        error = question.found.exception()
        if error is not None:
            return None, f"its files cannot be read: {error}"
        found = question.found.result()
        return content_of(question.lora, found), found.reason

    def _note(self, number: int, content: bytes) -> None:
        name = self._names.get(number)
        if name is not None and self._first.setdefault(name, content) != content:
            self._replaced.add(name)

    def _warn(self, lora: Any, reason: str) -> None:
        text = f"requests with the adapter {lora.lora_name!r} bypass the tiers: {reason}"
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("kvtiers: %s", text)
