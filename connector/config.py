"""The configuration: what can be set, how it is checked, and what came from where.

Nothing here needs vLLM or torch, so ``kvtiers config --check FILE`` runs the same
checks on a laptop as the server does before it answers its first request. What
depends on the serving machine or the model is asked for later, with
``resolve_blocks_per_chunk`` and ``Config.tier_configs``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.connector.config_entries import EntryReader
from kvtiers.connector.config_errors import (
    ConfigError,
    from_pydantic,
    misplaced_key,
    options_of,
    shown,
    unknown_key,
)
from kvtiers.connector.config_lmcache import near_word, translate
from kvtiers.connector.config_lmcache_values import Use, missed_of, said_of
from kvtiers.connector.config_settings import WARM_CACHE_RATIO, Settings
from kvtiers.connector.config_sources import EXTRA, Layers, Source, gather
from kvtiers.connector.config_specs import PolicySpec, TierSpec
from kvtiers.connector.heat import HeatSettings
from kvtiers.connector.sizes import Capacity
from kvtiers.tiers import TierConfig
from kvtiers.tiers.spelling import did_you_mean
from kvtiers.tiers.units import PORTION, SIZE
from pydantic import BaseModel, ValidationError

logger = logging.getLogger(__name__)

_DEFAULTS = Source("default", {"tiers": ["cpu", "fs"], "policy": "lru"})

# Keys of vLLM's own offloading, and what does their work here.
_VLLM_KEYS: Mapping[str, str] = {
    "block_size": "set 'chunk_size' (in tokens) instead, or, if storage is meant, 'block_size' of "
    "an fs tier in 'tiers'",
    "cache_policy_module_path": "set 'policy' instead; packages add policies by entry point",
    "cpu_bytes_to_use": "set 'capacity' of the cpu tier in 'tiers' instead",
    "eviction_policy": "set 'policy' instead",
    "secondary_tiers": "add the tiers to 'tiers', below cpu, instead",
    "spec_module_path": "leave it out, kvtiers brings its own",
    "spec_name": "leave it out, kvtiers brings its own",
    "sync_load_budget_bytes": "leave it out; vLLM cannot be told that a load within a step failed",
    "store_threshold": "leave it out, the policy decides what is admitted",
}


class Config(Settings):
    """A checked configuration.

    Attributes:
        tiers: from nearest to the GPU to farthest; the first one is ``cpu``.
        policy: decides which chunk lies in which tier.

    """

    tiers: tuple[TierSpec, ...]
    policy: PolicySpec

    @property
    def heat(self) -> HeatSettings | None:
        """How attention heat is measured, None if it is not."""
        choice = self.attention_heat
        if isinstance(choice, HeatSettings):
            return choice
        wanted = self.policy.wants_heat if choice == "auto" else choice
        return HeatSettings() if wanted else None

    def tier_configs(
        self, chunk_bytes: int, engines: int = 1, promised_bytes: int = 0
    ) -> list[TierConfig]:
        """The tiers' own configurations, in order, with capacities in bytes.

        Args:
            chunk_bytes: size of one chunk.
            engines: engines of this host that share its memory.
            promised_bytes: memory of this engine that is allocated and not yet touched.

        Raises:
            ConfigError: a capacity is below one chunk, or a share of nothing.

        """
        configs: list[TierConfig] = []
        problems: list[str] = []
        for index, tier in enumerate(self.tiers):
            try:
                path = f"tiers[{index}]"
                configs.append(tier.with_bytes(path, chunk_bytes, engines, promised_bytes))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return configs


@dataclass(frozen=True)
class Loaded:
    """A configuration and where its values come from.

    Attributes:
        config: checked as far as it can be without the model.
        origins: dotted path of every value, defaults included, to its origin.
        warnings: what the user should know, though it stops nothing.
        notes: what the user may want to know, though nothing is odd.
        lmcache: what became of each word of LMCache's.

    """

    config: Config
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lmcache: tuple[Use, ...] = ()

    def log(self) -> None:
        """Tell the operator what is odd or worth knowing about it."""
        for text in filter(None, [*self.warnings, missed_of(self.lmcache)]):
            logger.warning("kvtiers: %s", text)
        for text in filter(None, [*self.notes, said_of(self.lmcache)]):
            logger.info("kvtiers: %s", text)


def load(
    extra_config: Mapping[str, Any],
    environ: Mapping[str, str],
    file_named_by: str | None = None,
) -> Loaded:
    """Read and check a configuration from all its sources.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``; its ``config`` may name a
            YAML or JSON file, as may the variable ``KVTIERS_CONFIG``.
        environ: ``KVTIERS_<KEY>`` sets a top-level key, in YAML. See ``config_lmcache``
            for LMCache's variables.
        file_named_by: what put ``config`` into ``extra_config``, if not the user, such
            as a command line option; for error texts.

    Raises:
        ConfigError: it cannot work; every problem found is in the text.

    """
    found = gather(extra_config, environ, list(Config.model_fields), file_named_by)
    lmcache = translate(found, environ)
    owners = {**dict.fromkeys(_DEFAULTS.values, _DEFAULTS), **lmcache.layers.owners}
    layers = Layers(owners, lmcache.layers.warnings)
    settings, problems = _settings(layers)
    ratio = settings.warm_cache_ratio if settings is not None else None
    reader = EntryReader(layers, warm_cache_ratio=ratio or WARM_CACHE_RATIO)
    tiers, policy = reader.tiers(), reader.policy()
    problems = [*lmcache.problems, *reader.problems, *problems]
    problems += [_unknown(key, layers, reader) for key in _unknown_keys(layers)]
    if problems or policy is None or settings is None:
        raise ConfigError(problems)
    tiers = [tier.with_quota(settings.tenant_quota) for tier in tiers]
    # What counts, as for blocks_per_chunk.
    counting = {} if _own_memory(layers) else {"warm_cache_ratio": ratio or WARM_CACHE_RATIO}
    config = Config(**(settings.model_dump() | counting), tiers=tuple(tiers), policy=policy)
    if config.chunk_size is not None:
        check_max_tokens(config, config.chunk_size)
    origins = {path: _origin(layers, config, path) for path, _ in values(config)}
    warnings = [*layers.warnings, *_unbound(config)]
    return Loaded(config, origins, tuple(warnings), lmcache.notes, lmcache.uses)


def values(config: Config) -> Iterator[tuple[str, object]]:
    """Every value with its dotted path, in the order in which a file would have them."""
    for index, tier in enumerate(config.tiers):
        path = f"tiers[{index}]"
        yield f"{path}.type", tier.type
        if tier.name != tier.type:
            yield f"{path}.name", tier.name
        for key in options_of(type(tier.options)):
            if key != "type":
                own = key == "capacity" and tier.capacity is not None
                yield f"{path}.{key}", tier.capacity if own else option(tier.options, key)
    yield "policy.type", config.policy.type
    for key, value in config.policy.options:
        yield f"policy.{key}", value
    for key in Settings.model_fields:
        counts_blocks = key == "blocks_per_chunk" and config.chunk_size is None
        yield key, resolve_blocks_per_chunk(config, ()) if counts_blocks else option(config, key)


def option(options: BaseModel, key: str) -> object:
    """The value of an option; of one that is a size or a portion, as such."""
    value, metadata = getattr(options, key), type(options).model_fields[key].metadata
    if PORTION in metadata and value is not None:
        return Capacity.parse(value)
    is_size = key == "capacity" or SIZE in metadata
    return Capacity(nbytes=value) if is_size and isinstance(value, int) else value


def resolve_blocks_per_chunk(config: Config, block_tokens: Sequence[int]) -> int:
    """How many vLLM blocks make one chunk.

    Args:
        config: the configuration.
        block_tokens: tokens per block of each KV-cache group of the model.

    Raises:
        ConfigError: ``chunk_size`` is no multiple of the block size, or the groups'
            blocks differ in size, so that no number of tokens fits all of them.

    """
    if config.chunk_size is None:
        return config.blocks_per_chunk or 1
    sizes = sorted(set(block_tokens))
    if len(sizes) > 1:
        raise ConfigError(
            [
                f"chunk_size is {config.chunk_size} tokens, but the KV-cache groups of this model "
                f"have blocks of {', '.join(map(str, sizes))} tokens. Set blocks_per_chunk instead."
            ]
        )
    blocks, rest = divmod(config.chunk_size, sizes[0])
    if rest:
        fitting = [str(count * sizes[0]) for count in (blocks, blocks + 1) if count]
        raise ConfigError(
            [
                f"chunk_size is {config.chunk_size} tokens, which is no multiple of vLLM's block "
                f"of {sizes[0]} tokens. Set it to {' or '.join(fitting)}, or set blocks_per_chunk "
                "instead."
            ]
        )
    return blocks


def check_max_tokens(config: Config, chunk_tokens: int) -> None:
    """Refuse a ``max_tokens`` with which no prefix could ever be hit.

    Args:
        config: the configuration.
        chunk_tokens: tokens of the largest chunk of the model's KV-cache groups.

    Raises:
        ConfigError: it is below one chunk.

    """
    if config.max_tokens is not None and config.max_tokens < chunk_tokens:
        raise ConfigError(
            [
                f"max_tokens is {config.max_tokens}, which is below one chunk of {chunk_tokens} "
                "tokens, so nothing would ever be stored. Set it to at least that, make chunks "
                "smaller with blocks_per_chunk, or leave it out for no limit."
            ]
        )


def _unbound(config: Config) -> Iterator[str]:
    """Where the quota for all tiers bounds nobody."""
    for tier in config.tiers:
        if tier.unbound():
            yield (
                f"tenant_quota is {option(config, 'tenant_quota')}, and the {tier.name} tier has "
                "no capacity to take a share of: tenants are not bound there. Set its 'capacity', "
                "or give it a 'tenant_quota' of its own as a size."
            )


def _settings(layers: Layers) -> tuple[Settings | None, list[str]]:
    given = {key: layers.value(key) for key in layers.owners if key in Settings.model_fields}
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        return None, from_pydantic(error, Settings, layers.origin)
    record = settings.record
    if record is None:
        return settings, []
    try:
        record = record.below(layers.owners["record"].folder)
    except ValueError as error:
        origin = layers.origin("record.path")
        return settings, [f"record.path is {shown(str(record.path))} (from {origin}): {error}."]
    return settings.model_copy(update={"record": record}), []


def _unknown_keys(layers: Layers) -> list[str]:
    return [key for key in layers.owners if key not in Config.model_fields]


def _own_memory(layers: Layers) -> bool:
    """Whether the first tier says itself how much memory it takes."""
    first = layers.value("tiers")[0]
    return isinstance(first, Mapping) and first.get("capacity") is not None


def _unknown(key: str, layers: Layers, reader: EntryReader) -> str:
    origin = layers.origin(key)
    if key in _VLLM_KEYS:
        return (
            f"{key} (from {origin}) belongs to vLLM's own offloading and sets nothing in kvtiers: "
            f"{_VLLM_KEYS[key]}."
        )
    if key == "config":
        return f"config (from {origin}): a file cannot name another one. Move its keys here."
    belongs = reader.belongs(key, layers.value(key))
    if belongs is not None:
        return misplaced_key(key, origin, belongs)
    known = [*Config.model_fields, *(["config"] if origin == EXTRA else [])]
    text = unknown_key(key, known, origin)
    return text if did_you_mean(key, known) else text + near_word(key)


def _origin(layers: Layers, config: Config, path: str) -> str:
    """Where an effective value was written, "default" if nowhere."""
    top, _, key = path.rpartition(".")
    if not top:
        return layers.origin(path)
    entry = layers.value("policy") if top == "policy" else layers.value("tiers")[int(top[6:-1])]
    written = key == "type" if isinstance(entry, str) else key in entry
    if path == "tiers[0].capacity" and not _own_memory(layers) and layers.sets("warm_cache_ratio"):
        return layers.origin("warm_cache_ratio")
    if not written and key == "tenant_quota" and layers.sets(key):
        return layers.origin(key)
    if not written and top != "policy" and _derived(config.tiers[int(top[6:-1])].options, key):
        return layers.origin(top)
    return layers.origin(path) if written else "default"


def _derived(options: TierConfig, key: str) -> bool:
    """Whether a tier took an option from another one, such as a user from a URL."""
    if key not in options.model_fields_set or key in ("type", "capacity"):
        return False
    default = type(options).model_fields[key].get_default(call_default_factory=True)
    return bool(getattr(options, key) != default)
