"""What the pages for authors show works: their code is what is tested here."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import doc_pages
import pytest
import yaml
from kvtiers.connector.config import load
from kvtiers.policies import POLICIES, Policy
from kvtiers.tiers import TIERS, Tier

DOCS = doc_pages.DOCS
AUTHORS = {"write-a-tier.md": "kvtiers_memory", "write-a-policy.md": "kvtiers_patient"}

for page, name in AUTHORS.items():
    doc_pages.module(page, name)
memory = doc_pages.module("write-a-tier.md", "test_kvtiers_memory")
patient = doc_pages.module("write-a-policy.md", "test_kvtiers_patient")

TestMemoryTier = memory.TestMemoryTier
TestMemoryTierFarAway = memory.TestMemoryTierFarAway
TestPatient = patient.TestPatient
TestImpatient = patient.TestImpatient


@pytest.mark.parametrize(("page", "name"), AUTHORS.items())
def test_a_page_has_all_files_of_a_package(page: str, name: str) -> None:
    expected = {"pyproject.toml", f"{name}.py", f"test_{name}.py", "kvtiers.yaml"}
    assert set(doc_pages.files(page)) == expected


@pytest.mark.parametrize("page", AUTHORS)
def test_the_configuration_shown_is_valid_once_the_package_is_installed(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = doc_pages.files(page)
    install(tmp_path, tomllib.loads(files["pyproject.toml"])["project"], monkeypatch)
    config = load(yaml.safe_load(files["kvtiers.yaml"]), {}).config
    used = {tier.type for tier in config.tiers} | {config.policy.type}
    assert used & {"memory", "patient"}


def install(folder: Path, project: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry find what pip would have written for the package."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    for registry in (TIERS, POLICIES):
        monkeypatch.setitem(
            vars(registry),
            "_points",
            type(registry)(registry.group, registry.kind, registry._base)._points,
        )


@pytest.mark.parametrize("page", AUTHORS)
def test_the_table_of_questions_names_methods_and_defaults_that_exist(page: str) -> None:
    owner = {"write-a-tier.md": memory.TestMemoryTier, "write-a-policy.md": Policy}[page]
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / page).read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)", row)]
    assert len(names) > 4
    for name in names:
        assert hasattr(owner, name) or hasattr(Tier, name), name


def test_the_transfer_configuration_shown_is_json() -> None:
    (shown,) = re.findall(
        r"--kv-transfer-config '(.*?)'", (DOCS / "write-a-tier.md").read_text(), re.DOTALL
    )
    assert json.loads(shown)["kv_connector_extra_config"] == {"config": "kvtiers.yaml"}


@pytest.mark.parametrize("page", sorted(DOCS.parent.glob("*.md")) + sorted(DOCS.rglob("*.md")))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
