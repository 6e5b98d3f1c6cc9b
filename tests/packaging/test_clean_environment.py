"""The wheel, the example packages and the authors' pages, where neither vLLM nor torch is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import bare_imports
import doc_pages
import pytest
from environment import Environment
from example_packages import EXAMPLES, PACKAGES


def test_the_wheel_works_with_its_own_dependencies_only(bare: Environment, tmp_path: Path) -> None:
    bare.run("python", bare_imports.__file__, *bare_imports.BARE, cwd=tmp_path)
    installed = bare.run("python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path)
    assert not re.search(r"^(torch|vllm)", installed, re.MULTILINE)
    assert "tiers[0].type" in bare.run("kvtiers", "config", cwd=tmp_path)


def test_a_tier_whose_package_is_missing_names_the_extra_that_brings_it(
    bare: Environment, tmp_path: Path
) -> None:
    ask = (
        "from kvtiers.tiers import TIERS, TierConfigError\n"
        "tier = TIERS.get('redis')\n"
        "try: tier(tier.Config(), 4096)\n"
        "except TierConfigError as error: print(error)"
    )
    assert "pip install 'kvtiers[redis]'" in bare.run("python", "-c", ask, cwd=tmp_path)


@pytest.mark.parametrize("example", PACKAGES)
def test_an_example_passes_its_suite_where_it_is_installed(
    authors: Environment, tmp_path: Path, example: str
) -> None:
    # Without its sources beside them, so that the tests find what pip installed.
    shutil.copytree(EXAMPLES / example / "tests", tmp_path / "tests")
    said = authors.run("python", "-m", "pytest", "-q", cwd=tmp_path)
    assert re.fullmatch(r"\d\d+ passed in .*", said.splitlines()[-1]), said


@pytest.mark.parametrize("example", PACKAGES)
def test_the_configuration_an_example_shows_is_valid(
    authors: Environment, tmp_path: Path, example: str
) -> None:
    text = (EXAMPLES / example / "README.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "kvtiers.yaml").write_text(shown)
    authors.run("kvtiers", "config", "--check", "kvtiers.yaml", cwd=tmp_path)


@pytest.mark.parametrize("page", ["write-a-tier.md", "write-a-policy.md"])
def test_who_does_what_a_page_says_has_a_certified_package(
    authors: Environment, tmp_path: Path, page: str
) -> None:
    for name, content in doc_pages.files(page).items():
        (tmp_path / name).write_text(content)
    _, certify, check, *_ = re.findall(
        r"```bash\n(.*?)```", (doc_pages.DOCS / page).read_text(), re.DOTALL
    )
    assert re.search(r"\d\d passed", authors.run("bash", "-ec", certify, cwd=tmp_path))
    authors.run("bash", "-ec", check, cwd=tmp_path)
