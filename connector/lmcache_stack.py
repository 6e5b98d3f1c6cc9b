"""The tiers behind an LMCache server, from the ``adapter_params`` of its ``--l2-adapter``."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtiers.connector.config_entries import EntryReader
from kvtiers.connector.config_errors import ConfigError, from_pydantic
from kvtiers.connector.config_settings import VersionText
from kvtiers.connector.config_sources import Layers, Source, read_file
from kvtiers.connector.config_specs import PolicySpec, TierSpec
from kvtiers.connector.config_text import check
from kvtiers.connector.sizes import format_bytes
from kvtiers.tiers import ALIGNMENT, Namespace, Tier
from kvtiers.tiers.cpu import CpuTier, make_arena
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.host_memory import available_bytes
from kvtiers.tiers.lower import MakeWorkers
from kvtiers.tiers.populate import Populator
from kvtiers.tiers.units import Size
from kvtiers.tiers.workers import Op, ThreadWorkers
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of how an object is cut into pieces and how they are named. Raise it with any change."""

_ORIGIN = "adapter_params"
_ENTRIES = ("config", "tiers", "policy")
_LEAST_PIECES = 16
_WHY_NO_CPU = (
    "LMCache's own memory (L1) is that tier, above all that stand here, and is sized with "
    "--l1-size-gb. Leave cpu out."
)


class Settings(BaseModel):
    """What can be set beside the tiers and the policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    staging: Size = Field(
        default=256 << 20,
        description="the memory that objects pass through on their way to and from the tiers",
    )
    piece_size: Size = Field(
        default=1 << 20, description="the size of the pieces that objects are stored in"
    )
    weights_version: VersionText | None = Field(
        default=None,
        description="a text that changes with all that LMCache's keys do not tell: the weights, "
        "the dtype of the KV, the kind of machine",
    )

    @field_validator("piece_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        if value % ALIGNMENT:
            raise ValueError(f"it must be a multiple of {ALIGNMENT} bytes")
        return value

    @model_validator(mode="after")
    def _holds_pieces(self) -> Settings:
        if self.staging < _LEAST_PIECES * self.piece_size:
            raise ValueError(
                f"staging is {format_bytes(self.staging)} and piece_size is "
                f"{format_bytes(self.piece_size)}: it must hold at least {_LEAST_PIECES} pieces, "
                "and twice the largest object. Raise staging or lower piece_size"
            )
        return self


@dataclass(frozen=True)
class Stack:
    """The tiers behind one adapter.

    Attributes:
        hierarchy: of them, with the staging area as its arena.
        slots: pieces that the staging area holds.
        patience: the longest deadline of the tiers, in seconds.

    """

    hierarchy: Hierarchy
    slots: int
    patience: float


def build(params: Mapping[str, Any], wake: Callable[[], None]) -> Stack:
    """Check the parameters and build what they describe.

    Args:
        params: ``tiers`` and ``policy`` as in a configuration of the vLLM connector, the
            keys of ``Settings``, and ``config``, a file with some or all of these.
        wake: called on a tier's thread with each answer, so that it is taken in soon.

    Raises:
        ConfigError, TierConfigError: it cannot work; the text says what to change.

    """
    settings, tiers, policy = _checked(params)
    lower: dict[str, Tier] = {}
    for index, spec in enumerate(tiers):
        config = spec.with_bytes(f"tiers[{index}]", settings.piece_size)
        lower[spec.name] = spec.tier_class()(config, settings.piece_size)
    probed = {name: tier.probe() for name, tier in lower.items()}
    arena = make_arena(settings.staging, settings.piece_size)
    capacity = CpuTier.Config(capacity=arena.nbytes)
    staging = CpuTier(capacity, settings.piece_size, arena, Populator(arena))
    namespace = namespace_of(settings)
    make_workers = _waking(wake)
    hierarchy = Hierarchy(
        staging,
        lower,
        policy.make,
        namespace,
        make_workers=make_workers,
        away={name: why for name, why in probed.items() if why is not None},
    )
    logger.info(
        "kvtiers behind LMCache: policy %s; %s; pieces of %s, %s for staging; namespace %s",
        policy.type,
        ", ".join(lower),
        format_bytes(settings.piece_size),
        format_bytes(arena.nbytes),
        namespace.id,
    )
    return Stack(hierarchy, arena.slots, max(tier.config.deadline for tier in lower.values()))


def namespace_of(settings: Settings) -> Namespace:
    """What must be equal for pieces of equal names to hold the same bytes.

    Model, rank, KV-cache group, salt and prefix are in LMCache's keys, and so in the
    pieces' names. How LMCache lays KV out has no number of its own, so its release
    stands for that.
    """
    facts = {
        "format": FORMAT_VERSION,
        "engine": "lmcache",
        "lmcache": _lmcache_release(),
        "piece_bytes": settings.piece_size,
        "weights_version": settings.weights_version,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return Namespace(digest, facts)


def _lmcache_release() -> str | None:
    try:
        return ".".join(importlib.metadata.version("lmcache").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        # Something else speaks LMCache's interface.
        return None


def _checked(params: Mapping[str, Any]) -> tuple[Settings, list[TierSpec], PolicySpec]:
    layers = _gathered(params)
    reader = EntryReader(layers, _WHY_NO_CPU)
    tiers, policy = reader.tiers(), reader.policy()
    rest = {key: layers.value(key) for key in layers.owners if key not in _ENTRIES}
    problems, settings = list(reader.problems), None
    try:
        settings = Settings.model_validate(rest)
    except ValidationError as error:
        problems += from_pydantic(error, Settings, layers.origin, also_known=_ENTRIES)
    # More than there is would be taken as it is used, until the kernel ends the server.
    if settings is not None and settings.staging > (free := available_bytes()):
        problems.append(
            f"staging is {format_bytes(settings.staging)}, but this host (or its cgroup) has "
            f"{format_bytes(free)} of memory left. Set it to less than that; twice the largest "
            "object is enough."
        )
    if problems or settings is None or policy is None:
        raise ConfigError(problems)
    return settings, tiers, policy


def _gathered(params: Mapping[str, Any]) -> Layers:
    """The file that ``config`` names, if it does, and over it what else there is."""
    try:
        check(params)
    except ValueError as error:
        raise ConfigError([f"{_ORIGIN} cannot be read: {error}."]) from error
    sources = [Source("default", {"policy": "lru"}), Source(_ORIGIN, dict(params))]
    if "config" in params:
        # LMCache logs these parameters, and they stand on a command line: no place for a
        # password.
        sources.insert(1, read_file(params["config"], f"'config' in {_ORIGIN}"))
    owners = {key: source for source in sources for key in source.values if key != "config"}
    owners.setdefault("tiers", Source(_ORIGIN, {"tiers": []}))
    return Layers(owners)


def _waking(wake: Callable[[], None]) -> MakeWorkers:
    """Threads that call ``wake`` after each op: nobody steps the hierarchy otherwise."""

    def make(tier: Tier, done: Callable[[Op], None], threads: int) -> ThreadWorkers:
        def landed(op: Op) -> None:
            done(op)
            wake()

        return ThreadWorkers(tier, landed, threads=threads)

    return make
