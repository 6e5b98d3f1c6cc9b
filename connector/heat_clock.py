"""What a worker's probe takes, and what computing prompts does.

On the CPU by the clock; on a device by events among its own work, as it goes on while the
host has long left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kvtiers.connector.heat import NO_COST, HeatCost

Mark = Any
"""A point in time: seconds on the CPU, an event on a device."""


@dataclass(frozen=True)
class _Span:
    """Between two marks, counted by these shares."""

    begin: Mark
    end: Mark
    probe: float
    prefill: float


class HeatClock:
    """One worker's. Spans may be told while the device has yet to reach their end.

    Args:
        device: vLLM's type of the worker's device.

    """

    def __init__(self, device: str) -> None:
        self._on_host = device == "cpu"
        self.mark: Callable[[], Mark] = time.perf_counter
        if not self._on_host:
            self.mark = lambda: _event(device)
        self._spans: list[_Span] = []

    def probed(self, begin: Mark) -> None:
        """From ``begin`` until now something was measured."""
        self._spans.append(_Span(begin, self.mark(), 1.0, 0.0))

    def computed(self, begin: Mark, prefill: float) -> None:
        """From ``begin`` until now a step was computed, this share of it prompts."""
        self._spans.append(_Span(begin, self.mark(), 0.0, prefill))

    def take(self) -> HeatCost:
        """What has come to its end since the last call."""
        cost, late = NO_COST, []
        for span in self._spans:
            seconds = self._between(span.begin, span.end)
            if seconds is None:
                late.append(span)
            else:
                cost += HeatCost(span.probe * seconds, span.prefill * seconds)
        self._spans = late
        return cost

    def _between(self, begin: Mark, end: Mark) -> float | None:
        if self._on_host:
            seconds: float = end - begin
            return seconds
        return begin.elapsed_time(end) / 1000 if end.query() else None


def _event(device: str) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event
