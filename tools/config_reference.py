"""``kvtiers config --reference``: every key, as a page in Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from kvtiers.connector import config_lmcache_words as lmcache
from kvtiers.connector.config import Config, load
from kvtiers.connector.config_sources import PREFIX
from kvtiers.connector.config_specs import TierSpec
from kvtiers.policies import POLICIES
from kvtiers.tiers import TIERS
from kvtiers.tiers.residency import CPU
from kvtiers.tools.config_sections import (
    Section,
    adapter_section,
    clause,
    descriptions,
    own,
    policy_sections,
    problem_of,
    tier_sections,
    top_section,
)

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
_ADAPTER = """\
## Inside an LMCache server

`adapter_params` of `--l2-adapter` has `tiers`, without cpu, `policy`, `config` (a file with some or
all of them), and these keys:"""
_LMCACHE = """\
## LMCache's words

[Configuration](configuration.md#lmcaches-words) says where they count. The variable of each word is
`LMCACHE_` and the word in capital letters."""
_WITHOUT = """\
### Without a counterpart

These set nothing. A server's log and `kvtiers config` list those that are written somewhere."""
Cells = tuple[str, ...]


def reference() -> str:
    """The page; of tiers and policies, those that come with kvtiers."""
    parts = [_INTRO, _TOP, _top_level(), _TIERS, _entry()]
    for section in tier_sections():
        parts += [f"### {section.title}", _options(section)]
    parts.append(_POLICIES)
    for section, name in zip(policy_sections(), own(POLICIES), strict=True):
        summary = (inspect.getdoc(POLICIES.get(name)) or "").partition("\n\n")[0]
        parts += [f"### {section.title}", summary, _options(section)]
    parts += [_ADAPTER, _options(adapter_section())]
    parts += [_LMCACHE, _counterparts(), _WITHOUT, _jobs()]
    return "\n\n".join(parts) + "\n"


def _top_level() -> str:
    config, told = load({}, {}).config, descriptions(Config)
    defaults = {
        "tiers": f"`[{', '.join(tier.type for tier in config.tiers)}]`",
        "policy": f"`{config.policy.type}`",
    }
    rows = [
        (key, clause(problem_of({key: object()})), default, told[key])
        for key, default in defaults.items()
    ]
    rows += [(row.key, row.allowed, row.default, row.told) for row in top_section().rows()]
    return _table(
        ("key", "what it may be", "default", "what it is", "LMCache", "variable"),
        [(f"`{key}`", *cells, _words(key), f"`{PREFIX}{key.upper()}`") for key, *cells in rows],
    )


def _entry() -> str:
    told = descriptions(TierSpec)
    types = ", ".join(f"`{name}`" for name in own(TIERS))
    name = clause(problem_of({"tiers": [CPU, {"type": "fs", "name": object()}]}))
    rows = [
        ("`type`", f"{types}, or one of another package", told["type"]),
        ("`name`", name, told["name"]),
    ]
    return _table(("key", "what it may be", "what it is"), rows)


def _options(section: Section) -> str:
    rows = [
        (f"`{row.key}`", row.allowed, row.default, row.told, _words(section.name + row.key))
        for row in section.rows()
    ]
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


def _words(path: str) -> str:
    """LMCache's words that set what ``path`` names."""
    words = [word for word, found in lmcache.COUNTERPARTS.items() if path in found.sets]
    return ", ".join(f"`{word}`" for word in words)


def _table(titles: Cells, rows: Iterable[Cells]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """A text of ours in one line of Markdown."""
    return " ".join(text.replace("``", "`").split()).rstrip(".").replace("|", "\\|")
