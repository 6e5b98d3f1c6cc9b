"""What can be set, model by model, for the configuration reference.

What an option may be is what the error says that a wrong value gets; what it is stands in
its field's description, or in the ``Attributes`` of its model's docstring; its default is
what ``kvtiers config`` shows. So nothing here has to be kept in step.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.connector import lmcache_stack
from kvtiers.connector.config import load, option, values
from kvtiers.connector.config_errors import ConfigError, from_pydantic, options_of
from kvtiers.connector.config_settings import Settings
from kvtiers.connector.sizes import EXAMPLES, Capacity
from kvtiers.policies import POLICIES
from kvtiers.policies.registry import Registry
from kvtiers.tiers import TIERS
from kvtiers.tiers.residency import CPU
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

# Enough to make a tier of this type its variant for URLs: see ``Tier.variant``.
_URL: Mapping[str, Any] = {"path": "s3://bucket/prefix"}
# "url: ..." or "certfile, keyfile: ..." in a docstring's section.
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")
# The clause of a problem that says what is allowed.
_CLAUSE = re.compile(r".*?\(from .*?\): (?:it must be |'\w+' must be )?(.*?)\.?(?: It is .*)?")
_NEEDED = "none, it must be set"
_BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


@dataclass(frozen=True)
class Row:
    """One option.

    Attributes:
        key: its name.
        allowed: what it may be.
        default: what it is if nobody sets it, as Markdown.
        told: what it is for.

    """

    key: str
    allowed: str
    default: str
    told: str


@dataclass(frozen=True)
class Section:
    """One model of options, and where in a configuration they are written.

    Attributes:
        title: how the page calls it.
        model: checks the options.
        name: what LMCache's tables put before an option, with a dot.
        prefix: what the path of an option starts with in ``kvtiers config``.
        written: options -> the configuration that has them.

    """

    title: str
    model: type[BaseModel]
    name: str = ""
    prefix: str = ""
    written: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def options(self) -> list[str]:
        """What can be set, beside ``type``."""
        return [key for key in options_of(self.model) if key != "type"]

    def rows(self) -> Iterator[Row]:
        """Its options, in order."""
        told, defaults = descriptions(self.model), self.defaults()
        for key in self.options():
            yield Row(key, self.allowed(key), defaults[key], told[key])

    def allowed(self, key: str) -> str:
        """What an option may be."""
        if self.prefix.startswith("tiers") and key == "capacity":
            return f"a size or a share, such as {EXAMPLES}"
        # A value that no option may have.
        allowed = clause(self.problem({key: object()}))
        metadata = self.model.model_fields[key].metadata
        bounds = [
            text.format(getattr(bound, name))
            for bound in metadata
            for name, text in _BOUNDS.items()
            if getattr(bound, name, None) is not None
        ]
        return ", ".join([allowed, *bounds])

    def problem(self, options: Mapping[str, Any]) -> str:
        """The paragraph that tells what is wrong with the options."""
        return problem_of(self.written(options))

    def defaults(self) -> dict[str, str]:
        """What each option is if nobody sets it."""
        loaded = load(self.written({}), {})
        shown = dict(values(loaded.config))
        return {
            key: _default(self.model.model_fields[key], shown[self.prefix + key])
            if loaded.origins[self.prefix + key] == "default"
            else _NEEDED
            for key in self.options()
        }


class AdapterSection(Section):
    """What ``adapter_params`` of an LMCache server may hold beside ``tiers`` and ``policy``."""

    def problem(self, options: Mapping[str, Any]) -> str:
        """See ``Section.problem``."""
        try:
            self.model.model_validate(options)
        except ValidationError as error:
            return from_pydantic(error, self.model, lambda _path: "adapter_params")[0]
        raise ValueError(f"adapter_params may be {options}")

    def defaults(self) -> dict[str, str]:
        """See ``Section.defaults``."""
        unset = self.model()
        fields = self.model.model_fields
        return {key: _default(fields[key], option(unset, key)) for key in self.options()}


def top_section() -> Section:
    """The keys beside ``tiers`` and ``policy``."""
    return Section("Top level", Settings)


def tier_sections() -> Iterator[Section]:
    """The options of each type of tier, and of each class that a type stands for."""
    for name in own(TIERS):
        cls = TIERS.get(name)
        for variant in [{}, _URL] if cls.variant(_URL) is not cls.variant({}) else [{}]:
            entry = {"type": name, **variant}

            def written(options: Mapping[str, Any], entry: Any = entry) -> Mapping[str, Any]:
                tier = {**entry, **options}
                return {"tiers": [tier] if tier["type"] == CPU else [CPU, tier]}

            title = f"`{name}`" + (" where `path` is a URL" if variant else "")
            called = f"{name}[url]." if variant else f"{name}."
            prefix = "tiers[0]." if name == CPU else "tiers[1]."
            yield Section(title, cls.variant(variant).Config, called, prefix, written)


def policy_sections() -> Iterator[Section]:
    """The options of each policy."""
    for name in own(POLICIES):

        def written(options: Mapping[str, Any], name: str = name) -> Mapping[str, Any]:
            return {"policy": {"type": name, **options}}

        yield Section(f"`{name}`", POLICIES.get(name).Config, f"{name}.", "policy.", written)


def adapter_section() -> Section:
    """The keys of ``adapter_params`` beside ``tiers`` and ``policy``."""
    return AdapterSection("`adapter_params`", lmcache_stack.Settings)


def own(registry: Registry[Any]) -> list[str]:
    """The names that come with kvtiers, and not with another package."""
    named = {name: registry.get(name).__module__ for name in registry.names()}
    return [name for name, module in named.items() if module.startswith("kvtiers.")]


def problem_of(wrong: Mapping[str, Any]) -> str:
    """The first paragraph that tells what is wrong with a configuration."""
    try:
        load(wrong, {})
    except ConfigError as error:
        return error.problems[0]
    raise ValueError(f"a configuration may be {wrong}")


def clause(problem: str) -> str:
    """The part of a problem that says what is allowed."""
    found = _CLAUSE.fullmatch(problem)
    return found[1] if found else problem


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """What each option is, from its field or from the docstring of its model."""
    told: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        told |= _attributes(cls.__dict__.get("__doc__") or "")
    described = {key: field.description for key, field in model.model_fields.items()}
    return told | {key: text for key, text in described.items() if text}


def as_text(value: object) -> str:
    """A value as a person would write it."""
    if value is None:
        return "not set"
    if isinstance(value, Capacity | Path | Mapping | SecretStr | BaseModel):
        return str(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _default(field: FieldInfo, value: object) -> str:
    if field.default_factory is not None:
        # What a function makes may differ from machine to machine: it says what that is.
        return (inspect.getdoc(field.default_factory) or "").rstrip(".")
    text = as_text(value)
    return text if text == "not set" else f"`{text}`"


def _attributes(docstring: str) -> dict[str, str]:
    """The entries of a docstring's ``Attributes``, each on one line."""
    told: dict[str, str] = {}
    names: Sequence[str] = ()
    for line in inspect.cleandoc(docstring).partition("Attributes:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        if entry := _ENTRY.fullmatch(line.removeprefix("    ")):
            names = entry[1].split(", ")
            told |= dict.fromkeys(names, entry[2])
        else:
            told |= {name: f"{told[name]} {line.strip()}" for name in names if line.strip()}
    return told
