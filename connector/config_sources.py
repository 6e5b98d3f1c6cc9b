"""Where configuration values come from, and which source wins.

``kv_connector_extra_config`` beats the environment, the environment beats the
file, the file beats the defaults; key by key at the top level, so whoever sets
``tiers`` sets all tiers. Each value keeps its origin, for errors and for
``kvtiers config``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtiers.connector.config_errors import ConfigError, shown
from kvtiers.connector.config_text import check, read_document, read_variable_text
from kvtiers.tiers.spelling import did_you_mean

EXTRA = "kv_connector_extra_config"
PREFIX = "KVTIERS_"
# Variables that other parts of kvtiers read.
_OTHER_VARIABLES = ("KVTIERS_CONFIG", "KVTIERS_TRACES")
_MOST_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """Top-level keys and values from one place.

    Attributes:
        label: what an origin says, such as ``file /etc/kvtiers.yaml``.
        values: as written there.
        folder: relative paths are relative to it.
        lines: line of each dotted path, where the source has lines.

    """

    label: str
    values: Mapping[str, Any]
    folder: Path = field(default_factory=Path.cwd)
    lines: Mapping[str, int] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """Where ``path`` was written, or the nearest key around it."""
        path = enclosing(path, self.lines)
        return f"{self.label}:{self.lines[path]}" if path else self.label


@dataclass(frozen=True)
class Layers:
    """All sources on top of each other.

    Attributes:
        owners: the source that each top-level key is taken from.
        warnings: what is odd, but stops nothing.

    """

    owners: Mapping[str, Source]
    warnings: tuple[str, ...] = ()

    def value(self, key: str) -> Any:
        """The winning value of a top-level key that some source sets."""
        return self.owners[key].values[key]

    def sets(self, key: str) -> bool:
        """Whether some source gives a top-level key a value."""
        return key in self.owners and self.value(key) is not None

    def origin(self, path: str) -> str:
        """Where the value at a dotted path comes from."""
        owner = self.owners.get(path.partition(".")[0].partition("[")[0])
        return owner.origin(path) if owner is not None else "default"


def enclosing(path: str, known: Container[str]) -> str:
    """The dotted path itself, or the nearest one around it that is known; "" if none is."""
    while path and path not in known:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return path


def gather(
    extra: Mapping[str, Any],
    environ: Mapping[str, str],
    known: list[str],
    file_named_by: str | None = None,
) -> Layers:
    """Read every source.

    Args:
        extra: vLLM's ``kv_connector_extra_config``.
        environ: the process's environment.
        known: top-level keys that an environment variable may set.
        file_named_by: what put ``config`` into ``extra``, if not the user.

    Raises:
        ConfigError: a source cannot be read.

    """
    given = _checked_extra(extra)
    file = extra.get("config", environ.get("KVTIERS_CONFIG"))
    if file_named_by is None:
        file_named_by = f"'config' in {EXTRA}" if "config" in extra else "KVTIERS_CONFIG"
    variables, warnings = _from_environment(environ, known)
    sources = [read_file(file, file_named_by)] if file is not None else []
    sources += [*variables, Source(EXTRA, given)]
    owners = {key: source for source in sources for key in source.values}
    return Layers(owners, tuple(warnings))


def _checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in extra.items() if key != "config"}
    try:
        check(given)
    except ValueError as error:
        raise ConfigError([f"{EXTRA} cannot be read: {error}."]) from error
    return {str(key): value for key, value in given.items()}


def _from_environment(
    environ: Mapping[str, str], known: list[str]
) -> tuple[list[Source], list[str]]:
    by_variable = {PREFIX + key.upper(): key for key in known}
    sources, warnings = [], []
    for variable, text in environ.items():
        if variable in by_variable:
            label = f"environment {variable}"
            key = by_variable[variable]
            sources.append(Source(label, {key: read_variable_text(key, text, label)}))
        elif variable.startswith(PREFIX) and variable not in _OTHER_VARIABLES:
            guess = did_you_mean(variable, [*by_variable, *_OTHER_VARIABLES])
            warnings.append(f"The environment variable {variable} sets nothing in kvtiers.{guess}")
    return sources, warnings


def read_file(name: object, named_by: str) -> Source:
    """The keys of a YAML or JSON file; ``~`` and variables in its name expand.

    Args:
        name: path of the file, if the user has written one.
        named_by: what gives the name, for error texts.

    Raises:
        ConfigError: it cannot be read, or holds no mapping.

    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            [
                f"config is {shown(name)} (from {named_by}): it must be the path of a YAML or "
                "JSON file."
            ]
        )
    path = Path(os.path.expanduser(os.path.expandvars(name))).absolute()
    text = _text_of(path, named_by)
    source = f"The configuration file {path}"
    values, lines = read_document(text, path.suffix == ".json", source)
    label = f"file {path}"
    if not isinstance(values, dict):
        raise ConfigError(
            [
                f"The {label} must hold a mapping of keys such as 'tiers:' and 'policy:', "
                f"not a {type(values).__name__}."
            ]
        )
    return Source(label, {str(key): value for key, value in values.items()}, path.parent, lines)


def _text_of(path: Path, named_by: str) -> str:
    try:
        status = path.stat()
        # Opening a pipe would wait for its writer, for ever if there is none; a folder says so.
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            reason = "it is no regular file"
        elif status.st_size > _MOST_FILE_BYTES:
            reason = "it is larger than 1 MiB"
        else:
            return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "it is no text in UTF-8"
    except ValueError:
        reason = "no file can have that name"
    # Shown escaped: the name may hold what no terminal can show.
    shown = repr(str(path))[1:-1]
    raise ConfigError(
        [
            f"The configuration file {shown}, which {named_by} names, cannot be read: {reason}. "
            "Correct the path, or make the file readable for the server's user."
        ]
    )
