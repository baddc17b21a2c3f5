r"""Lines above and below one-dimensional functions: what `crown` replaces every non-linear site by.

A side has three valid lines, y ≤ λ_i x + μ_i (or ≥), i = 0, 1, 2. Any convex combination of them is valid as well:
the one with parameter τ ∈ [−1, 1] is

    line 1 + τ⁺(line 2 − line 1) + τ⁻(line 0 − line 1).

`crown` takes τ = 0; `alpha-crown` moves τ. Lines are proved before any of that, so whatever τ is, the bound is.

**Convex φ on [l, u].** Above: the chord. For any slope λ, φ(x) − λx is convex, so its maximum is at an end. Below:
the tangents at l, at a point between and at u. With the slope λ as computed, |λ − φ'(t)| ≤ γ|λ|,

    φ(x) − λx ≥ φ(t) − λt − γ|λ|(u − l).

**Activations.** For any slope the range of φ(x) − λ(x − c) is proved in `relaxations.activations.deviation`; of the
slopes tried (secant and tangents) the middle line takes the one with the least area, the others lean to either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.activations import LIBM, deviation
from prooflens.models.sites import ACTIVATIONS, Function
from prooflens.numerics import down, up
from prooflens.numerics.rounding import TINY
from prooflens.queries.simplex import Box

TANGENTS = 9
"""How many points of an interval offer their derivative as a slope."""


class Lines(NamedTuple):
    """Three lines λx + μ on one side of a function."""

    slope: Float[Tensor, " 3 *shape"]
    offset: Float[Tensor, " 3 *shape"]

    def at(self, tau: Float[Tensor, " f *shape"] | None) -> tuple[Tensor, Tensor]:
        """Return slope and offset of the combination τ, one for all forms or one per form."""
        return mixed(self.slope, tau), mixed(self.offset, tau)

    def part(self, token: int, dim: int = 0) -> Lines:
        """Return the lines of one token; its dimension is kept."""
        return Lines(*(end.narrow(dim + 1, token, 1) for end in self))

    @property
    def size(self) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """The largest |λ| and |μ|."""
        return self.slope.abs().amax(0), self.offset.abs().amax(0)


class LineRelaxation(NamedTuple):
    """Lines below and above a function."""

    lower: Lines
    upper: Lines

    def at(self, token: int, dim: int = 0) -> LineRelaxation:
        """Return the lines of one token, which is counted along a dimension."""
        return LineRelaxation(self.lower.part(token, dim), self.upper.part(token, dim))


def mixed(three: Float[Tensor, " 3 *shape"], tau: Float[Tensor, " f *shape"] | None) -> Tensor:
    """Return the combination of three lines with parameter τ, with a leading dimension of forms."""
    if tau is None:
        return three[1:2]
    low, middle, high = three
    made: Tensor = middle + tau.clamp(min=0.0) * (high - middle) + (-tau).clamp(min=0.0) * (low - middle)
    return made


def flat(box: Box) -> LineRelaxation:
    """Return constant lines: the box itself."""
    zero = torch.zeros_like(box.lower).expand(3, *box.lower.shape)
    return LineRelaxation(*(Lines(zero, end.expand(3, *end.shape)) for end in box))


def convex(
    function: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    box: Box,
    between: Float[Tensor, "*shape"] | None = None,
) -> LineRelaxation:
    """Return chord and tangents of a convex function.

    Args:
        function: φ, computed to 32 roundings.
        derivative: φ', computed to 32 roundings.
        box: the interval.
        between: where the middle tangent touches; None for the middle.
    """
    low, high = box
    middle = 0.5 * low + 0.5 * high if between is None else torch.minimum(torch.maximum(between, low), high)
    at = torch.stack((low, middle, high))
    value, slope = function(at), derivative(at)
    slack = LIBM * (value.abs() + slope.abs() * (at.abs() + (high - low))) + TINY
    tangents = Lines(slope, value - slope * at - 2.0 * slack)
    width = (high - low).clamp(min=TINY)
    chord = torch.minimum(torch.maximum((value[2] - value[0]) / width, slope[0]), slope[2])
    ends = value[[0, 2]] - chord * at[[0, 2]]
    rounding = LIBM * (value[[0, 2]].abs() + chord.abs() * at[[0, 2]].abs()) + TINY
    above = (ends + 2.0 * rounding).amax(0)
    return LineRelaxation(tangents, Lines(chord.expand(3, *chord.shape), above.expand(3, *above.shape)))


def activation(function: Function, box: Box) -> LineRelaxation:
    """Return lines of a model's activation, or of the jump of features, on a box of its inputs."""
    if function == "relu":
        return _relu(box)
    if function == "jump":
        return _jump(box)
    if function == "relu2":
        return convex(ACTIVATIONS[function], lambda x: 2.0 * torch.relu(x), box)
    low, high = box
    c = 0.5 * low + 0.5 * high
    tried = _slopes(function, box)
    ranges = [_range(function, c, box, slope) for slope in tried]
    above = torch.stack([found.upper for found in ranges])
    below = torch.stack([found.lower for found in ranges])
    slopes = torch.stack(tried)
    # The mean of a line over the interval is its value at c: the least area above φ, the largest below.
    order = slopes.argsort(0)
    pick_up = _three(above.argmin(0, keepdim=True), order)
    pick_low = _three(below.argmax(0, keepdim=True), order)
    return LineRelaxation(
        _through(slopes, below, pick_low, c, -1.0), _through(slopes, above, pick_up, c, 1.0)
    )


def softcap(cap: float, box: Box) -> LineRelaxation:
    """Return lines of c·tanh(x/c): if tanh(y) ≤ λy + μ on the box of y = x/c, then c·tanh(x/c) ≤ λx + cμ."""
    inner = activation("tanh", Box(down(box.lower / cap), up(box.upper / cap)))
    (low, below), (high, above) = inner
    return LineRelaxation(Lines(low, down(below * cap)), Lines(high, up(above * cap)))


def _relu(box: Box) -> LineRelaxation:
    """Return lines of a ReLU: below an unstable one any λx with λ ∈ [0, 1], above it the chord.

    A stable one is its own line.
    """
    low, high = box
    zero, one = torch.zeros_like(low), torch.ones_like(low)
    on, off = low >= 0, high <= 0
    lean = torch.where(high > -low, one, zero)
    below = torch.stack((zero, lean, one))
    below = torch.where(on, one, torch.where(off, zero, below))
    width = (high - low).clamp(min=TINY)
    chord = torch.where(on, one, torch.where(off, zero, (high / width).clamp(0.0, 1.0)))
    # relu(x) − λx is convex: −λl at l, (1 − λ)u at u.
    ends = torch.maximum(-chord * low, high - chord * high) + 4.0 * LIBM * (low.abs() + high.abs())
    offset = torch.where(on | off, zero, ends)
    return LineRelaxation(
        Lines(below, torch.zeros_like(below)),
        Lines(chord.expand(3, *chord.shape), offset.expand(3, *offset.shape)),
    )


def _jump(box: Box) -> LineRelaxation:
    """Return lines of the jump, which is 1 above 0 and 0 at 0 and below.

    With 0 < u in reach every λx, 0 ≤ λ ≤ 1/u, is below it; with l ≤ 0 in reach every 1 + λx, 0 ≤ λ ≤ −1/l, is above it.
    Where it cannot jump it is a constant.
    """
    low, high = box
    on, off = low > 0, high <= 0
    zero, one = torch.zeros_like(low), torch.ones_like(low)
    # Any smaller slope is as valid: rounded inward, and none so steep that the offsets' rounding is all there is.
    steep_low = (1.0 - 2.0**-50) / high.clamp(min=STEEPEST)
    steep_high = (1.0 - 2.0**-50) / (-low).clamp(min=STEEPEST)
    below = torch.stack((zero, torch.where(high > -low, steep_low, zero), steep_low))
    above = torch.stack((zero, torch.where(-low > high, steep_high, zero), steep_high))
    return LineRelaxation(
        Lines(torch.where(on | off, zero, below), torch.where(on, one, zero).expand(3, *zero.shape)),
        Lines(torch.where(on | off, zero, above), torch.where(off, zero, one).expand(3, *zero.shape)),
    )


STEEPEST = 2.0**-30
"""Lines at a jump are no steeper than one over this."""


def _slopes(function: Function, box: Box) -> list[Tensor]:
    """Return the secant's slope and derivatives across the interval; any slope is valid, so they need no proof."""
    low, high = box
    phi = ACTIVATIONS[function]
    width = (high - low).clamp(min=TINY)
    secant = torch.where(high > low, (phi(high) - phi(low)) / width, 0.0).clamp(-2.0, 2.0)
    found = [secant]
    with torch.enable_grad():
        for share in torch.linspace(0.0, 1.0, TANGENTS).tolist():
            x = (low + (high - low) * share).detach().requires_grad_()
            (slope,) = torch.autograd.grad(phi(x).sum(), x)
            found.append(slope)
    return found


def _range(function: Function, c: Tensor, box: Box, slope: Tensor) -> Box:
    """Bound φ(x) − λ(x − c)."""
    made = deviation(function, c, box, slope, torch.zeros_like(slope))
    return Box(made.value - made.error, made.value + made.error)


def _three(best: Tensor, order: Tensor) -> Tensor:
    """Return indices [3, shape] of the flattest slope, the best and the steepest."""
    return torch.cat((order[:1], best, order[-1:]))


def _through(slopes: Tensor, values: Tensor, pick: Tensor, c: Tensor, side: float) -> Lines:
    """Return lines λ(x − c) + v as λx + μ, with μ moved outward by its rounding."""
    slope, value = slopes.gather(0, pick), values.gather(0, pick)
    slack = LIBM * (value.abs() + slope.abs() * c.abs()) + TINY
    return Lines(slope, value - slope * c + side * slack)
