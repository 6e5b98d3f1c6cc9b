"""Records what an engine's cache sees, beside the engine and at next to none of its time.

The engine's thread notes a request when it is admitted and when it ends, a microsecond each.
All else is done by one thread of the recorder's own, some requests at a time, so that the
engine never waits for it longer than for any other step of its interpreter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtiers.policies import PolicyRequest
from kvtiers.tiers.recording_files import PartFiles
from kvtiers.tiers.recording_format import About
from kvtiers.tiers.recording_ids import ChunkNumbers
from kvtiers.tiers.recording_rows import Pseudonyms, Rows, Seen
from kvtiers.tiers.residency import GPU

logger = logging.getLogger(__name__)

_MOST_ROWS = 4096
"""Of a part."""
# Ended requests are left to gather for so long before the thread takes them.
_GATHER_SECONDS = 0.5
# While requests keep ending, what is not on disk yet is written so often.
_WRITE_SECONDS = 10.0
# A part is written anew with all of its rows: then the thread leaves it alone for so many times
# as long as that took, or until what comes in is overdue.
_REST = 1000
# For how long the thread works in one go, and then rests, so that the engine has its turn.
_TURN_SECONDS = 0.0005
# Chunks of requests that the thread has not taken yet: a disk that hangs must not eat memory.
_MOST_WAITING = 1 << 19
_CLOSE_SECONDS = 5.0


class Recorder:
    """One recording, from here to ``close``.

    All methods but ``close`` are called by whoever owns the hierarchy, and neither block nor raise.

    Args:
        folder: where its parts lie.
        about: the engine.
        max_bytes: of all recordings in the folder.
        group: KV-cache group whose chunks stand for the request's.
        clock: seconds, monotonic; that of ``PolicyRequest.arrival``.

    Raises:
        OSError: the folder can't be used.
        ImportError: pyarrow is not there.

    """

    def __init__(
        self,
        folder: Path,
        about: About,
        max_bytes: int,
        group: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = PartFiles(folder, max_bytes)
        self._about = about
        self._group = group
        self._clock = clock
        self._start = clock()
        self._tiers = [tier.name for tier in about.tiers]
        self._metadata = about.metadata(self._files.recording, self._files.started)
        # The engine's thread only.
        self._admitted: dict[str, Seen] = {}
        self._count = 0
        # Handed over; None says that from there on no chunk is what it was.
        self._ended: deque[Seen | None] = deque()
        self._waiting = 0
        self._taken = 0
        # The recorder's thread only.
        self._numbers, self._pseudonym = ChunkNumbers(), Pseudonyms()
        self._rows = Rows(self._tiers, self._start)
        self._unwritten, self._unwritten_since = 0, self._start
        self._rested_at = self._start
        self.stopped = False
        self._due, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtiers-record", daemon=True)
        self._thread.start()

    @property
    def recording(self) -> str:
        """What it is called."""
        return self._files.recording

    # The engine's thread ----------------------------------------------------

    def admitted(
        self, facts: PolicyRequest, cached: int, served: Mapping[int, Mapping[str, int]]
    ) -> None:
        """The engine starts a request. Only the first time counts, should it be preempted.

        Args:
            facts: with the prompt's chunks.
            cached: tokens that were not computed.
            served: per group, chunks that each tier served beside the GPU.

        """
        prompt = len(self._keys(facts))
        if self.stopped or facts.request_id in self._admitted:
            return
        if prompt < facts.prompt_tokens // self._about.chunk_tokens:
            # The engine names no chunks, so that it caches nothing.
            return
        chunks = served.get(self._group, {})
        hits = {tier: n * self._about.chunk_tokens for tier, n in chunks.items()}
        # The GPU holds blocks, of which several may make a chunk.
        hits[GPU] = max(0, cached - sum(hits.values()))
        self._admitted[facts.request_id] = Seen(self._count, self._clock(), prompt, hits)
        self._count += 1

    def finished(self, facts: PolicyRequest, *, read: bool = True) -> None:
        """The request ended; ``facts`` has the chunks of its output now.

        Args:
            facts: of the request.
            read: False for one that may not read the cache, such as one that asks for the
                logprobs of its prompt: it says nothing of the cache, and is left out.

        """
        seen = self._admitted.pop(facts.request_id, None)
        if seen is None or not read or self.stopped:
            return
        seen.facts, seen.keys, seen.ended = facts, self._keys(facts), self._clock()
        self._waiting += len(seen.keys)
        if self._waiting - self._taken > _MOST_WAITING:
            self._stop("its folder takes in less than the engine has to tell")
            return
        self._hand_over(seen)

    def reset(self) -> None:
        """The caches were emptied, as the weights may have changed: chunks are others now."""
        self._hand_over(None)

    def _hand_over(self, seen: Seen | None) -> None:
        self._ended.append(seen)
        if not self._due.is_set():
            self._due.set()

    def _keys(self, facts: PolicyRequest) -> tuple[bytes, ...]:
        for run in facts.runs:
            if run.group == self._group:
                return run.chunks  # type: ignore[return-value]  # a live engine's ids are keys
        return ()

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Write what there is, within so many seconds. Requests under way are not in it."""
        self._stopping.set()
        self._due.set()
        self._thread.join(timeout)

    # The recorder's thread --------------------------------------------------

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._stop(" ".join(str(error).split()) or type(error).__name__)

    def _stop(self, why: str) -> None:
        """Record no more, and say so once."""
        if not self.stopped:
            self.stopped = True
            logger.warning("kvtiers stops recording: %s. What was written stays.", why)
        self._ended.clear()
        self._admitted.clear()

    def _go_on(self) -> bool:
        """Wait for requests that have ended and take them in; False to end."""
        # With all on disk there is nothing to wake up for.
        self._due.wait(_GATHER_SECONDS if self._unwritten else None)
        busy = self._due.is_set()
        if busy and not self._stopping.is_set():
            self._stopping.wait(_GATHER_SECONDS)
            self._due.clear()
        stopping = self._stopping.is_set()
        self._take()
        now = self._clock()
        wanted = not busy or now - self._unwritten_since > _WRITE_SECONDS
        if self._unwritten and (stopping or (wanted and now >= self._rested_at)):
            self._write()
        return not (stopping or self.stopped)

    def _take(self) -> None:
        turn_ends = time.perf_counter() + _TURN_SECONDS
        while self._ended and not self.stopped:
            seen = self._ended.popleft()
            if seen is None:
                self._numbers.forget_all()
                continue
            self._rows.append(seen, self._numbers, self._pseudonym)
            self._taken += len(seen.keys)
            if not self._unwritten:
                self._unwritten_since = self._clock()
            self._unwritten += 1
            if len(self._rows) >= _MOST_ROWS:
                self._write()
            if time.perf_counter() > turn_ends:
                time.sleep(_TURN_SECONDS)
                turn_ends = time.perf_counter() + _TURN_SECONDS

    def _write(self) -> None:
        begin = time.thread_time()
        complete = len(self._rows) >= _MOST_ROWS
        self._files.write(self._rows.table(self._metadata), complete=complete)
        self._unwritten = 0
        if complete:
            self._rows = Rows(self._tiers, self._start)
        rest = min(_WRITE_SECONDS, _REST * (time.thread_time() - begin))
        self._rested_at = self._clock() + rest
