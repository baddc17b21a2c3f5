"""Linear programs over Δ_S ∩ [s̲, s̄]: attention weights that sum to 1 and lie in a box.

Every bound is the dual value of its program at one multiplier ν (weak duality): for all s with Σs = 1, s̲ ≤ s ≤ s̄,

    Σ c_j s_j  =  ν + Σ (c_j − ν) s_j  ≥  ν + Σ min((c_j − ν) s̲_j, (c_j − ν) s̄_j)          for every real ν.

The greedy allocation of the paper finds the ν at which this is an equality (the cost of the token that receives the
last of the budget), so the value is exact; and because any ν gives a true bound, rounding can only cost tightness.
Values are moved outward by an a-priori bound of their own rounding. Masked tokens enter as s̲ = s̄ = 0.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.errors import EmptyPolytopeError
from prooflens.numerics.rounding import down, up
from prooflens.queries.outward import sum_down, sum_slack, sum_up, together


class Box(NamedTuple):
    """Bounds s̲ ≤ s ≤ s̄ of attention weights (or of scores), with any leading dimensions."""

    lower: Float[Tensor, "... S"]
    upper: Float[Tensor, "... S"]


def checked_box(lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]) -> Box:
    """Return the box within [0, 1], or raise if it certainly misses the simplex.

    A box is refused if s̲_j > s̄_j, Σs̲ > 1 or Σs̄ < 1 holds in real arithmetic. Within rounding of these borders the
    programs below stay valid: their slack covers it.

    Args:
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Raises:
        EmptyPolytopeError: if no attention pattern satisfies the bounds; the message names the row and the sums.
    """
    lower, upper = together(lower, upper)
    if bool(lower.isnan().any() | upper.isnan().any()):
        raise EmptyPolytopeError("weight bounds contain NaN: no attention pattern can be compared with them")
    box = Box(lower.clamp_min(0.0), upper.clamp_max(1.0))
    crossed = box.lower > box.upper
    if bool(crossed.any()):
        *row, token = (int(i) for i in crossed.nonzero()[0])
        where = (*row, token)
        raise EmptyPolytopeError(
            f"weight bounds{_at(row)} contradict each other at token {token}: "
            f"lower {float(box.lower[where])!r} exceeds upper {float(box.upper[where])!r}"
        )
    _refuse(sum_down(box.lower) > 1.0, box.lower, "lower bounds", "more")
    _refuse(sum_up(box.upper) < 1.0, box.upper, "upper bounds", "less")
    return box


def _at(row: list[int]) -> str:
    return f" of row {tuple(row)}" if row else ""


def _refuse(bad: Bool[Tensor, "..."], bound: Float[Tensor, "... S"], side: str, relation: str) -> None:
    if bool(bad.any()):
        row = [int(i) for i in bad.nonzero()[0]] if bad.ndim else []
        total = float(bound[tuple(row)].sum())
        raise EmptyPolytopeError(
            f"no attention pattern satisfies the weight bounds{_at(row)}: "
            f"the {side} sum to {total!r}, {relation} than 1"
        )


def minimise(
    cost: Float[Tensor, "... S"], lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "..."]:
    """Bound min Σ c_j s_j over Δ_S ∩ [s̲, s̄] from below: proved, and equal to the minimum up to rounding.

    This is `prop:cert_attn` and `prop:lp_simplex` for a general cost. Complexity: O(S log S) per row.

    Args:
        cost: c, shape [..., S].
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Example:
        >>> cost, lower, upper = torch.tensor([[2.0, 5.0], [0.0, 0.25], [0.5, 1.0]]).double()
        >>> round(minimise(cost, lower, upper).item(), 9)  # s = (0.5, 0.5)
        3.5
    """
    box = checked_box(lower, upper)
    cost, low, high = together(cost, *box)
    nu = _multiplier(cost, low, high)
    reduced = cost - nu
    terms = reduced * torch.where(reduced >= 0, low, high)
    value = nu.squeeze(-1) + terms.sum(-1)
    magnitude = nu.squeeze(-1).abs() + terms.abs().sum(-1)
    # Two roundings per term (difference, product) and one more addition.
    return down(value - sum_slack(magnitude, cost.shape[-1] + 3))


def maximise(
    cost: Float[Tensor, "... S"], lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "..."]:
    """Bound max Σ c_j s_j over Δ_S ∩ [s̲, s̄] from above: proved, and equal to the maximum up to rounding.

    Args:
        cost: c, shape [..., S].
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Example:
        >>> cost, lower, upper = torch.tensor([[2.0, 5.0], [0.25, 0.0], [0.5, 1.0]]).double()
        >>> round(maximise(cost, lower, upper).item(), 9)  # s = (0.25, 0.75)
        4.25
    """
    return -minimise(-cost, lower, upper)


def _multiplier(
    cost: Float[Tensor, "... S"], low: Float[Tensor, "... S"], high: Float[Tensor, "... S"]
) -> Float[Tensor, "... 1"]:
    """Return ν: the cost of the token that gets the last of 1 − Σs̲ when the cheapest tokens are filled first."""
    ordered, order = cost.sort(-1)
    room = (high - low).gather(-1, order).cumsum(-1)
    budget = 1.0 - low.sum(-1, keepdim=True)
    last = (room < budget).sum(-1, keepdim=True).clamp_max(cost.shape[-1] - 1)
    return ordered.gather(-1, last)


def argmin(
    cost: Float[Tensor, "... S"], lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "... S"]:
    """Return the greedy vertex at which Σ c_j s_j is least: a point, correct up to rounding; `minimise` is the bound.

    Args:
        cost: c, shape [..., S].
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Example:
        >>> cost, lower, upper = torch.tensor([[2.0, 5.0], [0.0, 0.25], [0.5, 1.0]]).double()
        >>> argmin(cost, lower, upper).tolist()
        [0.5, 0.5]
    """
    box = checked_box(lower, upper)
    cost, low, high = together(cost, *box)
    order = cost.argsort(-1)
    room = (high - low).gather(-1, order)
    before = room.cumsum(-1) - room
    budget = (1.0 - low.sum(-1, keepdim=True)).clamp_min(0.0)
    given = torch.minimum((budget - before).clamp_min(0.0), room)
    point: Tensor = low + torch.zeros_like(low).scatter(-1, order, given)
    return point


def tighten(lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]) -> Box:
    """Return the smallest box around Δ_S ∩ [s̲, s̄], rounded outward and never wider than the given one.

    s_j = 1 − Σ_{k≠j} s_k, so s_j ≥ 1 − Σ_{k≠j} s̄_k and s_j ≤ 1 − Σ_{k≠j} s̲_k: the LPs with cost ±e_j.

    Args:
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Example:
        >>> box = tighten(torch.tensor([0.0, 0.25]).double(), torch.tensor([0.5, 1.0]).double())
        >>> [round(x, 9) for x in box.lower.tolist()]  # s_1 ≥ 1 − 0.5
        [0.0, 0.5]
    """
    box = checked_box(lower, upper)
    size = box.lower.shape[-1]
    total_low, total_high = box.lower.sum(-1, keepdim=True), box.upper.sum(-1, keepdim=True)
    rest_low, rest_high = total_low - box.lower, total_high - box.upper
    low = down(1.0 - rest_high - sum_slack(1.0 + total_high, size + 2))
    high = up(1.0 - rest_low + sum_slack(1.0 + total_low, size + 2))
    return checked_box(torch.maximum(box.lower, low), torch.minimum(box.upper, high))


def minimum_mass(
    group: Bool[Tensor, "... S"], lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "..."]:
    """Bound the attention mass on a group from below: proved, and exact up to rounding (`prop:evidence_mass`).

    The bound is max(Σ_E s̲, 1 − Σ_{not E} s̄): the multipliers 0 and 1 are the only break points of the dual.

    Args:
        group: True at the tokens of the group E, shape [..., S].
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Example:
        >>> lower, upper = torch.tensor([[0.125, 0.0, 0.0], [1.0, 1.0, 0.25]]).double()
        >>> round(minimum_mass(torch.tensor([True, True, False]), lower, upper).item(), 9)  # 1 − 0.25
        0.75
    """
    return group_difference(group, torch.zeros_like(group), lower, upper).clamp_min(0.0)


def maximum_mass(
    group: Bool[Tensor, "... S"], lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "..."]:
    """Bound the attention mass on a group from above: proved, and exact up to rounding.

    Args:
        group: True at the tokens of the group, shape [..., S].
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].
    """
    return -group_difference(torch.zeros_like(group), group, lower, upper)


def group_difference(
    plus: Bool[Tensor, "... S"],
    minus: Bool[Tensor, "... S"],
    lower: Float[Tensor, "... S"],
    upper: Float[Tensor, "... S"],
) -> Float[Tensor, "..."]:
    """Bound Σ_A s − Σ_B s from below for disjoint groups: proved, and exact up to rounding (`prop:head_spec`).

    Costs are +1, 0 and −1, so the best multiplier is one of these three. Complexity: O(S), no sort.

    Args:
        plus: True at the tokens of A, shape [..., S].
        minus: True at the tokens of B, shape [..., S].
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].

    Example:
        >>> plus, minus = torch.tensor([True, False]), torch.tensor([False, True])
        >>> lower, upper = torch.tensor([[0.25, 0.0], [1.0, 0.25]]).double()
        >>> round(group_difference(plus, minus, lower, upper).item(), 9)  # s = (0.75, 0.25)
        0.5
    """
    box = checked_box(lower, upper)
    cost = plus.double() - minus.double()
    cost, low, high = together(cost, *box)
    bounds = []
    for nu in (-1.0, 0.0, 1.0):
        reduced = cost - nu
        terms = reduced * torch.where(reduced >= 0, low, high)
        bounds.append(down(nu + terms.sum(-1) - sum_slack(abs(nu) + terms.abs().sum(-1), cost.shape[-1] + 2)))
    return torch.stack(bounds).amax(0)


def pairwise_margins(
    lower: Float[Tensor, "... S"], upper: Float[Tensor, "... S"]
) -> Float[Tensor, "... S S"]:
    """Bound s_i − s_j from below over Δ_S ∩ [s̲, s̄] for all pairs [i, j]: proved, and exact up to rounding.

    Positive entries decide top-k sets and rankings (`prop:cert_attn`, `cor:topk_ranking`). This is `group_difference`
    with its three multipliers for all pairs at once, in O(S²). The diagonal is 0.

    Args:
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].
    """
    box = checked_box(lower, upper)
    size = box.lower.shape[-1]
    low_i, low_j = box.lower[..., :, None], box.lower[..., None, :]
    high_i, high_j = box.upper[..., :, None], box.upper[..., None, :]
    total_low = box.lower.sum(-1)[..., None, None]
    total_high = box.upper.sum(-1)[..., None, None]
    forced_up = 2.0 * low_i + (total_low - low_i - low_j) - 1.0
    apart = low_i - high_j
    forced_down = 1.0 - 2.0 * high_j - (total_high - high_i - high_j)
    low_bound = down(forced_up - sum_slack(1.0 + 2.0 * total_low, size + 4))
    high_bound = down(forced_down - sum_slack(1.0 + 2.0 * total_high, size + 4))
    margins = torch.maximum(torch.maximum(low_bound, high_bound), down(apart))
    return margins.masked_fill(torch.eye(size, dtype=torch.bool, device=margins.device), 0.0)


def output_hull(
    lower: Float[Tensor, "... S"],
    upper: Float[Tensor, "... S"],
    value_lower: Float[Tensor, "... S D"],
    value_upper: Float[Tensor, "... S D"],
) -> tuple[Float[Tensor, "... D"], Float[Tensor, "... D"]]:
    """Bound Σ s_j V_j in each coordinate, exactly up to rounding, for s in Δ_S ∩ [s̲, s̄] and V in a box.

    This is `prop:lp_simplex`.

    Args:
        lower: s̲, shape [..., S].
        upper: s̄, shape [..., S].
        value_lower: lower bounds of the values V, shape [..., S, D].
        value_upper: upper bounds of the values V, shape [..., S, D].

    Returns:
        Lower and upper bounds, shape [..., D].
    """
    low, high = lower.unsqueeze(-2), upper.unsqueeze(-2)
    return minimise(value_lower.mT, low, high), maximise(value_upper.mT, low, high)
