"""Activations and inverse roots of tensor sets, by the relaxations of `relaxations.activations`.

The parabola is taken where its error plus what squaring x boxes is smaller than the chord's error.
"""

from __future__ import annotations

import torch

from prooflens.engines.relaxations.activations import (
    Relaxation,
    chord,
    deviation,
    parabola,
    root_chord,
    root_taylor,
)
from prooflens.engines.tensor_sets.products import square, square_rest
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.models.architecture import Activation


def apply(x: TensorSet, how: Relaxation, k: int) -> TensorSet:
    """Return the set of a relaxation: exact products, with the error in r."""
    moved = TensorSet(torch.zeros_like(x.c), x.L, x.ids, x.Q, x.pairs, x.r)
    y = moved.scaled(how.slope).plus(how.value)
    if bool((how.curvature != 0).any()):
        y = y + square(x, k).scaled(how.curvature)
    return y.widened(how.error)


def activation(function: Activation, x: TensorSet, k: int) -> TensorSet:
    """Return φ(x) for a model's activation."""
    hull = x.hull()
    cost = square_rest(x, k)
    straight = deviation(function, x.c, hull, *chord(function, x.c, hull))
    curved = deviation(function, x.c, hull, *parabola(function, x.c, hull))
    curved_cost = curved.error + curved.curvature.abs() * cost
    return apply(x, curved.or_else(straight, curved_cost < straight.error), k)


def inverse_root(x: TensorSet, k: int, floor: float) -> TensorSet:
    """Return x^{-½} for a set whose values are at least `floor` > 0."""
    hull = x.hull()
    low = hull.lower.clamp(min=floor)
    high = torch.maximum(hull.upper, low)
    off = torch.minimum(torch.maximum(x.c, low), high) - x.c
    if bool((off != 0).any()):
        x = x.plus(off).widened(off.abs())
    c = x.c
    curved, straight = root_taylor(c, low, high), root_chord(c, low, high)
    cost = curved.error + curved.curvature.abs() * square_rest(x, k)
    return apply(x, curved.or_else(straight, cost < straight.error), k)
