"""A region times a box: inputs, and beside them coordinates of a model's own, by which parts have other values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import RegionError
from prooflens.regions.region import Constraints, Region


def times_box(region: Region, tokens: Sequence[Sequence[int]], radii: Float[Tensor, " K"]) -> Region:
    """Return X times a box: every point has K coordinates more, and K factors in [−1, 1] more move them.

    A region with radii, whose coordinates have a factor each, keeps them where each of the new ones stands at one
    token; of all others the new factors stand behind those of X.

    Args:
        region: X, whose points have shape [S, d].
        tokens: the tokens at which each of the K coordinates stands, the same number at all of them; one that stands
            at none is 0.
        radii: how far each of them moves.

    Raises:
        RegionError: if X starts inside a model.

    Example:
        >>> import torch
        >>> both = times_box(Region(torch.zeros(2, 1), radius=torch.full((2, 1), 0.5)), [[1]], torch.ones(1))
        >>> both.radius.tolist(), both.free
        ([[0.5, 0.0], [0.5, 1.0]], 1)
    """
    if region.starts:
        raise RegionError(
            "a part is held at any value of a set in front of the first block: this region starts later"
        )
    center = torch.nn.functional.pad(region.center, (0, len(tokens)))
    d, label = region.center.shape[1], f"{region.label} × [−1, 1]^{len(tokens)}"
    plain = region.constraints is None and region.anchor is None
    if region.radius is not None and plain and all(len(own) < 2 for own in tokens):
        radius = torch.nn.functional.pad(region.radius, (0, len(tokens)))
        for number, own in enumerate(tokens):
            radius[list(own), d + number] = radii[number].to(radius)
        return Region(center, radius, label=label, image=region.image, free=len(tokens))
    moving = [number for number, own in enumerate(tokens) if own]
    more = center.new_zeros(len(moving), *center.shape)
    for row, number in enumerate(moving):
        more[row, list(tokens[number]), d + number] = radii[number].to(more)
    given = torch.nn.functional.pad(region.dense_generators(), (0, len(tokens)))
    held, k = region.constraints, (0, len(moving))
    if held is not None:
        matrices = (torch.nn.functional.pad(A, k) for A in (held.A_eq, held.A_ub))
        held = Constraints(next(matrices), held.b_eq, next(matrices), held.b_ub)
    anchor = None if region.anchor is None else torch.nn.functional.pad(region.anchor, k)
    generators = torch.cat((given, more))
    return Region(center, None, generators, held, label, anchor, region.image, free=len(tokens))
