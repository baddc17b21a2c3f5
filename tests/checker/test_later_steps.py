"""The checker's own network on the later steps, and honest runs about such models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prooflens as pl
from prooflens.checker import check
from prooflens.checker.depth import Walk
from prooflens.checker.network import Network
from prooflens.checker.region import balls
from prooflens.evaluation.soundness.cases import LATER, random_model
from prooflens.models import Transformer, scores_name
from prooflens.models.files import write_model


def written(family: str, folder: Path, seed: int = 1) -> Transformer:
    model = random_model(family, random.Random(seed), depth=2)
    write_model(folder, model.architecture, dict(model.weights))
    return pl.load(folder)


def point(model: Transformer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, model.architecture.d_model, generator=generator, dtype=torch.float64)


def assert_holds(ball: Any, value: float, exact: bool) -> None:
    """The ball holds the value, up to float64's rounding of the value; without RoPE it is that narrow itself."""
    rounding = 1e-9 * (1.0 + abs(value))
    assert abs(float(ball.mid()) - value) <= float(ball.rad()) + rounding
    assert not exact or float(ball.rad()) < rounding


@pytest.mark.parametrize("family", LATER)
def test_the_network_in_balls_is_the_model(family: str, tmp_path: Path) -> None:
    model = written(family, tmp_path)
    net = Network.read(tmp_path)
    assert net.sha256 == model.sha256
    x = point(model)
    (found,) = net.run([balls(x.numpy())], [0, 1], output=True)
    values = model.run(x, [scores_name(0), scores_name(1), "output"])
    exact = not model.architecture.is_rotary  # tables of cosines are known to a float32 unit only
    for layer in (0, 1):
        seen = net.mask(4, layer)
        assert np.array_equal(seen, model.mask(4, layer=layer).numpy())
        ours, theirs = found[layer], values[scores_name(layer)].numpy()
        for h, i, j in zip(*np.nonzero(np.broadcast_to(seen, theirs.shape)), strict=True):
            assert_holds(ours[h, i, j], theirs[h, i, j], exact)
    for ball, value in zip(found["logits"], values["output"].tolist(), strict=True):
        assert_holds(ball, value, exact)


@pytest.mark.slow
@pytest.mark.parametrize("family", LATER)
def test_honest_runs_have_nothing_wrong(family: str, tmp_path: Path) -> None:
    model = written(family, tmp_path / "model")
    results = pl.certify(
        model, point(model), pl.Ball(0.02), queries=["top1", "mass>=0.2"], budget="100/2/10", engine="crown"
    )
    results.save(tmp_path / "run")
    found = check(tmp_path / "run", tmp_path / "model")
    assert found.ok, found.problems
    if not Walk.refuses(Network.read(tmp_path / "model")):
        first = [
            r for r in results.rows if r["layer"] == 0 and r["verdict"] == "holds" and r["query"] == "top1"
        ]
        assert not first or found.counts["re-proved"] > 0
