"""Pieces of a region of few factors: boxes of coordinates, and the inputs that they stand for.

A box of factors is cut as it is. A simplex, the hull of k + 1 inputs, is the image of a box by a map that is linear in
each coordinate: with u ∈ [0, 1]^k, the shares of the inputs are

    1 − u₁,   u₁(1 − u₂),   u₁u₂(1 − u₃),   …,   u₁u₂…u_k,

so every box of coordinates stands for a part of the hull, and boxes that cover [0, 1]^k cover the hull and nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.regions import Region


@dataclass(frozen=True)
class Box:
    """A box of coordinates: binary fractions of [−1, 1], so that cutting is exact.

    Attributes:
        low: lower ends, one per factor.
        high: upper ends.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def whole(cls, n_factors: int) -> Box:
        """The box of all coordinates."""
        return cls((-1.0,) * n_factors, (1.0,) * n_factors)

    @property
    def share(self) -> float:
        """Its share of the whole box."""
        found = 1.0
        for low, high in zip(self.low, self.high, strict=True):
            found *= 0.5 * (high - low)
        return found

    def cut(self, axis: int) -> tuple[Box, Box]:
        """Cut it in two halves."""
        middle = 0.5 * (self.low[axis] + self.high[axis])
        first = Box(self.low, tuple(middle if i == axis else x for i, x in enumerate(self.high)))
        return first, Box(tuple(middle if i == axis else x for i, x in enumerate(self.low)), self.high)

    def at(self, points: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """Coordinates in the whole box of points in [−1, 1]^k of this one."""
        low, high = (
            torch.tensor(side, dtype=points.dtype, device=points.device) for side in (self.low, self.high)
        )
        return 0.5 * (low + high) + 0.5 * (high - low) * points


@dataclass(frozen=True, eq=False)
class Chart:
    """How coordinates in [−1, 1]^k stand for points of a region.

    Attributes:
        region: the region.
    """

    region: Region

    def factors(self, coordinates: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
        """The region's factors at some coordinates."""
        if not self.region.is_simplex:
            return coordinates
        u = 0.5 * (coordinates + 1.0)
        mass = torch.cumprod(u, -1)
        shares = mass * (1.0 - torch.cat((u[..., 1:], torch.zeros_like(u[..., :1])), -1))
        return 2.0 * shares - 1.0

    def inputs(self, coordinates: Float[Tensor, "... k"]) -> Float[Tensor, "... S d"]:
        """The inputs at some coordinates."""
        return self.region.point(self.factors(coordinates))

    def excludes(self, box: Box) -> bool:
        """Say whether a box of coordinates certainly holds no point of the region."""
        constraints = self.region.constraints
        if constraints is None or self.region.is_simplex:
            return False
        low, high = (torch.tensor(side, dtype=torch.float64) for side in (box.low, box.high))
        room = 1e-9
        for A, b, equal in (
            (constraints.A_ub.cpu(), constraints.b_ub.cpu(), False),
            (constraints.A_eq.cpu(), constraints.b_eq.cpu(), True),
        ):
            size = room * (A.abs().sum(-1) + b.abs() + 1.0)
            least = torch.minimum(A * low, A * high).sum(-1)
            most = torch.maximum(A * low, A * high).sum(-1)
            if bool((least > b + size).any()) or (equal and bool((most < b - size).any())):
                return True
        return False
