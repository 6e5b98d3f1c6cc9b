"""What was measured, appended to a file for ``kvtiers heat --log``.

A line of JSON for each measured prompt: its chunks under names that only this file has,
and the mass per layer, KV head and chunk. No text is in it, and no key by which one could
find a chunk in a tier. A thread writes, so that a slow disk delays nobody; what it can't
keep up with is dropped and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from kvtiers.policies import ChunkId, Run
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

# Of a file. The one before it is kept.
_MOST_BYTES = 64 << 20
# Prompts that wait to be written.
_MOST_WAITING = 64
_DIGITS = 6
# Of a line. One that is not whole begins so, too.
_BEGINNING = b'{"chunks":'
# More than any model has.
_MOST_LAYERS = 1 << 16

Measured = Mapping[int, NDArray[np.float32]]
"""Per layer ``[kv_heads, chunks]``, of all chunks from the first on."""


class HeatLog:
    """Appends to one file. ``note`` is the scheduler's thread's, and never blocks.

    Args:
        path: of the file, made if missing; readable by its owner only.
        clock: seconds of the processor that the calling thread has had.

    Attributes:
        seconds: that the thread that writes has had, so far.

    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.thread_time) -> None:
        self._path, self._clock = path, clock
        self.seconds = 0.0
        self._salt = secrets.token_bytes(16)
        self._waiting: queue.Queue[tuple[Run, Measured] | None] = queue.Queue(_MOST_WAITING)
        self._dropped = 0
        self._failed = False
        self._thread = threading.Thread(target=self._write_all, name="kvtiers-heat", daemon=True)
        self._thread.start()

    def note(self, run: Run, measured: Measured) -> None:
        """One prompt, with all its chunks."""
        try:
            self._waiting.put_nowait((run, measured))
        except queue.Full:
            self._dropped += 1

    def close(self, timeout: float = 1.0) -> None:
        """Write what waits, within ``timeout`` seconds."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
        self._thread.join(timeout)

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._append(self._line(*item))
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    logger.warning(
                        "kvtiers can't write %s, heat is not logged: %s", self._path, error
                    )
            self.seconds = self._clock()

    def _line(self, run: Run, measured: Measured) -> str:
        row = {
            "chunks": [self._name(chunk) for chunk in run.chunks],
            "layers": {
                str(layer): np.round(mass[:, : len(run)].astype(float), _DIGITS).tolist()
                for layer, mass in measured.items()
            },
            "dropped": self._dropped,
        }
        return json.dumps(row, separators=(",", ":")) + "\n"

    def _name(self, chunk: ChunkId) -> str:
        content = chunk if isinstance(chunk, bytes) else repr(chunk).encode()
        return hashlib.blake2b(content, digest_size=8, key=self._salt).hexdigest()

    def _append(self, line: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size + len(line) > _MOST_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a") as file:
            file.write(line)


# What the parts of a line raise that is none.
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)


def read(path: Path) -> Iterator[tuple[Run, dict[int, NDArray[np.float32]]]]:
    """What ``HeatLog`` wrote, oldest first. A last line that is not whole is left out.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is not one of ``HeatLog``'s; the text names it.

    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and _BEGINNING.startswith(line[: len(_BEGINNING)]):
                return  # an engine is writing it
            try:
                yield _read(line)
            except _DAMAGE as error:
                raise ValueError(
                    f"{path}, line {number} is no line of a heat log ({error}). Name the file that "
                    "'log' of attention_heat names."
                ) from error


def _read(line: bytes) -> tuple[Run, dict[int, NDArray[np.float32]]]:
    """What a line says. Raises whatever its parts raise if they are not what they must be."""
    row = json.loads(line)
    layers = {int(layer): np.array(mass, np.float32) for layer, mass in row["layers"].items()}
    chunks = tuple(map(str, row["chunks"]))
    if not layers or not all(0 <= layer < _MOST_LAYERS for layer in layers):
        raise ValueError("it has no layers of a model")
    shapes = {mass.shape for mass in layers.values()}
    if len(shapes) > 1 or any(len(s) != 2 or not s[0] or s[1] != len(chunks) for s in shapes):
        raise ValueError("its tables do not fit its chunks")
    if not chunks or not all(np.isfinite(mass).all() for mass in layers.values()):
        raise ValueError("its figures are no attention")
    return Run(chunks), layers
