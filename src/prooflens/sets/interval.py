"""Interval vectors: {x | lower ≤ x ≤ upper}, with arithmetic rounded outward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import SetError
from prooflens.sets.arrays import halved, is_rational, outward, parse, sum_down, sum_up


@dataclass(frozen=True, eq=False, init=False)
class Interval:
    """The box {x | lower ≤ x ≤ upper}, of any shape, coordinate by coordinate.

    Every operation returns a box that contains the real result: endpoints are rounded outward.

    Attributes:
        lower: lower ends, any shape.
        upper: upper ends, the same shape.

    Raises:
        SetError: if shapes differ, a lower end exceeds its upper one, or an entry is not finite.

    Example:
        >>> box = Interval([-1.0, 0.0], [2.0, 3.0])
        >>> box.center.tolist(), box.magnitude.tolist()
        ([0.5, 1.5], [2.0, 3.0])
    """

    lower: Float[Tensor, "*shape"]
    upper: Float[Tensor, "*shape"]

    def __init__(self, lower: Any, upper: Any) -> None:
        low, high = parse(lower, "lower"), parse(upper, "upper")
        if low.shape != high.shape:
            raise SetError(f"lower has shape {tuple(low.shape)} and upper {tuple(high.shape)}")
        if bool((low > high).any()):
            raise SetError("an interval needs lower <= upper in every coordinate")
        object.__setattr__(self, "lower", low)
        object.__setattr__(self, "upper", high)

    @property
    def dim(self) -> int:
        """The number of coordinates of the last axis (1 for a scalar box)."""
        return int(self.lower.shape[-1]) if len(self.lower.shape) else 1

    @property
    def width(self) -> Float[Tensor, "*shape"]:
        """upper − lower, rounded up."""
        return outward(self.upper - self.lower)

    @property
    def center(self) -> Float[Tensor, "*shape"]:
        """A point of the box near its middle."""
        return halved(self.lower + self.upper)

    @property
    def radius(self) -> Float[Tensor, "*shape"]:
        """r with [lower, upper] ⊆ [center − r, center + r] for the rounded centre."""
        above, below = outward(self.upper - self.center), outward(self.center - self.lower)
        return _where(above > below, above, below)

    @property
    def magnitude(self) -> Float[Tensor, "*shape"]:
        """max |x| over the box."""
        return _where(abs(self.lower) > abs(self.upper), abs(self.lower), abs(self.upper))

    def __add__(self, other: Interval) -> Interval:
        return Interval(-outward(-(self.lower + other.lower)), outward(self.upper + other.upper))

    def __neg__(self) -> Interval:
        return Interval(-self.upper, -self.lower)

    def __sub__(self, other: Interval) -> Interval:
        return self + (-other)

    def __mul__(self, other: Interval) -> Interval:
        """Return {xy | x in self, y in other}, element by element: the extremes lie at corners."""
        corners = [a * b for a in (self.lower, self.upper) for b in (other.lower, other.upper)]
        low = high = corners[0]
        for corner in corners[1:]:
            low, high = _where(corner < low, corner, low), _where(corner > high, corner, high)
        return Interval(-outward(-low), outward(high))

    def affine_map(self, M: Float[Tensor, "m n"], offset: Float[Tensor, " m"] | None = None) -> Interval:
        """Return a box around {Mx + offset}: Σ_j [min, max](M_ij x_j), rounded outward.

        Args:
            M: a matrix, shape [m, n].
            offset: a vector, shape [m]; None for 0.

        Example:
            >>> image = Interval([-1.0, 0.0], [1.0, 2.0]).affine_map(torch.tensor([[1.0, -1.0]]).double())
            >>> [round(x, 9) for x in (*image.lower.tolist(), *image.upper.tolist())]  # −1 − 2 and 1 − 0
            [-3.0, 1.0]
        """
        terms = _columns(self) * Interval(M, M)
        image = Interval(sum_down(terms.lower), sum_up(terms.upper))
        return image if offset is None else image + Interval(offset, offset)

    def intersect(self, other: Interval) -> Interval | None:
        """Return the common box, or None if there is none."""
        low = _where(self.lower > other.lower, self.lower, other.lower)
        high = _where(self.upper < other.upper, self.upper, other.upper)
        return None if bool((low > high).any()) else Interval(low, high)

    def contains(self, x: Float[Tensor, "*points shape"]) -> Bool[Tensor, "*points"]:
        """Say for each point whether it lies in the box."""
        x = x if isinstance(x, Tensor) else parse(x, "the point")
        inside: Tensor = ((x >= self.lower) & (x <= self.upper)).all(-1)
        return inside


def _columns(box: Interval) -> Interval:
    """Return the box as one row, to be multiplied entry by entry with the rows of a matrix."""
    return Interval(box.lower[None, :], box.upper[None, :])


def _where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    if is_rational(yes):
        import numpy as np

        chosen: Any = np.where(condition, yes, no)
        return chosen  # type: ignore[no-any-return]
    return torch.where(condition, yes, no)
