"""Sweeps about values inside the model: rows, resumption, directions that change, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.errors import ModelError
from prooflens.report.sweep import SweepReport, render_sweep
from prooflens.sweep.drive import start
from prooflens.sweep.spec import SpecError, parse_spec, read_spec
from prooflens.sweep.store import SweepStore
from prooflens.sweep.tasks import ModelFacts, plan
from prooflens.sweep.work import perform, run_task
from tests.sweep.conftest import SPEC, rows_of

INSIDE: dict[str, Any] = {
    "queries": ["neuron 1.3>0@-1", "read(blocks.1.hook_resid_post@2,D)>=0.5", "lens 0 argmax"]
}


@pytest.fixture
def direction(tmp_path: Path) -> Path:
    np.save(tmp_path / "d.npy", np.linspace(-1.0, 1.0, 8))
    return tmp_path / "d.npy"


def run(path: Path, **changes: Any) -> SweepStore:
    """A sweep in this process."""
    spec = parse_spec(SPEC | changes, "test")
    store = start(spec, path)
    for task in plan(spec, {"toy": ModelFacts.of("toy")}):
        assert perform(task, store).error is None
    return store


def test_rows_are_those_of_certify(tmp_path: Path, direction: Path) -> None:
    toy = pl.load("toy")
    store = run(tmp_path / "sweep", **INSIDE, vectors={"D": str(direction)}, regions={"eps": [1e-3]})
    table = rows_of(store)
    assert sorted(set(table["query"].to_pylist())) == sorted(INSIDE["queries"])
    assert set(table["model"].to_pylist()) == {"toy"}
    assert table.num_rows == 6
    vectors = {"D": torch.linspace(-1.0, 1.0, 8).double()}
    for row in table.to_pylist():
        x = toy.example(int(row["prompt"].removeprefix("sample ")))
        alone = pl.certify(toy, x, pl.Ball(1e-3), queries=row["query"], vectors=vectors, budget="100/3/15")
        assert alone.verdict == row["verdict"]
    page = render_sweep(SweepReport.of(tmp_path / "sweep"))
    assert "What is proved about values inside over 2 prompts" in page
    assert "neuron 1.3" in page


def test_radii_are_searched(tmp_path: Path) -> None:
    regions = {"radius": {"between": [1e-4, 1e-2], "tolerance": 2.0}}
    store = run(
        tmp_path / "sweep", queries=["neuron 1.3<100@-1"], samples=[0], regions=regions, budget="10/1/3"
    )
    (certified,) = rows_of(store)["certified"].to_pylist()
    assert certified > 0.0


def test_keys_are_those_of_before_and_see_other_directions(direction: Path) -> None:
    facts = {"toy": ModelFacts("toy", "0" * 64, 2, 2)}
    old = next(plan(parse_spec(SPEC, "here"), facts))
    assert "vectors" not in old.key
    assert old.vectors == ()
    asked = parse_spec(SPEC | INSIDE | {"vectors": {"D": str(direction)}}, "here")
    before = [task.key for task in plan(asked, facts)]
    task = next(plan(asked, {"toy": ModelFacts.of("toy")}))
    np.save(direction, np.ones(8))
    assert [task.key for task in plan(asked, facts)] != before
    with pytest.raises(ModelError, match="its file changed"):
        run_task(task)


def test_paths_are_found_beside_the_specification(tmp_path: Path, direction: Path) -> None:
    text = "models: toy\nsamples: [0]\nregions: {eps: 1e-3}\nqueries: ['read(blocks.0.hook_resid_post@-1,D)>0']\n"
    (tmp_path / "spec.yaml").write_text(f"{text}vectors: {{D: d.npy}}\n")
    assert read_spec(tmp_path / "spec.yaml").vectors == {"D": str(direction)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queries": ["top1", "neuron 1.3>0@-1"]}, "a sweep of their own"),
        ({"queries": ["neuron 1.3>0@-1"], "layers": [0]}, "give no layers, heads and positions"),
        ({"vectors": {"D": "d.npy"}}, "no query names a direction"),
        ({"queries": ["neuron 1.3"], "regions": {"radius": {}}}, "has no radius"),
    ],
)
def test_errors_are_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse_spec(SPEC | changes, "here")
    assert "\n" not in str(caught.value)
