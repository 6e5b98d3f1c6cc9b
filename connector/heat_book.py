"""Heat of chunks on the scheduler: which prompts are measured, and what came of it.

A chunk belongs to every request with its prefix, and each measures other layers. So what
is kept of a chunk is a moving average per layer and KV head, and what a policy is told is
their mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from kvtiers.connector.heat import HeatCost, HeatJob, HeatSettings, Readings
from kvtiers.connector.heat_budget import HeatBudget, Reserve
from kvtiers.policies import ChunkId, Run
from numpy.typing import NDArray

# Of a new measurement in a chunk's average.
_LEARNING = 0.3
# What is kept of chunks, in bytes. They are forgotten in the order of their last measurement.
_MOST_BYTES = 64 << 20
# Jobs whose answer is still to come, at most: that of an engine that lost one never comes.
_MOST_JOBS = 256

Heat = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt that is being measured.

    Attributes:
        run: its chunks.
        reserve: what was set aside for it.
        parts: by layer and rank, what has come of it.

    """

    run: Run
    reserve: Reserve
    parts: dict[tuple[int, int], Heat] = field(default_factory=dict)

    def ranks(self) -> int:
        """How many have answered."""
        return len({rank for _, rank in self.parts})

    def measured(self) -> dict[int, Heat]:
        """By layer the KV heads of all ranks, in their order."""
        layers: dict[int, list[Heat]] = {}
        for (layer, _), part in sorted(self.parts.items(), key=lambda item: item[0]):
            layers.setdefault(layer, []).append(part)
        return {layer: np.concatenate(parts) for layer, parts in layers.items()}


class HeatPlan:
    """Which prompts are measured. The scheduler's thread only.

    Args:
        settings: how much is measured.
        group: KV-cache group whose layers are measured.
        block_tokens: tokens of a block of the group.
        chunk_tokens: tokens of a chunk of the group.
        ranks: workers that answer, each with heads or layers of its own.

    """

    def __init__(
        self, settings: HeatSettings, group: int, block_tokens: int, chunk_tokens: int, ranks: int
    ) -> None:
        self.group = group
        self._settings, self._ranks = settings, ranks
        self._budget = HeatBudget(settings.budget)
        self._block_tokens, self._chunk_tokens = block_tokens, chunk_tokens
        self._seen = self._asked = 0
        self._waiting: OrderedDict[int, _Asked] = OrderedDict()
        self._ended: list[Reserve] = []

    def job(self, run: Run, blocks: Sequence[int], before: int, computed: int) -> HeatJob | None:
        """What to measure of a prompt whose end the step computes; None for nothing.

        Args:
            run: the prompt's chunks.
            blocks: its KV blocks.
            before: tokens that stand before the step.
            computed: tokens that the step computes, the prompt's last among them.

        """
        tokens = before + computed
        run = run.head(min(len(run), tokens // self._chunk_tokens))
        at = (tokens - 1) // self._block_tokens
        # The first chunk is the sink, which is told nobody.
        if len(run) < 2 or at >= len(blocks):
            return None
        self._seen += 1
        if self._seen % self._settings.every:
            return None
        reserve = self._budget.reserve(tokens)
        if reserve is None:
            return None
        self._asked = number = self._asked + 1
        self._waiting[number] = _Asked(run, reserve)
        if len(self._waiting) > _MOST_JOBS:
            self._waiting.popitem(last=False)
        return HeatJob(
            number=number,
            turn=number - 1,
            tokens=tokens,
            queries=min(self._settings.window, computed),
            last_block=blocks[at],
            block_tokens=self._block_tokens,
            chunk_tokens=self._chunk_tokens,
        )

    def waits_for(self, readings: Readings) -> bool:
        """Whether any of these is of a prompt that is under way: not of before a reset."""
        return any(number in self._waiting for number, _, _ in readings)

    def spent(self, cost: HeatCost, *, measured: bool = False) -> None:
        """What workers took; ``measured`` if measurements are in it."""
        self._budget.spent(cost, measured=measured)

    def delayed(self, seconds: float, *, measured: bool = False) -> None:
        """What the scheduler's process took, while all ranks wait; of the CPUs it has one."""
        cost = HeatCost(probe_s=seconds * self._ranks, probe_cpu_s=seconds)
        self._budget.spent(cost, measured=measured)

    def settled(self) -> None:
        """What was spent on the prompts that ``answered`` has told is known by now."""
        ended, self._ended = self._ended, []
        for reserve in ended:
            self._budget.give_back(reserve)
        if ended:
            self._budget.learn(sum(reserve.tokens for reserve in ended))

    def answered(self, readings: Readings) -> Iterator[tuple[Run, dict[int, Heat]]]:
        """Per measured prompt its chunks, and by layer ``[kv_heads, chunks]`` of all ranks.

        Ranks wait for their own GPUs, so one may answer a step later than another.
        """
        for (number, layer, rank), part in readings.items():
            asked = self._waiting.get(number)  # None from before a reset
            if asked is not None:
                asked.parts[layer, rank] = part
        for number in dict.fromkeys(number for number, _, _ in readings):
            asked = self._waiting.get(number)
            if asked is not None and asked.ranks() == self._ranks:
                del self._waiting[number]
                self._ended.append(asked.reserve)
                yield asked.run, asked.measured()

    def forget(self) -> None:
        """What is under way says nothing any more."""
        for asked in self._waiting.values():
            self._budget.give_back(asked.reserve)
        self._waiting.clear()
        self._budget.forget()


class HeatBook:
    """The moving averages. The scheduler's thread only.

    Args:
        layers: of the model.

    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        # Chunk to row, the one measured longest ago first. 0 in the table is not measured.
        self._rows: OrderedDict[ChunkId, int] = OrderedDict()
        self._table: Heat = np.zeros((0, layers, 0), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def heads(self) -> int:
        """KV heads of the model, 0 before the first measurement."""
        heads: int = self._table.shape[2]
        return heads

    def note(self, run: Run, measured: dict[int, Heat]) -> list[float]:
        """Take in what was measured of a prompt: per layer ``[kv_heads, chunks]``.

        Returns the heat of each chunk: attention of a query, 0 to 1, on average over
        heads and over all layers that were ever measured.
        """
        heads = next(iter(measured.values())).shape[0]
        if self._table.shape[2] != heads:
            self._start(heads)
        run = run.tail(max(0, len(run) - len(self._table)))
        rows = np.fromiter(map(self._row, run.chunks), np.intp, len(run))
        for layer, mass in measured.items():
            if layer < self._layers:
                self._average(rows, layer, mass[:, run.start : run.start + len(run)].T)
        known = self._table[rows]
        counts = np.count_nonzero(known, axis=(1, 2))
        means: list[float] = (known.sum(axis=(1, 2)) / np.maximum(counts, 1)).tolist()
        return means

    def heat(self, chunk: ChunkId) -> Heat | None:
        """``[layers, kv_heads]`` of a chunk, 0 where nothing was measured; None if nowhere."""
        row = self._rows.get(chunk)
        return None if row is None else self._table[row]

    def heat_of(self, run: Run) -> Heat:
        """``[layers, kv_heads, chunks]`` of a run, 0 where nothing was measured."""
        nothing = np.zeros(self._table.shape[1:], np.float32)
        known = [self.heat(chunk) for chunk in run.chunks]
        return np.stack([nothing if heat is None else heat for heat in known], axis=-1)

    def forget(self) -> None:
        """Other weights attend to other things."""
        self._rows.clear()
        self._table = np.zeros_like(self._table)

    def _start(self, heads: int) -> None:
        self._rows.clear()
        rows = max(1, _MOST_BYTES // (4 * self._layers * heads))
        self._table = np.zeros((rows, self._layers, heads), np.float32)

    def _row(self, chunk: ChunkId) -> int:
        row = self._rows.get(chunk)
        if row is not None:
            self._rows.move_to_end(chunk)
            return row
        if len(self._rows) < len(self._table):
            row = len(self._rows)
        else:
            _, row = self._rows.popitem(last=False)
            self._table[row] = 0
        self._rows[chunk] = row
        return row

    def _average(self, rows: NDArray[np.intp], layer: int, mass: Heat) -> None:
        old = self._table[rows, layer]
        mass = np.maximum(mass, np.finfo(np.float32).tiny)
        self._table[rows, layer] = np.where(old > 0, old + _LEARNING * (mass - old), mass)
