"""Radii: proved again on their balls, their breaking points run, and forged ones seen."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prooflens as pl
from prooflens.checker import check
from prooflens.results.record import save_radii
from tests.checker.forging import TOY, Change, edit

OPTIONS: dict[str, Any] = {"tolerance": 0.5, "between": (1e-4, 1.0), "seed": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy, folder = pl.load("toy"), tmp_path_factory.mktemp("radii") / "run"
    pl.radius(toy, toy.example(1), ["top1", "mass>=0.2"], layer=0, **OPTIONS).save(folder)
    return folder


def test_radii_are_proved_again_and_their_breaking_points_run(run: Path) -> None:
    found = check(run, TOY)
    assert found.ok
    assert found.counts["re-proved"] >= 10
    proved = [one.note for one in found.findings if one.status == "re-proved"]
    assert any("claimed >0" in note and "own bound" in note for note in proved)


def test_beyond_layer_0_and_token_by_token(tmp_path: Path) -> None:
    toy = pl.load("toy")
    found = pl.radius(toy, toy.example(), "1.1:top1@-1", tokens=[1, 3], per_token=True, **OPTIONS)
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok
    assert report.counts["re-proved"] > 0
    deep = found[:1]
    assert len(deep.evidence) == 1
    save_radii(deep, tmp_path / "part", {}, complete=False)
    assert check(tmp_path / "part", TOY).ok


def test_what_the_clean_input_decides(tmp_path: Path) -> None:
    toy = pl.load("toy")
    pl.radius(toy, toy.example(1), ["mass>=0.99", "top4"], "0.0", positions=[1], **OPTIONS).save(
        tmp_path / "run"
    )
    words = [one.status for one in check(tmp_path / "run", TOY).findings]
    assert words == ["witness confirmed", "re-proved"]


def nothing(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    return 0


def forged(run: Path, change: Change) -> None:
    """Change a run; radii count no verdicts."""
    edit(run, change)
    head = run / "run.json"
    head.write_text(json.dumps(json.loads(head.read_text()) | {"counts": {}}))


def larger(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    rows[0]["certified"] = 1.1 * rows[0]["attack"]
    return 0


def too_large(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    rows[0]["certified"], rows[0]["attack"] = 1.05 * rows[0]["attack"], None
    return 0


def nearer(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    rows[0]["attack"] *= 0.99
    return 0


def harmless(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["row/0/witness"] = tensors["region/0/center"].copy()
    return 0


def gone(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    del tensors["row/0/witness"]
    return 0


def other_head(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    rows[0]["claim"] = rows[0]["claim"].replace('"score", 0, 0,', '"score", 0, 1,')
    return 0


def easier(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    claim = json.loads(rows[0]["claim"])
    del claim["functionals"][0], claim["clean"][0]
    rows[0]["claim"] = json.dumps(claim)
    return 0


def one_token(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    rows[0]["token"] = 2
    return 0


def half_a_ball(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/radius"] = np.where(np.arange(len(tensors["region/0/radius"]))[:, None] < 2, 1.0, 0.5)
    return 0


def for_ever(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    rows[0]["certified"], rows[0]["attack"] = None, None
    return 0


@pytest.mark.parametrize(
    "forge",
    [larger, nearer, harmless, gone, other_head, easier, one_token, half_a_ball, for_ever],
    ids=lambda forge: forge.__name__,
)
def test_forged_radii_are_wrong(run: Path, tmp_path: Path, forge: Change) -> None:
    shutil.copytree(run, tmp_path / "run")
    forged(tmp_path / "run", nothing)
    assert check(tmp_path / "run", TOY, only={0}).ok
    forged(tmp_path / "run", forge)
    assert not check(tmp_path / "run", TOY, only={0}).ok


def test_a_radius_beyond_the_true_one_is_not_proved(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    forged(tmp_path / "run", too_large)
    found = check(tmp_path / "run", TOY, only={0})
    assert [one.status for one in found.findings] == ["not checkable"]


def test_radii_of_older_runs_have_no_claims(run: Path, tmp_path: Path) -> None:
    toy = pl.load("toy")
    held = pl.radius(toy, toy.example(1), "0.0:top1@1", **OPTIONS)
    pl.Radii(held.table, held.subject).save(tmp_path / "run")
    [found] = check(tmp_path / "run", TOY).findings
    assert (found.status, "no claim is stored" in found.note) == ("not checkable", True)
