"""Runs that earlier versions wrote are read, checked, reported and resumed."""

from __future__ import annotations

import operator
import shutil
from pathlib import Path

import pytest

import prooflens as pl
from prooflens.certificate import read_run
from prooflens.checker import check
from prooflens.report import collect, render
from prooflens.verdicts.output import output

HERE = Path(__file__).parent
EARLIER = sorted(HERE.glob("written-by-*"))
PLACE = ("layer", "head", "position", "query")
TOY = Path(pl.__file__).parent / "models" / "embedded" / "toy"


@pytest.mark.parametrize("folder", EARLIER, ids=lambda folder: folder.name)
def test_they_check_still(folder: Path) -> None:
    verdicts, answer = check(folder / "verdicts", TOY), check(folder / "output", TOY)
    assert verdicts.ok
    assert answer.ok
    assert verdicts.counts == {
        "re-proved": 19,
        "witness confirmed": 8,
        "nothing claimed": 6,
        "not checkable": 15,
        "WRONG": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("folder", EARLIER, ids=lambda folder: folder.name)
def test_the_same_question_gets_the_same_rows(folder: Path) -> None:
    queries = ["top1", "mass>=0.3", "entropy"]
    now = pl.certify("toy", pl.load("toy").example(1), pl.Ball(0.05), queries=queries)
    key = operator.itemgetter("query", "layer", "head", "position")
    earlier, today = (sorted(found.rows, key=key) for found in (pl.Results.load(folder / "verdicts"), now))
    for old, new in zip(earlier, today, strict=True):
        assert all(old[name] == new[name] for name in PLACE)
        assert new["clean"] == pytest.approx(old["clean"], rel=1e-12)  # processors add up in other orders
        # Bounds of `taylor` have changed since, in both directions: what was decided still is, and some more.
        assert (old["lower"] is None) == (new["lower"] is None)
        assert old["lower"] is None or new["lower"] >= old["lower"] - 0.5 * abs(old["lower"])
        if old["verdict"] == "unknown" and new["verdict"] != "unknown":
            continue
        assert old["verdict"] == new["verdict"]
        # Which engine bounds a range best has changed since.
        assert old["engine"] == new["engine"] or new["query"] == "entropy"
        assert new["guarantee"] == ("witness" if new["verdict"] == "fails" else old["guarantee"])
        assert new["reason"].startswith(old["reason"])  # since 0.2 it also says how far each engine came
    answer = output("toy", pl.load("toy").example(0), pl.Ball(0.01))
    assert [row["verdict"] for row in read_run(folder / "output").rows.to_pylist()] == [
        row["verdict"] for row in answer.rows
    ]


@pytest.mark.parametrize("folder", EARLIER, ids=lambda folder: folder.name)
def test_they_are_drawn_and_resumed(folder: Path, tmp_path: Path) -> None:
    assert "<svg" in render(collect(folder / "verdicts"))
    assert "<svg" in render(collect(folder / "radii"))
    run = tmp_path / "run"
    shutil.copytree(folder / "verdicts", run)
    whole = pl.certify(
        "toy", pl.load("toy").example(1), pl.Ball(0.05), queries=["top1", "top2"], out=run, resume=True
    )
    assert len(whole) == 48 + 16
