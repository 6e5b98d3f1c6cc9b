"""What is to be simulated, as people write it: policies, capacities, where the score begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from kvtiers.policies import POLICIES, Policy, Run, TierInfo
from kvtiers.policies.base import one_second_a_chunk
from kvtiers.policies.registry import DuplicateNameError, UnknownNameError
from kvtiers.simulator import optimum
from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.faults import told
from kvtiers.tiers.spelling import did_you_mean, meant
from kvtiers.tiers.units import read_percent, read_size
from pydantic import BaseModel, ValidationError

_FRACTION = re.compile(r"\s*\d*\.\d+\s*")
# Up to so many digits: nothing has more, and they would be no number for Python.
_WHOLE = re.compile(r"\s*\d[\d_]{0,17}\s*")


def _share(text: str) -> float | None:
    """``0.02`` or ``2%`` as a number, in or out of bounds; None for what is neither."""
    return float(text) if _FRACTION.fullmatch(text) else read_percent(text)


# Policies -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy and its options.

    Attributes:
        label: the name and what was written behind it, such as ``patient:half_life=300``.
        name: the registered name, or ``min``.
        options: an instance of the policy's ``Config``; None for ``min``.
        module: where its class is defined.

    """

    label: str
    name: str
    options: BaseModel | None = field(default=None, compare=False)
    module: str = field(default=__name__, compare=False)

    @property
    def is_optimum(self) -> bool:
        """Whether it is no policy but the bound of all."""
        return self.name == optimum.NAME

    def make(
        self,
        tiers: Sequence[TierInfo],
        clock: Callable[[], float],
        recompute_seconds: Callable[[Run], float] = one_second_a_chunk,
    ) -> Policy:
        """The policy for these tiers."""
        return POLICIES.get(self.name)(tiers, self.options, clock, recompute_seconds)


LRU = PolicyChoice("lru", "lru")
MIN = PolicyChoice(optimum.NAME, optimum.NAME)


def policies(text: str) -> list[PolicyChoice]:
    """The policies of a list such as ``lru,patient:half_life=300,min``, each once.

    Names may be written as people do: in capitals, with other hyphens or none.

    Raises:
        SimulatorError: there is no such policy, it can't be loaded, or it has no such option.

    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise SimulatorError(f"no policy is named. Known: {', '.join(_known())}.")
    return list(dict.fromkeys(map(_policy, words)))


def all_policies(warn: Callable[[str], None]) -> list[PolicyChoice]:
    """All that are installed, and the optimum.

    Args:
        warn: told of each that can't be had, which is left out.

    Raises:
        SimulatorError: two packages claim one name.

    """
    found = []
    for name in _known():
        try:
            found.append(_policy(name))
        except SimulatorError as error:
            warn(f"{error} It is left out.")
    return found


def _known() -> list[str]:
    try:
        return [*POLICIES.names(), MIN.name]
    except DuplicateNameError as error:
        raise SimulatorError(str(error)) from None


def _policy(word: str) -> PolicyChoice:
    written, _, rest = word.partition(":")
    if written.strip().lower() in (MIN.name, "optimum", "belady", "opt"):
        if rest:
            raise SimulatorError(f"'{word}': {MIN.name} has no options.")
        return MIN
    try:
        name = _registered(written)
        found = POLICIES.get(name)
    except UnknownNameError as error:
        optimal = did_you_mean(written.lower(), [MIN.name])
        raise SimulatorError(f"{error} '{MIN.name}' is the clairvoyant optimum.{optimal}") from None
    except (DuplicateNameError, ImportError, TypeError) as error:
        raise SimulatorError(str(error)) from None
    try:
        values = dict(_option(word, part, found) for part in rest.split(":") if part)
        label = f"{name}:{rest}" if rest else name
        return PolicyChoice(label, name, found.Config.model_validate(values), found.__module__)
    except SimulatorError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise SimulatorError(f"'{word}': option '{key}' of {name}: {first['msg']}.") from None
    except Exception as error:  # a stranger's model of its options may raise anything
        raise SimulatorError(f"'{word}': {name} can't be had: {told(error)}.") from error


def _registered(written: str) -> str:
    """The name it is registered under: ``lru`` for ``LRU``, ``w-tinylfu`` for ``W_TinyLFU``."""
    return meant(written, POLICIES.names()) or written


def _option(word: str, part: str, found: type[Policy]) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    known = sorted(found.Config.model_fields)
    if not equals or key not in known:
        options = [f"{each}=" for each in known]
        raise SimulatorError(
            f"'{word}': '{part}' is no option of {found.name}."
            f"{did_you_mean(f'{key}=', options)} Options: {', '.join(options) or 'none'}."
        )
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise SimulatorError(f"'{word}': '{value:.60}' is no value of an option.") from None


# Capacities ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """Chunks, bytes, or a share of a trace's footprint: exactly one is set."""

    text: str
    chunks: int | None = None
    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Read ``5000`` (chunks), ``2GiB`` (bytes), ``0.02`` or ``2%`` (a share).

        Raises:
            SimulatorError: it is none of these.

        """
        share = _share(text)
        if share is not None:
            if 0 < share <= 1:
                return cls(text, share=share)
        elif _WHOLE.fullmatch(text):
            if int(text):
                return cls(text, chunks=int(text))
        elif nbytes := read_size(text):
            return cls(text, nbytes=nbytes)
        raise SimulatorError(
            f"capacity '{text}': write chunks (5000), bytes with their unit (2GiB), or a share of "
            "the trace's footprint above 0 and up to 1 (0.02 or 2%)."
        )

    def resolve(self, footprint: int, chunk_bytes: int) -> tuple[int, float]:
        """How many chunks it is, at least one, and which share of the footprint.

        Args:
            footprint: chunks that shares are taken of.
            chunk_bytes: size of one, 0 if unknown.

        Raises:
            SimulatorError: it is a number of bytes, and chunks have no known size or a larger one.

        """
        if self.chunks is not None:
            return self.chunks, self.chunks / footprint
        if self.share is not None:
            return max(1, int(self.share * footprint)), self.share
        assert self.nbytes is not None
        if not chunk_bytes:
            raise SimulatorError(
                f"capacity '{self.text}' is a number of bytes, and the trace does not say how many "
                "a chunk has. Say so with --chunk-bytes, such as --chunk-bytes 32MiB."
            )
        if self.nbytes < chunk_bytes:
            raise SimulatorError(
                f"capacity '{self.text}' is less than one chunk, which has {chunk_bytes} bytes."
            )
        chunks = self.nbytes // chunk_bytes
        return chunks, chunks / footprint


# Where the score begins -----------------------------------------------------------


def score_from(text: str, requests: int) -> int:
    """The first request that counts, from 0: how many warm up, or which share of them.

    Raises:
        SimulatorError: it is neither, or leaves nothing to count.

    """
    share = _share(text)
    if share is not None and 0 <= share < 1:
        return int(share * requests)
    if share is None and _WHOLE.fullmatch(text) and int(text) < requests:
        return int(text)
    raise SimulatorError(
        f"--score-from '{text}': write how many requests warm up, fewer than the {requests} of "
        "the trace, or a share of them from 0 on and below 1, such as 0.5 or 50%."
    )
