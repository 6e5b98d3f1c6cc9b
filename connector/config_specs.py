"""What is known of a tier and of the policy once their entries are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtiers.connector.config_errors import ConfigError, from_pydantic
from kvtiers.connector.sizes import Capacity, file_system_bytes, format_bytes
from kvtiers.policies import POLICIES, Policy, Run, TierInfo
from kvtiers.policies.base import one_second_a_chunk
from kvtiers.policies.placement import Placement, with_placement
from kvtiers.policies.quota import with_quotas
from kvtiers.tiers import TIERS, Tier, TierConfig
from kvtiers.tiers.host_memory import available_bytes
from kvtiers.tiers.remote_url import is_remote
from kvtiers.tiers.residency import CPU
from kvtiers.tiers.units import Portion, portion_bytes
from pydantic import BaseModel, ConfigDict, ValidationError

TierClass = type[Tier]


class TierSpec(BaseModel):
    """One entry of ``tiers``.

    Attributes:
        name: how metrics and errors call it; the type unless given.
        type: the registered name of its class.
        capacity: as written or the default; None if the tier's class has no such
            option, or has a default of its own for it.
        options: the tier's own ``Config``. If ``capacity`` is set here, the one in
            the options means nothing until ``with_bytes``.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    type: str
    capacity: Capacity | None
    options: TierConfig

    def tier_class(self) -> TierClass:
        """The class behind ``type``, in the variant that the options ask for."""
        return TIERS.get(self.type).variant(dict(self.options))

    def has_whole(self) -> bool:
        """Whether this machine has something that a share of the tier is a share of."""
        path = getattr(self.options, "path", None)
        return self.type == CPU or not (path is None or is_remote(path))

    def with_quota(self, quota: Portion) -> TierSpec:
        """With this for tenants, unless its entry says something else."""
        if quota is None or "tenant_quota" in self.options.model_fields_set:
            return self
        options = self.options.model_copy(update={"tenant_quota": quota})
        return self.model_copy(update={"options": options})

    def unbound(self) -> bool:
        """Whether tenants have a share of it, and it has no capacity that could be shared out."""
        bound = self.capacity or getattr(self.options, "capacity", None)
        return bound is None and isinstance(self.options.tenant_quota, float)

    def with_bytes(
        self, path: str, chunk_bytes: int, engines: int = 1, promised: int = 0
    ) -> TierConfig:
        """The options with the capacity in bytes.

        Args:
            path: of this entry in the configuration, for error texts.
            chunk_bytes: size of one chunk.
            engines: engines of this host that share its memory.
            promised: bytes of memory each of them has been promised by the kernel and
                has not touched yet.

        Raises:
            ConfigError: it is below one chunk, a share of nothing, more memory than
                there is, or refused by the tier's own ``Config``; or the quota of a
                tenant is below one chunk.

        """
        options = self._sized(path, chunk_bytes, engines, promised)
        quota = portion_bytes(options.tenant_quota, getattr(options, "capacity", None))
        if quota is not None and quota < chunk_bytes:
            raise ConfigError([self._no_quota(path, quota, chunk_bytes)])
        return options

    def _sized(self, path: str, chunk_bytes: int, engines: int, promised: int) -> TierConfig:
        if self.capacity is None:
            return self.options
        # Memory is asked for a size too: what the host lacks ends in the kernel's killing us.
        asked = self.capacity.share is not None or self.type == CPU
        whole = self._whole_bytes(engines, promised) if asked else 0
        if whole is None:
            raise ConfigError(
                [f"{path}.capacity is {self.capacity}, but {self.share_of_nothing()}"]
            )
        nbytes = self.capacity.resolve(whole)
        if nbytes < chunk_bytes:
            raise ConfigError([self._too_small(path, nbytes, chunk_bytes)])
        if self.type == CPU and nbytes > whole:
            raise ConfigError([self._too_large(path, nbytes, whole, engines)])
        written = self.options.model_dump(exclude_unset=True) | {"capacity": nbytes}
        try:
            return type(self.options).model_validate(written)
        except ValidationError as error:
            raise ConfigError(
                from_pydantic(error, type(self.options), lambda _: str(self.capacity), path)
            ) from error

    def share_of_nothing(self) -> str:
        """Why a share can't be its capacity, if it has no whole."""
        return (
            f"a tier of type '{self.type}' has no whole on this machine to take a share of. Give "
            "it as a size, such as 8GiB."
        )

    def _whole_bytes(self, engines: int, promised: int) -> int | None:
        if self.type == CPU:
            return max(0, available_bytes() // engines - promised)
        path = getattr(self.options, "path", None)
        return file_system_bytes(str(path)) if self.has_whole() else None

    def _no_quota(self, path: str, nbytes: int, chunk_bytes: int) -> str:
        is_share = isinstance(self.options.tenant_quota, float)
        exact = f" ({Capacity.parse(self.options.tenant_quota)})" if is_share else ""
        return (
            f"The tenant_quota of {path} is {format_bytes(nbytes)}{exact}, which is below one "
            f"chunk of {format_bytes(chunk_bytes)}, so that no tenant could store anything. Set it "
            f"to a good multiple of {chunk_bytes} bytes, or leave it out for no limit."
        )

    @staticmethod
    def _too_large(path: str, nbytes: int, free: int, engines: int) -> str:
        each = f" for each of the {engines} engines on it" if engines > 1 else ""
        return (
            f"{path}.capacity is {format_bytes(nbytes)}, but this host (or its cgroup) has "
            f"{format_bytes(free)} of memory left{each}. Set it to less than that, or to a share "
            "such as 50%, or leave it out."
        )

    def _too_small(self, path: str, nbytes: int, chunk_bytes: int) -> str:
        exact = f" ({self.capacity} here)" if self.capacity and self.capacity.share else ""
        return (
            f"{path}.capacity is {format_bytes(nbytes)}{exact}, which is below one chunk of "
            f"{format_bytes(chunk_bytes)}. Set it to a good multiple of {chunk_bytes} bytes, or "
            "make chunks smaller with blocks_per_chunk."
        )


class PolicySpec(BaseModel):
    """The ``policy`` entry.

    Attributes:
        type: the registered name of its class.
        options: the policy's own ``Config``.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    type: str
    options: BaseModel

    @property
    def wants_heat(self) -> bool:
        """Whether the policy has use for measured attention."""
        return POLICIES.get(self.type).wants_heat

    def make(
        self,
        tiers: Sequence[TierInfo],
        clock: Callable[[], float],
        recompute_seconds: Callable[[Run], float] = one_second_a_chunk,
        placement: Placement = Placement(),  # noqa: B008 - frozen
    ) -> Policy:
        """The policy, under these rules, for these tiers and the quotas they have."""
        policy = POLICIES.get(self.type)(tiers, self.options, clock, recompute_seconds)
        return with_quotas(with_placement(policy, placement))
