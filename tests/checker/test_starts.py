"""Regions inside a model: runs say what their streams were computed from, and the checker computes them again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.network import Network
from prooflens.checker.starts import tail_of
from prooflens.cli import app
from prooflens.cli.view import torch_powers, torch_tables
from prooflens.errors import RegionError
from prooflens.evaluation.soundness.cases import FAMILIES, SOLU, random_model
from prooflens.models.export import export
from tests.checker.forging import TOY, edit
from tests.enumeration.words import reader

TEXT = "When Mary and John met the store"


def streams(toy: pl.Transformer) -> tuple[pl.Transformer, list[pl.Prompt]]:
    """The toy from layer 1 on, and the streams of three examples there."""
    made = [pl.start_at(toy, 1, toy.example(n)) for n in range(3)]
    return made[0][0], [stream for _, stream in made if stream is not None]


def regions(h: list[pl.Prompt]) -> dict[str, Any]:
    v = h[1].x[-1] - h[0].x[-1]
    return {
        "ball": pl.Ball(1e-3),
        "some tokens": pl.Ball(1e-3, tokens=[1]),
        "segment": pl.Segment(h[0], h[1]),
        "hull": pl.Hull(h),
        "texts": pl.Paraphrases(h, convex=True),
        "span": pl.Span(h[0], [pl.direction(h[0], 1, v)], 0.01),
        "steering": pl.Steer(h[0], v, (0.0, 0.05)),
        "all tokens": pl.Steer(h[0], v, (-0.01, 0.02), at=None),
    }


KINDS = ("ball", "some tokens", "segment", "hull", "texts", "span", "steering", "all tokens")


def made(kind: str, toy: pl.Transformer, out: Path) -> Path:
    tail, h = streams(toy)
    pl.certify(tail, h[0], regions(h)[kind], queries=["0:top1@-1"], out=out)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_computed_again(kind: str, toy: pl.Transformer, tmp_path: Path) -> None:
    report = check(made(kind, toy, tmp_path / "run"), TOY)
    assert report.ok, report
    assert report.counts["re-proved"] + report.counts["witness confirmed"] == 2
    assert all(
        "starts at layer 1, and the stored streams are the network's" in f.note for f in report.findings
    )
    assert not any("not stated" in finding.note for finding in report.findings)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_streams_of_tokens(kind: str, tmp_path: Path) -> None:
    """Token ids are embedded by the checker; readouts of the tail as well."""
    model = reader(kind)
    export(model, tmp_path / "model")
    tail, stream = pl.start_at(model, 1, model.prompt(TEXT))
    assert stream is not None
    for number, query in enumerate(("0:top1@-1", "neuron 0.3>0@-1", "argmax")):
        run = tmp_path / str(number)
        pl.certify(tail, stream, pl.Ball(1e-5), queries=[query], out=run)
        report = check(run, tmp_path / "model", tables=torch_tables, powers=torch_powers)
        assert report.ok, report
        assert all("streams are the network's" in finding.note for finding in report.findings)
        start = json.loads((run / "run.json").read_text())["start"]
        assert len(start["points"][0]["ids"]) == len(stream)


@pytest.mark.parametrize("family", [*FAMILIES, SOLU])
def test_tails_of_every_family_have_the_same_fingerprint(family: str) -> None:
    model = random_model(family, random.Random(5), 3)
    net = Network.made(model.architecture.to_dict(), {n: t.numpy() for n, t in model.weights.items()})
    assert net.sha256 == model.sha256
    for layer in (0, 2):
        tail, _ = pl.start_at(model, layer)
        assert tail_of(net, layer).sha256 == tail.sha256


def moved(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/center"] = tensors["region/0/center"] * (1.0 + 1e-8)
    return 0


def turned(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/generators"] = tensors["region/0/generators"] * (1.0 - 1e-7)
    return 0


def fed(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["start/0/input"] = tensors["start/0/input"] + 1e-6
    return 0


def steered(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["start/1/direction"] = tensors["start/1/direction"] * (1.0 + 1e-6)
    return 0


FORGED: list[tuple[str, Callable[..., int]]] = [
    ("ball", moved),
    ("ball", fed),
    ("segment", moved),
    ("segment", turned),
    ("hull", turned),
    ("texts", turned),
    ("span", fed),
    ("steering", moved),
    ("steering", turned),
    ("steering", steered),
]


@pytest.mark.parametrize(("kind", "change"), FORGED)
def test_a_forged_stream_is_seen(
    kind: str, change: Callable[..., int], toy: pl.Transformer, tmp_path: Path
) -> None:
    run = made(kind, toy, tmp_path / "run")
    edit(run, change)
    report = check(run, TOY)
    assert not report.ok or report.counts["WRONG"]
    assert "stored stream is not what the network computes" in str(report.problems)


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 0},
        {"layer": 7},
        {"points": [{"factors": None, "ids": [1, 2, 3, 4], "steering": None}]},
        {"points": [{"factors": [0.0], "ids": None, "steering": None}]},
        {"points": [{"factors": None, "ids": None, "steering": {"c": 1.0, "tokens": [0]}}]},
    ],
)
def test_a_forged_start_is_seen(change: dict[str, Any], toy: pl.Transformer, tmp_path: Path) -> None:
    run = made("ball", toy, tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    info["start"] |= change
    (run / "run.json").write_text(json.dumps(info))
    assert not check(run, TOY).ok


def test_what_is_not_stated_is_said(toy: pl.Transformer, tmp_path: Path) -> None:
    """A corner that is a tensor comes from nowhere; a start without points says nothing of the stream."""
    tail, h = streams(toy)
    run = tmp_path / "run"
    pl.certify(tail, h[0], pl.Segment(h[0], h[1].x), queries=["0:top1@-1"], out=run)
    report = check(run, TOY)
    assert report.ok
    assert "where its other corners come from is not stated" in report.findings[0].note
    info = json.loads((run / "run.json").read_text())
    info["start"]["points"] = []
    (run / "run.json").write_text(json.dumps(info))
    assert "what its stream comes from is not stated" in check(run, TOY).findings[0].note


def test_steering_says_what_is_wrong(toy: pl.Transformer) -> None:
    _, h = streams(toy)
    v = torch.ones(toy.architecture.d_model, dtype=torch.float64)
    for wrong, words in (
        (pl.Steer(h[0], v[:2]), "finite numbers"),
        (pl.Steer(h[0], v, (2.0, 1.0)), "smaller to a larger"),
        (pl.Steer(h[0], v, at=[9]), "steered tokens"),
    ):
        with pytest.raises(RegionError, match=words):
            wrong.region()
    tail, _ = streams(toy)
    with pytest.raises(RegionError, match="starts at another prompt"):
        pl.certify(tail, h[1], pl.Steer(h[0], v, (0.0, 0.1)), queries=["0:top1@-1"])


def test_the_command_line_starts_inside(toy: pl.Transformer, tmp_path: Path) -> None:
    run = CliRunner().invoke
    _, h = streams(toy)
    np.save(tmp_path / "v.npy", (h[1].x[-1] - h[0].x[-1]).numpy())
    inside = ["certify", "toy", "--from-layer", "1", "--query", "0:top1@-1"]
    steer = ["--steer", str(tmp_path / "v.npy"), "--strengths", "0,0.05"]
    for number, region in enumerate((["--eps", "0.001"], ["--to", "1"], steer)):
        out = str(tmp_path / str(number))
        assert run(app, [*inside, *region, "-o", out]).exit_code in (0, 3)
        checked = run(app, ["check", out, "--json"])
        assert checked.exit_code == 0, checked.output
        assert "streams are the network's" in checked.output
    for wrong in (["--steer", "v.npy"], ["--from-layer", "9", "--eps", "0.1"]):
        assert run(app, ["certify", "toy", *wrong]).exit_code == 1
    assert run(app, [*inside, *steer[:2], "--strengths", "1"]).exit_code == 1
