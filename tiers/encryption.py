"""The option ``encryption`` of every tier whose chunks lie at rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from kvtiers.tiers.base import TierConfig, TierConfigError
from kvtiers.tiers.file_option import FileOption
from kvtiers.tiers.keyring import (
    Keyring,
    KeyringError,
    looks_like_keys,
    read_file,
    read_variable,
)
from pydantic import BaseModel, ConfigDict, model_validator

_MUST_BE = (
    "'encryption' must be a file of keys, such as /run/secrets/kv.keys, or a mapping with "
    "'key_file' or 'key_env'"
)
_INLINE_KEY = (
    "'encryption' must not hold a key itself, as a configuration is logged and passed around. "
    "Write the key into a file that only this user can read and set 'key_file' to its path, or "
    "into a variable and set 'key_env' to its name"
)
# Who types these means to write the key itself.
_WORDS_FOR_KEYS = frozenset({"key", "keys", "secret", "passphrase", "password", "value"})


class Encryption(BaseModel):
    """Where the keys are.

    Attributes:
        key_file: file with one key a line, readable by this user only.
        key_env: variable of the environment with one or more keys.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key_file: FileOption | None = None
    key_env: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.key_file is None) == (self.key_env is None):
            raise ValueError("it must name either 'key_file' or 'key_env'")
        return self

    def __str__(self) -> str:
        return f"key_file {self.key_file}" if self.key_file else f"key_env {self.key_env}"

    def keyring(self, environ: Mapping[str, str] = os.environ) -> Keyring:
        """The keys, read now. Raises KeyringError."""
        if self.key_file is not None:
            return read_file(self.key_file)
        assert self.key_env is not None
        return read_variable(self.key_env, environ)


class AtRestConfig(TierConfig):
    """Options common to tiers whose chunks lie at rest.

    Attributes:
        encryption: where the keys are that chunks are encrypted with (AES-256-GCM): a file, or
            a mapping with ``key_file``, or with ``key_env``, the name of a variable. Unset:
            chunks lie there in clear.

    """

    # An error's text would show all that was given: a key in the wrong place, too.
    model_config = ConfigDict(hide_input_in_errors=True)

    encryption: Encryption | None = None

    # Before the field's own checks: an error of these shows what was written, and that may
    # be a key in the wrong place.
    @model_validator(mode="before")
    @classmethod
    def _names_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("encryption") is None:
            return given
        return {**given, "encryption": _mapping(given["encryption"])}


def _mapping(written: object) -> object:
    """The option as a mapping. Raises ValueError, and shows no value."""
    if isinstance(written, Encryption):
        return written
    if isinstance(written, Path):
        return {"key_file": written}
    if isinstance(written, str):
        written = {"key_file": written}
    if not isinstance(written, Mapping):
        # pydantic collects ValueErrors only.
        raise ValueError(_MUST_BE)  # noqa: TRY004
    texts = [value for value in written.values() if isinstance(value, str)]
    if _WORDS_FOR_KEYS & written.keys() or any(looks_like_keys(text) for text in texts):
        raise ValueError(_INLINE_KEY)
    return written


def keyring_of(config: AtRestConfig) -> Keyring | None:
    """The keys of a tier, None if it has none. Raises TierConfigError."""
    if config.encryption is None:
        return None
    try:
        return config.encryption.keyring()
    except KeyringError as error:
        raise TierConfigError(
            f"The {config.type} tier's 'encryption' can't be used: {error}"
        ) from None
