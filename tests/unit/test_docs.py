"""What docs/extending.md shows works: its code is what is tested here."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)

shown = ModuleType("shown")
for block in BLOCKS:
    exec(compile(block, "docs/extending.md", "exec"), shown.__dict__)

TestMemoryTier = shown.TestMemoryTier
TestFewestUses = shown.TestFewestUses


def test_the_page_shows_a_tier_a_policy_and_their_suites() -> None:
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("page", sorted(DOCS.parent.glob("*.md")) + sorted(DOCS.rglob("*.md")))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
