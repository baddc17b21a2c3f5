"""The range of Shannon entropy H(s) = −Σ s log s, in nats, over Δ_S ∩ [s̲, s̄] (`prop:entropy`, both sides repaired).

Below, by majorisation (soundness row 5; the paper's greedy vertex need not be the minimiser). Let
M_k = min(sum of the k largest s̄, 1 − sum of the S−k smallest s̲), M_S = 1. No feasible s has k weights of sum above
M_k, so s is majorised by the increments m of M, and H, being Schur-concave, satisfies H(s) ≥ H(m). Any larger,
nondecreasing M̃ ≤ 1 with M̃_S = 1 does as well, which is how rounding is covered. For S ≤ `EXACT_SIZE` the vertices
are enumerated: H is concave, so its minimum over the polytope is at one of them.

Above, by weak duality (row 6; a stopped bisection is a point, not a bound). For every θ > 0, with ν = −1 − log θ,

    H(s) ≤ ν + Σ max_{s̲≤x≤s̄} (h(x) − νx) = Σ h(x_j) + ν(1 − Σ x_j),   x_j = min(s̄_j, max(s̲_j, θ)),

with h(x) = −x log x, because h(x) − νx is concave with its peak at x = θ. The x_j are floats without error, so only
sums and logarithms round. θ is the root of Σx = 1, by Newton steps or by sorting; wherever that stops, the
bound is a bound.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF, down, gamma, up
from prooflens.queries.outward import LIBM_ROUNDINGS, log_down, log_up, sum_slack
from prooflens.queries.simplex import argmin, checked_box

EXACT_SIZE = 12
"""Rows of up to this many tokens get the exact minimum, from S·2^(S−1) vertices."""

NEWTON_STEPS = 8
"""Newton steps for θ before a row is solved by sorting."""

CHUNK = 2**16
"""How many numbers to work on at a time on a CPU, so that a chunk and its temporaries stay in the cache."""

DEVICE_CHUNK = 2**26
"""How many numbers to work on at a time on an accelerator: launches are few, and a chunk takes half a gigabyte."""


def entropy_range(
    lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"], exact: bool = True
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Bound the entropy H over Δ_S ∩ [s̲, s̄] from both sides; both bounds are proved.

    The upper bound is the maximum up to rounding. The lower bound is the minimum up to rounding if `exact` and S ≤
    `EXACT_SIZE`, else the majorisation bound. Complexity: O(S log S) per row, plus S·2^(S−1) for rows that are
    enumerated.

    Args:
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].
        exact: enumerate vertices where that is cheap.

    Returns:
        Lower and upper bounds in nats, shape [...].

    Raises:
        EmptyPolytopeError: if no attention pattern satisfies the bounds.

    Example:
        >>> low, high = entropy_range(torch.zeros(2), torch.ones(2))  # from 0 to log 2
        >>> round(low.item(), 6), round(high.item(), 6)
        (0.0, 0.693147)
    """
    box = checked_box(lower, upper)
    size = box.lower.shape[-1]
    lows, highs = box.lower.reshape(-1, size), box.upper.reshape(-1, size)
    step = max(1, _chunk(lows) // size)
    below = torch.empty(lows.shape[0], dtype=torch.float64, device=lows.device)
    above = torch.empty_like(below)
    for start in range(0, lows.shape[0], step):
        rows = slice(start, start + step)
        below[rows] = _majorisation(lows[rows], highs[rows])
        above[rows] = _dual(lows[rows], highs[rows])
    if exact and size <= EXACT_SIZE:
        _enumerate_open(lows, highs, below)
    shape = box.lower.shape[:-1]
    return below.reshape(shape), above.reshape(shape)


def _chunk(tensor: Tensor) -> int:
    return CHUNK if tensor.device.type == "cpu" else DEVICE_CHUNK


def entropy_of(weights: Float[Tensor, "... S"]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Bound Σ h(s_j) for exactly the floats given, whatever they sum to.

    Args:
        weights: s, shape [..., S].

    Example:
        >>> low, high = entropy_of(torch.tensor([0.5, 0.5]).double())
        >>> low.item() <= math.log(2.0) <= high.item()
        True
    """
    value, slack = _entropy_with_slack(weights)
    return down(value - slack).clamp_min(0.0), up(value + slack)


def _entropy_with_slack(x: Float[Tensor, "... S"]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return Σ h(x_j) and a bound of its error, also if every x_j > 0 carries one relative rounding of its own.

    The logarithm and product cost LIBM_ROUNDINGS + 1 roundings of |x log x|; a relative change u of x moves h(x) by
    at most u·x(|log x| + 1) + O(u²). Below `TINY` the clamp in the logarithm moves x log x by less than `TINY`.
    """
    size = x.shape[-1]
    terms = x * x.clamp_min(TINY).log_().neg_()
    value, magnitude, total = terms.sum(-1), terms.abs().sum(-1), x.sum(-1)
    slack = sum_slack(magnitude, size + LIBM_ROUNDINGS + 3) + gamma(4) * total
    return value, slack + size * TINY


def _majorisation(low: Float[Tensor, "N S"], high: Float[Tensor, "N S"]) -> Float[Tensor, " N"]:
    size = low.shape[-1]
    rounding = 1.0 + gamma(2 * size + 4)
    most = high.sort(-1, descending=True).values.cumsum_(-1).mul_(rounding)
    least = low.sort(-1).values.cumsum_(-1).mul_(1.0 - gamma(2 * size + 4))
    # Of the S−k smallest lower bounds: least[S−k−1], none of them for k = S.
    forced = up(1.0 - least[..., :-1]).flip(-1)
    M = torch.ones_like(most)
    M[..., :-1] = torch.minimum(most[..., :-1], forced).clamp_(max=1.0).cummax(-1).values
    m = M.diff(dim=-1, prepend=torch.zeros_like(M[..., :1]))
    value, slack = _entropy_with_slack(m)
    return down(value - slack).clamp_min_(0.0)


def _dual(low: Float[Tensor, "N S"], high: Float[Tensor, "N S"]) -> Float[Tensor, " N"]:
    size = low.shape[-1]
    theta = _water_level(low, high)
    x = torch.minimum(torch.maximum(theta, low), high)
    value, slack = _entropy_with_slack(x)
    total = x.sum(-1)
    gap = 1.0 - total
    gap_slack = sum_slack(1.0 + total, size + 1)
    level = theta.squeeze(-1)
    nu_low, nu_high = down(-1.0 - log_up(level)), up(-1.0 - log_down(level))
    # ν(1 − Σx) over the four corners of its two intervals, each product rounded once.
    corners = [nu * (gap + side * gap_slack) for nu in (nu_low, nu_high) for side in (-1.0, 1.0)]
    product = torch.stack(corners).amax(0)
    bound = value + product
    rounding = 4.0 * UNIT_ROUNDOFF * (value.abs() + product.abs() + slack) + TINY
    return torch.minimum(up(bound + slack + rounding), log_up(bound.new_tensor(float(size))))


def _water_level(low: Float[Tensor, "N S"], high: Float[Tensor, "N S"]) -> Float[Tensor, "N 1"]:
    """Return θ > 0 near the root of Σ min(s̄, max(s̲, θ)) = 1, a nondecreasing piecewise linear function of θ.

    Newton steps inside a bracket solve most rows; the others are solved through their sorted break points.
    """
    left = torch.full_like(low[..., :1], TINY)
    right = torch.ones_like(left)
    theta = torch.full_like(left, 1.0 / low.shape[-1])
    for _ in range(NEWTON_STEPS):
        gap, free = _gap(theta, low, high)
        left = torch.where(gap >= 0, theta, left)
        right = torch.where(gap <= 0, theta, right)
        newton = theta + gap / free.clamp_min(1)
        inside = (free > 0) & (newton >= left) & (newton <= right)
        theta = torch.where(inside, newton, 0.5 * (left + right))
    settled = _gap(theta, low, high)[0].abs() <= gamma(8 * low.shape[-1])
    rows = (~settled).squeeze(-1).nonzero().flatten()
    theta[rows] = _breakpoint_level(low[rows], high[rows])
    return theta


def _gap(
    theta: Float[Tensor, "N 1"], low: Float[Tensor, "N S"], high: Float[Tensor, "N S"]
) -> tuple[Float[Tensor, "N 1"], Int[Tensor, "N 1"]]:
    """Return 1 − Σ x at a level θ, and how many tokens move with θ."""
    x = torch.minimum(torch.maximum(theta, low), high)
    return 1.0 - x.sum(-1, keepdim=True), (x == theta).sum(-1, keepdim=True)


def _breakpoint_level(low: Float[Tensor, "N S"], high: Float[Tensor, "N S"]) -> Float[Tensor, "N 1"]:
    """Return the root up to rounding: Σ x grows with slope #{s̲ ≤ θ < s̄} between consecutive break points."""
    points, order = torch.cat([low, high], -1).sort(-1)
    slopes = torch.where(order < low.shape[-1], 1.0, -1.0).to(low.dtype).cumsum(-1)
    rises = slopes[..., :-1] * points.diff(dim=-1)
    totals = torch.cat([low.sum(-1, keepdim=True), rises], -1).cumsum(-1)
    segment = ((totals < 1.0).sum(-1, keepdim=True) - 1).clamp_min(0)
    start, total, slope = (t.gather(-1, segment) for t in (points, totals, slopes))
    return (start + (1.0 - total) / slope.clamp_min(1.0)).clamp(TINY, 1.0)


def _enumerate_open(
    low: Float[Tensor, "N S"], high: Float[Tensor, "N S"], below: Float[Tensor, " N"]
) -> None:
    """Raise `below` to the exact minimum, except where a greedy vertex shows that it is reached already."""
    size = low.shape[-1]
    witness = _entropy_with_slack(argmin(-high, low, high))[0]
    open_rows = (witness > below + gamma(64 * size) * math.log(size + 1)).nonzero().flatten()
    step = max(1, _chunk(low) // 2**size)
    for start in range(0, len(open_rows), step):
        rows = open_rows[start : start + step]
        below[rows] = torch.maximum(below[rows], vertex_minimum(low[rows], high[rows]))


def vertex_minimum(low: Float[Tensor, "N S"], high: Float[Tensor, "N S"]) -> Float[Tensor, " N"]:
    """Bound min H from below by enumerating all vertices: proved, and exact up to rounding.

    A vertex has one free token, the others at a bound. It is kept if its free weight is within rounding of its
    bounds, so that none is lost; h is concave, so its minimum over the rounding interval of that weight is at an end.

    Args:
        low: s̲, shape [N, S].
        high: s̄, shape [N, S].
    """
    size = low.shape[-1]
    bits = torch.arange(2**size, device=low.device)[:, None] >> torch.arange(size, device=low.device) & 1
    choice = bits.to(low.dtype)
    totals = low.sum(-1, keepdim=True) + (high - low) @ choice.T
    entropy_low, entropy_high = _point_entropy(low), _point_entropy(high)
    sums = entropy_low.sum(-1, keepdim=True) + (entropy_high - entropy_low) @ choice.T
    scale = 1.0 + high.sum(-1, keepdim=True)
    blur = sum_slack(scale, 2 * size + 4)
    best = torch.full_like(low[:, 0], math.inf)
    for free in range(size):
        at_lower = bits[:, free] == 0
        weight = 1.0 - (totals[:, at_lower] - low[:, free : free + 1])
        floor, ceiling = low[:, free : free + 1], high[:, free : free + 1]
        feasible: Bool[Tensor, "N V"] = (weight >= floor - blur) & (weight <= ceiling + blur)
        ends = [_point_entropy((weight + side * blur).clamp(floor, ceiling)) for side in (-1.0, 1.0)]
        value = sums[:, at_lower] - entropy_low[:, free : free + 1] + torch.minimum(*ends)
        best = torch.minimum(best, value.masked_fill(~feasible, math.inf).amin(-1))
    # Each of the S + 2 partial entropies is at most 1/e and carries a handful of roundings.
    slack = sum_slack(torch.full_like(best, 3.0 * (size + 2)), 2 * size + LIBM_ROUNDINGS + 6)
    return down(best - slack).clamp_min(0.0)


def _point_entropy(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return -x * x.clamp_min(TINY).log()
