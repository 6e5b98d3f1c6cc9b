"""Turns YAML and JSON texts into values, and refuses what no configuration needs.

A text comes from whoever starts the server, and a slip in it must end in a paragraph
that names its source: never in a parser's traceback, nor in minutes of expanding
aliases. The bounds here lie far above any real configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from kvtiers.connector.config_errors import ConfigError

_MOST_NODES = 10_000
_MOST_LEVELS = 32
# Python shows no number of more than 4300 digits, and error texts show values.
_MOST_BITS = 4096
# Texts however they look, since YAML would make one number of the versions 1.1 and 1.10.
_TEXTS = frozenset({"weights_version"})
_TEXT_TAG = "tag:yaml.org,2002:str"
_NULL_TAG = "tag:yaml.org,2002:null"
_TOO_DEEP = (
    f"it is nested more than {_MOST_LEVELS} levels deep (an alias inside what it names never ends)"
)
_TOO_MANY = f"it holds more than {_MOST_NODES} keys and values, with all aliases written out"

_NO_MARK = (
    "a value that begins with '*' repeats the one marked '&', and there is none, or several; a "
    "text is written in quotes"
)
_NO_TYPE = (
    "a value that begins with '!' names a type, and no known one; a text is written in quotes"
)

Lines = dict[str, int]


def read_document(text: str, is_json: bool, source: str) -> tuple[Any, Lines]:
    """The values of a file or of an inline text, and the line of each dotted path.

    JSON has no lines here; it is not read as YAML because it may hold tabs.

    Args:
        text: the whole of it.
        is_json: whether it is JSON, else it is YAML.
        source: what the error says of it, such as ``The configuration file /a.yaml``.

    Raises:
        ConfigError: it is not valid, or beyond the bounds.

    """
    kind = "JSON" if is_json else "YAML"
    try:
        values, lines = (json.loads(text), {}) if is_json else _read_yaml(text)
        check(values)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{source} is not valid {kind}: {_reason(error)}."]) from error
    return values, lines


def read_variable_text(key: str, text: str, label: str) -> Any:
    """The YAML value of an environment variable that sets a top-level key.

    Raises:
        ConfigError: it is not YAML, or beyond the bounds.

    """
    try:
        value, _ = _read_yaml(text, key)
        check(value, key)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"The value of {label} is not YAML: {_reason(error)}."]) from error
    return value


def check(value: object, path: str = "", level: int = 0) -> None:
    """Refuse values that no error text can show, or that end in no file and no digest.

    Raises:
        ValueError: nesting, a number or a text is beyond the bounds.

    """
    if level > _MOST_LEVELS:
        raise ValueError(_TOO_DEEP)
    at = path or "the top"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"the number at {at} has more than {_MOST_BITS} bits")
    if isinstance(value, str) and not _is_unicode(value):
        raise ValueError(f"{at} holds what is no Unicode text")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check(key, at, level + 1)
            check(item, f"{path}.{key}".lstrip("."), level + 1)
    elif isinstance(value, list | tuple | set):
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]", level + 1)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which stops at the bounds and says which value fits no type."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        self._level += 1
        _check_bounds(self._nodes, self._level)
        try:
            node = super().compose_node(parent, index)
        except yaml.composer.ComposerError as error:
            # PyYAML would name the mark: a password, if that begins with a star.
            raise yaml.composer.ComposerError(None, None, _NO_MARK, error.problem_mark) from error
        self._level -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            # What PyYAML's constructors of numbers, dates and truth values trip over.
            kind = node.tag.rpartition(":")[2]
            problem = f"a value is read as {kind} and is none; a text is written in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def refuse_tag(self, node: yaml.Node) -> Any:
        """What PyYAML would name: a password, if that begins with an exclamation mark."""
        raise yaml.constructor.ConstructorError(None, None, _NO_TYPE, node.start_mark)


_Loader.add_constructor(None, _Loader.refuse_tag)


def _read_yaml(text: str, key: str = "") -> tuple[Any, Lines]:
    """The values and their lines; ``key`` is the one that the whole text is the value of."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return (None if key else {}), {}
        lines: Lines = {}
        for count, (path, line) in enumerate(_walk(node, key, 0), start=1):
            _check_bounds(count, 0)
            lines[path] = line
        return loader.construct_document(_with_texts(node, key)), lines
    finally:
        loader.dispose()


def _with_texts(node: yaml.Node, key: str) -> yaml.Node:
    """The node, with the values of keys that are texts marked as such."""
    if not key and isinstance(node, yaml.MappingNode):
        node.value = [(name, _with_texts(item, name.value)) for name, item in node.value]
    elif key in _TEXTS and isinstance(node, yaml.ScalarNode) and node.tag != _NULL_TAG:
        # A node of its own: through an alias, another key may have this one for a number.
        return yaml.ScalarNode(_TEXT_TAG, node.value, node.start_mark, node.end_mark)
    return node


def _walk(node: yaml.Node, path: str, level: int) -> Iterator[tuple[str, int]]:
    """Dotted path and line of everything below a node, aliases written out."""
    _check_bounds(0, level)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{path}[{index}]", item.start_mark.line + 1
            yield from _walk(item, f"{path}[{index}]", level + 1)
    elif isinstance(node, yaml.MappingNode):
        seen: Lines = {}
        for key, item in node.value:
            below, line = _below(path, key), key.start_mark.line + 1
            # YAML readers silently keep the last of two equal keys.
            if key.value in seen:
                lines = f"in lines {seen[key.value]} and {line}"
                raise ValueError(f"{below} stands twice in it, {lines}. Keep one of them")
            seen[key.value] = line
            yield below, line
            yield from _walk(item, below, level + 1)


def _below(path: str, key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode):
        problem = "a list or a mapping is no key"
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
    return f"{path}.{key.value}".lstrip(".")


def _check_bounds(nodes: int, level: int) -> None:
    if nodes > _MOST_NODES:
        raise ValueError(_TOO_MANY)
    if level > _MOST_LEVELS:
        raise ValueError(_TOO_DEEP)


def _is_unicode(text: str) -> bool:
    """Whether it can be written to a file; JSON may name half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, yaml.MarkedYAMLError):
        return _marked(error)
    return " ".join(str(error).split()).rstrip(".")


def _marked(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's words without its excerpt of the text, which may hold a password."""
    words = " ".join(", ".join(filter(None, [error.context, error.problem])).split())
    mark = error.problem_mark or error.context_mark
    return f"{words} (line {mark.line + 1}, column {mark.column + 1})" if mark else words
