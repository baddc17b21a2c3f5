"""A region times a box: the same inputs, every value, and constraints on the inputs alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import prooflens as pl
from prooflens.errors import RegionError
from prooflens.models.prompt import Origin
from prooflens.regions.product import times_box
from prooflens.regions.starts import Start


def three(seed: int = 0) -> list[torch.Tensor]:
    return [*torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(seed)).double()]


@pytest.mark.parametrize("kind", ["ball", "segment", "hull"])
def test_points_are_inputs_beside_values(kind: str) -> None:
    x, y, z = three()
    places = {"ball": pl.Ball(0.1).around(x), "segment": pl.Segment(x, y).region()}
    region = (places | {"hull": pl.Hull([x, y, z]).region()})[kind]
    radii = torch.tensor([0.5, 2.0, 1.0]).double()
    for tokens in ([[0], [1], []], [[0, 1], [1], []]):
        both = times_box(region, tokens, radii)
        assert both.free == 3
        assert both.n_factors == region.n_factors + 2
        assert (both.radius is None) == (kind != "ball" or tokens[0] == [0, 1])
        assert torch.equal(both.reference[:, :4], region.reference)
        assert not both.reference[:, 4:].any()
        points, _ = both.sample(50, seed=1)
        assert all(region.contains(point[:, :4], 1e-9) for point in points[:5])
        values = points[:, :, 4:]
        assert bool((values.abs() <= radii).all())
        for number, own in enumerate(tokens):
            others = [token for token in range(2) if token not in own]
            assert not values[:, others, number].any()
            assert bool((values[:, own, number] == values[:, own[:1], number]).all())
            assert not own or float(values[:, own, number].max()) > 0.9 * float(radii[number])


def test_a_region_inside_a_model_is_refused() -> None:
    held = pl.Ball(0.1).around(three()[0])
    inside = replace(held, starts=(Start(None, Origin(1, three()[0])),))
    with pytest.raises(RegionError, match="starts later"):
        times_box(inside, [[0]], torch.ones(1))
