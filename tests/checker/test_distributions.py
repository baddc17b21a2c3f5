"""Runs about effects on probabilities and divergences: the checker proves them again, and sees what was forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prooflens as pl
from prooflens.checker import check
from prooflens.models.files import write_model
from tests.checker.forging import TOY, edit
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

Rows = list[dict[str, Any]]
Forgery = Callable[[Rows, dict[str, Any]], None]
METRICS = ["prob(0)", "prob(1|0,1)", "kl(0,1)"]


def saved(toy: pl.Transformer, out: Path, metric: str) -> Path:
    """A range, a claim with a little room, and one that a point breaks."""
    asked: Any = (toy, ["m0", "a0.h1"], toy.example(14), pl.Ball(0.005), metric)
    low, high = pl.effect(*asked, budget="20/1/2", engine="taylor").ends
    room = 0.3 * (high - low)
    wanted: dict[str, Any] = {"necessary": low - room, "faithful": 0.5 * min(abs(low), abs(high))}
    pl.effect(*asked, budget="20/1/2", engine="taylor", **wanted).save(out)
    return out


@pytest.mark.parametrize("metric", METRICS)
def test_claims_are_proved_again_and_witnesses_confirmed(
    toy: pl.Transformer, tmp_path: Path, metric: str
) -> None:
    report = check(saved(toy, tmp_path / "run", metric), TOY)
    assert report.ok, report
    assert [finding.status for finding in report.findings][1:] == ["re-proved", "witness confirmed"], report


def renamed(query: str) -> Forgery:
    def change(rows: Rows, tensors: dict[str, Any]) -> None:
        rows[2]["query"] = query

    return change


def other_atoms(rows: Rows, tensors: dict[str, Any]) -> None:
    """A probability of the other output under the query of this one."""
    claim = json.loads(rows[0]["claim"])
    for term in claim["functionals"][0]["terms"]:
        term[2] = term[3][1]
    rows[0]["claim"] = json.dumps(claim)


def shifted(rows: Rows, tensors: dict[str, Any]) -> None:
    for side in ("lower", "upper"):
        tensors[f"row/0/{side}"] = tensors[f"row/0/{side}"] + 0.2
        rows[0][side] = float(tensors[f"row/0/{side}"][0])


def turned(rows: Rows, tensors: dict[str, Any]) -> None:
    rows[2]["verdict"], rows[2]["guarantee"] = "holds", "proved"


@pytest.mark.parametrize(
    "forgery",
    [
        renamed("|effect(prob(0|0,1))|<=0.5 without m0, a0.h1"),
        renamed("|effect(kl(0,1))|<=0.5 without m0, a0.h1"),
        renamed("|effect(prob(7))|<=0.5 without m0, a0.h1"),
        other_atoms,
        shifted,
        turned,
    ],
)
def test_forged_rows_are_seen(toy: pl.Transformer, tmp_path: Path, forgery: Forgery) -> None:
    run = saved(toy, tmp_path / "run", "prob(0)")

    def change(rows: Rows, tensors: dict[str, Any]) -> int:
        forgery(rows, tensors)
        return 0

    edit(run, change)
    assert not check(run, TOY).ok


@pytest.mark.parametrize("metric", ["prob({A})", "prob({A}|{A},{B},9)", "kl({A},{B},9)"])
def test_families_are_run_again(tmp_path: Path, metric: str) -> None:
    model = reader("gpt2")
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    pl.family_effects(model, ["a0.h1", "m1"], TEMPLATE, metric, faithful=0.001).save(tmp_path / "run")
    report = check(tmp_path / "run", tmp_path / "model")
    assert report.ok, report
    assert report.counts["re-run"] == 2

    def change(rows: Rows, tensors: dict[str, Any]) -> int:
        rows[1]["most"] += 1e-4
        return 1

    edit(tmp_path / "run", change)
    assert not check(tmp_path / "run", tmp_path / "model").ok
