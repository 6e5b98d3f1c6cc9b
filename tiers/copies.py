"""The engine's own copies: the GPU into slots of the arena, and slots into the GPU.

A copy takes several steps and runs in other processes. From ``reserve`` or
``load`` until it has ended its slots are pinned, whatever becomes of their chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtiers.policies import ChunkId, Run
from kvtiers.tiers.directory import Chunk, State
from kvtiers.tiers.eviction import Eviction
from kvtiers.tiers.residency import CPU, Residency


class EngineCopies:
    """Pins of the engine's copies, by what ends them. The hierarchy's thread only."""

    def __init__(self, residency: Residency, eviction: Eviction) -> None:
        self._residency = residency
        self._eviction = eviction
        self._storing: dict[bytes, int] = {}
        self._loading: dict[str, dict[bytes, int]] = {}
        self._quarantine: list[int] = []

    # Into the arena ---------------------------------------------------------

    def reserve(self, run: Run) -> list[tuple[bytes, int]]:
        """Slots for what the arena neither has nor is getting, as far as there is room."""
        absent = [index for index, key in enumerate(run.chunks) if not self._in_arena(key)]
        with self._kept(run):
            room = self._eviction.make_room(len(absent))
        self._residency.counts[CPU]["dropped"] += len(absent) - room
        taken: list[tuple[bytes, int]] = []
        for index in absent[:room]:
            key = run.chunks[index]
            parent = run.chunks[index - 1] if index else run.parent
            assert isinstance(key, bytes)
            assert parent is None or isinstance(parent, bytes)
            chunk = self._residency.directory.ensure(
                key, run.start + index, run.group, parent, run.tenant
            )
            self._storing[key] = self._residency.take_slot(chunk, State.FILLING)
            taken.append((key, chunk.slot))
        return taken

    def _in_arena(self, key: ChunkId) -> bool:
        chunk = self._residency.get(key)
        # A spoiled store is absent, but its end is still to come.
        return key in self._storing or (chunk is not None and chunk.state is not State.ABSENT)

    @contextlib.contextmanager
    def _kept(self, run: Run) -> Iterator[None]:
        """Room for the tail of a run is not made by evicting its head."""
        chunks = [self._residency.get(key) for key in run.chunks]
        slots = [chunk.slot for chunk in chunks if chunk is not None and chunk.slot >= 0]
        for slot in slots:
            self._residency.slots.pin(slot)
        yield
        self._residency.slots.unpin(slots)

    def stored(self, keys: Iterable[bytes], success: bool) -> list[Run]:
        """These copies have ended. Returns what is readable now: the good and unspoiled."""
        slots = [self._storing.pop(key) for key in keys if key in self._storing]
        owners = [self._residency.slots.owner(slot) for slot in slots]
        chunks = [chunk for chunk in owners if chunk is not None]
        if not success:
            self._residency.drop(chunks)
            chunks = []
        self._residency.counts[CPU]["bytes_written"] += len(chunks) * self._residency.chunk_bytes
        runs = self._residency.ready(chunks)
        self._residency.slots.unpin(slots)
        return runs

    def slots_of_stores(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of stores under way."""
        return [self._storing[key] for key in keys if key in self._storing]

    # Out of the arena -------------------------------------------------------

    def load(self, request_id: str, keys: Sequence[bytes]) -> list[int]:
        """Slots to copy from, pinned; -1 for what is not ready."""
        slots = self._loading.setdefault(request_id, {})
        answer: list[int] = []
        for key in keys:
            chunk = self._residency.get(key)
            ready = chunk is not None and chunk.state is State.READY
            slot = chunk.slot if chunk is not None and ready else -1
            if slot >= 0 and key not in slots:
                self._residency.slots.pin(slot)
                slots[key] = slot
            answer.append(slot)
        return answer

    def loading(self, request_id: str) -> Mapping[bytes, int]:
        """What is being copied to the GPU for the request, and from which slots."""
        return self._loading.get(request_id, {})

    def loaded(self, request_id: str) -> None:
        """The copy has ended, well or not."""
        slots = self._loading.pop(request_id, {}).values()
        self._residency.counts[CPU]["bytes_read"] += len(slots) * self._residency.chunk_bytes
        self._residency.slots.unpin(slots)

    # When something went wrong ----------------------------------------------

    def spoil(self, slots: Iterable[int]) -> None:
        """Nobody shall read these; a store into them that ends well changes nothing."""
        owners = [self._residency.slots.owner(slot) for slot in set(slots) if slot >= 0]
        bad: list[Chunk] = [chunk for chunk in owners if chunk is not None]
        self._residency.counts[CPU]["failures"] += len(bad)
        self._residency.drop(bad)

    def reset(self) -> None:
        """Nobody will say when the copies under way end: their pins stay until ``flushed``."""
        self._quarantine += self._storing.values()
        for slots in self._loading.values():
            self._quarantine += slots.values()
        self._storing.clear()
        self._loading.clear()

    def flushed(self) -> None:
        """Every copy that was under way at the last reset has ended."""
        self._residency.slots.unpin(self._quarantine)
        self._quarantine.clear()
