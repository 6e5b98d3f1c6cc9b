"""Which paths are URLs of a remote filesystem, and what may stand in one."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Spellings of a path on this machine.
_LOCAL = ("file://", "local://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def without_local_scheme(path: str) -> str:
    """``path`` without a ``file://`` before it; anything else as it is."""
    scheme = next((scheme for scheme in _LOCAL if path.lower().startswith(scheme)), "")
    return path[len(scheme) :]


def is_remote(path: object) -> bool:
    """Whether ``path`` is a URL that does not name a folder of this machine."""
    return isinstance(path, str) and "://" in without_local_scheme(path)


def protocol_of(url: str) -> str:
    """``s3`` of ``s3://bucket/prefix``."""
    return url.partition("://")[0]


def checked_url(url: str) -> str:
    """``url`` with its protocol in lower case and no slash at its end.

    Raises:
        ValueError: it names no place in a filesystem that fsspec knows, or fsspec or the
            package for its protocol is not installed; the text says what to do.

    """
    scheme = _SCHEME.match(url)
    if "::" in url or scheme is None:
        raise ValueError(
            "it must be one URL, such as s3://bucket/prefix. Chains of filesystems are not taken: "
            "a cache or an archive in between would answer with what was there once"
        )
    if "?" in url or "#" in url:
        raise ValueError("it must end before the '?' or '#'. Options go into 'storage_options'")
    protocol, rest = scheme[1].lower(), url[scheme.end() :].rstrip("/")
    if not rest.strip("/"):
        raise ValueError(f"it must name a place, such as {protocol}://bucket/prefix")
    _require_installed(protocol)
    return f"{protocol}://{rest}"


def _require_installed(protocol: str) -> None:
    s3 = protocol in ("s3", "s3a")
    advice = f"Try: pip install 'kvtiers[{'s3' if s3 else 'fsspec'}]'"
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(
            f"URLs need the package fsspec, which is not installed. {advice}"
        ) from error
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        # fsspec's own words name the package.
        text = f"'{protocol}' needs a package that is not installed: {error}"
        raise ValueError(f"{text}. {advice}" if s3 else text) from error
    except ValueError as error:
        raise ValueError(_unknown(protocol, fsspec.available_protocols())) from error


def check_option_names(url: str, written: Iterable[str]) -> None:
    """Refuse a misspelt option of S3's filesystem, which takes any name until it connects.

    Others hand names on to a client of theirs, which alone knows them.

    Args:
        url: checked.
        written: names of options.

    Raises:
        ValueError: a name is none of S3's, and near to one.

    """
    if protocol_of(url) not in ("s3", "s3a"):
        return
    import fsspec

    classes = fsspec.get_filesystem_class("s3").__mro__
    known = {name for cls in classes for name in inspect.signature(cls.__init__).parameters}
    for name in sorted(set(written) - known):
        # Without a near one it may be of the S3 client's session, which takes more.
        for near in difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise ValueError(f"'storage_options' has '{name}'. Did you mean '{near}'? Correct it")


def _unknown(protocol: str, known: list[str]) -> str:
    near = difflib.get_close_matches(protocol, known, n=1, cutoff=0.5)
    guess = f" Did you mean '{near[0]}'?" if near else ""
    return (
        f"fsspec knows no protocol '{protocol}'.{guess} It knows {', '.join(sorted(known))}; a "
        "package may register more with it"
    )


def without_password(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose ``path`` has its password moved into ``storage_options``.

    Before anything checks the path: an error's text would show it.

    Raises:
        ValueError: ``storage_options`` names another one.

    """
    moved = dict(options)
    path, given = moved.get("path"), moved.get("storage_options")
    if not isinstance(path, str) or not (given is None or isinstance(given, Mapping)):
        return moved
    scheme, separator, rest = path.partition("://")
    # Up to the last '@': a password may hold any of the characters that end a host.
    user, at, place = rest.rpartition("@")
    name, colon, password = user.partition(":")
    if not (separator and at and colon):
        return moved
    if given and given.get("password", password) != password:
        raise ValueError(
            "'path' holds a password, and 'storage_options' another one. Leave it out of 'path'"
        )
    moved["path"] = f"{scheme}://{name}@{place}" if name else f"{scheme}://{place}"
    moved["storage_options"] = {**(given or {}), "password": password}
    return moved
