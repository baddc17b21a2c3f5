"""Derivatives of activations against ball arithmetic, and their suprema proved on a grid of balls."""

import itertools
import math

import pytest
import torch
from flint import arb, arb_series, ctx

from prooflens.engines.relaxations.derivatives import (
    DERIVATIVE_ERROR,
    FIFTH,
    FOURTH,
    SECOND,
    THIRD,
    derivatives,
    expansions,
    secants,
)
from prooflens.models.architecture import Activation
from prooflens.models.sites import ACTIVATIONS

SMOOTH: list[Activation] = ["gelu", "gelu_tanh", "silu", "tanh"]


def series(function: Activation, x: arb) -> list[arb]:
    """φ and its first six derivatives on a ball."""
    ctx.cap, ctx.prec = 7, 200
    t = arb_series([x, 1])
    if function == "gelu":
        y = t * (1 + (t / arb(2).sqrt()).erf()) / 2
    elif function == "tanh":
        y = t.tanh() if hasattr(t, "tanh") else _tanh(t)
    elif function == "silu":
        y = t / (1 + (-t).exp())
    else:
        inner = (arb(2) / arb.pi()).sqrt() * (t + arb("0.044715") * t * t * t)
        y = t * (1 + _tanh(inner)) / 2
    factorial = [1, 1, 2, 6, 24, 120, 720]
    return [y[k] * factorial[k] for k in range(7)]


def _tanh(t: arb_series) -> arb_series:
    doubled = (-2 * t).exp()
    return (1 - doubled) / (1 + doubled)


@pytest.mark.parametrize("function", SMOOTH)
def test_derivatives_are_within_their_error(function: Activation) -> None:
    points = torch.cat((torch.linspace(-9.0, 9.0, 181), torch.tensor([-30.0, -14.0, 13.0, 25.0]))).double()
    found = derivatives(function, points)
    for i, x in enumerate(points.tolist()):
        truth = series(function, arb(x))
        for order, computed in enumerate(found, start=1):
            assert abs(float(truth[order].mid()) - float(computed[i])) < DERIVATIVE_ERROR / 2


@pytest.mark.parametrize("function", SMOOTH)
def test_suprema_hold_on_the_whole_line(function: Activation) -> None:
    """Balls cover [0, 12], in mean-value form; beyond, derivatives past the first decay.

    φ(−x) = ±φ(x) or φ(x) − x for all four, so |φ″| to |φ⁽⁵⁾| are even.
    """
    radius = 1 / 256
    for k in range(12 * 128 + 1):
        middle, around = series(function, arb(k / 128)), series(function, arb(k / 128, radius))
        for order, limits in enumerate((SECOND, THIRD, FOURTH, FIFTH), start=2):
            limit = limits[function]
            assert float(middle[order].abs_upper() + radius * around[order + 1].abs_upper()) <= limit


@pytest.mark.parametrize("function", SMOOTH)
def test_gaps_hold_between_the_points_of_their_grid(function: Activation) -> None:
    """For moves from small, where the mean value theorem says more, to large, where fitted coefficients do."""
    x = torch.linspace(-4.0, 4.0, 41, dtype=torch.float64)[:, None]
    b = torch.tensor([[0.01, 0.1, 0.7, 1.5, 3.0, 6.0, 30.0]], dtype=torch.float64)
    known = derivatives(function, x)
    found = expansions(function, x.expand(-1, 7), b.expand(41, -1), known)
    u = torch.linspace(-1.0, 1.0, 1999, dtype=torch.float64)[:, None, None] * b
    gap = ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x) - known.first * u
    for order, (cubic, quartic, limit) in enumerate(found, start=1):
        left = gap - (0.5 * known.second * u**2 if order > 1 else 0.0) - cubic * u**3 - quartic * u**4
        assert bool((left.abs().amax(0) <= limit * (1 + 1e-9) + 1e-14).all())
        assert order > 2 or not bool(cubic.any())
        assert order > 3 or not bool(quartic.any())


@pytest.mark.parametrize("function", [*SMOOTH, "relu2"])
@pytest.mark.parametrize("bent", [False, True])
def test_secants_are_enclosed(function: Activation, bent: bool) -> None:
    """|c(u) − middle − lean·u| ≤ bend·u² + spread between the points of the grid, for small moves and large ones."""
    x = torch.cat((torch.linspace(-4.0, 4.0, 41), torch.tensor([-30.0, -9.0, 24.2]))).double()[:, None]
    b = torch.tensor([[1e-4, 0.01, 0.1, 0.7, 1.5, 3.0, 6.0, 30.0]], dtype=torch.float64)
    x, b = x.expand(-1, 8).contiguous(), b.expand(44, -1).contiguous()
    known = derivatives(function, x)
    middle, lean, bend, spread = secants(function, x, b, known, bent)
    u = torch.linspace(-1.0, 1.0, 1998, dtype=torch.float64)[:, None, None] * b
    gap = ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x) - known.first * u
    left = (gap - 0.5 * (middle + lean * u) * u.square()).abs()
    # What computed values and derivatives err by is counted where secants are used.
    slack = 4e-15 * (1.0 + x.abs() + u.abs()).square() + DERIVATIVE_ERROR * (u.abs() + u.square())
    assert bool((left <= 0.5 * (bend * u.square() + spread) * u.square() * (1 + 1e-9) + slack).all())


@pytest.mark.parametrize("function", [f for f in SMOOTH if f != "relu2"])
def test_secants_follow_their_neuron(function: Activation) -> None:
    """What leaves a flat neuron flat: its own values on a grid say so, where suprema on the whole line do not."""
    x, b = torch.tensor([24.0], dtype=torch.float64), torch.tensor([1.6], dtype=torch.float64)
    for bent in (False, True):
        _, _, bend, spread = secants(function, x, b, derivatives(function, x), bent)
        assert float(bend * b.square() + spread) < 0.05
    x, b = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64)
    known = derivatives(function, x)
    u = torch.linspace(-1.0, 1.0, 1998, dtype=torch.float64) * b
    curve = 2.0 * (ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x) - known.first * u) / u.square()
    *_, spread = secants(function, x, b, known)
    assert float(spread) <= 1.05 * 0.5 * float(curve.amax() - curve.amin()) + 1e-3


@pytest.mark.parametrize("function", SMOOTH)
def test_expansions_hold_in_real_numbers(function: Activation) -> None:
    """Coefficients and gaps as they were rounded, for moves where rounding is all there is and for large ones."""
    x = torch.tensor([-31.0, -4.0, -1.3, 0.0, 0.7, 2.2, 50.0], dtype=torch.float64)[:, None]
    b = torch.tensor([[0.0, 1e-9, 1e-5, 1e-3, 0.02, 0.3, 2.0, 40.0]], dtype=torch.float64)
    known = derivatives(function, x)
    found = expansions(function, x.expand(-1, 8), b.expand(7, -1), known)
    places = 2.0 * torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1.0
    for i, j in itertools.product(range(7), range(8)):
        center, far = arb(float(x[i])), float(b[0, j])
        # What computed derivatives err by is counted where the gap is used.
        slack = DERIVATIVE_ERROR * sum(far**k for k in range(1, 5))
        first, second = (arb(float(part[i])) for part in known[:2])
        for place in (*places.tolist(), -1.0, 1.0):
            u = arb(place * far)
            move = series(function, center + u)[0] - series(function, center)[0] - first * u
            for order, expansion in enumerate(found, start=1):
                cubic, quartic, gap = (float(part[i, j]) for part in expansion)
                left = move - (second * u**2 / 2 if order > 1 else 0) - cubic * u**3 - quartic * u**4
                assert abs(float(left.mid())) <= gap * (1 + 1e-12) + slack


@pytest.mark.parametrize("function", SMOOTH)
def test_fitted_coefficients_leave_less_than_those_of_taylor(function: Activation) -> None:
    """Where φ is not flat, by a factor of at least three."""
    x = torch.linspace(-0.6, 0.6, 7, dtype=torch.float64)
    b = torch.full_like(x, 1.0)
    known = derivatives(function, x)
    fitted = expansions(function, x, b, known)[3].gap
    u = torch.linspace(-1.0, 1.0, 1999, dtype=torch.float64)[:, None]
    gap = ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x)
    for order, derivative in enumerate(known, start=1):
        gap = gap - derivative * u**order / math.factorial(order)
    assert float((fitted / gap.abs().amax(0)).max()) < 1 / 3
