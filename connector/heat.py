"""What the scheduler and the workers tell each other about attention heat.

The scheduler knows requests and their chunks, a worker sees rows of a batch. So the
scheduler sends, with the step that computes the end of a prompt, what to measure; the
answer comes back with the worker's metadata, under the number of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from kvtiers.connector.config_errors import shown
from kvtiers.connector.heat_post import Posted
from kvtiers.tiers.file_option import FileOption
from kvtiers.tiers.spelling import did_you_mean
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Readings = Mapping[tuple[int, int, int], NDArray[np.float32]]
"""``(job, layer, rank)`` to ``[kv_heads, chunks]``: see ``attention_mass``. A rank knows
its own KV heads only."""


NOT_MEASURED = (
    "Attention heat is not measured (%s). The policy works without it; set attention_heat to "
    "false to be rid of this warning."
)
"""What the log says, with the reason."""


class HeatSettings(BaseModel):
    """How attention heat is measured, if it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(
        default=3, ge=1, description="the most layers that are measured for a request, in turn"
    )
    window: int = Field(
        default=32, ge=1, description="how many queries at the end of a prompt are measured"
    )
    every: int = Field(default=1, ge=1, description="which requests are measured: each n-th")
    budget: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="the share of the time of computing prompts that measuring may take",
    )
    share: bool = Field(
        default=False,
        description="whether engines tell each other, through the first tier that they share",
    )
    log: FileOption | None = Field(
        default=None, description="the file that what is measured is appended to"
    )


_ALLOWED = (
    "it must be 'auto', true, false, or a mapping with some of layers, window and every, whole "
    "numbers from 1 on, budget, a share of at most 1, share, true or false, and log, the path of a "
    "file"
)


def _checked(value: object) -> object:
    """Raises ValueError, with one sentence on what is allowed."""
    if isinstance(value, HeatSettings | bool) or value == "auto":
        return value
    if not isinstance(value, Mapping):
        raise ValueError(_ALLOWED)  # noqa: TRY004 - pydantic collects ValueErrors only
    for key in value:
        if key not in HeatSettings.model_fields:
            hint = did_you_mean(str(key), HeatSettings.model_fields)
            raise ValueError(f"{_ALLOWED}, and it has {shown(key)}.{hint}")
    try:
        return HeatSettings.model_validate(value)
    except ValidationError as error:
        wrong = error.errors()[0]
        text = f"{_ALLOWED}, and its {wrong['loc'][0]} is {shown(wrong['input'])}"
        raise ValueError(text) from error


HeatChoice = Annotated[HeatSettings | Literal["auto", True, False], BeforeValidator(_checked)]
"""Whether heat is measured ("auto": if the policy asks for it), or how."""


@dataclass(frozen=True, slots=True)
class HeatJob:
    """The end of one prompt, which the step computes.

    Attributes:
        number: of the job.
        turn: which of the layers it is the turn of, a counter.
        tokens: of the request that are in the KV cache once the step is done.
        queries: how many of them, at the end, to measure; all are computed by the step.
        last_block: KV block of the last token, which no other request of the step has.
        block_tokens: tokens of a KV block.
        chunk_tokens: tokens of a chunk.

    """

    number: int
    turn: int
    tokens: int
    queries: int
    last_block: int
    block_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class HeatStep(Posted):
    """What a worker is told of a step.

    Attributes:
        jobs: what to measure.
        prefill: share of the step's tokens that are prompts'.

    """

    jobs: tuple[HeatJob, ...] = ()
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class HeatCost:
    """What was spent on measuring, and on computing prompts, measuring included.

    Attributes:
        probe_s: seconds of measuring, by the clock.
        prefill_s: seconds of computing prompts, by the clock.
        probe_cpu_s: processor time of measuring.
        prefill_cpu_s: processor time of computing prompts.

    """

    probe_s: float = 0.0
    prefill_s: float = 0.0
    probe_cpu_s: float = 0.0
    prefill_cpu_s: float = 0.0

    def __add__(self, other: HeatCost) -> HeatCost:
        """Both together."""
        return HeatCost(
            self.probe_s + other.probe_s,
            self.prefill_s + other.prefill_s,
            self.probe_cpu_s + other.probe_cpu_s,
            self.prefill_cpu_s + other.prefill_cpu_s,
        )


NO_STEP, NO_COST = HeatStep(), HeatCost()


@dataclass(frozen=True, slots=True, eq=False)
class HeatReport(Posted):
    """What workers tell after a step: false if it is nothing.

    Attributes:
        readings: what was measured.
        cost: what was spent since the last report.

    """

    readings: Readings = field(default_factory=dict)
    cost: HeatCost = NO_COST

    def __bool__(self) -> bool:
        return bool(self.readings) or self.cost != NO_COST

    def __add__(self, other: HeatReport) -> HeatReport:
        """Of several ranks: each measures KV heads of its own, under its own key."""
        return HeatReport(
            {**self.readings, **other.readings},
            self.cost + other.cost,
            post_s=self.post_s + other.post_s,
        )


NO_REPORT = HeatReport()


def layers_at(turn: int, wanted: int, count: int) -> range:
    """Indices of at most ``wanted`` of ``count`` layers, spread evenly; a round has all once."""
    step = max(1, -(-count // wanted))
    return range(turn % step, count, step)
