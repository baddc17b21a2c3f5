r"""Lines of a softmax weight, for `crown`: s_j = 1/Z_j with Z_j = Σ_k e^{d_k}, d_k = a_k − a_j.

From bounds d_k ∈ [l_k, u_k] of score *differences* (a query that both scores share cancels in them):

    Z ≤ Σ chord_k(d_k),   Z ≥ Σ tangent_k(d_k),
    1/Z ≥ 1/Z₀ − (Z − Z₀)/Z₀²  ≥  1/Z₀ − (Σ chord_k(d_k) − Z₀)/Z₀²,
    1/Z ≤ 1/Z̲ − (Z − Z̲)/(Z̲ Z̄)  ≤  1/Z̲ − (Σ tangent_k(d_k) − Z̲)/(Z̲ Z̄).

1/Z is convex and falls, so every step keeps its side; no product of two ranges occurs. Where a line is worse than the
box of weights in the middle of the differences, or an exponential would leave float64, the box is the line.

**Σ_j s_j = 1.** Σ_j A_j s_j = κ + Σ_j (A_j − κ) s_j for every κ. The rule takes the κ that minimises
Σ_j |A_j − κ| e_j, e_j the gap between the lines: a weighted median. What all weights share costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.engines.crown.lines import LineRelaxation, Lines, convex, flat, mixed
from prooflens.engines.crown.steps import Parameters, Passed, cut, magnitude, paired, summed
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.queries import Box, weight_box
from prooflens.queries.outward import exp_down, exp_up, sum_down, sum_up

WIDEST = 300.0
"""Score differences beyond this are not given to exponentials."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The rule of softmax: each weight between two linear functions of its row's scores, and its box.

    Attributes:
        lower: lines below, [3, H, S, S, S] (query, weight, key).
        upper: lines above.
        box: a box of the weights.
        gap: the distance between the lines in the middle.
        size: the absolute-value chain, for rounding.
    """

    lower: Lines
    upper: Lines
    box: Box
    gap: Float[Tensor, "H S S"]
    size: Float[Tensor, "H S S"]

    @classmethod
    def of(
        cls,
        mask: Bool[Tensor, "S S"] | Bool[Tensor, "H S S"],
        scores: Box,
        differences: Float[Tensor, "H S S S"],
    ) -> Weights:
        """Make the lines of softmax weights.

        Args:
            mask: which keys take part, shape [S, S], or [H, S, S] where heads differ.
            scores: a box of the scores.
            differences: D[j, k] ≥ a_j − a_k, shape [H, S, S, S].
        """
        box = weight_box(scores.lower, scores.upper, differences, mask.expand(scores.lower.shape))
        S = mask.shape[-1]
        present = mask[..., :, None] & mask[..., None, :]
        other = present & ~torch.eye(S, dtype=torch.bool, device=mask.device)
        low, high = -differences, differences.mT
        usable = ((high <= WIDEST) & (low >= -WIDEST) & (low <= high)) | ~other
        fine = (usable.all(-1) & (box.lower > 0))[..., None]
        low, high = (torch.where(other & fine, end, 0.0) for end in (low, high))
        exps = convex(torch.exp, torch.exp, Box(low, high))
        lines = _reciprocal(exps, Box(low, high), box, other, present)
        middle = 0.5 * low + 0.5 * high
        above = lines.upper.offset[1] + (lines.upper.slope[1] * middle).sum(-1)
        below = lines.lower.offset[1] + (lines.lower.slope[1] * middle).sum(-1)
        constant = flat(box)
        known = fine[..., 0] & mask
        upper = _pick(known & (above <= box.upper), lines.upper, constant.upper)
        lower = _pick(known & (below >= box.lower), lines.lower, constant.lower)
        gap = torch.minimum(above, box.upper) - torch.maximum(below, box.lower)
        upper, lower = (_on_scores(side) for side in (upper, lower))
        largest = torch.maximum(upper.slope.abs().amax(0), lower.slope.abs().amax(0))
        offsets = torch.maximum(upper.offset.abs().amax(0), lower.offset.abs().amax(0))
        reach = torch.einsum("hijk,hik->hij", largest, magnitude(scores).masked_fill(~mask, 0.0))
        return cls(lower, upper, box, gap.clamp(min=0.0), 4.0 * (reach + offsets) + 1.0)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of τ: one per weight and side."""
        return {"lower": tuple(self.gap.shape), "upper": tuple(self.gap.shape)}

    @property
    def roundings(self) -> int:
        """The roundings of a sum over all weights of all rows."""
        return 4 * self.gap.numel() + 16

    @property
    def stays(self) -> tuple[bool, ...]:
        """A row of weights reads its own row of scores."""
        return (True,)

    def at(self, token: int) -> Weights:
        """Return one query's row, for all heads."""
        box = Box(*(cut(end, token, 1) for end in self.box))
        gap, size = cut(self.gap, token, 1), cut(self.size, token, 1)
        return Weights(self.lower.part(token, 1), self.upper.part(token, 1), box, gap, size)

    def back(self, A: Tensor, tau: Parameters) -> Passed:
        """Shift by κ, then take the line above where A is positive and the one below where it is negative."""
        kappa = weighted_median(A, self.gap)
        A = A - kappa
        plus = A.clamp(min=0.0)
        minus = A - plus
        moved = _times(plus, self.upper.slope, tau.get("upper")) + _times(
            minus, self.lower.slope, tau.get("lower")
        )
        over, under = mixed(self.upper.offset, tau.get("upper")), mixed(self.lower.offset, tau.get("lower"))
        constant = summed(plus * over + minus * under) + summed(kappa)
        return Passed((moved,), constant, paired(A.abs(), self.size) + summed(kappa.abs()))


def weighted_median(A: Float[Tensor, "F H S S"], weight: Float[Tensor, "H S S"]) -> Float[Tensor, "F H S 1"]:
    """Return κ per row that minimises Σ_j |A_j − κ| weight_j; any κ is valid.

    Example:
        >>> A = torch.tensor([0.0, 1.0, 5.0]).reshape(1, 1, 1, 3)
        >>> weighted_median(A, torch.ones(1, 1, 3)).item()
        1.0
    """
    order = A.detach().argsort(-1)
    total = weight.expand_as(A).gather(-1, order).cumsum(-1)
    place = (total < 0.5 * total[..., -1:]).sum(-1, keepdim=True).clamp(max=A.shape[-1] - 1)
    return A.detach().gather(-1, order.gather(-1, place))


def _times(A: Tensor, slope: Tensor, tau: Tensor | None) -> Tensor:
    """Return Σ_j A_j slope_jk, the slopes mixed by τ; A is weighted rather than the slopes."""
    low, middle, high = slope
    made = torch.einsum("fhij,hijk->fhik", A, middle)
    if tau is None:
        return made
    up_part = torch.einsum("fhij,hijk->fhik", A * tau.clamp(min=0.0), high - middle)
    return made + up_part + torch.einsum("fhij,hijk->fhik", A * (-tau).clamp(min=0.0), low - middle)


def _pick(where: Tensor, yes: Lines, no: Lines) -> Lines:
    """Return sloped lines where they are better, else constants; the slopes have one dimension more."""
    slope = torch.where(where[..., None], yes.slope, 0.0)
    return Lines(slope, torch.where(where, yes.offset, no.offset))


def _reciprocal(
    exps: LineRelaxation, d: Box, box: Box, other: Bool[Tensor, "S S S"], present: Bool[Tensor, "S S S"]
) -> LineRelaxation:
    """Return lines of 1/Z in the differences: slopes [3, H, S, S, S], offsets [3, H, S, S]."""

    def total(of: Tensor) -> Tensor:
        return torch.where(other, of, 0.0).sum(-1) + 1.0

    S = other.shape[-1]
    absent = ~other
    # Z from the exponentials' ends, and from the weights' box.
    least = torch.maximum(
        1.0 + sum_down(exp_down(d.lower).masked_fill(absent, 0.0)),
        (1.0 / box.upper.clamp(min=TINY)) * (1.0 - gamma(8)),
    ) * (1.0 - gamma(8))
    most = up(1.0 + sum_up(exp_up(d.upper).masked_fill(absent, 0.0))) * (1.0 + gamma(8))
    from_box = (1.0 / box.lower.clamp(min=TINY)) * (1.0 + gamma(8))
    most = torch.maximum(torch.minimum(most, from_box), least)
    middle = 0.5 * d.lower + 0.5 * d.upper
    chord = Lines(*(torch.where(other, part, 0.0) for part in exps.upper))
    tangent = Lines(*(torch.where(other, part, 0.0) for part in exps.lower))
    at_middle = total(chord.slope[1] * middle + chord.offset[1])
    outer = convex(torch.reciprocal, lambda z: -z.reciprocal().square(), Box(least, most), at_middle)
    # Below: the tangent of 1/Z, with Z at most its chords. Above: the chord of 1/Z, with Z at least its tangents.
    low_slope = outer.lower.slope[..., None] * chord.slope
    low_offset = outer.lower.offset + outer.lower.slope * (chord.offset.sum(-1) + 1.0)
    high_slope = outer.upper.slope[..., None] * tangent.slope
    high_offset = outer.upper.offset + outer.upper.slope * (tangent.offset.sum(-1) + 1.0)
    reach = torch.maximum(d.lower.abs(), d.upper.abs())
    count = gamma(8 * S + 64)

    def slack(slope: Tensor, outer_slope: Tensor, inner: Tensor, offset: Tensor) -> Tensor:
        size = (slope.abs() * reach).sum(-1) + outer_slope.abs() * (inner.abs().sum(-1) + 1.0) + offset.abs()
        return count * size + TINY

    below = slack(low_slope, outer.lower.slope, chord.offset, outer.lower.offset)
    above = slack(high_slope, outer.upper.slope, tangent.offset, outer.upper.offset)
    return LineRelaxation(Lines(low_slope, low_offset - below), Lines(high_slope, high_offset + above))


def _on_scores(lines: Lines) -> Lines:
    """Rewrite lines in differences a_k − a_j as lines in scores: a_j gets minus the sum of the slopes.

    The sum's rounding, γ_S Σ|slope||a_j|, is part of the rule's size: |slope_jj| ≤ Σ|slope_jk| is a coefficient
    there.
    """
    own = -lines.slope.sum(-1)
    return Lines(lines.slope + torch.diag_embed(own), lines.offset)
