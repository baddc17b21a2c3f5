"""A region as a box of factors, and boxes of few factors cut into equal parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import grow, length
from prooflens.numerics import gamma
from prooflens.regions import Region

PIECES = (16, 4, 2, 2)
"""Into how many parts each factor's interval is cut, for 1, 2, 3 and 4 factors; powers of two are exact."""


def pieces(region: Region) -> Iterator[tuple[Region, float]]:
    """Yield boxes of equal size that cover the region's, and by how much their centres may be off."""
    G = region.dense_generators()
    n = PIECES[len(G) - 1]
    blur = grow(gamma(len(G) + 8) * length(region.center.abs() + G.abs().sum(0)).amax())
    for shares in itertools.product(range(1 - n, n, 2), repeat=len(G)):
        move = torch.tensordot(torch.tensor(shares).to(G) / n, G, 1)
        yield Region(region.center + move, generators=G / n, label=region.label), float(blur)


def factors(region: Region) -> Float[Tensor, "S d p"]:
    """Return G as a map from factors to the input; a region that is a point gets one factor that does nothing."""
    if region.n_factors == 0:
        return region.center.new_zeros(*region.center.shape, 1)
    return region.dense_generators().movedim(0, -1).contiguous()
