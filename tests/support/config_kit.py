"""What tests of the configuration share."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.tiers import TIERS


def problems(
    extra: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The paragraphs on what is wrong with a configuration."""
    with pytest.raises(ConfigError) as raised:
        load(extra, environ or {})
    return raised.value.problems


def problem(extra: Mapping[str, object], environ: Mapping[str, str] | None = None) -> str:
    """The only one."""
    (only,) = problems(extra, environ)
    return only


@contextlib.contextmanager
def installed_tier(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: str = ""
) -> Iterator[str]:
    """A tier of another package, installed the way packages are; its name.

    Args:
        folder: to install into.
        monkeypatch: of the test.
        options: the fields of its ``Config``, a line each.

    """
    config = textwrap.indent(f"type: str = 'acme'\n{options}", 8 * " ")
    (folder / "acme_tier.py").write_text(
        "from kvtiers.tiers import Tier, TierConfig\n"
        "from pydantic import Field\n"
        "class AcmeTier(Tier):\n"
        f"    class Config(TierConfig):\n{config}\n"
        "    contains = read = write = remove = scan = usage = None\n"
    )
    info = folder / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtiers.tiers]\nacme = acme_tier:AcmeTier\n")
    monkeypatch.syspath_prepend(str(folder))
    TIERS.__dict__.pop("_points", None)
    try:
        yield "acme"
    finally:
        TIERS.__dict__.pop("_points", None)
