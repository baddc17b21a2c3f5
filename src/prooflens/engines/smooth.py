"""Derivatives of activations up to the fourth, and bounds of the third, fourth and fifth on the whole line.

`taylor` reads an activation only through these. The constants are suprema rounded up; `tests/engines/test_smooth.py`
proves them with ball arithmetic. A computed derivative errs by at most `DERIVATIVE_ERROR`: each is a product of few
bounded factors, and the factors that grow (x, x³) are multiplied by ones that decay faster.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prooflens.errors import EngineError
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS

DERIVATIVE_ERROR = 2.0**-40
"""Absolute error of a computed φ′, φ″, φ‴ or φ⁗."""

SECOND: dict[Activation, float] = {"gelu": 0.8, "gelu_tanh": 0.8, "silu": 0.51, "tanh": 0.78, "relu": 0.0}
"""sup |φ″|."""

THIRD: dict[Activation, float] = {"gelu": 0.8, "gelu_tanh": 0.8, "silu": 0.33, "tanh": 2.1, "relu": 0.0}
"""sup |φ‴|."""

FOURTH: dict[Activation, float] = {"gelu": 1.7, "gelu_tanh": 1.7, "silu": 0.53, "tanh": 4.3, "relu": 0.0}
"""sup |φ⁗|."""

FIFTH: dict[Activation, float] = {"gelu": 3.0, "gelu_tanh": 3.0, "silu": 0.7, "tanh": 18.0, "relu": 0.0}
"""sup |φ⁽⁵⁾|."""


GRID = 24
"""Points of a grid on each side."""


class Derivatives(NamedTuple):
    """φ′, φ″, φ‴, φ⁗ at some points."""

    first: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor


def exp_tail(x: Tensor, first: int, power: int, terms: int = 32) -> Tensor:
    """Σ_{k ≥ first} x^{k−power}/k! for x ≥ 0 and power ≤ first, from above."""
    term = x ** (first - power) / math.factorial(first)
    found = term
    for k in range(first + 1, first + terms):
        term = term * x / k
        found = found + term
    return (found + term * x * torch.exp(x)) * (1.0 + 2.0**-32)


def gaps(function: Activation, x: Tensor, b: Tensor, known: Derivatives) -> list[Tensor]:
    """sup |φ(x + u) − φ(x) − φ′u − … − φ⁽ᵏ⁾uᵏ/k!| over |u| ≤ b, for k = 1, 2, 3, 4, from above.

    By the mean value theorem for small b. For large b that is far too much, and a grid says more: between two of its
    points the gap changes by at most half their distance times sup |φ⁽ᵏ⁺¹⁾| bᵏ/k!. ReLU's kink is not counted.
    """
    most = (SECOND[function], THIRD[function], FOURTH[function], FIFTH[function])
    found = [m * b ** (k + 1) / math.factorial(k + 1) for k, m in enumerate(most, 1)]
    if function == "relu":
        return found
    terms = [part / math.factorial(k) for k, part in enumerate(known, 1)]
    places = torch.linspace(-1.0, 1.0, 2 * GRID + 1).to(b)
    u = places.reshape(-1, *(1 for _ in b.shape)) * b
    gap = ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x)
    worst = []
    for k, term in enumerate(terms, 1):
        gap = gap - term * u**k
        worst.append(gap.abs().amax(0))
    slack = 2.0**-44 * (1.0 + x.abs() + b) * (1.0 + b) ** 4
    step = 0.51 / GRID
    finer = [w + step * (k + 1) * f + slack for k, (w, f) in enumerate(zip(worst, found, strict=True), 1)]
    return [torch.minimum(f, g) for f, g in zip(found, finer, strict=True)]


def derivatives(function: Activation, x: Tensor) -> Derivatives:
    """φ′(x), φ″(x), φ‴(x), φ⁗(x); ReLU's are those away from its kink."""
    if function == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        cumulative = 0.5 * torch.erfc(-x / math.sqrt(2.0))
        square = x * x
        return Derivatives(
            cumulative + x * density,
            (2.0 - square) * density,
            (square - 4.0) * x * density,
            ((7.0 - square) * square - 4.0) * density,
        )
    if function == "tanh":
        return Derivatives(*_tanh(x))
    if function == "silu":
        s = torch.sigmoid(x)
        first = s * (1.0 - s)
        second = first * (1.0 - 2.0 * s)
        third = first * (1.0 - 6.0 * first)
        fourth = second * (1.0 - 12.0 * first)
        return Derivatives(
            s + x * first, 2.0 * first + x * second, 3.0 * second + x * third, 4.0 * third + x * fourth
        )
    if function == "gelu_tanh":
        c, cubic = math.sqrt(2.0 / math.pi), 0.044715
        u = c * (x + cubic * x**3)
        u1, u2, u3 = c * (1.0 + 3.0 * cubic * x * x), 6.0 * c * cubic * x, 6.0 * c * cubic
        t1, t2, t3, t4 = _tanh(u)
        outer = t1 * u1, t2 * u1 * u1 + t1 * u2, t3 * u1**3 + 3.0 * t2 * u1 * u2 + t1 * u3
        last = t4 * u1**4 + 6.0 * t3 * u1 * u1 * u2 + t2 * (3.0 * u2 * u2 + 4.0 * u1 * u3)
        return Derivatives(
            0.5 * (1.0 + torch.tanh(u)) + 0.5 * x * outer[0],
            outer[0] + 0.5 * x * outer[1],
            1.5 * outer[1] + 0.5 * x * outer[2],
            2.0 * outer[2] + 0.5 * x * last,
        )
    if function == "relu":
        zero = torch.zeros_like(x)
        return Derivatives((x > 0).to(x), zero, zero, zero)
    raise EngineError(f"the derivatives of {function} are not known")


def _tanh(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # From e^{-2|x|}, so that what decays keeps its relative accuracy.
    t, small = torch.tanh(x), torch.exp(-2.0 * x.abs())
    first = 4.0 * small / (1.0 + small).square()
    return first, -2.0 * t * first, first * (6.0 * t * t - 2.0), t * first * (16.0 - 24.0 * t * t)
