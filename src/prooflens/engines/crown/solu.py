"""Planes of SoLU, for `crown`: its first order around the middle of its input, and what is beyond as a constant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.crown.steps import Parameters, Passed, cut, magnitude, paired, summed
from prooflens.engines.relaxations.solu import Expansion, expansion
from prooflens.queries import Box


@dataclass(frozen=True, eq=False)
class Softened:
    """The rule of SoLU: each output between two parallel planes, or in its box where that is narrower.

    Attributes:
        planes: the first order and what is beyond it (`relaxations.solu`).
        boxed: outputs that are replaced by their box.
        y: the box of the outputs.
        size: the absolute-value chain, for rounding.
    """

    planes: Expansion
    boxed: Bool[Tensor, "S n"]
    y: Box
    size: Float[Tensor, "S n"]

    @classmethod
    def of(cls, x: Box, y: Box) -> Softened:
        """Make the planes of SoLU on boxes.

        Args:
            x: a box of the input.
            y: a box of the output.
        """
        planes = expansion(x)
        boxed = ~(2.0 * planes.rest < y.upper - y.lower)
        size = 8.0 * (planes.size + planes.linear_size(magnitude(x)))
        size = torch.where(boxed, magnitude(y), size + magnitude(y) + torch.where(boxed, 0.0, planes.rest))
        return cls(planes, boxed, y, size)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """No τ."""
        return {}

    @property
    def roundings(self) -> int:
        """The roundings of sums over all coordinates."""
        return 8 * self.size.numel() + 64

    @property
    def stays(self) -> tuple[bool, ...]:
        """The only input belongs to the output's token."""
        return (True,)

    def at(self, token: int) -> Softened:
        """Return one token's planes."""
        planes = Expansion(*(cut(part, token) for part in vars(self.planes).values()))
        y = Box(*(cut(end, token) for end in self.y))
        return Softened(planes, cut(self.boxed, token), y, cut(self.size, token))

    def back(self, A: Tensor, tau: Parameters) -> Passed:
        """Take the affine part back, with the rest on the side of A's sign; a box where that is narrower."""
        size = paired(A.abs(), self.size)
        boxed = torch.where(self.boxed, A, 0.0)
        upper, lower = (torch.where(self.boxed, end, 0.0) for end in (self.y.upper, self.y.lower))
        constant = summed(boxed.clamp(min=0.0) * upper) + summed(boxed.clamp(max=0.0) * lower)
        A = torch.where(self.boxed, 0.0, A)
        moved = self.planes.back(A)
        rest = torch.where(self.boxed, 0.0, self.planes.rest)
        constant = constant + paired(A, self.planes.value) + paired(A.abs(), rest)
        return Passed((moved,), constant - paired(moved, self.planes.center), size)
