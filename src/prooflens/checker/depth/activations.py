"""Activations as stand-ins: a float polynomial around a float point, and what it leaves, proved by Arb.

For |u| ≤ b and floats h, φ̂, φ̂′, a₂, a₃:  |φ(h + u) − φ̂ − φ̂′u − a₂u² − a₃u³| ≤ rest. The coefficients are
Taylor's, rounded, and the rest is what rounding leaves plus sup|φ⁗|b⁴/24 over the ball h ± b, from a power series
over that ball. Where a neuron moves so far that a shorter polynomial leaves less, that is taken.

A ReLU whose kink is in reach has no useful tangent: its stand-in is the chord over |u| ≤ b, lowered by half of its
greatest height. With θ = (b + h)/2b the chord is 0 at u = −b and b + h at u = b, it is above φ, most at the kink u =
−h, by θ(b − h) = (b² − h²)/2b; so the lowered one is off by at most (b² − h²)/4b.

The jump of features is 1 above 0, and 0 at 0 and below: a constant where h ± b does not reach 0, else ½ ± ½.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb, arb_series, ctx

from prooflens.checker.depth.shapes import Array

ORDER = 5
BITS = 80
Series = Any
SMOOTH: dict[str, Callable[[Series], Series]] = {
    "gelu": lambda x: x / 2 * (1 + (x / arb(2).sqrt()).erf()),
    "gelu_tanh": lambda x: x / (1 + (-2 * (2 / arb.pi()).sqrt() * (x + arb("0.044715") * x * x * x)).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "tanh": lambda x: 1 - 2 / (1 + (2 * x).exp()),
}
"""Activations as power series: x·(1 + tanh y)/2 = x/(1 + e^(−2y))."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """φ̂, φ̂′, a₂, a₃ and the rest, all of one shape."""

    value: Array
    slope: Array
    second: Array
    third: Array
    rest: Array


def expansion(function: str, h: Array, b: Array) -> Expansion:
    """The stand-in of an activation at h for moves up to b; where b is not finite the rest is infinite."""
    pairs = list(zip(h.ravel().tolist(), b.ravel().tolist(), strict=True))
    if function == JUMP:
        found = [_jump(x, far) for x, far in pairs]
    elif function in KINKED:
        found = [KINKED[function](x, far) for x, far in pairs]
    else:
        found = [_smooth(SMOOTH[function], x, far) for x, far in pairs]
    return Expansion(*(np.array(part).reshape(h.shape) for part in zip(*found, strict=True)))


def coefficients(function: Callable[[Series], Series], x: arb) -> list[arb]:
    """Taylor coefficients over a ball; not finite where the ball is too wide for a division.

    Args:
        function: of a power series.
        x: the ball.
    """
    try:
        held = list(function(arb_series([x, 1], ORDER)).coeffs())
    except (ZeroDivisionError, ValueError):
        return [arb("nan")] * ORDER
    return held + [arb(0)] * (ORDER - len(held))


def _smooth(function: Callable[[Series], Series], h: float, b: float) -> tuple[float, ...]:
    if not np.isfinite(h + b):
        return 0.0, 0.0, 0.0, 0.0, np.inf
    with ctx.workprec(BITS):
        at, over = coefficients(function, arb(h)), coefficients(function, arb(h, b))
        if not all(c.is_finite() for c in (*at, *over)):
            return 0.0, 0.0, 0.0, 0.0, np.inf
        kept = [float(c.mid()) for c in at[:4]]
        far = arb(b)
        # Degree k keeps the coefficients up to k; what is beyond is sup|φ^(k+1)|b^(k+1)/(k+1)!.
        slips = [abs(at[i] - kept[i]) * far**i for i in range(4)]
        rests = [sum(slips[: k + 1], arb(0)) + abs(over[k + 1]) * far ** (k + 1) for k in (1, 2, 3)]
        ends = [high(rest) for rest in rests]
    best = int(np.argmin(ends)) + 1
    return (*(c if i <= best else 0.0 for i, c in enumerate(kept)), ends[best - 1])


def high(x: arb) -> float:
    """A float above a ball; infinite if the ball is not finite.

    Args:
        x: the ball.
    """
    return float(np.nextafter(float(x.upper()), np.inf)) if x.is_finite() else np.inf


def _relu(h: float, b: float) -> tuple[float, ...]:
    if not np.isfinite(h + b):
        return 0.0, 0.0, 0.0, 0.0, np.inf
    if b <= abs(h):
        return max(h, 0.0), float(h > 0.0), 0.0, 0.0, 0.0
    with ctx.workprec(BITS):
        slope = min(1.0, max(0.0, 0.5 * (h / b + 1.0)))
        # Whatever float the slope is, φ(h + u) − slope·u is greatest at u = ±b and least at the kink u = −h.
        top, bottom = (arb(slope) * b).max(arb(h) + b - arb(slope) * b), arb(slope) * h
        middle = float(((top + bottom) / 2).mid())
        return middle, slope, 0.0, 0.0, high((top - middle).max(middle - bottom))


def _relu2(h: float, b: float) -> tuple[float, ...]:
    if not np.isfinite(h + b):
        return 0.0, 0.0, 0.0, 0.0, np.inf
    bent = b > abs(h)
    with ctx.workprec(BITS):
        # On the side of h it is its own second order; beyond the kink that is off by (h + u)² ≤ (b − |h|)².
        value, slope = (arb(h) ** 2, 2 * arb(h)) if h > 0.0 else (arb(0), arb(0))
        kept = float(value.mid()), float(slope.mid()), float(h > 0.0)
        rest = abs(value - kept[0]) + abs(slope - kept[1]) * b + ((arb(b) - abs(h)) ** 2 if bent else 0)
        return *kept, 0.0, high(rest)


def _jump(h: float, b: float) -> tuple[float, ...]:
    if b < abs(h) < np.inf:  # not so where either is NaN
        return float(h > 0.0), 0.0, 0.0, 0.0, 0.0
    return 0.5, 0.0, 0.0, 0.0, 0.5


JUMP = "jump"
"""The name of the function by which features become active; no network has it as its activation."""

KINKED: dict[str, Callable[[float, float], tuple[float, ...]]] = {"relu": _relu, "relu2": _relu2}
"""Activations with a kink, by their name."""
