r"""One-dimensional functions as parabolas: φ(x) ∈ v + λ(x − c) + κ(x − c)² ± e, proved on an interval.

Two candidates per coordinate (the paper's hybrid quadratic/DeepPoly relaxation): a chord (κ = 0) and a parabola.
Whatever λ and κ are, the range of the deviation g(x) = φ(x) − λ(x − c) − κ(x − c)² on [l, u] gives v and e:

- **ReLU**: g is quadratic on each side of 0, so its extremes lie at l, 0, u and the two vertices;
- **the jump**, 1 above 0 and 0 elsewhere: with 0 inside no line helps, so λ = κ = 0 and the range is [0, 1];
- **smooth φ**: on a grid of step h, g exceeds its values at the two ends of a cell by at most h²/8·(M₂ + 2|κ|),
  M₂ ≥ sup|φ''|; for ReLU² as well, as φ' is Lipschitz with M₂ = 2;
- **x^{-½}** (norms): second-order Taylor, remainder (5/16) l^{-7/2}|x − c|³; or the chord, whose g is convex:
  greatest at an end, at least (3/2)(2|λ|)^{1/3} + λc.

The parabola is taken where its error plus what squaring x boxes is smaller than the chord's error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.models.sites import ACTIVATIONS, Function
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.queries.simplex import Box

CURVATURE: dict[Function, float] = {
    "gelu": 0.8,
    "gelu_tanh": 0.8,
    "silu": 0.51,
    "tanh": 0.77,
    "relu2": 2.0,
}
"""M₂ ≥ sup|φ''|: 2/√(2π), the same for the tanh form, 1/2, 4/(3√3), 2. The tests check them with ball arithmetic."""

CELLS = 32
"""How many cells the grid has on which a smooth function is compared with its relaxation."""

LIBM = gamma(64)
"""Activations are trusted to 64 roundings relative to |x| + |φ(x)|, many times what libm and CUDA document."""


class Relaxation(NamedTuple):
    """A parabola around φ: φ(x) ∈ value + slope(x − c) + curvature(x − c)² ± error."""

    value: Float[Tensor, "*shape"]
    slope: Float[Tensor, "*shape"]
    curvature: Float[Tensor, "*shape"]
    error: Float[Tensor, "*shape"]

    def or_else(self, other: Relaxation, better: Tensor) -> Relaxation:
        """Return this relaxation where `better`, and the other elsewhere."""
        return Relaxation(*(torch.where(better, a, b) for a, b in zip(self, other, strict=True)))


def deviation(function: Function, c: Tensor, hull: Box, slope: Tensor, curvature: Tensor) -> Relaxation:
    """Enclose φ(x) − λ(x − c) − κ(x − c)² in value ± error on an interval, for any λ and κ.

    Args:
        function: the activation φ.
        c: where the parabola is centred.
        hull: the interval of x.
        slope: λ; stable ReLUs get their own, and jumps get 0.
        curvature: κ; jumps get 0.
    """
    if function == "jump":
        return _jump_range(hull)
    of = _relu_deviation if function == "relu" else _grid_deviation
    return of(function, c, hull, slope, curvature)


def _ends(function: Function, hull: Box) -> tuple[Tensor, Tensor, Tensor]:
    phi = ACTIVATIONS[function]
    width = (hull.upper - hull.lower).clamp(min=TINY)
    return phi(hull.lower), phi(hull.upper), width


def chord(function: Function, c: Tensor, hull: Box) -> tuple[Tensor, Tensor]:
    """Return the slope of the secant and curvature 0; slope 0 if the interval is too narrow. Any slope is valid."""
    at_low, at_high, width = _ends(function, hull)
    most = _steepest(function, hull)
    slope = ((at_high - at_low) / width).clamp(-most, most)
    return slope, torch.zeros_like(slope)


def _steepest(function: Function, hull: Box) -> Tensor:
    """Return a slope that no secant exceeds; a narrow interval may compute any."""
    at = torch.full_like(hull.upper, 2.0)
    return 2.0 * hull.upper.clamp(min=1.0) if function == "relu2" else at


def parabola(function: Function, c: Tensor, hull: Box) -> tuple[Tensor, Tensor]:
    """Return the slope at c and half the second derivative of the parabola through both ends and the middle."""
    at_low, at_high, width = _ends(function, hull)
    middle = 0.5 * hull.lower + 0.5 * hull.upper
    at_middle = ACTIVATIONS[function](middle)
    bend = 2.0 * ((at_high - at_middle) - (at_middle - at_low)) / width.square().clamp(min=TINY)
    wide = width > 2.0**-20 * (1.0 + c.abs())
    curvature = torch.where(wide, bend, 0.0)
    slope = (at_high - at_low) / width + 2.0 * curvature * (c - middle)
    most = 4.0 * _steepest(function, hull)
    return torch.where(wide, slope, 0.0).clamp(-most, most), curvature


def _centred(low: Tensor, high: Tensor, slope: Tensor, curvature: Tensor) -> Relaxation:
    """Return value and error from the range of the deviation."""
    value = 0.5 * low + 0.5 * high
    error = up(torch.maximum(high - value, value - low)) * (1.0 + gamma(4)) + TINY
    return Relaxation(value, slope, curvature, error)


def _relu_deviation(function: Function, c: Tensor, hull: Box, slope: Tensor, curvature: Tensor) -> Relaxation:
    """Return the exact range of relu(x) − λ(x − c) − κ(x − c)², rounded outward; stable neurons are linear."""
    low, high = hull
    zero = torch.zeros_like(c).clamp(low, high)
    points = [low, high, zero]
    for side, start, end in ((0.0, low, zero), (1.0, zero, high)):
        # side·x − λ(x − c) − κ(x − c)² turns where side − λ = 2κ(x − c).
        turn = c + (side - slope) / torch.where(curvature == 0, 1.0, 2.0 * curvature)
        points.append(torch.minimum(torch.maximum(turn, start), end))
    x = torch.stack(points)
    g, slack = _deviation(torch.relu(x), x, c, slope, curvature)
    # Near a vertex g changes by at most κ times the square of the vertex' own rounding.
    slack = slack + curvature.abs() * (gamma(16) * (1.0 + c.abs() + (high - low))) ** 2
    made = _centred((g - slack).amin(0), (g + slack).amax(0), slope, curvature)
    nothing, one = torch.zeros_like(c), torch.ones_like(c)
    on = Relaxation(c, one, nothing, nothing)
    off = Relaxation(nothing, nothing, nothing, nothing)
    return on.or_else(off.or_else(made, high <= 0), low >= 0)


def _jump_range(hull: Box) -> Relaxation:
    """Return the range of the jump: exactly 0 or 1, or ½ ± ½ with both sides of 0 in the interval; NaN is both."""
    on, off = hull.lower > 0, hull.upper <= 0
    nothing = torch.zeros_like(hull.lower)
    value = torch.where(on, 1.0, torch.where(off, 0.0, nothing + 0.5))
    return Relaxation(value, nothing, nothing, torch.where(on | off, 0.0, nothing + 0.5))


def _grid_deviation(function: Function, c: Tensor, hull: Box, slope: Tensor, curvature: Tensor) -> Relaxation:
    """Bound the range of φ(x) − λ(x − c) − κ(x − c)² by a grid and sup|φ''|."""
    low, high = hull
    share = torch.linspace(0.0, 1.0, CELLS + 1, dtype=c.dtype, device=c.device)
    x = low + (high - low) * share.reshape(-1, *(1 for _ in c.shape))
    x = torch.cat((x[:-1], high[None]))
    g, slack = _deviation(ACTIVATIONS[function](x), x, c, slope, curvature)
    # A grid point may sit a few roundings off: cells are that much wider.
    step = (high - low) * (1.0 / CELLS) + gamma(16) * (low.abs() + high.abs()) + TINY
    between = 0.125 * (CURVATURE[function] + 2.0 * curvature.abs()) * step.square() * (1.0 + gamma(16))
    return _centred((g - slack).amin(0) - between, (g + slack).amax(0) + between, slope, curvature)


def _deviation(
    value: Tensor, x: Tensor, c: Tensor, slope: Tensor, curvature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return g and a bound of its rounding at every point."""
    move = x - c
    g = value - slope * move - curvature * move.square()
    size = (x.abs() + c.abs()) * slope.abs() + curvature.abs() * (x.abs() + c.abs()).square()
    return g, LIBM * (value.abs() + x.abs() + size) + TINY


def root_taylor(c: Tensor, low: Tensor, high: Tensor) -> Relaxation:
    """Enclose x^{-½} on [low, high] by its second-order Taylor polynomial at c."""
    reach = up(torch.maximum(high - c, c - low))
    value = c.rsqrt()
    slope, curvature = -0.5 * value / c, 0.375 * value / c.square()
    remainder = 0.3125 * reach.pow(3) / low.pow(3) * low.rsqrt()
    rounding = LIBM * (value + slope.abs() * reach + curvature * reach.square())
    return Relaxation(value, slope, curvature, (remainder + rounding) * (1.0 + LIBM) + TINY)


def root_chord(c: Tensor, low: Tensor, high: Tensor) -> Relaxation:
    """Enclose x^{-½} on [low, high] by its chord."""
    a, b = low.sqrt(), high.sqrt()
    slope = -1.0 / (a * b * (a + b))
    ends = torch.stack((1.0 / a - slope * (low - c), 1.0 / b - slope * (high - c)))
    least = 1.5 * (-2.0 * slope).pow(1.0 / 3.0) + slope * c
    size = ends.abs().amax(0) + least.abs() + slope.abs() * (c + high) + 1.0 / a
    slack = LIBM * size
    return _centred(least - slack, ends.amax(0) + slack, slope, torch.zeros_like(c))
