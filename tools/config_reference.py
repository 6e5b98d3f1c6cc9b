"""``kvtiers config --reference``: every key, from the code that checks it.

What a key may be is what the error says that a wrong value gets; what it is stands in its
field's description, or in the ``Attributes`` of its model's docstring; its default is what
``kvtiers config`` shows. So there is no second place to keep in step.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.connector import config_lmcache_words as lmcache
from kvtiers.connector.config import Config, load, values
from kvtiers.connector.config_errors import ConfigError, options_of
from kvtiers.connector.config_settings import Settings
from kvtiers.connector.config_sources import PREFIX
from kvtiers.connector.config_specs import TierSpec
from kvtiers.connector.sizes import EXAMPLES, Capacity
from kvtiers.policies import POLICIES
from kvtiers.policies.registry import Registry
from kvtiers.tiers import TIERS
from kvtiers.tiers.residency import CPU
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

_INTRO = """\
# Configuration reference

Printed by `kvtiers config --reference` from the code that checks the keys: change that, and not
this page. [Configuration](configuration.md) says where keys are written and which source wins."""
_TOP = """\
## Top level

Each key can be set by the variable beside it. What `LMCache` names is its word for the same."""
_TIERS = """\
## Tiers

An entry of `tiers` is the name of a type, or a mapping with these keys and options of its type:"""
_POLICIES = """\
## Policies

`policy` is the name of a type, or a mapping with `type` and the options of that type."""
_LMCACHE = """\
## LMCache's words

[Configuration](configuration.md#lmcaches-words) says where they count. The variable of each word is
`LMCACHE_` and the word in capital letters."""
_WITHOUT = """\
### Without a counterpart

These set nothing. A server's log and `kvtiers config` list those that are written somewhere."""
# Enough to make a tier of this type its variant for URLs: see ``Tier.variant``.
_URL: Mapping[str, Any] = {"path": "s3://bucket/prefix"}
# "url: ..." or "certfile, keyfile: ..." in a docstring's section.
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")
# The clause of a problem that says what is allowed.
_CLAUSE = re.compile(
    r".*?(?:\(from .*?\): |: '\w+' must be )(?:it must be )?(.*?)\.?(?: It is .*)?"
)
_NEEDED = "none, it must be set"
_BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}

Row = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One model and where its options are written.

    Attributes:
        title: how the page calls it.
        model: checks the options.
        prefix: what the path of an option starts with in ``kvtiers config``.
        called: what the tables of LMCache's words put before an option.
        written: options -> the configuration that has them.

    """

    title: str
    model: type[BaseModel]
    prefix: str
    called: str
    written: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def options(self) -> list[str]:
        """What can be set, beside ``type``."""
        return [key for key in options_of(self.model) if key != "type"]

    def told(self) -> dict[str, str]:
        """What each option is, from its field or from the docstring of its model."""
        told: dict[str, str] = {}
        for cls in reversed(self.model.__mro__):
            told |= _attributes(cls.__dict__.get("__doc__") or "")
        described = {key: field.description for key, field in self.model.model_fields.items()}
        return told | {key: text for key, text in described.items() if text}

    def rows(self) -> Iterator[Row]:
        """Of each option: its name, what it may be, its default, what it is, LMCache's word."""
        told = self.told()
        loaded = load(self.written({}), {})
        shown = dict(values(loaded.config))
        for key in self.options():
            path = self.prefix + key
            by_default = loaded.origins[path] == "default"
            default = _default(self.model.model_fields[key], shown[path]) if by_default else _NEEDED
            yield f"`{key}`", self._allowed(key), default, told[key], _words(self.called + key)

    def _allowed(self, key: str) -> str:
        """What the error says that a value gets which no option may have."""
        if self.prefix.startswith("tiers") and key == "capacity":
            return f"a size or a share, such as {EXAMPLES}"
        allowed = allowed_for(self.written({key: object()}))
        bounds = [
            text.format(getattr(bound, name))
            for bound in self.model.model_fields[key].metadata
            for name, text in _BOUNDS.items()
            if getattr(bound, name, None) is not None
        ]
        return ", ".join([allowed, *bounds])


def reference() -> str:
    """The page in Markdown; of tiers and policies, those that come with kvtiers."""
    parts = [_INTRO, _TOP, _top_level(), _TIERS, _entry()]
    for section in tier_sections():
        parts += [f"### {section.title}", _options(section)]
    parts.append(_POLICIES)
    for section in policy_sections():
        summary = (inspect.getdoc(POLICIES.get(section.title.strip("`"))) or "").partition("\n\n")
        parts += [f"### {section.title}", _cell(summary[0]), _options(section)]
    parts += [_LMCACHE, _counterparts(), _WITHOUT, _jobs()]
    return "\n\n".join(parts) + "\n"


def as_text(value: object) -> str:
    """A value as a person would write it."""
    if value is None:
        return "not set"
    if isinstance(value, Capacity | Path | Mapping | SecretStr):
        return str(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def top_section() -> Section:
    """The keys beside ``tiers`` and ``policy``."""
    return Section("Top level", Settings, "", "", lambda options: options)


def tier_sections() -> Iterator[Section]:
    """The options of each type of tier, and of each class that a type stands for."""
    for name in _own(TIERS):
        cls = TIERS.get(name)
        for variant in [{}, _URL] if cls.variant(_URL) is not cls.variant({}) else [{}]:
            entry = {"type": name, **variant}

            def written(options: Mapping[str, Any], entry: Any = entry) -> Mapping[str, Any]:
                tier = {**entry, **options}
                return {"tiers": [tier] if tier["type"] == CPU else [CPU, tier]}

            title = f"`{name}`" + (" where `path` is a URL" if variant else "")
            prefix = "tiers[0]." if name == CPU else "tiers[1]."
            called = f"{name}[url]." if variant else f"{name}."
            yield Section(title, cls.variant(variant).Config, prefix, called, written)


def policy_sections() -> Iterator[Section]:
    """The options of each policy."""
    for name in _own(POLICIES):

        def written(options: Mapping[str, Any], name: str = name) -> Mapping[str, Any]:
            return {"policy": {"type": name, **options}}

        yield Section(f"`{name}`", POLICIES.get(name).Config, "policy.", f"{name}.", written)


def allowed_for(wrong: Mapping[str, Any]) -> str:
    """What the first problem of a configuration says that is allowed."""
    try:
        load(wrong, {})
    except ConfigError as error:
        found = _CLAUSE.fullmatch(error.problems[0])
        return found[1] if found else error.problems[0]
    raise ValueError(f"kvtiers has no objection to {wrong}")


# Tables ---------------------------------------------------------------------


def _top_level() -> str:
    section = top_section()
    told = Section("", Config, "", "", lambda options: options).told()
    config = load({}, {}).config
    tiers = f"`[{', '.join(tier.type for tier in config.tiers)}]`"
    rows: list[Row] = [
        ("`tiers`", allowed_for({"tiers": object()}), tiers, told["tiers"], _words("tiers")),
        (
            "`policy`",
            allowed_for({"policy": object()}),
            f"`{config.policy.type}`",
            told["policy"],
            _words("policy"),
        ),
        *section.rows(),
    ]
    titles = ("key", "what it may be", "default", "what it is", "LMCache", "variable")
    return _table(titles, [(*row, f"`{PREFIX}{row[0].strip('`').upper()}`") for row in rows])


def _entry() -> str:
    told = Section("", TierSpec, "", "", lambda options: options).told()
    types = ", ".join(f"`{name}`" for name in _own(TIERS))
    name = allowed_for({"tiers": [CPU, {"type": "fs", "name": object()}]})
    rows = [
        ("`type`", f"{types}, or one of another package", told["type"]),
        ("`name`", name, told["name"]),
    ]
    return _table(("key", "what it may be", "what it is"), rows)


def _options(section: Section) -> str:
    rows = list(section.rows())
    titles = ("option", "what it may be", "default", "what it is", "LMCache")
    return _table(titles, rows) if rows else "It has no options."


def _counterparts() -> str:
    rows = [
        (f"`{word}`", ", ".join(f"`{path}`" for path in found.sets), found.means)
        for word, found in lmcache.COUNTERPARTS.items()
    ]
    return _table(("word", "sets", "how it is read"), rows)


def _jobs() -> str:
    by_job: dict[str, list[str]] = {}
    for word, job in lmcache.WITHOUT_COUNTERPART.items():
        olds = [old for old, today in lmcache.ALIASES.items() if today == word]
        by_job.setdefault(job, []).extend([word, *olds])
    rows = [(", ".join(f"`{word}`" for word in words), job) for job, words in by_job.items()]
    return _table(("words", "what does the job here, or why nothing does"), rows)


# Cells ----------------------------------------------------------------------


def _own(registry: Registry[Any]) -> list[str]:
    named = {name: registry.get(name).__module__ for name in registry.names()}
    return [name for name, module in named.items() if module.startswith("kvtiers.")]


def _default(field: FieldInfo, value: object) -> str:
    if field.default_factory is not None:
        # What a function makes may differ from machine to machine: it says what that is.
        return (inspect.getdoc(field.default_factory) or "").rstrip(".")
    text = as_text(value)
    return text if text == "not set" else f"`{text}`"


def _words(path: str) -> str:
    """LMCache's words that set what ``path`` names."""
    words = [word for word, found in lmcache.COUNTERPARTS.items() if path in found.sets]
    return ", ".join(f"`{word}`" for word in words)


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


def _table(titles: Row, rows: Iterable[Row]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """A text of ours in one line of Markdown."""
    return " ".join(text.replace("``", "`").split()).rstrip(".").replace("|", "\\|")
