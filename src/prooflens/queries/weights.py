"""Bounds of attention weights from what is known of the scores: boxes s̲ ≤ s ≤ s̄ for the programs of `simplex`.

Sources, tightest first:

1. `from_differences`: pairwise bounds D[j, k] ≥ a_j − a_k. s_j = 1/(1 + Σ_{k≠j} e^{a_k − a_j}), so
   1/(1 + Σ e^{D[k, j]}) ≤ s_j ≤ 1/(1 + Σ e^{−D[j, k]}) (Eq. `qp_exact_diff`, with proved differences).
2. `from_scores`: a box of scores through the exact vertex-softmax optimum: s_j is increasing in a_j and decreasing in
   every other score, so its extremes are at two vertices (Eq. `softmax_bounds`).
3. `interval_softmax`: numerator and denominator as independent intervals.
4. `piecewise_chord`: one piece of the score range at a time, then the **maximum** over pieces (soundness row 7: the
   score may lie in any piece; the minimum of Eq. `joint_softmax` is not a bound).

3 and 4 contain 2 for every input, so `weight_box` intersects 1 and 2 and lets the simplex tighten the result; they
are here because the paper's tables use them. Everything is rounded outward. `mask` marks the keys that take part; the
others get the weight [0, 0].
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import QueryError
from prooflens.numerics.rounding import TINY, UNIT_ROUNDOFF, down, gamma, up
from prooflens.queries.outward import (
    LIBM_ROUNDINGS,
    exclusive_sum,
    exp_down,
    exp_up,
    scaled_down,
    scaled_up,
    sum_down,
    sum_up,
    together,
)
from prooflens.queries.simplex import Box, tighten

WIDEST_SCORES = 600.0
"""The widest score range that `vertex_softmax` works on; beyond it exponentials underflow and its bound is
trivial."""

Mask = Bool[Tensor, "... S"] | None


def weight_box(
    lower: Float[Tensor, "... S"] | None = None,
    upper: Float[Tensor, "... S"] | None = None,
    differences: Float[Tensor, "... S S"] | None = None,
    mask: Mask = None,
) -> Box:
    """Bound the attention weights that bounds of the scores allow, tightened by the simplex; rounded outward.

    Args:
        lower: lower bounds a̲ of the scores, shape [..., S]; needs `upper`.
        upper: upper bounds ā of the scores, shape [..., S]; needs `lower`.
        differences: D[j, k] ≥ a_j − a_k, shape [..., S, S].
        mask: True at the keys that take part; None for all.

    Returns:
        Bounds s̲ ≤ s ≤ s̄. If both kinds of bounds are given, each weight gets the better of the two.

    Raises:
        QueryError: if neither kind of bounds is given.

    Example:
        >>> low, high = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]]).double()
        >>> box = weight_box(low, high)  # s_0 = e^{a_0}/(e^{a_0} + 1)
        >>> [round(x, 6) for x in (*box.lower.tolist(), *box.upper.tolist())]
        [0.5, 0.25, 0.75, 0.5]
    """
    boxes = []
    if differences is not None:
        boxes.append(from_differences(differences, mask))
    if lower is not None and upper is not None:
        boxes.append(from_scores(lower, upper, mask))
    if not boxes:
        raise QueryError("weight_box needs a box of scores (lower and upper) or pairwise differences")
    low = torch.stack([box.lower for box in boxes]).amax(0)
    high = torch.stack([box.upper for box in boxes]).amin(0)
    return tighten(low, high)


def differences_from_scores(
    lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "... S S"]:
    """Return D[j, k] = ā_j − a̲_k rounded up, and 0 for j = k: what a box of scores says about their differences.

    Args:
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
    """
    size = lower.shape[-1]
    D = up(upper[..., :, None] - lower[..., None, :])
    return D.masked_fill(torch.eye(size, dtype=torch.bool, device=D.device), 0.0)


def from_differences(differences: Float[Tensor, "... S S"], mask: Mask = None) -> Box:
    """Bound weights by pairwise bounds of the scores (source 1).

    1/(1 + Σ_{k≠j} e^{D[k, j]}) ≤ s_j ≤ 1/(1 + Σ_{k≠j} e^{−D[j, k]}).

    Args:
        differences: D[j, k] ≥ a_j − a_k, shape [..., S, S]; the diagonal is not read.
        mask: True at the keys that take part; None for all.
    """
    size = differences.shape[-1]
    absent = torch.eye(size, dtype=torch.bool, device=differences.device)
    if mask is not None:
        absent = absent | ~mask[..., None, :]
    most = sum_up(exp_up(differences.mT).masked_fill(absent, 0.0))
    least = sum_down(exp_down(-differences).masked_fill(absent, 0.0)).clamp_min(0.0)
    return _masked(Box(scaled_down(1.0 / (1.0 + most), 2), scaled_up(1.0 / (1.0 + least), 2)), mask)


def from_scores(lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"], mask: Mask = None) -> Box:
    """Bound weights by a box of scores (source 2): the exact range of every weight. Complexity: O(S).

    Args:
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
        mask: True at the keys that take part; None for all.
    """
    low, high = _exponentials(lower, upper, mask)
    size = lower.shape[-1]
    rest_low = scaled_down(exclusive_sum(low.lower), 2 * size)
    rest_high = scaled_up(exclusive_sum(high.upper), 2 * size)
    return _masked(Box(_share_down(low.lower, rest_high), _share_up(high.upper, rest_low)), mask)


def interval_softmax(lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"], mask: Mask = None) -> Box:
    """Bound weights by interval arithmetic (source 3): e^{a̲_j} / Σ e^{ā} ≤ s_j ≤ e^{ā_j} / Σ e^{a̲}.

    Args:
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
        mask: True at the keys that take part; None for all.
    """
    low, high = _exponentials(lower, upper, mask)
    total_low, total_high = sum_down(low.lower).clamp_min(0.0), sum_up(high.upper)
    below = scaled_down(low.lower / total_high[..., None], 1)
    above = scaled_up(high.upper / total_low[..., None], 1)
    return _masked(Box(below, above), mask)


def chord_pieces(
    lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"], pieces: int, mask: Mask = None
) -> Box:
    """Bound s_j on each piece of the range of a_j, as [pieces, ..., S] (Eq. `piecewise_upper`).

    On [a_p, a_{p+1}] the chord of e^a is at most e^{a_{p+1}} and Z is at least e^{a_p} + Σ_{k≠j} e^{a̲_k}; the lower
    side is e^{a_p} over e^{a_{p+1}} + Σ_{k≠j} e^{ā_k}.

    Args:
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
        pieces: how many pieces of equal length, at least 1.
        mask: True at the keys that take part; None for all.
    """
    if pieces < 1:
        raise QueryError(f"piecewise chords need at least one piece, got {pieces}")
    fractions = torch.arange(1, pieces, dtype=torch.float64) / pieces
    inner = [lower + (upper - lower) * t for t in fractions.tolist()]
    edges = torch.stack([lower, *inner, upper])
    shift = _shift(upper, mask)
    low, high = _exponentials(lower, upper, mask)
    size = lower.shape[-1]
    rest_low = scaled_down(exclusive_sum(low.lower), 2 * size)
    rest_high = scaled_up(exclusive_sum(high.upper), 2 * size)
    start, end = edges[:-1] - shift, edges[1:] - shift
    starts_low, ends_high = exp_down(down(start)), exp_up(up(end))
    below = scaled_down(starts_low / scaled_up(ends_high + rest_high, 1), 1)
    above = scaled_up(ends_high / (starts_low + rest_low), 2)
    return _masked(Box(below, above), mask)


def piecewise_chord(
    lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"], pieces: int = 4, mask: Mask = None
) -> Box:
    """Bound weights piece by piece (source 4): the largest upper and the smallest lower bound of all pieces.

    Args:
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
        pieces: how many pieces of equal length, at least 1.
        mask: True at the keys that take part; None for all.
    """
    parts = chord_pieces(lower, upper, pieces, mask)
    return Box(parts.lower.amin(0), parts.upper.amax(0))


def mass_from_scores(
    group: Bool[Tensor, "... S"],
    lower: Float[Tensor, "... S"],
    upper: Float[Tensor, "... S"],
    mask: Mask = None,
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return the exact range of the mass on a group over a box of scores: group low and rest high, then the reverse.

    Args:
        group: True at the tokens of the group, shape [..., S].
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
        mask: True at the keys that take part; None for all.
    """
    low, high = _exponentials(lower, upper, mask)
    inside_low, inside_high = _sums(low.lower, high.upper, group)
    outside_low, outside_high = _sums(low.lower, high.upper, ~group)
    return _share_down(inside_low, outside_high), _share_up(inside_high, outside_low)


def mass_from_differences(
    group: Bool[Tensor, "... S"], differences: Float[Tensor, "... S S"], mask: Mask = None
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Bound the mass on a group E by D[j, k] ≥ a_j − a_k, through the odds Σ_{j∈E} 1/Σ_{k∉E} e^{a_k − a_j}.

    Args:
        group: True at the tokens of the group, shape [..., S].
        differences: D, shape [..., S, S].
        mask: True at the keys that take part; None for all.
    """
    present = torch.ones_like(group) if mask is None else mask
    inside, outside = group & present, ~group & present
    odds_low = _odds_down(differences, inside, outside)
    odds_against = _odds_down(differences, outside, inside)
    below = torch.where(odds_low.isinf(), 1.0, odds_low / (1.0 + odds_low))
    above = 1.0 / (1.0 + odds_against)
    return scaled_down(below, 3), scaled_up(above, 3).clamp_max(1.0)


def vertex_softmax(
    cost: Float[Tensor, "... S"],
    lower: Float[Tensor, "... S"],
    upper: Float[Tensor, "... S"],
    mask: Mask = None,
) -> Float[Tensor, "..."]:
    """Bound max Σ c_j s_j over a box of scores from above: proved, and exact up to rounding (Vertex-Softmax).

    At the optimum v, raising a_j helps if and only if c_j > v: the scores of the costliest tokens are at their upper
    ends, the others at their lower ones. All S + 1 thresholds come from prefix sums, in O(S log S). If weights are
    off by a relative δ, the average moves by at most 2δ(max c − min c).

    Args:
        cost: c, shape [..., S].
        lower: a̲, shape [..., S].
        upper: ā, shape [..., S].
        mask: True at the keys that take part; None for all.

    Example:
        >>> cost, low, high = torch.tensor([[1.0, 0.0], [0.0, 0.0], [math.log(3.0), 0.0]]).double()
        >>> round(vertex_softmax(cost, low, high).item(), 6)  # s_0 = 3/(3 + 1)
        0.75
    """
    cost, lower, upper = together(cost, lower, upper)
    if mask is None:
        mask = torch.ones_like(lower, dtype=torch.bool)
    mask = mask.expand(lower.shape)
    shift = _shift(upper, mask)
    largest = cost.masked_fill(~mask, -math.inf).amax(-1, keepdim=True)
    smallest = cost.masked_fill(~mask, math.inf).amin(-1, keepdim=True)
    depth = (shift - lower.masked_fill(~mask, math.inf).amin(-1, keepdim=True)).clamp(0.0, WIDEST_SCORES)
    # Costs relative to the smallest: an average of numbers in [0, range], no cancellation.
    above = (cost - smallest).masked_fill(~mask, 0.0)
    order = above.argsort(-1, descending=True)
    c = above.gather(-1, order)
    weight_low = (lower - shift).exp().masked_fill(~mask, 0.0).gather(-1, order)
    weight_high = (upper - shift).exp().masked_fill(~mask, 0.0).gather(-1, order)
    top, bottom = _thresholds(c * weight_high, c * weight_low), _thresholds(weight_high, weight_low)
    best = (top / bottom).nan_to_num(nan=0.0).amax(-1, keepdim=True)
    roundings = 2.0 * (LIBM_ROUNDINGS + depth) + 4.0 * cost.shape[-1] + 16.0
    span = largest - smallest
    value = smallest + best + span * (2.0 * UNIT_ROUNDOFF) * roundings
    # A product c·w that vanishes loses 2⁻¹⁰⁷⁴, by weights that add up to at least e^{−depth}.
    value = up(value + 4.0 * UNIT_ROUNDOFF * (smallest.abs() + span) + TINY + 2.0**-1060 * depth.exp())
    trivial = ~((depth < WIDEST_SCORES) & (value <= largest))
    return torch.where(trivial, largest, value).squeeze(-1)


def _thresholds(raised: Float[Tensor, "... S"], kept: Float[Tensor, "... S"]) -> Float[Tensor, "... T"]:
    """For k = 0 … S, return the sum of the first k of `raised` and the rest of `kept`; all are ≥ 0."""
    zero = torch.zeros_like(raised[..., :1])
    first = torch.cat([zero, raised], -1).cumsum(-1)
    others = torch.cat([zero, kept.flip(-1)], -1).cumsum(-1).flip(-1)
    return first + others


def _odds_down(
    differences: Float[Tensor, "... S S"], inside: Bool[Tensor, "... S"], outside: Bool[Tensor, "... S"]
) -> Float[Tensor, "..."]:
    """Bound Σ_inside e^a / Σ_outside e^a from below; ∞ if nothing is outside."""
    against = sum_up(exp_up(differences.mT).masked_fill(~outside[..., None, :], 0.0))
    shares = scaled_down(1.0 / against, 1).masked_fill(~inside, 0.0)
    odds = sum_down(shares).clamp_min(0.0)
    return torch.where(outside.any(-1), odds, torch.full_like(odds, math.inf))


def _shift(upper: Float[Tensor, "... S"], mask: Mask) -> Float[Tensor, "... 1"]:
    visible = upper if mask is None else upper.masked_fill(~mask, -math.inf)
    return visible.amax(-1, keepdim=True)


def _exponentials(
    lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"], mask: Mask
) -> tuple[Box, Box]:
    """Bound e^{a̲ − M} and e^{ā − M}, where M is the largest ā of the keys that take part; 0 at the other keys."""
    shift = _shift(upper, mask)
    out = []
    for edge in (lower, upper):
        moved = edge - shift
        low, high = exp_down(down(moved)), exp_up(up(moved))
        if mask is not None:
            low, high = low.masked_fill(~mask, 0.0), high.masked_fill(~mask, 0.0)
        out.append(Box(low, high))
    return out[0], out[1]


def _sums(
    low: Float[Tensor, "... S"], high: Float[Tensor, "... S"], group: Bool[Tensor, "... S"]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    below = sum_down(low.masked_fill(~group, 0.0)).clamp_min(0.0)
    above = high.masked_fill(~group, 0.0).sum(-1) * (1.0 + gamma(2 * low.shape[-1] + 4))
    return below, above


def _share_down(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at most x/(x + y), for x, y ≥ 0."""
    total = x + y
    return torch.where(total > 0, scaled_down(x / total, 2), torch.zeros_like(x))


def _share_up(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return at least x/(x + y), for x, y ≥ 0; 1 for NaN, since nothing is known there."""
    total = x + y
    share = torch.where(total == 0, torch.zeros_like(x), scaled_up(x / total, 2))
    return share.nan_to_num(nan=1.0).clamp_max(1.0)


def _masked(box: Box, mask: Mask) -> Box:
    """Set the weights of keys that take no part to [0, 0], and those that infinite scores made NaN to [0, 1]."""
    low, high = box.lower.nan_to_num(nan=0.0), box.upper.nan_to_num(nan=1.0).clamp_max(1.0)
    if mask is None:
        return Box(low, high)
    return Box(low.masked_fill(~mask, 0.0), high.masked_fill(~mask, 0.0))
