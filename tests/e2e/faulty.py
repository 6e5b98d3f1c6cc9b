"""A connector whose copies go wrong on cue, in whatever process vLLM runs them.

The test says what shall happen through a folder that ``FOLDER_VARIABLE`` names,
because a worker may be another process and our configuration refuses keys that it
does not know. Orders are drawn per rank, one a job, oldest first.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvtiers.connector.connector import TieredKVConnector
from kvtiers.connector.transfer import ArenaSpec
from kvtiers.tiers.arena import Arena
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

FOLDER_VARIABLE = "FAULTY_COPIES"

# Finite, so that it changes answers and does not turn them into NaN, which attention
# would spread from positions that it masks.
GARBAGE = 7.0

FATES = {
    "ok": "as it should be",
    "raise": "submitting it raises, nothing is copied",
    "refuse": "it is not accepted, nothing is copied",
    "fail": "it is reported as failed, nothing is copied",
    "garbage": "garbage is written, and it is reported as failed",
    "half": "the second half is garbage, and it is reported as failed",
    "lie": "garbage is written, and it is reported as good",
}
HOLE = "hole"
"""Kind of an order: a store lacks a block of its last group before our worker sees it."""


@dataclass(frozen=True)
class Order:
    """What becomes of one copy job.

    Attributes:
        number: of the order.
        kind: "load", "store" or ``HOLE``.
        fate: one of ``FATES``.
        held: it is neither done nor reported before ``Faults.release``, or before
            the worker is told to wait for it.
        deaf: waiting does not end it either: the copy goes on behind everybody's back.
        rank: the only rank it is for, None for each of them.

    """

    number: int
    kind: str
    fate: str
    held: bool = False
    deaf: bool = False
    rank: int | None = None


class Faults:
    """The test's end: give orders, see what jobs there were."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders: list[Order] = []
        self._holding = True
        self._seen = 0
        self._write()

    def order(self, kind: str, fate: str, times: int = 1, **how: Any) -> None:
        """The next ``times`` jobs of that kind meet this fate."""
        assert fate in FATES
        for _ in range(times):
            self._orders.append(Order(len(self._orders), kind, fate, **how))
        self._holding = True
        self._write()

    def release(self) -> None:
        """Held jobs are done and reported, and later ones are not held."""
        self._holding = False
        self._write()

    def forget(self) -> None:
        """Orders that nobody has drawn are void, held jobs are let go, the list starts anew."""
        self._orders = [Order(o.number, "none", "ok") for o in self._orders]
        self.release()
        self._seen += len(self.jobs())

    def jobs(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Jobs submitted since ``forget``, in order, with the fate of each."""
        log = self._folder / "jobs"
        lines = log.read_text().splitlines() if log.exists() else []
        jobs = [json.loads(line) for line in lines[self._seen :]]
        return [job for job in jobs if kind in (None, job["kind"])]

    def _write(self) -> None:
        fresh = self._folder / "orders.new"
        orders = [asdict(order) for order in self._orders]
        fresh.write_text(json.dumps({"orders": orders, "holding": self._holding}))
        fresh.replace(self._folder / "orders")


class Cues:
    """The worker's end of ``Faults``."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._drawn: Counter[str] = Counter()

    def draw(self, kind: str) -> Order | None:
        """The fate of the next job of this kind, None if nothing was ordered."""
        for entry in self._read()["orders"][self._drawn[kind] :]:
            order = Order(**entry)
            if order.kind == kind and order.rank in (None, self._rank):
                self._drawn[kind] = order.number + 1
                return order
        return None

    def holding(self) -> bool:
        """Whether held jobs stay held."""
        return bool(self._read()["holding"])

    def note(self, **job: Any) -> None:
        """Let the test know of a job."""
        with open(os.path.join(self._folder, "jobs"), "a") as log:
            log.write(json.dumps({"rank": self._rank, **job}) + "\n")

    def _read(self) -> dict[str, Any]:
        with open(os.path.join(self._folder, "orders")) as file:
            found: dict[str, Any] = json.load(file)
        return found


class FaultyEngine(OffloadingWorker):
    """Does the copies of ``engine``, or not, as ordered."""

    def __init__(
        self, engine: OffloadingWorker, caches: CanonicalKVCaches, arena: Arena, cues: Cues
    ) -> None:
        self._engine = engine
        self._caches = caches
        self._arena = arena
        self._cues = cues
        self._failed: set[int] = set()
        self._refused: list[TransferResult] = []
        self._held: dict[int, tuple[Order, Callable[[], object]]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaSpec) -> bool:
        slots = [int(slot) for slot in dst_spec.block_ids]

        def spoil(share: float) -> None:
            for slot in slots[int(len(slots) * (1 - share)) :]:
                np.frombuffer(self._arena.slot(slot), np.float32)[:] = GARBAGE

        return self._submit(
            "store",
            job_id,
            slots,
            src_spec.block_ids.tolist(),
            lambda: self._engine.submit_store(job_id, src_spec, dst_spec),
            spoil,
        )

    def submit_load(
        self, job_id: int, src_spec: ArenaSpec, dst_spec: GPULoadStoreSpec, **options: Any
    ) -> bool:
        def spoil(share: float) -> None:
            end = 0
            for group, size in enumerate(dst_spec.group_sizes):
                end += size
                blocks = dst_spec.block_ids[end - int(size * share) : end]
                self._spoil_blocks(group, blocks.tolist())

        return self._submit(
            "load",
            job_id,
            [int(slot) for slot in src_spec.block_ids],
            dst_spec.block_ids.tolist(),
            lambda: self._engine.submit_load(job_id, src_spec, dst_spec, **options),
            spoil,
        )

    def _spoil_blocks(self, group: int, blocks: list[int]) -> None:
        for ref in self._caches.group_data_refs[group]:
            tensor = self._caches.tensors[ref.tensor_idx].tensor
            tensor.view(torch.float32)[blocks] = GARBAGE

    def _submit(
        self,
        kind: str,
        job_id: int,
        slots: list[int],
        blocks: list[int],
        copy: Callable[[], bool],
        spoil: Callable[[float], None],
    ) -> bool:
        order = self._cues.draw(kind) or Order(-1, kind, "ok")
        held = order.held and self._cues.holding()
        self._cues.note(kind=kind, fate=order.fate, held=held, slots=slots, blocks=blocks)
        if order.fate == "raise":
            raise OSError(f"{kind} job {job_id} fails as ordered")
        if order.fate == "refuse":
            return False
        work = self._work(order.fate, job_id, copy, spoil)
        if held:
            self._held[job_id] = (order, work)
            return True
        work()
        return True

    def _work(
        self, fate: str, job_id: int, copy: Callable[[], bool], spoil: Callable[[float], None]
    ) -> Callable[[], object]:
        def work() -> None:
            if fate == "fail":
                self._refused.append(TransferResult(job_id, False))
                return
            assert copy()
            if fate in ("garbage", "half", "lie"):
                spoil(0.5 if fate == "half" else 1.0)
            if fate in ("garbage", "half"):
                self._failed.add(job_id)

        return work

    def get_finished(self) -> list[TransferResult]:
        if self._held and not self._cues.holding():
            self._let_go(set(self._held))
        refused, self._refused = self._refused, []
        results = [*refused, *self._engine.get_finished()]
        return [
            TransferResult(result.job_id, False) if result.job_id in self._failed else result
            for result in results
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._let_go({job for job in job_ids & self._held.keys() if not self._held[job][0].deaf})
        self._engine.wait(job_ids)

    def shutdown(self) -> None:
        self._let_go(set(self._held))
        self._engine.shutdown()

    def _let_go(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids):
            self._held.pop(job_id)[1]()


class FaultyConnector(TieredKVConnector):
    """``TieredKVConnector`` over a ``FaultyEngine``."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        spec = self._spec
        cues = Cues(os.environ[FOLDER_VARIABLE], spec.config.parallel.rank)
        make = spec._engine
        spec._engine = lambda caches, layout, arena: FaultyEngine(
            make(caches, layout, arena), caches, arena, cues
        )
        super().register_kv_caches(kv_caches)
        submit = spec.worker.submit_store

        def submit_store(job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaSpec) -> bool:
            if cues.draw(HOLE) is not None:
                src_spec = with_hole(src_spec)
            return submit(job_id, src_spec, dst_spec)

        spec.worker.submit_store = submit_store


def with_hole(spec: GPULoadStoreSpec) -> GPULoadStoreSpec:
    """A store as vLLM 0.32 makes it when the first block of the last group is null."""
    sizes = list(spec.group_sizes)
    last = max(group for group, size in enumerate(sizes) if size)
    lost = sum(sizes[:last])
    blocks = spec.block_ids.tolist()
    sizes[last] -= 1
    return GPULoadStoreSpec(blocks[:lost] + blocks[lost + 1 :], sizes, spec.block_indices)
