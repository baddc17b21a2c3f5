"""Runs about effects of edits: the checker makes the edited network itself, and sees what was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.models.edits import mean_of
from prooflens.results import Verdict
from prooflens.results.effects import Effect
from tests.checker.forging import TOY, edit

Rows = list[dict[str, Any]]
Forgery = Callable[[Rows, dict[str, Any]], None]


def saved(toy: pl.Transformer, out: Path, edits: object, metric: str, **claims: Any) -> Effect:
    v = torch.linspace(-1.0, 1.0, toy.architecture.d_model, dtype=torch.float64)
    found = pl.effect(
        toy,
        edits,  # type: ignore[arg-type]
        toy.example(),
        pl.Ball(0.01),
        metric,
        vectors={"v": v},
        budget="50/1/5",
        **claims,
    )
    found.save(out)
    return found


@pytest.mark.parametrize(
    "metric", ["logit0-logit1", "logit1", "neuron 1.3@2", "read(blocks.1.hook_resid_post@3,v)"]
)
@pytest.mark.parametrize("kind", ["head", "parts", "mean", "direction"])
def test_witnesses_of_effects_are_confirmed(
    toy: pl.Transformer, tmp_path: Path, kind: str, metric: str
) -> None:
    edits = {
        "head": "a0.h1",
        "parts": ["m0", "a1.h0", "m1.n3"],
        "mean": mean_of(toy, "a0.h1", [toy.example(i) for i in range(3)]),
        "direction": pl.Edit("m0", direction=torch.linspace(0.0, 1.0, toy.architecture.d_model).double()),
    }[kind]
    found = saved(toy, tmp_path / "run", edits, metric, faithful=0.0, necessary=-50.0)
    assert [claim.verdict.value for claim in found.claims] == ["holds", "fails"]
    report = check(tmp_path / "run", TOY)
    assert report.ok, report
    assert report.counts["witness confirmed"] == 1
    assert ("the edit is the stored one" in report.findings[0].note) == (kind in ("mean", "direction"))


def test_two_answers_are_confirmed(toy: pl.Transformer, tmp_path: Path) -> None:
    x, ball = toy.example(14), pl.Ball(1e-3)
    found = pl.effect(toy, "a0", x, ball, "logit0-logit1", sufficient=True, budget="20/1/2")
    assert found.claims[-1].verdict is Verdict.FAILS
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.findings[-1].status == "witness confirmed", report

    def another(rows: Rows, tensors: dict[str, Any]) -> int:
        rows[-1]["query"] = "same answer without m0.n0"
        return 0

    edit(tmp_path / "run", another)
    assert check(tmp_path / "run", TOY).counts["WRONG"] == 1


@pytest.fixture
def run(toy: pl.Transformer, tmp_path: Path) -> Path:
    """A range, a claim that holds, one that fails."""
    saved(toy, tmp_path / "run", "a1.h0", "logit0-logit1", faithful=1.0, necessary=5.0)
    assert check(tmp_path / "run", TOY).ok
    return tmp_path / "run"


def renamed(query: str) -> Forgery:
    def change(rows: Rows, tensors: dict[str, Any]) -> None:
        rows[2]["query"] = query

    return change


def narrowed(rows: Rows, tensors: dict[str, Any]) -> None:
    """Bounds of the effect that the clean input leaves."""
    tensors["row/0/lower"] = tensors["row/0/lower"] + 1.0
    tensors["row/0/upper"] = tensors["row/0/upper"] + 1.0
    rows[0]["lower"], rows[0]["upper"] = float(tensors["row/0/lower"][0]), float(tensors["row/0/upper"][0])


def turned(rows: Rows, tensors: dict[str, Any]) -> None:
    """A claim that fails, as one that holds."""
    rows[1]["verdict"], rows[1]["guarantee"] = "holds", "proved"


def moved(rows: Rows, tensors: dict[str, Any]) -> None:
    tensors["row/1/witness_alpha"] = 1.5 * tensors["row/1/witness_alpha"]


def weaker(rows: Rows, tensors: dict[str, Any]) -> None:
    claim = json.loads(rows[2]["claim"])
    claim["functionals"][0]["terms"] = claim["functionals"][0]["terms"][:2]
    rows[2]["claim"] = json.dumps(claim)


@pytest.mark.parametrize(
    "forgery",
    [
        renamed("|effect(logit0-logit1)|<=0.5 without a1.h0"),
        renamed("|effect(logit1-logit0)|<=1.0 without a1.h1"),
        renamed("|effect(logit0)|<=1.0 without a1.h0"),
        renamed("effect(logit0-logit1)>=1.0 without a1.h0"),
        renamed("logit0>logit1"),
        narrowed,
        turned,
        moved,
        weaker,
    ],
)
def test_forged_rows_are_seen(run: Path, forgery: Forgery) -> None:
    def change(rows: Rows, tensors: dict[str, Any]) -> int:
        forgery(rows, tensors)
        return 0

    edit(run, change)
    assert not check(run, TOY).ok


@pytest.mark.parametrize(
    "edited",
    [
        {"edit": "without a1.h1", "name": "toy without a1.h1"},
        {"edit": "without a1.h1"},
        {"zeroed": {"blocks.1.o.weight": [[4, 8]]}},
        {"zeroed": {"blocks.1.o.weight": [[0, 99]]}},
        {"zeroed": {}},
        {"removed": ["blocks.1.o.bias"]},
        {"replaced": ["blocks.1.o.weight"]},
        {"sha256": "0" * 64},
        None,
    ],
)
def test_another_edit_in_the_header_is_seen(run: Path, edited: dict[str, Any] | None) -> None:
    info = json.loads((run / "run.json").read_text())
    info["edited"] = None if edited is None else info["edited"] | edited
    (run / "run.json").write_text(json.dumps(info))
    assert not check(run, TOY).ok
