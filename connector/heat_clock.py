"""What a worker's probe takes, and what computing prompts does.

On the CPU by the clock and in processor time; on a device by events among its own work, as
it goes on while the host has long left, and what the host does beside that like on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kvtiers.connector.heat import NO_COST, HeatCost

HostMark = tuple[float, float]
"""A point in time on the host: by the clock, and in processor time of the process."""
Mark = Any
"""A point in time of what computes: a ``HostMark`` on the CPU, an event on a device."""


def host_mark() -> HostMark:
    """Now. All threads of the process count: those of a layer wait for the one that measures.

    To ask for processor time is to ask the kernel, which may let somebody else run first who
    waits for this core. That is owed to what was done until now, so it is asked twice.
    """
    time.process_time()
    cpu = time.process_time()
    return time.perf_counter(), cpu


@dataclass(frozen=True)
class _Span:
    """Between two events, counted by these shares."""

    begin: Mark
    end: Mark
    probe: float
    prefill: float

    def cost(self) -> HeatCost | None:
        """None if the device has yet to reach its end. A device's time is by both clocks."""
        if not self.end.query():
            return None
        seconds = self.begin.elapsed_time(self.end) / 1000
        probe, prefill = self.probe * seconds, self.prefill * seconds
        return HeatCost(probe, prefill, probe, prefill)


class HeatClock:
    """One worker's. Spans may be told while the device has yet to reach their end.

    Args:
        device: vLLM's type of the worker's device.
        now: of the host.

    """

    def __init__(self, device: str, now: Callable[[], HostMark] = host_mark) -> None:
        self._on_host = device == "cpu"
        self.now = now
        self.mark: Callable[[], Mark] = now if self._on_host else lambda: _event(device)
        self._cost = NO_COST
        self._spans: list[_Span] = []

    @property
    def waits(self) -> bool:
        """Whether the device has yet to reach an end, or had when that was last looked at."""
        return bool(self._spans)

    def probed(self, begin: Mark) -> None:
        """From ``begin`` until now something was measured."""
        self._add(begin, 1.0, 0.0)

    def computed(self, begin: Mark, prefill: float) -> None:
        """From ``begin`` until now a step was computed, this share of it prompts."""
        self._add(begin, 0.0, prefill)

    def prepared(self, begin: HostMark) -> None:
        """From ``begin`` until now the host did what measuring needs beside it."""
        self._cost += _between(begin, self.now(), 1.0, 0.0)

    def posted(self, seconds: float) -> None:
        """Telling what to measure took this, of processes that do nothing else meanwhile."""
        self._cost += HeatCost(probe_s=seconds, probe_cpu_s=seconds)

    def take(self) -> HeatCost:
        """What has come to its end since the last call."""
        cost, self._cost, late = self._cost, NO_COST, []
        for span in self._spans:
            found = span.cost()
            if found is None:
                late.append(span)
            else:
                cost += found
        self._spans = late
        return cost

    def _add(self, begin: Mark, probe: float, prefill: float) -> None:
        if self._on_host:
            self._cost += _between(begin, self.now(), probe, prefill)
        else:
            self._spans.append(_Span(begin, self.mark(), probe, prefill))


def _between(begin: HostMark, end: HostMark, probe: float, prefill: float) -> HeatCost:
    wall, cpu = end[0] - begin[0], end[1] - begin[1]
    return HeatCost(probe * wall, prefill * wall, probe * cpu, prefill * cpu)


def _event(device: str) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event
