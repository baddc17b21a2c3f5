"""Second derivatives of activations on complex discs.

For |w| ≤ R, f(c + w) − f(c) − f'(c)w is at most ½R² sup|f″| over the disc: the M of `grid`. With z = x + iy,

    σ'(z) = 1/(2(cosh x + cos y)) in absolute value,     |1 − 2σ(z)|² = (cosh x − cos y)/(cosh x + cos y),

and the disc lies in |x| ≥ |c| − R, |y| ≤ R. For R ≥ π there is a pole in reach, and the bound is ∞.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models.architecture import Activation

ROOM = 1.0 + 2.0**-32
"""Raises a bound over the roundings of its own computation."""
SAFE = 3.14159
"""Below π: discs that reach further are not bounded."""


def second(function: Activation, c: Tensor, R: Tensor) -> Float[Tensor, ...]:
    """Bound |f″| on the complex discs |z − c| ≤ R; ∞ where a pole is near.

    Args:
        function: the activation f.
        c: real centres.
        R: radii.
    """
    if function == "silu":
        slope, bend = _sigmoid(c, R)
        return (2.0 * slope + (c.abs() + R) * bend) * ROOM
    if function == "tanh":
        # tanh z = 2σ(2z) − 1.
        return 8.0 * _sigmoid(2.0 * c, 2.0 * R)[1] * ROOM
    if function == "gelu":
        least = (c.abs() - R).clamp(min=0.0)
        density = torch.exp((0.5 * (R.square() - least.square())).clamp(max=600.0)) / math.sqrt(2.0 * math.pi)
        found = (2.0 + (c.abs() + R).square()) * density * ROOM
        return torch.where(R < 30.0, found, torch.inf)
    if function == "gelu_tanh":
        # z σ(g(z)) with g(z) = 2a(z + bz³).
        a, b = 2.0 * math.sqrt(2.0 / math.pi) * ROOM, 0.044715 * ROOM
        far = c.abs() + R
        inner = 2.0 * math.sqrt(2.0 / math.pi) * (c + 0.044715 * c**3)
        wide = a * (R + b * (3.0 * c.square() * R + 3.0 * c.abs() * R.square() + R**3)) * ROOM
        slope, bend = _sigmoid(inner * (1.0 - 2.0**-40), wide + inner.abs() * 2.0**-40)
        first, twice = a * (1.0 + 3.0 * b * far.square()), 6.0 * a * b * far
        return (2.0 * slope * first + far * (bend * first.square() + slope * twice)) * ROOM
    return torch.where(c.abs() >= R, 0.0, torch.inf)  # relu, away from its kink


def _sigmoid(c: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Bound |σ'| and |σ″| on discs."""
    least = (c.abs() - R).clamp(min=0.0, max=600.0)
    across = torch.cos(R.clamp(max=SAFE))
    top, bottom = torch.cosh(least) - across, (torch.cosh(least) + across) * (1.0 - 2.0**-32)
    slope = 0.5 / bottom
    turn = torch.where(across >= 0.0, 1.0, (top / bottom).sqrt())
    fits = (R < SAFE) & (bottom > 2.0**-30)
    bent = slope * turn
    return torch.where(fits, slope * ROOM, torch.inf), torch.where(fits, bent * ROOM, torch.inf)
