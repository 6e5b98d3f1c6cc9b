"""How a configuration's problems read: one paragraph each, key first, remedy last."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtiers.tiers.spelling import did_you_mean
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Locate = Callable[[str], str]
"""Says where a dotted path was written, such as ``file /etc/kvtiers.yaml:3``."""

# By pydantic's type of an error, where its own words are not a user's.
_SAYS: Mapping[str, str] = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "it must be true or false"),
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "it must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "it must be a number"),
    "string_type": "it must be a text, in quotes",
    "path_type": "it must be a path, in quotes",
}

# Where a colon stands before an '@': all up to the last one, but for the scheme of a URL.
# Over lines, too: a password may be broken into several.
_CREDENTIALS = re.compile(r"\A(?=.*:.*@)(\w[\w+.-]*:/*)?.*@", re.DOTALL)

# User and password of a URL within a text.
_IN_URLS = re.compile(r"(\b\w[\w+.-]*://)[^\s'\"@]*:[^\s'\"]*@")


class ConfigError(ValueError):
    """The configuration cannot work; the text says what to change.

    Attributes:
        problems: one paragraph per problem.

    """

    def __init__(self, problems: Sequence[str]) -> None:
        # Whatever a text quotes, also one that a tier or policy wrote.
        self.problems = tuple(_IN_URLS.sub(r"\1***@", problem) for problem in problems)
        super().__init__("\n\n".join(self.problems))


def unknown_key(path: str, known: Iterable[str], origin: str) -> str:
    """The paragraph on a key that nothing reads."""
    names = sorted(known)
    key = path.rpartition(".")[2]
    return (
        f"{path} (from {origin}) is not a key that kvtiers knows.{did_you_mean(key, names)} "
        f"Known here: {', '.join(names)}. Correct it or leave it out."
    )


def misplaced_key(path: str, origin: str, belongs: str) -> str:
    """The paragraph on a key that is known, but elsewhere.

    Args:
        path: where it was written.
        origin: in which source.
        belongs: what it is and where to write it, a clause.

    """
    return f"{path} (from {origin}) sets nothing there: {belongs}."


def from_pydantic(
    error: ValidationError,
    model: type[BaseModel],
    locate: Locate,
    prefix: str = "",
    also_known: Iterable[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> list[str]:
    """What pydantic found, as paragraphs.

    Args:
        error: raised by validating ``model``.
        model: whose fields are suggested for a misspelt key.
        locate: where a path was written.
        prefix: path of ``model`` in the configuration, such as ``tiers[1]``.
        also_known: keys that are allowed beside the model's fields.
        elsewhere: keys that belong to another place -> what ``misplaced_key`` says.

    """
    paragraphs = []
    misplaced = elsewhere or {}
    for item in error.errors(include_url=False):
        path = _dotted(prefix, item["loc"])
        if item["type"] == "extra_forbidden" and item["loc"][-1] in misplaced:
            belongs = misplaced[str(item["loc"][-1])]
            paragraphs.append(misplaced_key(path, locate(path), belongs))
        elif item["type"] == "extra_forbidden":
            owner = _model_at(model, item["loc"][:-1])
            known = [*options_of(owner), *(also_known if owner is model else ())]
            paragraphs.append(unknown_key(path, known, locate(path)))
        elif item["type"] == "missing":
            paragraphs.append(f"{path} is missing.{_purpose(model, item['loc'])} Set it.")
        else:
            message = _message(item)
            if item["loc"]:
                written = f"{path} is {_shown(model, item)} (from {locate(path)})"
                message = f"{written}: {message}{_purpose(model, item['loc'])}"
            elif path:
                message = f"{path} (from {locate(path)}): {message}"
            paragraphs.append(message)
    return paragraphs


def options_of(model: type[BaseModel]) -> list[str]:
    """The fields that can be set; an excluded one is there for the model's base only."""
    return [key for key, field in model.model_fields.items() if not field.exclude]


def _message(item: ErrorDetails) -> str:
    says = item["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    if item["type"] == "greater_than_equal":
        says = f"it must be {item['ctx']['ge']} or more"
    # As YAML and JSON write them.
    says = says.replace("True or False", "true or false")
    return _SAYS.get(item["type"], says).rstrip(".") + "."


def _shown(model: type[BaseModel], item: ErrorDetails) -> str:
    """What was written, unless nobody may see it."""
    loc = item["loc"]
    field = _model_at(model, loc[:-1]).model_fields.get(str(loc[-1]))
    return "hidden" if field is not None and is_secret(field) else shown(item["input"])


def is_secret(field: FieldInfo) -> bool:
    """Whether nobody may see what is written for it."""
    return SecretStr in (field.annotation, *typing.get_args(field.annotation))


def shown(value: object) -> str:
    """A value as an error text may have it, who knows where: without what can hold a password."""
    if isinstance(value, Mapping) and value:
        return f"a mapping of {', '.join(map(shown, value))}"
    if isinstance(value, list | tuple | set) and value:
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return "empty" if value is None else str(value).lower()
    return repr(without_credentials(value) if isinstance(value, str) else value)


def without_credentials(text: str) -> str:
    """A text in which what looks like the user and password of a URL is replaced by stars."""
    return _CREDENTIALS.sub(r"\1***@", text)


def _dotted(prefix: str, loc: Sequence[int | str]) -> str:
    path = prefix
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    for part in loc:
        field = model.model_fields.get(str(part))
        nested = [field.annotation, *typing.get_args(field.annotation)] if field else []
        found = [t for t in nested if isinstance(t, type) and issubclass(t, BaseModel)]
        model = found[0] if found else model
    return model


def _purpose(model: type[BaseModel], loc: Sequence[int | str]) -> str:
    field = _model_at(model, loc[:-1]).model_fields.get(str(loc[-1])) if loc else None
    return f" It is {field.description}." if field is not None and field.description else ""
