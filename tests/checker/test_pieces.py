"""Regions of few factors: claims that need pieces are proved on pieces, and false ones are not."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.claims import value
from prooflens.checker.network import Network
from prooflens.checker.pieces import Pieces, _halves
from prooflens.checker.proofs import Range
from prooflens.checker.region import Region
from tests.checker.forging import TOY


@pytest.fixture(scope="module")
def toy() -> pl.Transformer:
    return pl.load("toy")


@pytest.mark.parametrize("far", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_way_is_proved_in_pieces(toy: pl.Transformer, tmp_path: Path, far: float) -> None:
    a = toy.example(0).x
    way = pl.Segment(a, a + far * (toy.example(1).x - a))
    found = pl.certify(toy, a, way, queries=["top1", "mass>=0.2"])
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok
    assert report.counts["re-proved"] >= 0.9 * found.counts["holds"] > 3
    assert report.counts["witness confirmed"] == found.counts["fails"]


def test_a_hull_of_three_prompts(toy: pl.Transformer, tmp_path: Path) -> None:
    a, b, c = (toy.example(i).x for i in range(3))
    found = pl.certify(toy, a, pl.Hull([a, a + 0.2 * (b - a), a + 0.2 * (c - a)]))
    found.save(tmp_path / "run")
    report = check(tmp_path / "run", TOY)
    assert report.ok
    assert report.counts["re-proved"] >= 0.9 * found.counts["holds"] > 3


def above(level: float, found: Range) -> bool:
    return found.low > level


def test_what_pieces_prove_is_true_everywhere(toy: pl.Transformer) -> None:
    a, b = toy.example(0).x.numpy(), toy.example(1).x.numpy()
    region = Region(center=0.5 * (a + b), generators=0.25 * (b - a)[None])
    net = Network.read(TOY)
    functional = {
        "constant": 0.0,
        "terms": [[1.0, "score", 1, 1, 2, 3], [-1.0, "score", 1, 1, 2, 0]],
        "sense": ">0",
    }
    values = [
        float(value(functional, found).mid())
        for found in net.run([region.point(np.array([x])) for x in np.linspace(-1, 1, 21)], {1})
    ]
    least = min(values)
    pieces = Pieces(net, region, lambda what: None)
    for gap in (0.2, 0.5):
        found, asked = pieces.bounds(functional, partial(above, least - gap))
        assert least - gap < found.low <= least
        assert asked >= 1


def test_what_is_false_is_never_shown(toy: pl.Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prooflens.checker.pieces.MOST_PIECES", 8)
    x = toy.example(0).x.numpy()
    region = Region(center=x, generators=0.1 * np.ones((1, *x.shape)))
    functional = {
        "constant": 0.0,
        "terms": [[1.0, "score", 1, 0, 0, 1], [-1.0, "score", 1, 0, 0, 1]],
        "sense": ">0",
    }
    found, asked = Pieces(Network.read(TOY), region, lambda what: None).bounds(
        functional, partial(above, 0.0)
    )
    assert found.low == -np.inf
    assert asked == 9


def test_pieces_cover_what_they_are_cut_from() -> None:
    left, right = _halves(((0.0, 0.5), (1.0, 0.5)))
    assert left == ((-0.5, 0.5), (0.5, 0.5))
    assert right == ((0.5, 0.5), (0.5, 0.5))


def test_constraints_leave_pieces_out_with_room_for_rounding(toy: pl.Transformer) -> None:
    x = toy.example(0).x.numpy()
    G = np.stack([0.01 * np.ones_like(x), 0.01 * x])
    empty = {"A_eq": np.zeros((0, 2)), "b_eq": np.zeros(0)}
    region = Region(center=x, generators=G, A_ub=np.ones((1, 2)), b_ub=np.zeros(1), **empty)
    pieces = Pieces(Network.read(TOY), region, lambda what: None)
    assert pieces._is_empty(((0.5, 0.75), (0.5, 0.25)))
    assert not pieces._is_empty(((0.5, 0.5), (0.5, 0.5)))
