"""What the deployed precision changes, measured beside radii, circuits and families; never called proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import prooflens as pl
from prooflens.certificate import read_run
from prooflens.checker import check
from prooflens.errors import ModelError
from prooflens.report.data import collect
from prooflens.report.page import render
from prooflens.results.deployed import Difference, FamilyDifference, largest_of
from prooflens.verdicts.deployed import POINTS
from tests.checker.forging import TOY
from tests.conftest import Call
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.test_readouts import vectors
from tests.enumeration.words import reader

SHORT = "8/1/2"


def test_radii_are_measured_on_their_certified_balls() -> None:
    """Brute force: the largest difference at the 64 points that the ball of the certified radius draws."""
    toy = pl.load("toy")
    rad = pl.radius(toy, toy.example(), "0.1:top1@-1", deployed="bfloat16", budget=SHORT)
    top = int(toy.scores(toy.example(), 0)[1, -1].argmax())
    points, _ = pl.Ball(rad.certified).around(toy.example()).sample(POINTS)
    low = toy.to(dtype=torch.bfloat16)
    held = [model.scores(points.to(model.dtype), 0)[:, 1, -1].double() for model in (toy, low)]
    rest = [key for key in range(4) if key != top]
    first, second = (scores[:, top] - scores[:, rest].amax(-1) for scores in held)
    assert rad.difference_samples == pytest.approx(float((first - second).abs().max()), abs=1e-12)
    assert rad.difference_worst is not None  # the witness
    assert rad.precision is not None
    assert "measured, not proved" in rad.precision
    assert pl.radius(toy, toy.example(), "0.1:top1@-1", budget=SHORT).precision is None


def test_a_radius_of_zero_and_one_token_at_a_time() -> None:
    toy = pl.load("toy")
    rad = pl.radius(
        toy,
        toy.example(),
        "1.0:top1@-1",
        per_token=True,
        between=(5.0, 10.0),
        tolerance=1.0,
        deployed="float32",
        engine="interval",
        budget=SHORT,
    )
    assert len(rad) == 4
    assert all(row["difference_centre"] is not None for row in rad.rows)
    unproved = [row for row in rad.rows if row["certified"] == 0.0]
    assert unproved
    assert all(row["difference_samples"] is None for row in unproved)


def test_runs_of_radii_keep_it(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ("radius", "toy", "--layer", "0", "--positions=-1", "--budget", SHORT, "--deployed", "bfloat16")
    _, out, _ = call(*command, "-o", str(run))
    assert "measured, not proved, in bfloat16" in out
    assert "difference" in out
    assert "measured, not proved" in read_run(run).info["effort"]["precision"]
    assert "deployed precision" in render(collect(run))
    _, out, _ = call(*command, "--json")
    assert "measured, not proved" in json.loads(out)["precision"]


def test_circuits_have_the_largest_of_their_parts(call: Call, tmp_path: Path) -> None:
    toy, run = pl.load("toy"), tmp_path / "run"
    for asked in ("0.0:top1@-1 & 0.1:top1@-1", "0.0:top1@-1 & neuron 1.5>0@-1"):
        res = pl.circuit(toy, toy.example(), pl.Ball(0.001), asked, deployed="bfloat16", budget="0/0/0")
        assert res.whole.difference == max(row["difference"] for row in res.parts.rows) > 0.0
    weighted = "1 * 0.0:mass>=0.1@-1 + 1 * 0.1:mass>=0.1@-1 > 0"
    res = pl.circuit(toy, toy.example(), pl.Ball(0.001), weighted, deployed="float32", budget="0/0/0")
    assert res.whole.difference > 0.0
    command = ("circuit", "toy", "0.0:top1@-1 & 0.1:top1@-1", "--eps", "0.001", "--deployed", "bfloat16")
    _, out, _ = call(*command, "-o", str(run))
    assert "every proved margin is at least" in out
    assert check(run, TOY).ok


def test_the_largest_of_parts() -> None:
    made = largest_of([Difference("a", 1.0, None, 0.5), Difference("b", 0.1, 2.0, None)])
    assert made == Difference("a, b", 1.0, 2.0, 0.5)
    assert largest_of([]) is None


def test_families_are_measured_at_members() -> None:
    """Brute force: both precisions of prooflens' own forward pass at the members nearest to zero."""
    model = reader("llama")
    queries = ["1.0:top1={A}@-1", "logit{A}>logit{B}", "feature SAE.4 off@-1"]
    found = pl.family(
        model, TEMPLATE, queries, vectors=vectors(model), deployed="float32", confirm=0.0, nearest=3
    )
    assert all(isinstance(row.deployed, FamilyDifference) for row in found)
    low = model.to(dtype=torch.float32)
    family = TEMPLATE.of(model)
    row = found[1]
    assert row.deployed is not None
    apart = []
    for judged in row.nearest:
        x = model.embed(torch.tensor(judged.ids))
        a, b = (model.tokenizer.encode(judged.fillers[slot])[0] for slot in "AB")  # type: ignore[union-attr]
        logits = [held(x.to(held.dtype)).double() for held in (model, low)]
        margins = [float((one[-1] if one.ndim == 2 else one)[[a, b]] @ torch.tensor([1.0, -1.0]).double())
                   for one in logits]  # fmt: skip
        assert margins[0] == pytest.approx(judged.margin, abs=1e-12)
        apart.append(abs(margins[0] - margins[1]))
    assert row.deployed.at_nearest == pytest.approx(max(apart), abs=1e-12)
    assert row.deployed.nearest == min(3, family.size)
    assert "measured, not proved, in float32 by prooflens' own forward pass" in row.note
    assert "change sign" in row.note
    assert row.to_dict()["deployed"]["drawn"] == 16
    plain = pl.family(model, TEMPLATE, queries[0], confirm=0.0)[0]
    assert plain.deployed is None
    assert "deployed" not in plain.to_dict()


def test_the_command_of_families_takes_it(call: Call) -> None:
    code, _, err = call("family", "toy", "--template", "x{A}", "--slot", "A= a, b", "--query", "logit0>logit1",
                        "--deployed", "float16")  # fmt: skip
    assert code == 1
    assert len(err.strip().splitlines()) == 1
    with pytest.raises(ModelError, match="bfloat16 or float32, not in 'float16'"):
        pl.family(reader("llama"), TEMPLATE, "logit{A}>logit{B}", deployed="float16")
