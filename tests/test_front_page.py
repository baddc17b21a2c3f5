"""The front page: short, and every block of it runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from prooflens.models import Transformer
from tests.conftest import Call

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "docs" / name for name in ("from-transformerlens.md", "from-autolirpa.md", "from-cora.md")]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_it_is_short_and_has_the_two_commands() -> None:
    assert len(README.splitlines()) < 120
    clone = next(block for block in blocks(README, "console") if "make" in block)
    assert [line.split("#")[0].strip() for line in clone.splitlines()] == ["make demo", "make test"]


def test_the_block_about_the_embedded_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(blocks(README, "python")[0], names)
    said = re.search(r"print\(res\)  # (.*?), …; (weakest.*)", README)
    assert said is not None
    assert said[1] in repr(names["res"])
    assert repr(names["res"]).endswith(f"{said[2]}>")
    assert (tmp_path / "toy.html").is_file()


@pytest.mark.pretrained
@pytest.mark.slow
def test_the_other_blocks_run(smollm2: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("import prooflens as pl", names)
    monkeypatch.setattr("prooflens.verdicts.question.load", lambda model: smollm2)
    for block in blocks(README, "python")[1:]:
        exec(block, names)
    assert names["res"]["0.4"].verdict == "holds"


def test_the_commands_run(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(README, "console") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("prooflens")]
    assert len(commands) == 4
    for _, *arguments in commands:
        code, _, err = call(*arguments)
        assert code in (0, 2, 3), err
    assert (tmp_path / "toy.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_for_people_from_other_tools_run(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        exec(block, {})
