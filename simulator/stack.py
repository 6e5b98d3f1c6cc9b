"""What ``--tiers`` reads: a stack of tiers with their sizes and speeds, and an engine's speed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import yaml
from kvtiers.policies.placement import Admission, Placement, WriteWhen
from kvtiers.simulator.choices import Capacity
from kvtiers.simulator.errors import SimulatorError
from kvtiers.tiers.spelling import did_you_mean
from kvtiers.tiers.units import Size, read_size
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

GPU, CPU = "gpu", "cpu"
# More can only be a slip of the pen, and each takes memory.
_MOST_REPLICAS, _MOST_THREADS = 1024, 1024


def _bandwidth(value: object) -> object:
    """``5GB/s`` as bytes per second."""
    if isinstance(value, str):
        nbytes = read_size(value.strip().removesuffix("/s"))
        if nbytes is None:
            raise ValueError("it must be bytes per second, such as 5GB/s")
        return nbytes
    return value


def _capacity(value: object) -> object:
    return value if isinstance(value, Capacity) else Capacity.parse(str(value))


Seconds = Annotated[float, Field(allow_inf_nan=False)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth), Field(gt=0, allow_inf_nan=False)]


class TierModel(BaseModel):
    """One tier.

    Attributes:
        name: ``gpu`` for the engine's own prefix cache, ``cpu`` for the arena, which must
            be there, and any other for what lies below.
        capacity: chunks, bytes with their unit, or a share of the trace's footprint.
        latency: seconds before the first byte of a call comes.
        read, write: bytes per second, of all calls together.
        threads: calls at a time.
        shared: whether all replicas use one and the same.
        deadline: seconds that a lookup or load may take.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = Field(min_length=1)
    capacity: Annotated[Capacity, BeforeValidator(_capacity)]
    latency: Seconds = Field(default=0.0, ge=0)
    read: Bandwidth = 25e9
    write: Bandwidth = 25e9
    threads: int = Field(default=4, ge=1, le=_MOST_THREADS)
    shared: bool = False
    deadline: Seconds = Field(default=5.0, gt=0)


class StackModel(BaseModel):
    """A stack of tiers, and the engines that use it.

    Attributes:
        tiers: from nearest to the GPU to farthest.
        prefill: tokens per second that an engine computes.
        replicas: engines, among which requests are dealt out.
        chunk_bytes: size of a chunk, where the trace does not say.
        admission: what lower tiers take, as in an engine's configuration.
        write: when they get it, likewise.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tiers: tuple[TierModel, ...] = Field(min_length=1)
    prefill: float = Field(default=10_000.0, gt=0, allow_inf_nan=False)
    replicas: int = Field(default=1, ge=1, le=_MOST_REPLICAS)
    chunk_bytes: Size | None = None
    admission: Admission = "all"
    write: WriteWhen = "through"

    @model_validator(mode="after")
    def _one_of_each(self) -> StackModel:
        names = [tier.name for tier in self.tiers]
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise ValueError(f"two tiers are named '{twice[0]}'")
        if names[: 1 + (GPU in names)] not in ([CPU], [GPU, CPU]):
            raise ValueError("the first tier must be cpu, or gpu and then cpu")
        if any(tier.shared for tier in self.tiers if tier.name in (GPU, CPU)):
            raise ValueError("gpu and cpu belong to one replica each: they can't be shared")
        return self

    @property
    def placement(self) -> Placement:
        """How the lower tiers are filled."""
        return Placement(self.admission, self.write)

    def named(self, name: str) -> TierModel | None:
        """The tier of that name, if there is one."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    @property
    def lower(self) -> Sequence[TierModel]:
        """What lies below the arena."""
        return [tier for tier in self.tiers if tier.name not in (GPU, CPU)]


def read_stack(path: str | os.PathLike[str]) -> StackModel:
    """Read a stack from a YAML or JSON file.

    Raises:
        SimulatorError: it can't be read, or says what can't be.

    """
    try:
        with open(path, encoding="utf-8") as file:
            value = yaml.safe_load(file)
    except OSError as error:
        raise SimulatorError(f"{path}: it can't be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: text that is no UTF-8, or a date that there is none of.
        raise SimulatorError(f"{path}: it is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise SimulatorError(f"{path}: it must be a mapping with the key 'tiers'.")
    try:
        return StackModel.model_validate(value)
    except ValidationError as error:
        raise SimulatorError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    # A key that is missing may be there, misspelt.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first: Mapping[str, Any] = problems[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        model = TierModel if "tiers" in first["loc"] else StackModel
        known = model.model_fields
        if "type" in first["loc"]:
            return (
                f"'{place}' belongs to an engine's configuration, and --tiers takes models of "
                f"tiers, with sizes and speeds: {', '.join(known)}. See docs/simulate.md."
            )
        close = did_you_mean(str(first["loc"][-1]), known)
        return f"'{place}' is no key of it.{close} Known there: {', '.join(known)}."
    said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{f'{chr(39)}{place}{chr(39)}: ' if place else ''}{said}."
