"""Random weight boxes, a tenth of them of each degenerate kind, all with a point of the simplex inside."""

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KINDS = 5


def random_boxes(
    count: int, size: int, seed: int
) -> tuple[Float[Tensor, "N S"], Float[Tensor, "N S"], Float[Tensor, "N S"]]:
    """lower, upper and a feasible point, as exact floats: lower ≤ point ≤ upper and Σ point = 1 up to rounding.

    Kind 0 has zero width at some tokens, kind 1 lower sums at 1, kind 2 ties, kind 3 upper sums at 1; others are free.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    sharpness = 4.0 * uniform(count, 1)
    point = (sharpness * torch.randn(count, size, generator=generator, dtype=torch.float64)).softmax(-1)
    kind = torch.arange(count) % (2 * KINDS)
    point[kind == 2] = 1.0 / size
    scale = uniform(count, 1)
    below, above = scale * uniform(count, size), 2.0 * scale * uniform(count, size)
    below[kind == 0] *= uniform(int((kind == 0).sum()), size) < 0.5
    above[kind == 0] *= below[kind == 0] > 0
    below[kind == 1] = 0.0
    below[kind == 2], above[kind == 2] = below[kind == 2, :1], above[kind == 2, :1]
    above[kind == 3] = 0.0
    return point * (1.0 - below), (point * (1.0 + above)).clamp_max(1.0), point


def candidate_vertices(
    lower: Float[Tensor, "N S"], upper: Float[Tensor, "N S"]
) -> Iterator[tuple[Float[Tensor, "N S"], Bool[Tensor, " N"]]]:
    """All vertices of Δ_S ∩ [s̲, s̄]: one free token, every choice of a bound for the others; and where they fit."""
    size = lower.shape[1]
    for free in range(size):
        others = [j for j in range(size) if j != free]
        for sides in itertools.product((0, 1), repeat=size - 1):
            vertex = lower.clone()
            for j, side in zip(others, sides, strict=True):
                vertex[:, j] = upper[:, j] if side else lower[:, j]
            weight = 1 - vertex[:, others].sum(-1)
            fits = (weight >= lower[:, free] - 1e-12) & (weight <= upper[:, free] + 1e-12)
            vertex[:, free] = weight.clamp(lower[:, free], upper[:, free])
            yield vertex, fits
