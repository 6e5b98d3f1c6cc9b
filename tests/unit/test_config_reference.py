"""The reference is what the code says, all of it, and the page in docs/ is the reference."""

import difflib
from pathlib import Path
from typing import Literal

import pytest
from config_kit import installed_tier
from kvtiers.connector.config_settings import Settings
from kvtiers.tiers import TIERS, TierConfig
from kvtiers.tools import cli
from kvtiers.tools.config_reference import reference
from kvtiers.tools.config_sections import (
    Row,
    Section,
    adapter_section,
    descriptions,
    policy_sections,
    tier_sections,
    top_section,
)
from pydantic import Field

PAGE = Path(__file__).parents[2] / "docs" / "configuration-reference.md"
SECTIONS = [top_section(), *tier_sections(), *policy_sections(), adapter_section()]


def test_the_page_in_docs_is_what_the_command_prints_now(capsys):
    assert cli.main(["config", "--reference"]) == 0
    printed = capsys.readouterr().out
    difference = "".join(
        difflib.unified_diff(
            PAGE.read_text().splitlines(keepends=True), printed.splitlines(keepends=True)
        )
    )
    assert not difference, (
        "A key, a default or a description has changed. Write the page anew:\n"
        f"  kvtiers config --reference > docs/{PAGE.name}\n{difference}"
    )


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_every_option_says_what_it_is(section):
    told = descriptions(section.model)
    assert [key for key in section.options() if not told.get(key)] == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_every_option_of_a_model_is_a_row_and_no_cell_shows_this_machine(section):
    rows = list(section.rows())
    assert [row.key for row in rows] == section.options()
    text = str(rows)
    assert str(Path.home()) not in text
    assert " object at 0x" not in text


def test_the_page_is_the_same_on_every_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVTIERS_CHUNK_SIZE", "256")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "512")
    monkeypatch.chdir(tmp_path)
    assert reference() == PAGE.read_text()


def row(section: Section, key: str) -> Row:
    return next(row for row in section.rows() if row.key == key)


def section(title: str) -> Section:
    return next(section for section in SECTIONS if section.title == title)


def test_a_row_has_what_a_user_asks():
    assert row(section("`cpu`"), "capacity") == Row(
        "capacity",
        "a size or a share, such as 8GiB, 20GB, 1073741824, 25% or 0.25",
        "`50%`",
        "bytes of host memory for KV.",
    )
    path = row(section("`fs`"), "path")
    assert path.allowed == "a path, in quotes"
    assert path.default == "``kvtiers`` in the user's cache folder"
    assert row(section("`fs`"), "block_size").default == "`4 KiB`"
    assert row(section("`fs` where `path` is a URL"), "path").default == "none, it must be set"
    assert row(top_section(), "blocks_per_chunk").allowed == "a whole number, 1 or more"
    assert row(adapter_section(), "staging").default == "`256 MiB`"


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("| `capacity` |", "| `max_local_cpu_size` |"),
        ("| `chunk_size` |", "| `chunk_size` | `KVTIERS_CHUNK_SIZE` |"),
        ("| `policy` |", "| `cache_policy` | `KVTIERS_POLICY` |"),
        ("| `max_local_cpu_size` | `cpu.capacity` |", "for the whole engine here |"),
        ("| `enable_pd`, `enable_xpyd`,", "is the work of another connector |"),
    ],
)
def test_the_page_has_lmcaches_words_beside_ours_and_all_of_them_below(start, end):
    lines = PAGE.read_text().splitlines()
    assert any(line.startswith(start) and line.endswith(end) for line in lines)


def test_options_that_a_tier_does_not_have_are_not_in_its_table():
    assert section("`cpu`").options() == ["tenant_quota", "capacity"]


class Described(TierConfig):
    """Options of a test's tier.

    Attributes:
        first, second: two that share
            a text.
        both: not this.

    More prose: not an entry.
    """

    type: str = "fs"
    first: int = 1
    second: int = 2
    both: Literal["a", "b"] = Field(default="a", description="this")


def test_a_description_is_the_fields_or_the_docstrings():
    told = descriptions(Described)
    assert told["first"] == told["second"] == "two that share a text."
    assert told["both"] == "this"
    assert told["deadline"].startswith("seconds a lookup in this tier, or a load from it, may take")
    assert "More prose" not in str(told)


def test_tiers_of_other_packages_are_not_in_the_page(tmp_path, monkeypatch):
    with installed_tier(tmp_path, monkeypatch) as name:
        assert name in TIERS.names()
        assert name not in reference()


def test_every_setting_has_its_variable():
    page = PAGE.read_text()
    assert all(f"`KVTIERS_{key.upper()}`" in page for key in Settings.model_fields)
