"""LayerNorm and RMSNorm for `crown`, composed of convex functions and one product per coordinate.

    m = Px,   v = Σ_k m_k²/d + ε,   n = v^{-½},   y_k = γ_k m_k n + β_k.

Backwards: the product m_k n by McCormick around the middle (τ as in `crown.steps`), n by chord and tangent of v^{-½},
each m_k² by chord and tangent, then P. If McCormick's gap is wider than the box of y_k itself (`thm:ln`: |y_k − β_k|
≤ |γ_k|√(d−1)), that coordinate is replaced by its box.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.crown.lines import LineRelaxation, convex
from prooflens.engines.crown.steps import (
    Middle,
    Parameters,
    Passed,
    cut,
    magnitude,
    paired,
    summed,
    through_lines,
)
from prooflens.models.sites import Norm
from prooflens.numerics import down, gamma, up
from prooflens.queries import Box


def centred(A: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Return PᵀA = PA: the coefficients less their mean."""
    return A - A.mean(-1, keepdim=True)


def square_lines(m: Box) -> LineRelaxation:
    """Return chord and tangents of m²."""
    return convex(torch.square, lambda x: 2.0 * x, m)


@dataclass(frozen=True, eq=False)
class Normalise:
    """The rule of a norm: its output between planes."""

    step: Norm
    m: Middle
    n: Middle
    squares: LineRelaxation
    root: LineRelaxation
    boxed: Bool[Tensor, "S d"]
    y: Box
    size: Float[Tensor, "S *H d"]

    @classmethod
    def of(
        cls, step: Norm, x: Box, m: Box, v: Box, y: Box, usable: Bool[Tensor, " S"] | None = None
    ) -> Normalise:
        """Make the planes of a norm.

        Args:
            step: the norm.
            x: a box of the input.
            m: a box of the centred input.
            v: a box of the variance plus ε; positive.
            y: a box of the output.
            usable: tokens for which v can be used; the others are replaced by their box.
        """
        root = convex(torch.rsqrt, lambda t: -0.5 * t.rsqrt() / t, v)
        n = Box(
            down(v.upper.rsqrt() * (1.0 - gamma(16))).clamp(min=0.0), up(v.lower.rsqrt() * (1.0 + gamma(16)))
        )
        squares = square_lines(m)
        mid_m, mid_n = Middle.of(m), Middle.of(n)
        weight = m.lower.new_ones(m.lower.shape[-1]) if step.weight is None else step.weight
        bias = torch.zeros_like(weight) if step.bias is None else step.bias
        gap = 2.0 * weight.abs() * mid_m.r * mid_n.r[..., None]
        boxed = ~(gap < y.upper - y.lower)
        boxed = boxed if usable is None else boxed | ~usable[..., None]
        root_slope, root_offset = (
            torch.maximum(a, b) for a, b in zip(root.lower.size, root.upper.size, strict=True)
        )
        square_slope, square_offset = (
            torch.maximum(a, b) for a, b in zip(squares.lower.size, squares.upper.size, strict=True)
        )
        large_m, large_n = magnitude(m), magnitude(n)[..., None]
        large_x = magnitude(x)
        spread = large_x + large_x.mean(-1, keepdim=True) if step.centred else large_x
        inner = (square_slope * spread + square_offset).mean(-1) + step.eps
        through = (root_slope * inner + root_offset)[..., None]
        size = 16.0 * weight.abs() * (spread + large_m) * (large_n + through) + bias.abs() + magnitude(y)
        return cls(step, mid_m, mid_n, squares, root, boxed, y, size)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of τ: for the products, for the squares from below, for the root from below."""
        shape = tuple(self.size.shape)
        return {"lower": shape, "upper": shape, "squares": shape, "root": shape[:-1]}

    @property
    def roundings(self) -> int:
        """The roundings of sums over all coordinates."""
        return 8 * self.size.numel() + 64

    @property
    def stays(self) -> tuple[bool, ...]:
        """The only input belongs to the output's token."""
        return (True,)

    def at(self, token: int) -> Normalise:
        """Return one token's planes."""
        return Normalise(
            self.step,
            self.m.at(token),
            self.n.at(token),
            self.squares.at(token),
            self.root.at(token),
            cut(self.boxed, token),
            Box(*(cut(end, token) for end in self.y)),
            cut(self.size, token),
        )

    def back(self, A: Tensor, tau: Parameters) -> Passed:
        """Go back through product, root, squares and centring in turn."""
        size = paired(A.abs(), self.size)
        boxed = torch.where(self.boxed, A, 0.0)
        constant = summed(boxed.clamp(min=0.0) * _finite(self.y.upper, self.boxed)) + summed(
            boxed.clamp(max=0.0) * _finite(self.y.lower, self.boxed)
        )
        A = torch.where(self.boxed, 0.0, A)
        if self.step.bias is not None:
            constant = constant + paired(A, self.step.bias.expand(self.size.shape))
        if self.step.weight is not None:
            A = A * self.step.weight
        (m, r_m), (n, r_n) = self.m, self.n
        by_m, by_n = A * n[..., None], A * m
        constant = constant + paired(A.abs(), r_m * r_n[..., None]) - paired(A, m * n[..., None])
        if tau:
            plus = A.clamp(min=0.0)
            above, below = plus * tau["upper"], (A - plus) * tau["lower"]
            tilt_m, tilt_n = (below - above) * r_n[..., None], (below + above) * r_m
            constant = constant - paired(tilt_m, m) - paired(tilt_n, n[..., None].expand(m.shape))
            by_m, by_n = by_m + tilt_m, by_n + tilt_n
        by_v, offset = through_lines(by_n.sum(-1), self.root, tau.get("root"), None)
        constant = constant + summed(offset) + summed(by_v) * self.step.eps
        per_square = (by_v / m.shape[-1])[..., None].expand(A.shape)
        by_square, offset = through_lines(per_square, self.squares, tau.get("squares"), None)
        by_m = by_m + by_square
        return Passed((centred(by_m) if self.step.centred else by_m,), constant + summed(offset), size)


def _finite(end: Tensor, boxed: Tensor) -> Tensor:
    """Return the box's end where it is used, and 0 elsewhere, where it might be infinite."""
    return torch.where(boxed, end, 0.0)
