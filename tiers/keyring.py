"""Keys that chunks at rest are encrypted with: how they are written, read, and made.

    # The first key encrypts, all of them decrypt.
    2026-11:8J+k…=     an id, a colon, 32 random bytes in base64

As in Kubernetes' and Fernet's lists the first one is in use, so a key is exchanged in
three steps: add the new one at the end everywhere, move it to the front everywhere, and
leave the old one out once nothing worth having is left of it.

No error and no text of an object shows a key, or a part of one.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kvtiers.tiers.format import MAX_KEY_ID_BYTES

KEY_BYTES = 32

_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_KEY_ID_BYTES}}}")
_HEX = re.compile(rf"[0-9A-Fa-f]{{{2 * KEY_BYTES}}}")
# In a variable, where a line break is hard to write.
_BETWEEN = re.compile(r"[\s,;]+")
_MOST_BYTES = 1 << 20
# 32 random bytes have about 30 different values, and never as few as this.
_LEAST_DIFFERENT = 16
_MAKE_ONE = "'kvtiers keygen' makes one"


class KeyringError(ValueError):
    """The keys can't be used; the text says why, without a part of them."""


class Keyring:
    """The keys of one tier.

    Args:
        keys: id to 32 bytes; the first one is for writing.

    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = dict(keys)
        self.active = next(iter(self._keys))

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._keys)})"

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def __getitem__(self, key_id: str) -> bytes:
        return self._keys[key_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)


def parse(text: str, where: str) -> Keyring:
    """The keys in a text. Raises KeyringError.

    Args:
        text: one key a line, or several with commas between; ``#`` begins a comment.
        where: what errors call it.

    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    entries = [entry for line in lines for entry in _BETWEEN.split(line) if entry]
    if not entries:
        raise KeyringError(f"{where} holds no key. Write one, as 'id:base64'; {_MAKE_ONE}.")
    keys: dict[str, bytes] = {}
    for number, entry in enumerate(entries, start=1):
        name, key = _entry(entry, f"key {number} in {where}")
        if name in keys:
            raise KeyringError(f"{where} names the key id '{name}' twice. Give each its own.")
        if key in keys.values():
            raise KeyringError(
                f"{where} holds one key under two ids, the second of them '{name}'. Remove one: "
                "chunks name the id that they need."
            )
        keys[name] = key
    return Keyring(keys)


def read_file(path: Path) -> Keyring:
    """The keys in a file. Raises KeyringError, also where others may read or change it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _refuse_exposed(path, os.fstat(descriptor))
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise KeyringError(
            f"The key file {path} can't be read ({error.strerror}). Name a file that this user "
            f"may read; {_MAKE_ONE}."
        ) from None
    if len(content) > _MOST_BYTES:
        raise KeyringError(f"The key file {path} has more than {_MOST_BYTES} bytes: it is none.")
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise KeyringError(
            f"The key file {path} is no text in ASCII. Keys are written in base64; {_MAKE_ONE}."
        ) from None
    return parse(text, f"the key file {path}")


def read_variable(name: str, environ: Mapping[str, str]) -> Keyring:
    """The keys in a variable of the environment. Raises KeyringError."""
    if not environ.get(name):
        raise KeyringError(
            f"The variable {name}, which 'key_env' names, is not set. Set it to one or more keys, "
            f"as 'id:base64'; {_MAKE_ONE}."
        )
    return parse(environ[name], f"the variable {name}")


def new_key(key_id: str | None = None) -> str:
    """A line with a new random key. Raises KeyringError for an id that can't be one."""
    name = key_id if key_id is not None else _dated()
    if not _ID.fullmatch(name):
        raise KeyringError(f"'{name}' can't be a key id. {_WHAT_IS_AN_ID}")
    return f"{name}:{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}"


def looks_like_keys(text: str) -> bool:
    """Whether somebody wrote a key where its file or variable was to be named."""
    for entry in _BETWEEN.split(text):
        key = entry.rpartition(":")[2]
        if _HEX.fullmatch(key) or len(_from_base64(key) or b"") == KEY_BYTES:
            return True
    return False


_WHAT_IS_AN_ID = (
    f"An id has 1 to {MAX_KEY_ID_BYTES} letters, digits, dots, underscores and hyphens, such as "
    "'2026-11'."
)


def _dated() -> str:
    # Of two keys made in one month, by two people, ids must differ.
    return f"{datetime.now(UTC):%Y-%m-%d}-{secrets.token_hex(4)}"


def _entry(entry: str, what: str) -> tuple[str, bytes]:
    name, colon, encoded = entry.partition(":")
    # Without a colon it may be the key itself: it is not shown.
    if not colon:
        raise KeyringError(f"{what} has no id. Write it as 'id:base64'; {_MAKE_ONE}.")
    if not _ID.fullmatch(name):
        raise KeyringError(f"{what} has an id that can't be one. {_WHAT_IS_AN_ID}")
    return name, _key(encoded, f"{what}, '{name}',")


def _key(encoded: str, what: str) -> bytes:
    key = bytes.fromhex(encoded) if _HEX.fullmatch(encoded) else _from_base64(encoded)
    if key is None:
        raise KeyringError(f"{what} is neither base64 nor hexadecimal. Write it anew; {_MAKE_ONE}.")
    if len(key) != KEY_BYTES:
        raise KeyringError(
            f"{what} has {len(key)} bytes, and AES-256 takes {KEY_BYTES}: 44 characters of base64, "
            f"or 64 of hexadecimal; {_MAKE_ONE}."
        )
    if len(set(key)) < _LEAST_DIFFERENT or all(32 <= byte < 127 for byte in key):
        raise KeyringError(
            f"{what} is not random: it is text, or repeats itself, and can be guessed; {_MAKE_ONE}."
        )
    return key


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _refuse_exposed(path: Path, status: os.stat_result) -> None:
    """Raise KeyringError for a file that others than its owner and group may read or change."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise KeyringError(f"The key file {path} is not a file. Name one; {_MAKE_ONE}.")
    if status.st_uid not in (0, os.geteuid()):
        raise KeyringError(
            f"The key file {path} belongs to another user, who can change it. Let it belong to "
            "this user or to root."
        )
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise KeyringError(
            f"The key file {path} has the mode {mode:04o}: others can read it, or change it. "
            f"Set it to 0400, such as with 'chmod 400 {path}', or 'defaultMode: 0400' of a secret "
            "in Kubernetes."
        )
