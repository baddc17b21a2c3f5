"""Runs about effects over families: both models are run again by the checker, and forgeries are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prooflens as pl
from prooflens.checker import CheckReport, check
from prooflens.models.edits import value_on
from prooflens.models.files import write_model
from prooflens.verdicts.pair import Edits
from tests.checker.forging import edit
from tests.enumeration.test_enumerate import TEMPLATE
from tests.enumeration.words import reader

Rows = list[dict[str, Any]]
EDITS: list[Edits] = ["a0.h1", "m1", ["a1.h0", "m0.n3"]]


def examined(run: Path) -> CheckReport:
    return check(run, run.parent / "model")


@pytest.fixture(params=["gpt2", "llama"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = reader(request.param)
    write_model(tmp_path / "model", model.architecture, dict(model.weights))
    edits = [*EDITS, value_on(model, "a0.h0", next(iter(TEMPLATE.of(model))).text, -1)]
    found = pl.family_effects(
        model, edits, TEMPLATE, "logit{A}-logit{B}", necessary=0.0, faithful=0.02, sufficient=True
    )
    found.save(tmp_path / "run", command="a test")
    return tmp_path / "run"


def test_honest_runs_are_run_again(run: Path) -> None:
    report = examined(run)
    assert report.ok, report
    assert report.counts["re-run"] == 4
    assert pl.report(run, path=run.parent / "report.html").is_file()
    assert ["free text" in finding.note for finding in report.findings] == [False, False, False, True]


def put(name: str, change: Callable[[Any], Any]) -> Callable[[Rows], None]:
    def forge(rows: Rows) -> None:
        rows[1][name] = change(rows[1][name])

    return forge


def swapped(rows: Rows) -> None:
    rows[0]["edited"], rows[1]["edited"] = rows[1]["edited"], rows[0]["edited"]


@pytest.mark.parametrize(
    "forgery",
    [
        swapped,
        put("least", lambda x: x + 0.1),
        put("most", lambda x: x - 0.1),
        put("mean", lambda x: x + 100.0),
        put("asked", lambda x: x - 1),
        put("members", lambda x: x - 1),
        put("necessary", lambda x: 0),
        put("faithful", lambda x: None),
        put("same", lambda x: 10**6),
        put("least_ids", lambda x: [*x[:-1], x[-1] + 1]),
        put("word", lambda x: "proved"),
        put("metric", lambda x: "logit{B}-logit{A}"),
        put("edited_sha256", lambda x: "0" * 64),
    ],
)
def test_forged_rows_are_seen(run: Path, forgery: Callable[[Rows], None]) -> None:
    def change(rows: Rows, tensors: dict[str, Any]) -> int:
        forgery(rows)
        return 1

    edit(run, change)
    assert not examined(run).ok


def test_another_edit_in_the_header_is_seen(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    info["edits"][0] |= {"zeroed": info["edits"][1]["zeroed"]}
    (run / "run.json").write_text(json.dumps(info))
    assert examined(run).findings[0].status == "WRONG"
