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
from prooflens.engines.relaxations.solu import expansion, solu_box
from prooflens.engines.tensor_sets.products import square, square_rest
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.models.sites import Function
from prooflens.numerics import up
from prooflens.numerics.rounding import TINY
from prooflens.queries.simplex import Box

NARROW = 0.5
"""A box replaces a set with generators if it is narrower than this share of the set's hull."""


def apply(x: TensorSet, how: Relaxation, k: int) -> TensorSet:
    """Return the set of a relaxation: exact products, with the error in r."""
    moved = TensorSet(torch.zeros_like(x.c), x.L, x.ids, x.Q, x.pairs, x.r)
    y = moved.scaled(how.slope).plus(how.value)
    if bool((how.curvature != 0).any()):
        y = y + square(x, k).scaled(how.curvature)
    return y.widened(how.error)


def activation(function: Function, x: TensorSet, k: int) -> TensorSet:
    """Return φ(x) for a model's activation, or for the jump of features."""
    hull = x.hull()
    cost = square_rest(x, k)
    straight = deviation(function, x.c, hull, *chord(function, x.c, hull))
    curved = deviation(function, x.c, hull, *parabola(function, x.c, hull))
    curved_cost = curved.error + curved.curvature.abs() * cost
    return apply(x, curved.or_else(straight, curved_cost < straight.error), k)


def softcap(cap: float, x: TensorSet, k: int) -> TensorSet:
    """c·tanh(x/c). 1/c is rounded: tanh is never steeper than 1, so that costs a unit of |x| at most."""
    hull = x.hull()
    size = torch.maximum(hull.lower.abs(), hull.upper.abs())
    capped = activation("tanh", x.scaled(1.0 / cap), k).scaled(cap)
    return capped.widened(up(2.0**-52 * size) + TINY)


def solu(x: TensorSet) -> TensorSet:
    """x·softmax(x): first order around the middle of the hull, the rest in r, cut by the box; or the box alone."""
    hull = x.hull()
    made = expansion(hull)
    moved = x.plus(-made.center).linear(made.linear, made.linear_size, x.c.shape[-1] + 8)
    y = moved.plus(made.value).widened(made.rest)
    whole, box = y.hull(), solu_box(hull)
    # A box that is not much narrower is not worth the generators that it would cost.
    narrow = ~(box.upper - box.lower > NARROW * (whole.upper - whole.lower))
    return y.within(Box(*(torch.where(narrow, *ends) for ends in zip(box, whole, strict=True))))


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
