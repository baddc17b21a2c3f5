"""Zonotopes: {c + Gβ | β ∈ [−1,1]ᵐ}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.arrays import diagonal_matrix, join, outward, parse, sum_up, take, zeros
from prooflens.sets.interval import Interval
from prooflens.sets.reduction_order import smallest_columns


@dataclass(frozen=True, eq=False, init=False)
class Zonotope:
    """The set {c + Gβ | β ∈ [−1,1]ᵐ}.

    Attributes:
        c: the centre, shape [n].
        G: the generators as columns, shape [n, m].

    Raises:
        SetError: if shapes do not fit, or an entry is not finite.

    Example:
        >>> z = Zonotope([0.0, 0.0], [[1.0, 1.0], [1.0, -1.0]])
        >>> [round(x, 9) for x in z.interval().upper.tolist()]
        [2.0, 2.0]
        >>> import torch
        >>> round(z.support(torch.tensor([1.0, 1.0]).double()).item(), 9)  # |1 + 1| + |1 − 1|
        2.0
    """

    c: Float[Tensor, " n"]
    G: Float[Tensor, "n m"]

    def __init__(self, c: Any, G: Any = None) -> None:
        centre = parse(c, "c")
        if len(centre.shape) != 1:
            raise SetError(f"c must be a vector, not of shape {tuple(centre.shape)}")
        generators = zeros((int(centre.shape[0]), 0), centre) if G is None else parse(G, "G")
        if len(generators.shape) != 2 or generators.shape[0] != centre.shape[0]:
            raise SetError(f"G must have {centre.shape[0]} rows; it has shape {tuple(generators.shape)}")
        object.__setattr__(self, "c", centre)
        object.__setattr__(self, "G", generators)

    @property
    def dim(self) -> int:
        """The dimension of the space, n."""
        return int(self.c.shape[0])

    @property
    def order(self) -> float:
        """The number of generators per dimension, m/n."""
        return int(self.G.shape[1]) / max(self.dim, 1)

    def affine_map(self, M: Float[Tensor, "k n"], offset: Float[Tensor, " k"] | None = None) -> Zonotope:
        """Return {Mx + offset}, exact up to rounding to nearest.

        Args:
            M: a matrix, shape [k, n].
            offset: a vector, shape [k]; None for 0.
        """
        c = M @ self.c
        return Zonotope(c if offset is None else c + offset, M @ self.G)

    def minkowski_sum(self, other: Zonotope) -> Zonotope:
        """Return {x + y}, exact up to rounding to nearest."""
        if other.dim != self.dim:
            raise SetError(f"the zonotopes lie in dimensions {self.dim} and {other.dim}")
        return Zonotope(self.c + other.c, join([self.G, other.G], 1))

    def interval(self) -> Interval:
        """Return the interval hull c ± Σ_j |G_·j|, rounded outward."""
        radius = sum_up(abs(self.G), 1)
        return Interval(-outward(-(self.c - radius)), outward(self.c + radius))

    def support(self, direction: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """Bound max direction·x from above, exactly up to rounding: direction·c + Σ_j |direction·G_·j|.

        Args:
            direction: a vector, shape [n].
        """
        projected = Interval(self.c, self.c).affine_map(direction[None, :])
        radii = Interval(self.G.T[:, :], self.G.T[:, :]) * Interval(direction[None, :], direction[None, :])
        sizes = Interval(-sum_up(-radii.lower), sum_up(radii.upper)).magnitude
        return outward(projected.upper[0] + sum_up(sizes, 0))

    def reduce(self, order: float) -> Zonotope:
        """Return a zonotope around this one with at most order·n generators (Girard): the smallest are boxed.

        Boxing is an enclosure: |Σ_{j ∈ D} G_kj β_j| ≤ Σ_{j ∈ D} |G_kj|, rounded up.

        Args:
            order: generators per dimension, at least 1.

        Example:
            >>> Zonotope([0.0], [[1.0, 0.5, 0.25]]).reduce(1).G.shape
            torch.Size([1, 1])
        """
        dropped, kept = smallest_columns(self.G, self.dim, order)
        if len(dropped) == 0:
            return self
        return Zonotope(
            self.c, join([take(self.G, kept), diagonal_matrix(sum_up(abs(take(self.G, dropped)), 1))], 1)
        )
