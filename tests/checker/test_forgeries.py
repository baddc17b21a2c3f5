"""Runs that were forged as a whole: other sets, models, prompts and answers under the same names, with fresh hashes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from tests.checker.forging import TOY, column, edit, head


def every(**values: object) -> Any:
    """The same value in all rows."""

    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        for row in rows:
            row |= values
        return 0

    return change


@pytest.fixture
def run(toy: pl.Transformer, tmp_path: Path) -> Path:
    """A small honest run."""
    queries = ["top1", "mass>=0.2"]
    pl.certify(toy, toy.example(0), pl.Ball(0.1), "0.0", queries=queries).save(tmp_path / "run")
    assert check(tmp_path / "run", TOY).ok
    return tmp_path / "run"


@pytest.mark.parametrize(
    "label",
    [
        "ball ε=0.2",
        "ball ε=0.1 on tokens [0]",
        "ball ε=[0.1, 0.1]",
        "ball ε={9: 0.1}",
        "ball ε=0,1",
        "hull of 2 texts",
    ],
)
def test_a_larger_set_in_the_name_is_caught(run: Path, label: str) -> None:
    edit(run, every(region=label))
    head(run, region={"label": label})
    report = check(run, TOY)
    assert report.counts["WRONG"] == len(report.findings) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"region": {"eps": 0.2}},
        {"counts": {"holds": 99}},
        {"tokens": ["x", "y", "z", "w"]},
        {"model": {"name": "gpt2"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_header_that_says_something_else_is_caught(run: Path, changes: dict[str, Any]) -> None:
    head(run, **changes)
    assert check(run, TOY).problems


def test_a_second_region_is_caught(run: Path) -> None:
    edit(run, column("region_id", 1))
    assert check(run, TOY).problems


def test_tokens_that_are_not_those_of_the_centre_are_caught(run: Path) -> None:
    edit(run, every(tokens=["x0", "x1"]))
    head(run, tokens=["x0", "x1"])
    assert "tokens" in check(run, TOY).problems[0]


def test_verdicts_without_their_claims_are_caught(run: Path) -> None:
    edit(run, every(claim=None, verdict="holds", guarantee="proved"))
    report = check(run, TOY)
    assert report.counts["WRONG"] == len(report.findings) > 0


def test_another_answer_is_caught(toy: pl.Transformer, tmp_path: Path) -> None:
    pl.output(toy, toy.example(0), pl.Ball(1e-3)).save(tmp_path / "run")
    assert check(tmp_path / "run", TOY).ok

    def swap(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        for row in rows:
            row["candidate"] = 1 - row["candidate"]
        return 0

    edit(tmp_path / "run", swap)
    assert check(tmp_path / "run", TOY).counts["WRONG"] == 2


def test_a_sum_with_a_slightly_larger_constant_is_caught(toy: pl.Transformer, tmp_path: Path) -> None:
    query = "0.5 * 0.0:mass>=0.2@-1 + -2.0 * 0.1:mass>=0.2@-1 > 0"
    pl.circuit(toy, toy.example(0), pl.Ball(1e-4), query).save(tmp_path / "run")
    assert check(tmp_path / "run", TOY).ok

    def raise_constant(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        claim = json.loads(rows[-1]["claim"])
        claim["functionals"][0]["constant"] += 1e-10
        rows[-1]["claim"] = json.dumps(claim)
        return len(rows) - 1

    row = edit(tmp_path / "run", raise_constant)
    assert [f.row for f in check(tmp_path / "run", TOY).findings if f.status == "WRONG"] == [row]


@pytest.mark.slow
@pytest.mark.parametrize("forge", ["loose constraints", "a text left out"])
def test_another_hull_under_the_same_name_is_caught(toy: pl.Transformer, tmp_path: Path, forge: str) -> None:
    x, y = toy.example(0).x, toy.example(1).x
    hull = pl.Paraphrases([x, x + 0.1 * (y - x), x + 0.2 * (x - y)], convex=True)
    pl.certify(toy, toy.example(0), hull, "0.0").save(tmp_path / "run")
    assert check(tmp_path / "run", TOY).ok

    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        if forge == "loose constraints":
            tensors["region/0/A_eq"] = np.zeros((1, 3))
            tensors["region/0/b_eq"] = np.zeros(1)
        else:
            tensors["region/0/generators"][1] = 0.0
        return 0

    edit(tmp_path / "run", change)
    report = check(tmp_path / "run", TOY)
    assert report.counts["WRONG"] == len(report.findings) > 0


@pytest.mark.parametrize("name", ["ball ε=0.01", "ball ε=0.01 on tokens [1, -1]", "ball ε={0: 0.01}"])
@pytest.mark.parametrize("forge", ["one coordinate", "half the radius", "another token"])
def test_a_smaller_region_under_the_same_name_is_caught(
    toy: pl.Transformer, tmp_path: Path, name: str, forge: str
) -> None:
    balls = [pl.Ball(0.01), pl.Ball(0.01, tokens=[1, -1]), pl.Ball({0: 0.01})]
    ball = next(ball for ball in balls if str(ball) == name)
    pl.certify(toy, toy.example(0), ball, "0.0", positions=[0]).save(tmp_path / "run")
    assert check(tmp_path / "run", TOY).counts["re-proved"] == 1

    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        whole = tensors["region/0/radius"]
        smaller = np.zeros_like(whole)
        smaller[whole.argmax() // whole.shape[1], 0] = whole.max()
        if forge == "half the radius":
            smaller = 0.5 * whole
            rows[0]["eps"] = float(smaller.max())
        elif forge == "another token":
            smaller = np.zeros_like(whole)
            smaller[2] = whole.max()
        tensors["region/0/radius"] = smaller
        for corner in [name for name in tensors if "corner" in name]:
            del tensors[corner]
        return 0

    edit(tmp_path / "run", change)
    assert check(tmp_path / "run", TOY).counts["WRONG"] == 1


def test_a_region_with_a_name_of_its_own_is_checked_as_it_is_stored(
    toy: pl.Transformer, tmp_path: Path
) -> None:
    region = pl.Ball(0.01).around(toy.example(0)).scaled(0.5)
    pl.certify(toy, toy.example(0), region, "0.0", positions=[0]).save(tmp_path / "run")
    (finding,) = check(tmp_path / "run", TOY).findings
    assert finding.status == "re-proved"
    assert "its name is free text" in finding.note


def test_a_cut_model_under_the_name_of_the_whole_is_caught(toy: pl.Transformer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pl.output(toy, toy.example(0), pl.Ball(0.001), layers=1).save(run)
    assert check(run, TOY).ok

    def rename(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        for row in rows:
            row["model"] = "toy"
        return 0

    edit(run, rename)
    info = json.loads((run / "run.json").read_text())
    info["model"]["name"] = "toy"
    (run / "run.json").write_text(json.dumps(info))
    assert "was cut" in check(run, TOY).problems[0]


def test_an_argmax_without_its_margins_is_caught(toy: pl.Transformer, tmp_path: Path) -> None:
    pl.certify(toy, toy.example(0), pl.Ball(1e-3), queries=["argmax"]).save(tmp_path / "run")

    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        claim = json.loads(rows[0]["claim"]) | {"functionals": [], "clean": []}
        rows[0] |= {"claim": json.dumps(claim), "lower": None, "upper": None}
        for name in [name for name in tensors if name.startswith("row/")]:
            del tensors[name]
        tensors |= {"row/0/lower": np.zeros(0), "row/0/upper": np.zeros(0)}
        return 0

    edit(tmp_path / "run", change)
    assert check(tmp_path / "run", TOY).counts["WRONG"] == 1


@pytest.fixture
def cut(toy: pl.Transformer, tmp_path: Path) -> Path:
    """An honest run about a way, with its pieces."""
    a = toy.example(0).x
    way = pl.Segment(a, a + 0.05 * (toy.example(1).x - a))
    pl.certify(toy, a, way, "1.0", engine="chebyshev").save(tmp_path / "cut")
    report = check(tmp_path / "cut", TOY)
    assert report.ok
    assert report.counts["re-proved"] > 0
    return tmp_path / "cut"


@pytest.mark.parametrize("side", ["low", "high", "lower", "anchor"])
def test_pieces_that_do_not_cover_the_region_are_caught(cut: Path, side: str) -> None:
    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        row = next(r for r in rows if r["verdict"] == "holds")
        if side == "anchor":
            tensors["region/0/anchor"] = tensors["region/0/anchor"] * -1.0
        else:
            name = f"row/{row['row']}/cover/{side}"
            step = {"low": 0.5, "high": -0.5, "lower": -100.0}[side]
            tensors[name] = tensors[name] + step
        return int(row["row"])

    edit(cut, change)
    assert check(cut, TOY).counts["WRONG"] > 0


def test_pieces_of_a_ball_of_few_factors_are_those_of_its_radii(toy: pl.Transformer, tmp_path: Path) -> None:
    x = toy.example(0).x
    radius = torch.zeros_like(x)
    radius[0, :3] = 0.05
    region = pl.Region(x, radius=radius)
    pl.certify(toy, x, region, "1.0", engine="chebyshev").save(tmp_path / "ball")
    report = check(tmp_path / "ball", TOY)
    assert report.ok
    assert report.counts["re-proved"] > 0
