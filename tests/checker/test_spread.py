"""Runs about parts at any value of a set: proved again on X × V, and a forged set is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.models.edits import between
from prooflens.models.export import export
from prooflens.models.parts import Edit
from prooflens.models.spread import RADII
from tests.checker.forging import TOY, edit

METRIC = "logit0-logit1"
QUICK: Any = {"budget": "20/1/2", "engine": "taylor"}


def edits_of(toy: pl.Transformer) -> dict[str, Edit | list[Edit]]:
    v = torch.linspace(0.0, 1.0, 8).double()
    way = between(toy, "m0@1@2", toy.example(0), toy.example(2))
    assert isinstance(way.spread, torch.Tensor)
    return {
        "box": Edit("a1.h0@-1", spread=0.03),
        "everywhere": Edit("a0.h1", spread=0.003),
        "block": Edit("a1@-1", torch.ones(8).double(), spread=0.01),
        "way": replace(way, spread=0.003 * way.spread),
        "neuron": Edit("m1.n3@0@2", torch.tensor([[1.0], [2.0]]).double(), spread=0.3),
        "direction": Edit("blocks.1.hook_resid_pre", direction=v, spread=0.01),
        "several": [
            Edit("a0.h0.result@0", spread=0.01),
            Edit("blocks.0.hook_attn_out", torch.tensor([0.3]).double(), direction=v, spread=0.01),
        ],
    }


def regions(toy: pl.Transformer) -> dict[str, Any]:
    x, y, z = (toy.example(i).x for i in range(3))
    near = [x + 0.001 * (other - x) for other in (y, z)]
    return {"ball": pl.Ball(0.002), "segment": pl.Segment(x, near[0]), "hull": pl.Hull([x, *near])}


def kept(toy: pl.Transformer, one: Edit | list[Edit], where: Any, out: Path, metric: str = METRIC) -> None:
    """A run whose claims leave a little room beside the range that is proved."""
    low, high = pl.effect(toy, one, toy.example(), where, metric, **QUICK).ends
    room = 0.2 * (high - low)
    claims: dict[str, Any] = {"necessary": low - room, "faithful": max(high, -low) + room}
    found = pl.effect(toy, one, toy.example(), where, metric, sufficient=metric == METRIC, **claims, **QUICK)
    found.save(out)


@pytest.mark.parametrize("kind", ["box", "everywhere", "block", "way", "neuron", "direction", "several"])
def test_effects_of_every_value_are_proved_again(toy: pl.Transformer, kind: str, tmp_path: Path) -> None:
    kept(toy, edits_of(toy)[kind], pl.Ball(0.002), tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok, report
    assert report.counts["re-proved"] >= 3
    assert ("free text" in str(report)) == (kind not in ("box", "everywhere"))


@pytest.mark.parametrize("where", ["segment", "hull"])
def test_regions_of_few_factors_have_a_box_beside_them(
    toy: pl.Transformer, where: str, tmp_path: Path
) -> None:
    for kind in ("box", "way"):
        kept(toy, edits_of(toy)[kind], regions(toy)[where], tmp_path / kind)
        report = check(tmp_path / kind, TOY)
        assert report.ok, report
        assert report.counts["re-proved"] >= 2


def test_readouts_behind_and_in_front_of_the_part(toy: pl.Transformer, tmp_path: Path) -> None:
    for metric in ("neuron 1.3@3", "neuron 0.3@3"):
        kept(toy, edits_of(toy)["box"], pl.Ball(0.002), tmp_path / metric[:8], metric)
        report = check(tmp_path / metric[:8], TOY)
        assert report.ok, report


def test_a_witness_is_an_input_and_a_value(toy: pl.Transformer, tmp_path: Path) -> None:
    asked = toy, edits_of(toy)["box"], toy.example(), pl.Ball(0.002), METRIC
    found = pl.effect(*asked, faithful=0.001, **QUICK)
    witness = found.claims[0].witness
    assert witness is not None
    assert witness.x.shape == (4, 12)
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert (report.ok, report.counts["witness confirmed"]) == (True, 1)


def smaller(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/radius"][:, 8:] *= 0.5
    return 0


def elsewhere(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/center"][3, 8] = 0.001
    return 0


def missing(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/radius"][3, 9] = 0.0
    return 0


def narrow(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    for name in ("radius", "center"):
        tensors[f"region/0/{name}"] = np.ascontiguousarray(tensors[f"region/0/{name}"][:, :11])
    return 0


def renamed(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    for row in rows:
        row["region"] = row["region"].replace("^4", "^5")
    return 0


def half(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    tensors["region/0/generators"][-1, :, 8:] *= 0.5
    return 0


def tied(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """An input's factor moves the value, too: both are no product then."""
    tensors["region/0/generators"][0] += tensors["region/0/generators"][-1]
    return 0


def joined(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """One factor for the value and a coordinate of the input."""
    G = tensors["region/0/generators"]
    G[-1] += G[0]
    return 0


def one_token(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
    """The value stays in the middle of its set at one of the two tokens."""
    tensors["region/0/generators"][-1, 1, 8:] = 0.0
    return 0


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("box", change) for change in (smaller, elsewhere, missing, narrow, renamed)),
        *(("way", change) for change in (half, tied, joined, one_token)),
    ],
)
def test_a_forged_set_of_values_is_wrong(
    toy: pl.Transformer, kind: str, change: Callable[..., int], tmp_path: Path
) -> None:
    kept(toy, edits_of(toy)[kind], pl.Ball(0.002), tmp_path / "run")
    assert check(tmp_path / "run", TOY).ok
    edit(tmp_path / "run", change)
    assert not check(tmp_path / "run", TOY).ok


def test_other_generators_than_the_fingerprint_or_the_words_say_are_wrong(
    toy: pl.Transformer, tmp_path: Path
) -> None:
    kept(toy, edits_of(toy)["box"], pl.Ball(0.002), tmp_path / "run")

    def change(rows: list[dict[str, Any]], tensors: dict[str, Any]) -> int:
        tensors["edited/blocks.1.o.held.spread"] *= 0.5
        return 0

    edit(tmp_path / "run", change)
    assert "fingerprint" in str(check(tmp_path / "run", TOY))
    less = pl.edit(toy, Edit("a1.h0@-1", spread=0.01))
    assert not torch.equal(less.weights[RADII], pl.edit(toy, edits_of(toy)["box"]).weights[RADII])
    forged = replace(less, name="toy with a1.h0@-1 at any value within 0.03 of 0")
    pl.effect(toy, forged, toy.example(), pl.Ball(0.002), METRIC, faithful=1.0, **QUICK).save(
        tmp_path / "less"
    )
    assert "other parts are taken out" in str(check(tmp_path / "less", TOY))


def test_an_exported_model_is_the_same_network(toy: pl.Transformer, tmp_path: Path) -> None:
    from prooflens.checker.network import Network

    edited = pl.edit(toy, Edit("a1.h0", spread=0.1))
    assert Network.read(export(edited, tmp_path / "edited")).sha256 == edited.sha256
