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
from prooflens.checker.effects import pair_of
from prooflens.checker.findings import WrongError
from prooflens.checker.network import Network
from prooflens.models.edits import mean_of
from prooflens.results import Verdict
from prooflens.results.effects import Effect
from tests.checker.forging import PACKAGE, TOY, edit

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
        engine="taylor",
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
    assert report.findings[1].status == "re-proved", report
    assert ("the edit is the stored one" in report.findings[0].note) == (kind in ("mean", "direction"))


@pytest.mark.parametrize(
    ("name", "part"), [("toy", "a0.h1"), ("toy", "m1"), ("toy", "a1.h0.k1"), ("toy-4layer", "a1.h0")]
)
def test_claims_about_effects_are_proved_again(name: str, part: str, tmp_path: Path) -> None:
    """Claims with a little room, and the same answer, of both models."""
    model, region = pl.load(name), pl.Ball(0.01)
    asked: Any = (model, part, model.example(), region, "logit0-logit1")
    low, high = pl.effect(*asked, budget="20/1/2", engine="taylor").ends
    room = 0.1 * (high - low)
    wanted: dict[str, Any] = {"necessary": low - room, "faithful": max(high, -low) + room, "sufficient": True}
    pl.effect(*asked, budget="20/1/2", engine="taylor", **wanted).save(tmp_path / "run")
    report = check(tmp_path / "run", PACKAGE / "models" / "embedded" / name)
    assert report.ok, report
    assert [finding.status for finding in report.findings][1:] == ["re-proved"] * 3, report
    ends = [float(end) for end in report.findings[0].note.partition(":")[0].split()[2::2]]
    assert low - room <= ends[0] <= ends[1] <= high + room


@pytest.mark.parametrize("part", ["a0.h1.result", "a1.h0.result@-1@1"])
def test_what_a_head_writes_is_known_by_its_name(toy: pl.Transformer, tmp_path: Path, part: str) -> None:
    saved(toy, tmp_path / "run", part, "logit0-logit1", faithful=0.0)
    report = check(tmp_path / "run", TOY)
    assert report.ok, report
    assert report.counts["witness confirmed"] == 1
    assert "free text" not in str(report)


def test_a_range_is_proved_again_only_if_it_is_wide_enough(toy: pl.Transformer, tmp_path: Path) -> None:
    """The honest range moved outward by a tenth of its width, and inward by a tenth, in row and tensors."""
    words = []
    for number, share in enumerate((0.1, -0.1)):
        out = tmp_path / f"{number}"
        found = saved(toy, out, "a0.h1", "logit0-logit1")

        def change(
            rows: Rows, tensors: dict[str, Any], room: float = share * (found.upper - found.lower)
        ) -> int:
            for side, sign in (("lower", -1.0), ("upper", 1.0)):
                tensors[f"row/0/{side}"] = tensors[f"row/0/{side}"] + sign * room
                rows[0][side] = float(tensors[f"row/0/{side}"][0])
            return 0

        edit(out, change)
        words.append(check(out, TOY).findings[0])
    assert [finding.status for finding in words] == ["re-proved", "not checkable"]
    assert all(finding.note.startswith("own range 0.042") for finding in words)


def test_effects_on_the_way_between_prompts_are_proved_in_pieces(toy: pl.Transformer, tmp_path: Path) -> None:
    x, end = toy.example().x, toy.example(1).x
    way = pl.Segment(x, x + 0.5 * (end - x))
    claimed = pl.effect(
        toy, "a1.h0", x, way, "logit0-logit1", faithful=0.05, budget="20/1/2", engine="chebyshev"
    )
    assert claimed.verdicts == [Verdict.HOLDS]
    claimed.save(tmp_path / "run")
    assert check(tmp_path / "run", TOY).findings[1].status == "re-proved"


def test_effects_on_capped_outputs_are_none() -> None:
    net = Network.read(TOY)
    capped = Network(net.arch | {"logit_cap": 30.0}, net.weights)
    stated: dict[str, Any] = {"edit": "without a0", "name": "toy without a0"}
    with pytest.raises(WrongError, match="cap"):
        pair_of(capped, {"edited": stated, "model": {"name": "toy"}}, {})


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
