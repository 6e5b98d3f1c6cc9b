"""Reads and checks the entries whose options belong to a registered class: tiers and the policy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtiers.connector.config_errors import (
    from_pydantic,
    is_secret,
    options_of,
    shown,
    without_credentials,
)
from kvtiers.connector.config_settings import MOST_OF_MEMORY, WARM_CACHE_RATIO, Settings
from kvtiers.connector.config_sources import Layers
from kvtiers.connector.config_specs import PolicySpec, TierSpec
from kvtiers.connector.sizes import Capacity
from kvtiers.policies import POLICIES
from kvtiers.policies.registry import DuplicateNameError, Registry, UnknownNameError
from kvtiers.tiers import TIERS, TierConfig
from kvtiers.tiers.file_option import at_home, with_variables
from kvtiers.tiers.remote_url import is_remote, without_local_scheme
from kvtiers.tiers.residency import CPU, GPU
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

# A disk is shared with others, and 100 GiB hold many prefixes.
_DEFAULT_CAPACITY: Mapping[str, Capacity] = {"fs": Capacity(share=0.25, at_most=100 << 30)}
_GPU_IS_VLLMS = (
    "the GPU tier is vLLM's own prefix cache. It is always there, above the first tier, and is "
    "not listed. Leave it out."
)
# What others call a tier, and what is written here.
_CALLED_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("s3", "gcs", "azure", "object", "fsspec"),
        "an object store is a tier of type 'fs' whose 'path' is a URL, such as "
        "{type: fs, path: s3://bucket/prefix}.",
    ),
    **dict.fromkeys(
        ("disk", "file", "local", "ssd", "nvme", "nfs"),
        "a disk or a mount is a tier of type 'fs', such as {type: fs, path: /nvme/kvtiers}.",
    ),
    "valkey": "a Valkey server is a tier of type 'redis', such as "
    "{type: redis, url: valkey://host:6379}.",
}
_ON_ITS_OWN = dict.fromkeys(
    Settings.model_fields,
    "it is a key of its own, for all tiers. Write it beside 'tiers', outside of the entry",
)
# A tier's Config wants bytes where only the serving machine can tell them.
_STAND_IN = 1 << 40


class EntryReader:
    """Turns what was written into specs, and collects what is wrong with it.

    Args:
        layers: the sources, with a value for ``tiers`` and ``policy``.
        why_no_cpu: if the arena is somebody else's, what to say to who lists it; None
            if it is the first tier.
        warm_cache_ratio: share of free memory for a cpu tier without ``capacity``.

    """

    def __init__(
        self,
        layers: Layers,
        why_no_cpu: str | None = None,
        warm_cache_ratio: float = WARM_CACHE_RATIO,
    ) -> None:
        self.problems: list[str] = []
        self._layers = layers
        self._why_no_cpu = why_no_cpu
        self._defaults = {**_DEFAULT_CAPACITY, CPU: Capacity(share=warm_cache_ratio)}

    def tiers(self) -> list[TierSpec]:
        """The tiers without problems, in order."""
        raw = self._layers.value("tiers")
        if not isinstance(raw, list | tuple) or not raw:
            first = "cpu, " if self._why_no_cpu is None else ""
            self._refuse(
                "tiers",
                raw,
                f"it must be a list of tiers, such as [{first}{{type: fs, path: /data}}].",
            )
            return []
        specs = {index: self._tier(index, entry) for index, entry in enumerate(raw)}
        self._check_together({index: spec for index, spec in specs.items() if spec is not None})
        return [spec for spec in specs.values() if spec is not None]

    def policy(self) -> PolicySpec | None:
        """The policy, None if it has a problem."""
        options = self._mapping("policy", self._layers.value("policy"))
        cls = self._class(POLICIES, "policy", options)
        if options is None or cls is None:
            return None
        name = options.pop("type")
        checked = self._validated(cls.Config, options, "policy", "type")
        return None if checked is None else PolicySpec(type=name, options=checked)

    def belongs(self, key: str, value: object) -> str | None:
        """What a top-level key is, if it is an option of a tier or the policy that is used."""
        if key in self._options(POLICIES, self._layers.value("policy")):
            return "it is an option of the policy. Write it into 'policy', beside its 'type'"
        raw = self._layers.value("tiers")
        for entry in reversed(raw) if isinstance(raw, list | tuple) else ():
            if field := self._options(TIERS, entry).get(key):
                name = entry if isinstance(entry, str) else entry["type"]
                hidden = is_secret(field) or isinstance(value, Mapping | list | tuple)
                written = "..." if hidden else shown(value).strip("'")
                return (
                    "it is an option of a tier. Write it into the entry of the tier it is for, "
                    f"such as {{type: {name}, {key}: {written}}} in 'tiers'"
                )
        return None

    def _options(self, registry: Registry[Any], entry: object) -> dict[str, FieldInfo]:
        """What can be set of the tier or policy that an entry names, as far as it can be told."""
        name = entry.get("type") if isinstance(entry, Mapping) else entry
        try:
            cls = registry.get(name) if isinstance(name, str) else None
        except (DuplicateNameError, UnknownNameError, ImportError, TypeError):
            # Told where the entry itself is read.
            return {}
        if cls is None:
            return {}
        if registry is TIERS:
            cls = cls.variant(entry if isinstance(entry, Mapping) else {})
        fields = cls.Config.model_fields
        return {option: fields[option] for option in options_of(cls.Config) if option != "type"}

    def _tier(self, index: int, entry: object) -> TierSpec | None:
        path = f"tiers[{index}]"
        options = self._mapping(path, entry)
        cls = self._class(TIERS, path, options)
        if options is None or cls is None:
            return None
        found = len(self.problems)
        # A variable may hold a URL.
        self._expand_path(path, options)
        cls = cls.variant(options)
        name = self._name(path, options)
        capacity = self._capacity(path, options, cls.Config)
        checked = self._validated(cls.Config, options, path, "name")
        if checked is None or len(self.problems) > found:
            return None
        spec = TierSpec(name=name, type=options["type"], capacity=capacity, options=checked)
        if capacity is not None and capacity.share is not None and not spec.has_whole():
            self._refuse(f"{path}.capacity", str(capacity), spec.share_of_nothing())
            return None
        if spec.unbound():
            self._refuse(
                f"{path}.tenant_quota",
                options["tenant_quota"],
                "the tier has no capacity to take a share of. Give it one, or write the quota as "
                "a size, such as 10GiB.",
            )
            return None
        return spec

    def _mapping(self, path: str, entry: object) -> dict[str, Any] | None:
        """The entry's own copy; a bare name is short for an entry without options."""
        if isinstance(entry, str):
            return {"type": entry}
        if not isinstance(entry, Mapping):
            self._refuse(path, entry, "it must be a name, or a mapping with a 'type' and options.")
            return None
        options = {str(key): value for key, value in entry.items()}
        if "type" not in options:
            self.problems.append(_without_type(path, options, self._layers.origin(path)))
            return None
        if not isinstance(options["type"], str):
            self._refuse(
                f"{path}.type", options["type"], "it must be the name of a tier or policy."
            )
            return None
        return options

    def _class(self, registry: Registry[Any], path: str, options: Mapping[str, Any] | None) -> Any:
        if options is None:
            return None
        name = options["type"]
        try:
            return registry.get(name)
        except DuplicateNameError as error:
            # It is about what is installed and not about this entry: every entry hears of it.
            if str(error) not in self.problems:
                self.problems.append(str(error))
        except UnknownNameError as error:
            self._refuse(f"{path}.type", name, _why_unknown(registry, name, str(error)))
        except (ImportError, TypeError) as error:
            self._refuse(f"{path}.type", name, str(error))
        return None

    def _name(self, path: str, options: dict[str, Any]) -> str:
        name = options.pop("name", options["type"])
        if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            return name
        self._refuse(
            f"{path}.name", name, "metrics carry it, so use letters, digits, '_', '.' and '-' only."
        )
        return ""

    def _capacity(
        self, path: str, options: dict[str, Any], config: type[TierConfig]
    ) -> Capacity | None:
        """Take the capacity out of the options and leave bytes in its place."""
        if "capacity" not in config.model_fields:
            return None
        field = config.model_fields["capacity"]
        # A class that has a default of its own knows better, such as the fs tier's for URLs.
        has_own = not field.is_required() and field.default is not None
        capacity = None if has_own else self._defaults.get(options["type"])
        written = options.get("capacity")
        if written is not None:
            self._check_only_capacity(path, options["type"], written)
            try:
                capacity = Capacity.parse(written)
            except ValueError as error:
                self._refuse(f"{path}.capacity", written, f"{error}.")
                options["capacity"] = _STAND_IN  # so that the tier's Config does not tell it again
        share = capacity.share if capacity is not None else None
        if options["type"] == CPU and share is not None and share > MOST_OF_MEMORY:
            self._refuse(
                f"{path}.capacity",
                written,
                "the engine needs a part of the memory that is free when the server starts. Take "
                f"at most {MOST_OF_MEMORY:.0%} of it.",
            )
        if capacity is not None:
            options["capacity"] = _STAND_IN if capacity.nbytes is None else capacity.nbytes
        return capacity

    def _check_only_capacity(self, path: str, of_type: str, written: object) -> None:
        if of_type == CPU and self._layers.sets("warm_cache_ratio"):
            ratio = self._layers.value("warm_cache_ratio")
            origin = self._layers.origin("warm_cache_ratio")
            self._refuse(
                f"{path}.capacity",
                written,
                f"warm_cache_ratio is {shown(ratio)} (from {origin}), and both say how much memory "
                "the cpu tier takes. Keep one of them.",
            )

    def _expand_path(self, path: str, options: dict[str, Any]) -> None:
        written = options.get("path")
        if not isinstance(written, str) or not written:
            return
        if is_remote(written) and "@" in written:
            return  # a password may look like a variable, and must not be shown as one
        expanded = without_local_scheme(written)
        try:
            expanded = with_variables(expanded)
        except ValueError as error:
            self._refuse(f"{path}.path", written, f"{error}.")
        if is_remote(expanded):
            options["path"] = expanded
            return
        scheme, lost_a_slash, rest = expanded.partition(":/")
        if lost_a_slash and re.fullmatch(r"\w{2,}", scheme):
            url = f"{scheme}://{rest.lstrip('/')}"
            self._refuse(
                f"{path}.path",
                written,
                f"a URL has two slashes after its colon, such as {without_credentials(url)}. A "
                f"folder of that name is written ./{scheme}:/",
            )
        local = Path(expanded)
        try:
            local = at_home(local)
        except ValueError as error:
            self._refuse(f"{path}.path", written, f"{error}.")
        options["path"] = os.path.normpath(self._layers.owners["tiers"].folder / local)

    def _validated(
        self, model: type[BaseModel], options: Mapping[str, Any], path: str, also_known: str
    ) -> Any:
        try:
            return model.model_validate(options)
        except ValidationError as error:
            locate: Callable[[str], str] = self._layers.origin
            self.problems += from_pydantic(
                error, model, locate, path, also_known=[also_known], elsewhere=_ON_ITS_OWN
            )
            return None

    def _check_together(self, specs: Mapping[int, TierSpec]) -> None:
        """The arena is the first tier and no other; names and folders must differ."""
        names: dict[str, int] = {}
        folders: dict[tuple[str, str], int] = {}
        for index, spec in specs.items():
            if self._why_no_cpu is not None and spec.type == CPU:
                self._refuse(f"tiers[{index}]", spec.type, self._why_no_cpu)
                continue
            # Where the first entry has a problem of its own, nobody knows what it was to be.
            misplaced = 0 in specs and (index == 0) != (spec.type == CPU)
            if misplaced and self._why_no_cpu is None:
                is_second = index > 0 and specs[0].type == CPU
                self._refuse(
                    f"tiers[{index}]",
                    spec.type,
                    "the first tier is always 'cpu', since all KV comes and goes through it, and "
                    f"no other one is. {'Leave this one out' if is_second else 'Put cpu first'}.",
                )
                continue
            self._check_name(index, spec, names.setdefault(spec.name, index))
            if folder := _folder(spec):
                self._check_folder(index, spec, folders.setdefault((spec.type, folder), index))

    def _check_name(self, index: int, spec: TierSpec, first: int) -> None:
        path = f"tiers[{index}]"
        if spec.type == CPU and spec.name != CPU:
            self._refuse(f"{path}.name", spec.name, "the cpu tier is always called 'cpu'.")
        elif spec.type != CPU and spec.name in (CPU, GPU):
            self._refuse(
                f"{path}.name",
                spec.name,
                f"metrics call another tier that. Give this one another name, such as "
                f"'{spec.type}'.",
            )
        elif first != index:
            self._refuse(
                path,
                spec.name,
                f"tiers[{first}] is called that already. Remove one of the two, or give one of "
                "them another 'name'.",
            )

    def _check_folder(self, index: int, spec: TierSpec, first: int) -> None:
        if first != index:
            self._refuse(
                f"tiers[{index}].path",
                str(getattr(spec.options, "path", None)),
                f"tiers[{first}] lies in that folder already. Remove one of the two, or give one "
                "of them another 'path'.",
            )

    def _refuse(self, path: str, value: object, why: str) -> None:
        origin = self._layers.origin(path)
        self.problems.append(f"{path} is {shown(value)} (from {origin}): {why}")


def _why_unknown(registry: Registry[Any], name: str, says: str) -> str:
    """What to say of a name that is not registered, to who meant something that is."""
    if registry is not TIERS:
        return says
    if name.lower() == GPU:
        return _GPU_IS_VLLMS
    if "://" in name:
        return (
            "a tier is named by its type; a URL is an option of it, such as "
            "{type: redis, url: redis://host:6379} or {type: fs, path: s3://bucket/prefix}."
        )
    return _CALLED_HERE.get(name.lower(), says)


def _without_type(path: str, options: Mapping[str, Any], origin: str) -> str:
    near = difflib.get_close_matches("type", options, n=1) or [
        key for key in options if key == "name" and path == "policy"
    ]
    guess = f" Did you mean 'type' by '{near[0]}'?" if near else ""
    names = (POLICIES if path == "policy" else TIERS).names()
    if len(options) == 1 and (name := next(iter(options))) in names:
        guess = f" Did you mean {{type: {name}, ...}}?"
    return (
        f"{path}.type is missing (from {origin}): it must be the name of a tier or policy. "
        f"Written here: {', '.join(options) or 'nothing'}.{guess}"
    )


def _folder(spec: TierSpec) -> str | None:
    """Where the tier lies, the same text for all ways to write one folder."""
    path = getattr(spec.options, "path", None)
    if is_remote(path):
        # Two servers may have a bucket of the same name.
        server = sorted(dict(getattr(spec.options, "storage_options", {})).items())
        return f"{path} {server}"
    return os.path.realpath(path) if isinstance(path, str | Path) else None
