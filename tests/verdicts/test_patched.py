"""Patches: the metric takes the other prompt's side at every point, or a point shows that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.errors import ProoflensError, QueryError
from prooflens.models.edits import value_on
from prooflens.models.files import write_model
from prooflens.results import Verdict
from tests.checker.forging import TOY, edit
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

METRIC = torch.tensor([1.0, -1.0]).double()
ALL = ["a0", "m0", "a1", "m1"]


def places(toy: pl.Transformer) -> dict[str, Any]:
    x, y, z = (toy.example(i).x for i in (2, 0, 1))
    return {
        "ball": pl.Ball(0.01),
        "segment": pl.Segment(x, x + 0.1 * (y - x)),
        "hull": pl.Hull([x, x + 0.1 * (y - x), x + 0.05 * (z - x)]),
    }


@pytest.mark.parametrize("kind", ["ball", "segment", "hull"])
def test_every_point_takes_the_side_or_a_point_does_not(
    toy: pl.Transformer, kind: str, tmp_path: Path
) -> None:
    """Input 2 is on the other side than input 0: all parts together carry it over, one neuron does not."""
    x, other, place = toy.example(2), toy.example(0), places(toy)[kind]
    asked: Any = (toy, ALL, x, place, "logit0-logit1")
    found = pl.effect(*asked, patched=other, budget="20/1/2")
    (claim,) = found.claims
    patched = pl.edit(toy, [value_on(toy, part, other) for part in ALL])
    region = place.around(x) if isinstance(place, pl.Ball) else place.region()
    margins = patched(region.sample(200, seed=0)[0]) @ METRIC
    assert claim.claim == "patched: metric of the edited model > 0"
    if claim.verdict is Verdict.HOLDS:
        assert float(margins.min()) > 0.0
        assert found.outcomes[-1].lower <= float(margins.min())
    kept = pl.effect(toy, "m0.n3", x, place, "logit0-logit1", patched=other, budget="20/1/2")
    assert kept.claims[0].verdict is Verdict.FAILS
    witness = kept.claims[0].witness
    assert witness is not None
    assert float(pl.edit(toy, value_on(toy, "m0.n3", other))(witness.x) @ METRIC) <= 0.0
    for number, one in enumerate((found, kept)):
        one.save(tmp_path / f"{number}")
        report = check(tmp_path / f"{number}", TOY)
        assert report.ok, report
        word = "re-proved" if one.claims[0].verdict is Verdict.HOLDS else "witness confirmed"
        assert report.findings[-1].status in (word, "not checkable"), report


def test_a_side_is_proved_again(toy: pl.Transformer, tmp_path: Path) -> None:
    other = toy.example(14)
    patch = value_on(
        toy, "m1", other, -1
    )  # one value for all tokens: the checker knows such networks in depth
    found = pl.effect(toy, patch, toy.example(0), pl.Ball(0.005), "logit0-logit1", patched=other)
    assert found.verdicts == [Verdict.HOLDS]
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert [finding.status for finding in report.findings][-1] == "re-proved", report

    def other_side(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        rows[-1]["query"] = rows[-1]["query"].replace(">0", "<0")
        return 0

    edit(tmp_path / "run", other_side)
    assert not check(tmp_path / "run", TOY).ok


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"metric": "prob(0)"}, "has no side"), ({"patched": torch.zeros(3, 8).double()}, "as long|tokens")],
)
def test_what_has_no_side_is_refused(toy: pl.Transformer, asked: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"metric": "logit0-logit1", "patched": toy.example(1)} | asked
    with pytest.raises(ProoflensError, match=said):
        pl.effect(toy, "m1.n0", toy.example(), pl.Ball(0.01), **given)


def test_members_that_take_the_side_are_counted(tmp_path: Path) -> None:
    model = reader("gpt2")
    family = TEMPLATE.of(model)
    other = next(iter(family))
    parts = [["m1"], ["a0.h1@-1"]]
    found = pl.family_effects(model, parts, TEMPLATE, "logit{A}-logit{B}", patched=other.text, batch=7)
    there = model(torch.tensor(other.ids))[-1]
    for row, names in zip(found.rows, parts, strict=True):
        patched = pl.edit(model, [value_on(model, name, other.text) for name in names])
        count = 0
        for member in family:
            a, b = (member.ids[member.roles[slot][0][0]] for slot in "AB")
            y = patched(torch.tensor(member.ids))[-1]
            count += int(float((there[a] - there[b]) * (y[a] - y[b])) > 0.0)
        assert row.patched == count
        assert row.edited == patched.name
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    found.save(tmp_path / "run")
    assert check(tmp_path / "run", tmp_path / "model").ok
    assert pl.report(tmp_path / "run", path=tmp_path / "report.html").is_file()

    def forged(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        rows[0]["patched"] = 0 if rows[0]["patched"] else rows[0]["asked"]
        return 1

    edit(tmp_path / "run", forged)
    assert not check(tmp_path / "run", tmp_path / "model").ok
    with pytest.raises(QueryError, match="has no side"):
        pl.family_effects(model, ["m1"], TEMPLATE, "prob({A})", patched=other.text)


def test_the_command(call: Call) -> None:
    asked = ("effect", "toy", "--metric", "logit0-logit1", "--budget", "20/1/2", "--eps", "0.005")
    code, told, _ = call(*asked, "--without", "m1", "--patched", "14")
    assert (code, "patched: metric of the edited model > 0: holds" in told) == (0, True)
    code, told, _ = call(*asked, "--without", "m0.n3", "--patched", "2")
    assert (code, "patched: metric of the edited model < 0: fails" in told) == (3, True)
