"""Vectors with the rounding of their computation, coordinate by coordinate, through the steps of one token.

`relaxations` encloses sets; here a set is one point, and all that spreads is rounding. Middles are what the model
itself computes in float64, radii bound the distance to the real values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.errors import ModelError
from prooflens.models.sites import Affine, AnyStep, Norm, Rotary, Shift
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF

LOST = 2.0**-500
"""More than what the length of a vector loses where squares of its entries vanish: √d · 2⁻⁵¹¹ for d up to 2²²."""

LARGEST = 2.0**500
"""Entries of norms are at most this large: their squares stay in float64."""


def more(x: Tensor) -> Tensor:
    """Return numbers at least as large as a real x ≥ 0 that took up to 8 roundings, each relative to x, to compute.

    (1 + u)⁹ < 1 + 16u, and the product itself rounds once; `TINY` covers underflow.
    """
    return x * (1.0 + 16.0 * UNIT_ROUNDOFF) + TINY


class Enclosure(NamedTuple):
    """All real vectors v with |v − middle| ≤ radius in every coordinate."""

    middle: Float[Tensor, "*shape"]
    radius: Float[Tensor, "*shape"]


def norm_upper(x: Float[Tensor, "*B d"]) -> Float[Tensor, " *B"]:
    """Return an upper bound of ‖x‖₂ over the last dimension."""
    return more(x.square().sum(-1).sqrt() * (1.0 + gamma(x.shape[-1] + 8)) + LOST)


def enclose(step: AnyStep, *inputs: Enclosure) -> Enclosure:
    """Enclose what a step makes of real vectors in the given enclosures.

    Args:
        step: an affine map, a norm, a rotation or a shift.
        inputs: what it reads.

    Raises:
        ModelError: if the step is of another kind: then the first scores are not what is counted here.
    """
    (x,) = inputs
    match step:
        case Affine():
            return _affine(step, x)
        case Norm():
            return _norm(step, x)
        case Rotary():
            return _rotary(step, x)
        case Shift():
            middle = x.middle + step.offset
            return Enclosure(middle, more(x.radius + UNIT_ROUNDOFF * middle.abs()))
    raise ModelError(
        f"the first scores go through {type(step).__name__} ({step.out}): layer 0 of such a model cannot be counted"
    )


def _affine(step: Affine, x: Enclosure) -> Enclosure:
    """|fl(Wx̂ + b) − (Wx + b)| ≤ |W|r + γ(|W||x̂| + |b|)."""
    middle = step(x.middle)
    n = step.weight.shape[-1]
    rounded = gamma(n + 4)
    carried = (x.radius + rounded * x.middle.abs()).flatten(-step.in_dims)
    spread = torch.nn.functional.linear(carried, step.weight.abs())
    if step.bias is not None:
        spread = spread + rounded * step.bias.abs()
    spread = more(spread * (1.0 + gamma(n + 8)) + TINY * (n + 4))
    return Enclosure(middle, spread.reshape(middle.shape))


def _norm(step: Norm, x: Enclosure) -> Enclosure:
    """z = γ ⊙ m·n + β with n = 1/√(‖m‖²/d + ε).

    m is off by r in every coordinate (and by γ_{d+2} of its terms, where it is centred), so ‖m‖ by ‖r‖: that gives n
    from below and above, and |z − m̂n̂| ≤ r·n₊ + |m̂|·max(n₊ − n̂, n̂ − n₋).
    """
    d = x.middle.shape[-1]
    middle, radius = x
    if step.centred:
        size = middle.abs()
        size = size + size.mean(-1, keepdim=True)
        spread = radius + radius.mean(-1, keepdim=True)
        middle = middle - middle.mean(-1, keepdim=True)
        radius = more(spread * (1.0 + gamma(d + 8)) + gamma(d + 8) * size + TINY * d)
    length = middle.square().sum(-1, keepdim=True).sqrt()
    off = norm_upper(radius)[..., None]
    most = more(length * (1.0 + gamma(d + 8)) + off + LOST)
    least = down(length * (1.0 - gamma(d + 8)) - off - LOST, 2).clamp(min=0.0)
    if not bool((most < LARGEST).all()):
        nothing = torch.full_like(middle, torch.inf)
        return Enclosure(middle, nothing)
    n_low = down((most.square() / d + step.eps).rsqrt() * (1.0 - gamma(16)), 2)
    n_high = up((least.square() / d + step.eps).rsqrt() * (1.0 + gamma(16)), 2)
    n = (length.square() / d + step.eps).rsqrt()
    off_n = up(torch.maximum(n_high - n, n - n_low).clamp(min=0.0), 2)
    z = middle * n
    spread = more(radius * n_high + z.abs() * UNIT_ROUNDOFF + middle.abs() * off_n)
    if step.weight is not None:
        z, spread = z * step.weight, spread * step.weight.abs()
        spread = more(spread + UNIT_ROUNDOFF * z.abs())
    if step.bias is not None:
        z = z + step.bias
        spread = more(spread + UNIT_ROUNDOFF * z.abs())
    return Enclosure(z, spread + LOST)


def _rotary(step: Rotary, x: Enclosure) -> Enclosure:
    """Two products and a sum round once each."""
    half = x.middle.shape[-1] // 2
    cos, sin = step.cos[:, None, :].abs(), step.sin[:, None, :].abs()

    def turned(size: Tensor) -> Tensor:
        return size * cos + torch.cat((size[..., half:], size[..., :half]), -1) * sin

    middle = step(x.middle)
    spread = turned(x.radius) + gamma(4) * turned(x.middle.abs())
    return Enclosure(middle, more(spread))
