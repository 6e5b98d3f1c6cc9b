"""Configurations in LMCache's words: where they are read from, and when they count.

Words in kvtiers' own sources (``kv_connector_extra_config``, its file) configure kvtiers
like all others. LMCache's own sources (the file that ``LMCACHE_CONFIG_FILE`` names, and
the variables ``LMCACHE_<WORD>``) may belong to an LMCache that runs beside kvtiers, so
they count only where kvtiers' own say nothing of what these words could say.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtiers.connector import config_lmcache_words as lmcache
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.config_lmcache_translator import Translator
from kvtiers.connector.config_lmcache_values import Use, Word
from kvtiers.connector.config_settings import Settings
from kvtiers.connector.config_sources import EXTRA, Layers, Source, enclosing, read_file
from kvtiers.connector.config_text import check
from kvtiers.tiers.spelling import did_you_mean

_FILE = "LMCACHE_CONFIG_FILE"
_PREFIX = "LMCACHE_"
# How users of LMCache's connector for vLLM write its words in the extra configuration.
_DOTTED = "lmcache."
_OWN = frozenset({*Settings.model_fields, "tiers", "policy", "config"})
# What LMCache's words could set, too.
_SAYS: Mapping[str, str] = {
    "tiers": "where KV lies",
    "policy": "what decides",
    "chunk_size": "how large a chunk is",
    "blocks_per_chunk": "how large a chunk is",
    "offload_prompt_only": "whether generated tokens are kept",
}
# Whoever sets one of these has configured kvtiers.
_OWN_CHOICES = frozenset({*_SAYS, "warm_cache_ratio"})

Words = dict[str, Word]


@dataclass(frozen=True)
class Translation:
    """All sources, in kvtiers' words only.

    Attributes:
        layers: with what LMCache's words set.
        uses: what became of each of LMCache's words.
        problems: one paragraph for each word that cannot be what it is.
        notes: what an operator may want to know, though nothing is odd.

    """

    layers: Layers
    uses: tuple[Use, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Translated(Source):
    """What LMCache's words set, each value with the place of its word."""

    places: Mapping[str, str] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        return self.places.get(enclosing(path, self.places), self.label)


def translate(found: Layers, environ: Mapping[str, str]) -> Translation:
    """Say in kvtiers' words what is written in LMCache's.

    Args:
        found: kvtiers' own sources.
        environ: the process's environment.

    Raises:
        ConfigError: one of LMCache's own sources counts and cannot be read.

    """
    owners = {key: source for key, source in found.owners.items() if not _is_word(key)}
    words, problems = _own_words(found.owners)
    warnings, notes = list(found.warnings), []
    first = next((key for key in found.owners if _is_word(key) or key in _OWN_CHOICES), None)
    if first is not None:
        notes += _left_alone(environ, first, found.owners[first].origin(first))
    else:
        words, odd = _words_of_lmcache(environ)
        warnings += odd
        notes += _read_from_lmcache(environ, words)
    translator = Translator(words)
    problems += [*_conflicts(translator, owners), *translator.problems]
    source = _Translated(
        "LMCache's words", translator.values, translator.folder, places=translator.places
    )
    owners |= dict.fromkeys(translator.values, source)
    return Translation(
        Layers(owners, tuple(warnings)), tuple(translator.uses), tuple(problems), tuple(notes)
    )


def near_word(key: str) -> str:
    """A question with the nearest of LMCache's words, with a space before it; "" without one."""
    guess = did_you_mean(key, lmcache.names())
    return guess.replace("?", ", a word of LMCache's?")


def _is_word(key: str) -> bool:
    """Whether a top-level key is LMCache's, or is written like one of its, and not kvtiers'."""
    return key not in _OWN and (lmcache.is_known(key) or key.startswith(_DOTTED))


def _name(key: str) -> str:
    """The spelling in the tables of a word, dotted or not."""
    return lmcache.today(key if lmcache.is_known(key) else key.removeprefix(_DOTTED))


# Words in kvtiers' own sources ----------------------------------------------


def _own_words(owners: Mapping[str, Source]) -> tuple[Words, list[str]]:
    words: Words = {}
    problems: list[str] = []
    # What beats the file comes last.
    for key in sorted(filter(_is_word, owners), key=lambda key: owners[key].label == EXTRA):
        source = owners[key]
        word = Word(_name(key), key, source.values[key], source.origin(key), source.folder)
        other = words.get(word.name)
        words[word.name] = word
        if not lmcache.is_known(word.name):
            problems.append(_unknown_dotted(word))
        elif other is not None and owners[other.key] is source:
            problems.append(
                f"{key} (from {word.origin}) and {other.key} (from {other.origin}) are the same "
                "word of LMCache's. Keep one of them."
            )
    return words, problems


def _unknown_dotted(word: Word) -> str:
    known = [name if name.startswith(_DOTTED) else _DOTTED + name for name in lmcache.names()]
    return (
        f"{word.key} (from {word.origin}) is not a word of LMCache's that kvtiers knows."
        f"{did_you_mean(word.key, known)} Correct it or leave it out."
    )


def _conflicts(translator: Translator, owners: Mapping[str, Source]) -> Iterable[str]:
    """A paragraph for each of kvtiers' keys that LMCache's words set too."""
    for key, what in _SAYS.items():
        words = translator.words_for(key) if key in owners else []
        if words:
            named = ", ".join(f"{word.key} (from {word.origin})" for word in words)
            yield (
                f"{named} {'says' if len(words) == 1 else 'say'} {what} in LMCache's words, and "
                f"{key} (from {owners[key].origin(key)}) says it too. Keep the one or the other."
            )


# LMCache's own sources ------------------------------------------------------


def _words_of_lmcache(environ: Mapping[str, str]) -> tuple[Words, list[str]]:
    """What LMCache itself would read: its file, and over it the variables."""
    words: Words = {}
    warnings: list[str] = []
    if environ.get(_FILE):
        source = read_file(environ[_FILE], _FILE)
        for key, value in source.values.items():
            # For LMCache, relative folders start where the server runs.
            word = Word(lmcache.today(key), key, value, source.origin(key), Path.cwd())
            if lmcache.is_known(word.name):
                words[word.name] = word
            else:
                warnings.append(_unknown_key(word))
    for variable in _variables(environ):
        name = lmcache.today(variable.removeprefix(_PREFIX).lower())
        text = _text_of(environ, variable)
        words[name] = Word(name, variable, text, f"environment {variable}", Path.cwd())
    return words, warnings + _near_variables(environ)


def _variables(environ: Mapping[str, str]) -> list[str]:
    """The variables of ``environ`` that set one of LMCache's words."""
    by_variable = {f"{_PREFIX}{name.upper()}" for name in lmcache.names() if "." not in name}
    return [variable for variable in environ if variable in by_variable]


def _text_of(environ: Mapping[str, str], variable: str) -> str:
    """A variable's text, without the quotes that LMCache takes off too."""
    text = environ[variable].strip()
    try:
        check(text, variable)
    except ValueError as error:
        raise ConfigError([f"The environment cannot be read: {error}."]) from error
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _unknown_key(word: Word) -> str:
    # No error: LMCache starts with it, and a newer LMCache may know what it is.
    return (
        f"{word.key} (from {word.origin}) is not a word of LMCache's that kvtiers knows, and sets "
        f"nothing.{did_you_mean(word.key, lmcache.names())}"
    )


def _near_variables(environ: Mapping[str, str]) -> list[str]:
    """Misspelt ones. Others are left alone, as LMCache has variables that set no word."""
    known = [_PREFIX + name.upper() for name in lmcache.names()]
    warnings = []
    for variable in environ:
        if variable.startswith(_PREFIX) and variable not in known and variable != _FILE:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.9)
            warnings += [
                f"The environment variable {variable} sets nothing in kvtiers. Did you mean "
                f"'{near}'?"
                for near in close
            ]
    return warnings


def _sources_of_lmcache(environ: Mapping[str, str]) -> list[str]:
    return [*([_FILE] if environ.get(_FILE) else []), *_variables(environ)]


def _read_from_lmcache(environ: Mapping[str, str], words: Words) -> list[str]:
    if not words:
        return []
    return [
        f"Configured by LMCache's own {', '.join(_sources_of_lmcache(environ))}, since nothing "
        "that kvtiers is given says where KV lies. If they are meant for an LMCache beside "
        "kvtiers, set 'tiers'."
    ]


def _left_alone(environ: Mapping[str, str], key: str, origin: str) -> list[str]:
    there = _sources_of_lmcache(environ)
    if not there:
        return []
    return [
        f"Left to LMCache: {', '.join(there)}. kvtiers is configured by its own sources, as "
        f"{key} is set (from {origin}). To build on a file of LMCache's, name it with 'config'."
    ]
