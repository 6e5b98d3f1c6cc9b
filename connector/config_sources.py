"""Where configuration values come from, and which source wins.

``kv_connector_extra_config`` beats the environment, the environment beats the
file, the file beats the defaults; key by key at the top level, so whoever sets
``tiers`` sets all tiers. Each value keeps its origin, for errors and for
``kvtiers config``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kvtiers.connector.config_errors import ConfigError, did_you_mean

EXTRA = "kv_connector_extra_config"
PREFIX = "KVTIERS_"
# Variables that other parts of kvtiers read.
_OTHER_VARIABLES = ("KVTIERS_CONFIG", "KVTIERS_TRACES")
# Texts however they look, since YAML would make one number of the versions 1.1 and 1.10.
_TEXTS = frozenset({"weights_version"})


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
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
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

    def origin(self, path: str) -> str:
        """Where the value at a dotted path comes from."""
        owner = self.owners.get(path.partition(".")[0].partition("[")[0])
        return owner.origin(path) if owner is not None else "default"


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
        ConfigError: a file or a variable cannot be read.

    """
    given = {key: value for key, value in extra.items() if key != "config"}
    file = extra.get("config", environ.get("KVTIERS_CONFIG"))
    if file_named_by is None:
        file_named_by = f"'config' in {EXTRA}" if "config" in extra else "KVTIERS_CONFIG"
    variables, warnings = _from_environment(environ, known)
    sources = [_from_file(file, file_named_by)] if file is not None else []
    sources += [*variables, Source(EXTRA, given)]
    owners = {key: source for source in sources for key in source.values}
    return Layers(owners, tuple(warnings))


def _from_environment(
    environ: Mapping[str, str], known: list[str]
) -> tuple[list[Source], list[str]]:
    by_variable = {PREFIX + key.upper(): key for key in known}
    sources, warnings = [], []
    for variable, text in environ.items():
        if variable in by_variable:
            label = f"environment {variable}"
            key = by_variable[variable]
            sources.append(Source(label, {key: _yaml_value(key, text, label)}))
        elif variable.startswith(PREFIX) and variable not in _OTHER_VARIABLES:
            guess = did_you_mean(variable, [*by_variable, *_OTHER_VARIABLES])
            warnings.append(f"The environment variable {variable} sets nothing in kvtiers.{guess}")
    return sources, warnings


def _yaml_value(key: str, text: str, label: str) -> Any:
    try:
        return _as_written(key, yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(
            [f"The value of {label} is not YAML: {_one_line(error)}. It reads {text!r}."]
        ) from error


def _from_file(name: object, named_by: str) -> Source:
    if not isinstance(name, str) or not name:
        raise ConfigError(
            [f"config is {name!r} (from {named_by}): it must be the path of a YAML or JSON file."]
        )
    path = Path(os.path.expanduser(os.path.expandvars(name))).absolute()
    label = f"file {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ConfigError(
            [
                f"The configuration file {path}, which {named_by} names, cannot be read: {reason}. "
                "Correct the path, or make the file readable for the server's user."
            ]
        ) from error
    values, lines = _parse(text, path)
    if not isinstance(values, dict):
        raise ConfigError(
            [
                f"The {label} must hold a mapping of keys such as 'tiers:' and 'policy:', "
                f"not a {type(values).__name__}."
            ]
        )
    return Source(label, {str(key): value for key, value in values.items()}, path.parent, lines)


def _parse(text: str, path: Path) -> tuple[Any, dict[str, int]]:
    """Values and the line of each; JSON has no lines here (and may hold tabs, unlike YAML)."""
    try:
        if path.suffix == ".json":
            return json.loads(text), {}
        return _parse_yaml(text, path)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(
            [f"The configuration file {path} is not valid {kind}: {_one_line(error)}."]
        ) from error


def _parse_yaml(text: str, path: Path) -> tuple[Any, dict[str, int]]:
    values = yaml.safe_load(text)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return {}, {}
    lines = dict(_walk(node, "", path))
    if isinstance(values, dict) and isinstance(node, yaml.MappingNode):
        nodes = {key.value: item for key, item in node.value}
        values = {key: _as_written(key, value, nodes.get(key)) for key, value in values.items()}
    return values, lines


def _as_written(key: str, value: Any, node: yaml.Node | None) -> Any:
    """The value, or what its node reads if the key's values are texts."""
    is_text = key in _TEXTS and value is not None and isinstance(node, yaml.ScalarNode)
    return node.value if is_text and node is not None else value


def _walk(node: yaml.Node, path: str, file: Path) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{path}[{index}]", item.start_mark.line + 1
            yield from _walk(item, f"{path}[{index}]", file)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, item in node.value:
            below, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            # YAML readers silently keep the last of two equal keys.
            if key.value in seen:
                raise ConfigError(
                    [
                        f"{below} stands twice in {file}, in lines {seen[key.value]} and {line}. "
                        "Keep one of them."
                    ]
                )
            seen[key.value] = line
            yield below, line
            yield from _walk(item, below, file)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
