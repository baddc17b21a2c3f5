"""The notebooks: what a reader finds in the files before running anything. `make notebook` runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import prooflens as pl

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
LARGEST = 200_000
"""Bytes of a notebook with its outputs: pictures are drawings, and nothing brings a library along."""


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_every_public_name_occurs_in_a_notebook() -> None:
    code = "\n".join(source(cell) for path in EXAMPLES for cell in cells(path, "code"))
    assert [name for name in pl.__all__ if not re.search(rf"\bpl\.{name}\b", code)] == []


def test_there_are_ten() -> None:
    assert len(EXAMPLES) == 10
    listed = (Path(__file__).parents[1] / "docs" / "index.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/{path.name}" not in listed] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_begins_for_colab_and_has_its_outputs(path: Path) -> None:
    first, install = cells(path, "markdown")[0], cells(path, "code")[0]
    assert source(first).startswith("# ")
    badge = r"\[!\[Open in Colab\]\(\S+/colab-badge\.svg\)\]\(https://colab\.research\.google\.com/\S*\)"
    assert re.search(badge, source(first))
    assert f"`{path.name}`" in source(first)
    assert source(install).startswith("# On Colab")
    guard, installs = source(install).splitlines()[-2:]
    assert guard == 'if find_spec("prooflens") is None:'
    assert re.fullmatch(r' +%pip install --quiet "prooflens\[[a-z,]+\]"', installs)
    assert install["outputs"] == []
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    assert len(outputs) >= 2
    assert all(output["output_type"] != "error" for output in outputs)
    assert path.stat().st_size < LARGEST
    assert all(cell["execution_count"] for cell in cells(path, "code"))


def test_most_have_a_picture() -> None:
    drawn = [path.stem for path in EXAMPLES if "image/svg+xml" in path.read_text()]
    assert {path.stem for path in EXAMPLES} - set(drawn) <= {"check"}
