"""Derivatives of activations up to the fourth, and bounds of the second to fifth on the whole line.

`taylor` reads an activation only through these. The suprema are rounded up, and
`tests/engines/relaxations/test_derivatives.py` checks them with ball arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prooflens.errors import EngineError
from prooflens.models.sites import ACTIVATIONS, Function

DERIVATIVE_ERROR = 2.0**-40
"""The absolute error of a computed φ′, φ″, φ‴ or φ⁗.

Each is a sum of a few products of bounded factors, and the factors that grow (x, x³) are multiplied by ones that
decay faster, so a few hundred u = 2⁻⁵³ would do. 2⁻⁴⁰ = 8192u; the tests compare with ball arithmetic.
"""

SECOND: dict[Function, float] = {
    "gelu": 0.8,
    "gelu_tanh": 0.8,
    "silu": 0.51,
    "tanh": 0.78,
    "relu": 0.0,
    "jump": 0.0,
    "relu2": 2.0,
}
"""An upper bound of sup |φ″|; of the jump away from 0, here and below."""

THIRD: dict[Function, float] = {
    "gelu": 0.8,
    "gelu_tanh": 0.8,
    "silu": 0.33,
    "tanh": 2.1,
    "relu": 0.0,
    "jump": 0.0,
    "relu2": 0.0,
}
"""An upper bound of sup |φ‴|; of ReLU² away from its kink, as for the next ones."""

FOURTH: dict[Function, float] = {
    "gelu": 1.7,
    "gelu_tanh": 1.7,
    "silu": 0.53,
    "tanh": 4.3,
    "relu": 0.0,
    "jump": 0.0,
    "relu2": 0.0,
}
"""An upper bound of sup |φ⁗|."""

FIFTH: dict[Function, float] = {
    "gelu": 3.0,
    "gelu_tanh": 3.0,
    "silu": 0.7,
    "tanh": 18.0,
    "relu": 0.0,
    "jump": 0.0,
    "relu2": 0.0,
}
"""An upper bound of sup |φ⁽⁵⁾|."""


GRID = 24
"""How many cells a grid has on each side of the centre."""


class Derivatives(NamedTuple):
    """φ′, φ″, φ‴ and φ⁗ at some points."""

    first: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor


def exp_tail(x: Tensor, first: int, power: int, terms: int = 32) -> Tensor:
    """Bound Σ_{k ≥ first} x^{k−power}/k! from above, for x ≥ 0 and power ≤ first.

    With T the last term that is added, the rest is at most T(eˣ − 1) ≤ T·x·eˣ, because K!/(K + j)! ≤ 1/j!. All terms
    are positive, so 1 + 2⁻³² covers their few hundred roundings.

    Args:
        x: where the series is evaluated.
        first: the first k.
        power: how many powers of x are divided out.
        terms: how many terms are added one by one.

    Example:
        >>> bound = exp_tail(torch.tensor(1.0, dtype=torch.float64), first=1, power=1).item()
        >>> 0.0 <= bound - (math.e - 1.0) < 1e-8
        True
    """
    term = x ** (first - power) / math.factorial(first)
    found = term
    for k in range(first + 1, first + terms):
        term = term * x / k
        found = found + term
    return (found + term * x * torch.exp(x)) * (1.0 + 2.0**-32)


class Expansion(NamedTuple):
    """φ(x + u) = φ + φ′u [+ ½φ″u²] + cubic u³ + quartic u⁴ ± gap, for |u| ≤ b."""

    cubic: Tensor
    quartic: Tensor
    gap: Tensor


def expansions(function: Function, x: Tensor, b: Tensor, known: Derivatives) -> list[Expansion]:
    """Expand an activation to first order (without φ″), second, third and fourth order, with proved gaps.

    First and second order are Taylor's. For small b so are the others, with the gap of the mean value theorem. For
    large b that gap is far too large, and a grid says more: between two points at distance h, a gap g exceeds the
    larger of its values there by at most sup|g″| h²/8. Since a grid proves the gap of *any* coefficients, third and
    fourth order are fitted: they leave an eighth of what Taylor's coefficients leave of u⁵ and u⁶. ReLU's kink and the
    jump at 0 are not counted.

    Rounding: a gap is a sum of five terms of size at most (1 + |x| + b)(1 + b)⁴, each with a few roundings and one
    libm call; 2⁻⁴⁴ = 512u covers them. 0.126 in place of 1/8 covers the rounding of h² and of the grid's points.

    Args:
        function: the activation φ.
        x: where it is expanded.
        b: how far u may go.
        known: the computed derivatives at x.
    """
    most = (SECOND[function], THIRD[function], FOURTH[function], FIFTH[function])
    zero = torch.zeros_like(b)
    cubic, quartic = (zero + part / math.factorial(k) for k, part in ((3, known.third), (4, known.fourth)))
    kept = ((zero, zero), (zero, zero), (cubic, zero), (cubic, quartic))
    means = [m * b ** (k + 1) / math.factorial(k + 1) for k, m in enumerate(most, 1)]
    found = [Expansion(*taylor, mean) for taylor, mean in zip(kept, means, strict=True)]
    if function in ("relu", "jump"):
        return found
    if function == "relu2":
        # Beyond the kink, by up to b − |x|, x + u squared is all that second order misses, on either side.
        missed = kinked(x, b).square() * (1.0 + 2.0**-50)
        return [found[0], *(Expansion(zero, zero, missed) for _ in range(3))]
    places = torch.linspace(-1.0, 1.0, 2 * GRID + 1, dtype=b.dtype, device=b.device)
    v = places.reshape(-1, *(1 for _ in b.shape))
    u = v * b
    gap = ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x) - known.first * u
    gaps = [gap, gap - 0.5 * known.second * u**2]
    gaps += [gaps[1] - cubic * u**3, gaps[1] - cubic * u**3 - quartic * u**4]
    slack = 2.0**-44 * (1.0 + x.abs() + b) * (1.0 + b) ** 4
    for k in range(1, 5):
        # g″ is Taylor's remainder of φ″ of order k − 1, plus what the fit adds.
        bent = most[k - 1] * b ** (k - 1) / math.factorial(k - 1) + DERIVATIVE_ERROR * (1.0 + b) ** 2
        tried = [(zero, zero)] if k < 3 else [(zero, zero), _fit(gaps[k - 1], v, b, k)]
        for third, fourth in tried:
            left = gaps[k - 1] - third * u**3 - fourth * u**4
            rough = bent + 6.0 * third.abs() * b + 12.0 * fourth.abs() * b**2
            rounding = slack + 2.0**-44 * (third.abs() * b**3 + fourth.abs() * b**4)
            limit = left.abs().amax(0) + rough * (b / GRID).square() * 0.126 + rounding
            better = limit < found[k - 1].gap
            coefficients = kept[k - 1][0] + third, kept[k - 1][1] + fourth
            found[k - 1] = Expansion(
                *(
                    torch.where(better, new, old)
                    for new, old in zip((*coefficients, limit), found[k - 1], strict=True)
                )
            )
    return found


class Secants(NamedTuple):
    """φ(x + u) = φ + φ′u + ½c(u)u² exactly, with |c(u) − middle − lean·u| ≤ bend·u² + spread for |u| ≤ b."""

    middle: Tensor
    lean: Tensor
    bend: Tensor
    spread: Tensor


def secants(function: Function, x: Tensor, b: Tensor, known: Derivatives, bent: bool = False) -> Secants:
    """Enclose the curvature c(u) of secants, by a constant or by a line and a parabola.

    c(u) = 2∫(1 − t)φ″(x + tu)dt, so |c⁽ᵏ⁾| ≤ 2/((k + 1)(k + 2)) sup|φ⁽ᵏ⁺²⁾|. By Taylor |c − φ″ − ⅓φ‴u| is at most
    (|φ⁗|/12 + sup|φ⁽⁵⁾|b/60)u². For large b a grid says more: of g = c less a line and a parabola, |g| exceeds its
    values on the grid by at most sup|g″|h²/8 between two points at distance h, and (c − φ″ − ⅓φ‴u)/u² moves by at most
    sup|φ⁽⁵⁾|/60 per unit of u. The least of bend·b² + spread is taken. ReLU² moves by 2 more where its kink is in
    reach; other kinks are not counted.

    Rounding: φ(x + u) − φ − φ′u errs by 2⁻⁴⁴(1 + |x| + b)(1 + b) and by 2⁻⁴⁰|u| for φ′, as in `expansions`.

    Args:
        function: the activation φ.
        x: where it is expanded.
        b: how far u may go.
        known: the computed derivatives at x.
        bent: enclose it by a line and a parabola, not by a constant.
    """
    zero = torch.zeros_like(b)
    slack = DERIVATIVE_ERROR * (1.0 + b + b.square())
    if not bent or function in ("relu", "jump", "relu2"):
        spread = known.third.abs() * b / 3.0 + FOURTH[function] * b.square() / 12.0 + slack
        found = Secants(known.second, zero, zero, spread + 2.0 * (kinked(x, b) > 0.0) * (function == "relu2"))
    else:
        most = known.fourth.abs() / 12.0 + FIFTH[function] * b / 60.0
        found = Secants(known.second, known.third / 3.0, most, slack)
    if function in ("relu", "jump", "relu2"):
        return found
    places = torch.arange(-GRID, GRID + 1, dtype=b.dtype, device=b.device) / GRID
    far = b.clamp(min=2.0**-30)
    v = places[places != 0.0].reshape(-1, *(1 for _ in b.shape))
    u, step = v * far, far / GRID
    curve = 2.0 * (ACTIVATIONS[function](x + u) - ACTIVATIONS[function](x) - known.first * u) / u.square()
    rounding = 2.0**-43 * (1.0 + x.abs() + b) * (1.0 + b) / step.square() + 2.0**-39 / step + 2.0**-39
    lean = bend = zero
    if bent:
        ratio = (curve - known.second - known.third / 3.0 * u) / u.square()
        most = ratio.abs().amax(0) + FIFTH[function] / 60.0 * step + (rounding + 2.0**-38 * b) / step.square()
        found = _closer(found, Secants(known.second, known.third / 3.0, most, slack), b)
        even = v.square() - v.square().mean()
        lean = (curve * v).sum(0) / v.square().sum() / far
        bend = (curve * even).sum(0) / even.square().sum() / far.square()
    left = curve - lean * u - bend * u.square()
    high = torch.maximum(left.amax(0), known.second)
    low = torch.minimum(left.amin(0), known.second)
    rounding = rounding + 2.0**-44 * (lean.abs() * far + bend.abs() * far.square())
    between = (FOURTH[function] / 6.0 + 2.0 * bend.abs()) * step.square() * 0.126
    spread = 0.5 * (high - low) + between + rounding
    return _closer(found, Secants(0.5 * (high + low), lean, bend.abs(), spread), b)


def _closer(one: Secants, other: Secants, b: Tensor) -> Secants:
    """Return the enclosure that leaves less at |u| = b, one by one."""
    left, right = (x.bend * b.square() + x.spread for x in (one, other))
    return Secants(*(torch.where(right < left, new, old) for new, old in zip(other, one, strict=True)))


def kinked(x: Tensor, b: Tensor) -> Tensor:
    """Return how far x + u, |u| ≤ b, gets beyond the kink of a ReLU at 0, seen from x, rounded up; 0 if it does not.

    Args:
        x: the centre.
        b: how far u may go.
    """
    return (b - x.abs()).clamp(min=0.0) * (1.0 + 2.0**-50)


def _fit(gap: Tensor, v: Tensor, b: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return coefficients of u³ and, in fourth order, of u⁴ that take most of a gap away, at places u = vb.

    Least squares with more weight near the ends is near to the best in the largest error.
    """
    weight = (1.02 - v.square()) ** -0.5
    scale = b.clamp(min=2.0**-60)
    odd, even = 0.5 * (gap - gap.flip(0)), 0.5 * (gap + gap.flip(0))
    third = (weight * odd * v**3).sum(0) / (weight * v**6).sum(0) / scale**3
    fourth = (weight * even * v**4).sum(0) / (weight * v**8).sum(0) / scale**4
    return third, fourth if order == 4 else torch.zeros_like(fourth)


def derivatives(function: Function, x: Tensor) -> Derivatives:
    """Return φ′(x), φ″(x), φ‴(x) and φ⁗(x); those of ReLU, ReLU² and the jump are those away from 0.

    Args:
        function: the activation φ.
        x: where to evaluate.

    Raises:
        EngineError: if the derivatives of the activation are not known.

    Example:
        >>> derivatives("tanh", torch.zeros(1, dtype=torch.float64)).first.item()
        1.0
    """
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
    if function == "relu2":
        zero = torch.zeros_like(x)
        return Derivatives(2.0 * torch.relu(x), 2.0 * (x > 0).to(x), zero, zero)
    if function == "jump":
        zero = torch.zeros_like(x)
        return Derivatives(zero, zero, zero, zero)
    raise EngineError(f"the derivatives of {function} are not known")


def _tanh(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # From e^{-2|x|}, so that what decays keeps its relative accuracy.
    t, small = torch.tanh(x), torch.exp(-2.0 * x.abs())
    first = 4.0 * small / (1.0 + small).square()
    return first, -2.0 * t * first, first * (6.0 * t * t - 2.0), t * first * (16.0 - 24.0 * t * t)
