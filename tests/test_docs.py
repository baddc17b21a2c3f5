"""Files that the documentation names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_are_there(page: Path) -> None:
    named = re.findall(
        r"\b(?:benchmarks|docs|examples|tests)/[\w/.-]+\.\w+", page.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()] == []
