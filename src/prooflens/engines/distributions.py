r"""Effects on distributions over outputs, a probability p_t or KL(p ‖ p′), from joint bounds of differences of logits.

With y the outputs of M and z those of M′, over n named ones, r one of them (t itself for a probability), and

    g_j = y_j − y_r,   h_j = z_j − z_r,   d_j = g_j − h_j,   s = softmax(g),   s′ = softmax(h),   R = Σ_j s_j e^{−d_j},

| metric | is | bounds that are intersected |
|---|---|---|
| p_t − p′_t | s_t − s′_t = s_t (1 − 1/R) = s′_t (R − 1) | both alone; both products, R over the box of s |
| KL(p ‖ p′) | log R + Σ s_j d_j | its two parts; 0; (max d − min d)²/8 (Hoeffding) |

and for both the tangent at the clean point, a·y − b·z, as *one* form of the two models, and the second order beyond:
along a line with u = ġ, v = ḣ and u_r = v_r = 0, E the mean under s and E′ under s′,

    s_t″ = s_t (2(E u)² − E u²)                                  lies within ± s_t E u²,
    KL″  = E[(u − E u)²(q − E q)] + Var u − 2 Cov(u, v) + Var′ v     lies within [−Q E u² − E v²,
                                                                       Q E u² + E (u − v)² + E′ v²],

q = log s − log s′ and Q = max d − min d. All g, h, d and the tangent are bounded in one call (`relational`), on every
piece by itself where an engine cuts the region. Tangents are multiples of 2⁻⁴⁴, so that their sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee, tighter
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import NO_OPTIONS, Engine, EngineOptions
from prooflens.engines.relational import bound_effects
from prooflens.engines.relaxations.interval_steps import multiply
from prooflens.numerics import down, up
from prooflens.problem import Problem
from prooflens.queries.distributions import Divergence, Probability
from prooflens.queries.outward import (
    exp_down,
    exp_up,
    log_down,
    log_sum_exp_down,
    log_sum_exp_up,
    log_up,
    sum_down,
    sum_up,
)
from prooflens.queries.simplex import Box, maximise, minimise
from prooflens.queries.weights import weight_box

MOST_OUTPUTS = 512
"""Over more outputs than this a distribution is not bounded on a region: every one has three forms."""

GRAIN = 2.0**44
"""Weights of tangents are multiples of one over this: while their sizes sum to less than 2⁸, sums are exact."""


@dataclass(frozen=True)
class Distribution:
    """What is measured on two models with the same n outputs.

    Attributes:
        size: n.
        target: the output whose probability is measured; None for the divergence of the edited model.
    """

    size: int
    target: int | None

    @property
    def reference(self) -> int:
        """The output that all others are compared with."""
        return 0 if self.target is None else self.target

    def metrics(
        self, first: Float[Tensor, "... n"], second: Float[Tensor, "... n"]
    ) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
        """Return what is measured on both models: probabilities, or the divergence and 0; differentiable.

        Args:
            first: outputs of the model.
            second: outputs of the edited one.
        """
        every = tuple(range(self.size))
        if self.target is not None:
            atom = Probability(self.target, every)
            return atom.value(first), atom.value(second)
        both = torch.cat((first, second), -1)
        found = Divergence(every, tuple(i + self.size for i in every)).value(both)
        return found, torch.zeros_like(found)


def bound_distribution(
    engine: Engine,
    problem: Problem,
    edited: Problem,
    measured: Distribution,
    options: EngineOptions = NO_OPTIONS,
) -> FormBounds:
    """Bound the effect of an edit on a distribution over the region, with the engine's guarantee.

    Args:
        engine: who bounds linear forms of both models.
        problem: the model with only the outputs that are measured, and the region.
        edited: the edited one and the same region.
        measured: what is measured.
        options: memory that may be used, and who is told of progress.

    Returns:
        One lower and one upper bound of p − p′, or of KL(p ‖ p′); corners are those of the tangent.

    Raises:
        EngineError: if the engine refuses.
    """
    g0, h0 = (_clean_gaps(asked, measured.reference) for asked in (problem, edited))
    tangent = Tangent.at(measured, g0, h0)
    forms, others = _asked(measured, tangent)
    found = bound_effects(engine, problem, edited, forms, options, other=others)
    # On pieces, where there are some: the largest of all is the largest anywhere.
    ends = found.lower[None], found.upper[None]
    if found.cover is not None:
        ends = found.cover.lower, found.cover.upper
    known = Known.of(measured, tangent, Box(*(side.cpu().double() for side in ends)))
    box = known.effect()
    low, high = found.lower_corner, found.upper_corner
    return FormBounds(
        box.lower.amin(0, keepdim=True),
        box.upper.amax(0, keepdim=True),
        None if low is None else low[-1:],
        None if high is None else high[-1:],
    )


def distribution_forms(size: int) -> Forms:
    """Return forms of as many outputs as a distribution reads: what an engine is asked whether it refuses.

    Args:
        size: n.
    """
    return replace(Forms.of([], 1), logits=torch.ones(1, size, dtype=torch.float64))


def _clean_gaps(problem: Problem, reference: int) -> Float[Tensor, " n"]:
    """Differences of outputs at the region's reference: any numbers near them will do."""
    with torch.no_grad():
        _, output = problem.values(problem.region.reference[None], (), output=True)
    assert output is not None
    y = output[0].double().cpu()
    return y - y[reference]


def _asked(measured: Distribution, tangent: Tangent) -> tuple[Forms, Forms]:
    """Forms of both models: every d, every g, every h, and the tangent; g and h read one model only."""
    n, r = measured.size, measured.reference
    rows = torch.eye(n, dtype=torch.float64)
    rows[:, r] -= 1.0
    nothing = torch.zeros_like(rows)
    a, b = tangent.weights()
    sides = (torch.cat((rows, rows, nothing, a[None])), torch.cat((rows, nothing, -rows, b[None])))
    first, second = (replace(Forms.of([], 3 * n + 1), logits=side) for side in sides)
    return first, second


@dataclass(frozen=True, eq=False)
class Tangent:
    """The linear part of a metric at a pair of gaps: value + a·(g − g₀) − b·(h − h₀), and how far a and b are off.

    Attributes:
        reference: r, whose gap is 0.
        g0: gaps of the model.
        h0: gaps of the edited one.
        value: an enclosure of the metric there, a lower and an upper end.
        a: weights of g; that of r is 0.
        b: weights of −h.
        off_a: no weight of g is further from the derivative.
        off_b: likewise for h.
    """

    reference: int
    g0: Float[Tensor, " n"]
    h0: Float[Tensor, " n"]
    value: Box
    a: Float[Tensor, " n"]
    b: Float[Tensor, " n"]
    off_a: Float[Tensor, " n"]
    off_b: Float[Tensor, " n"]

    @classmethod
    def at(cls, measured: Distribution, g0: Float[Tensor, " n"], h0: Float[Tensor, " n"]) -> Tangent:
        """Enclose the metric and its derivatives at gaps, and round these.

        Args:
            measured: what is measured.
            g0: gaps of the model; any numbers.
            h0: gaps of the edited one.
        """
        r = measured.reference
        s, other = weight_box(g0, g0), weight_box(h0, h0)
        if measured.target is not None:
            value = Box(down(s.lower[r] - other.upper[r]), up(s.upper[r] - other.lower[r]))
            slopes = [_negative(multiply(Box(p.lower[r], p.upper[r]), p)) for p in (s, other)]
        else:
            # q = log s − log s′ and KL = Σ s q; ∂g: s (q − KL), −∂h: s − s′.
            every = torch.ones(len(g0), dtype=torch.bool)
            sums = [Box(log_sum_exp_down(x, every), log_sum_exp_up(x, every)) for x in (g0, h0)]
            gap = Box(down(g0 - h0), up(g0 - h0))
            q = Box(
                down(down(gap.lower - sums[0].upper) + sums[1].lower),
                up(up(gap.upper - sums[0].lower) + sums[1].upper),
            )
            terms = multiply(s, q)
            value = Box(sum_down(terms.lower), sum_up(terms.upper))
            beyond = Box(down(q.lower - value.upper), up(q.upper - value.lower))
            slopes = [
                multiply(s, beyond),
                Box(down(s.lower - other.upper), up(s.upper - other.lower)),
            ]
        a, b = (_rounded(slope, r) for slope in slopes)
        off_a, off_b = (
            torch.maximum(up(slope.upper - w), up(w - slope.lower)).clamp_min(0.0)
            for slope, w in zip(slopes, (a, b), strict=True)
        )
        return cls(r, g0, h0, value, a, b, off_a, off_b)

    def weights(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the weights of the outputs of both models: r gets what makes them sum to 0, without rounding."""
        found = []
        for weights in (self.a, self.b):
            row = weights.clone()
            row[self.reference] = -weights.sum()
            found.append(row)
        return found[0], found[1]

    @property
    def constant(self) -> Box:
        """An enclosure of value − a·g₀ + b·h₀."""
        terms = torch.cat((-self.a * self.g0, self.b * self.h0))
        low, high = sum_down(terms, extra=1), sum_up(terms, extra=1)
        return Box(down(self.value.lower + low), up(self.value.upper + high))


def _negative(box: Box) -> Box:
    return Box(-box.upper, -box.lower)


def _rounded(slope: Box, reference: int) -> Float[Tensor, " n"]:
    """Multiples of one over the grain near a slope; 0 for the reference, whose gap does not move.

    All are 0 where they are too large to be added without rounding: what they are off by is counted in any case.
    """
    found = ((0.5 * slope.lower + 0.5 * slope.upper) * GRAIN).round() / GRAIN
    found[reference] = 0.0
    return found if float(found.abs().sum()) < 2.0**8 else torch.zeros_like(found)


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of gaps, of their differences and of the tangent, on P pieces of a region.

    Attributes:
        measured: what is measured.
        tangent: where its linear part was taken.
        g: gaps of the model, shape [P, n].
        h: those of the edited one.
        d: differences g − h.
        linear: the tangent's form a·y − b·z, shape [P].
    """

    measured: Distribution
    tangent: Tangent
    g: Box
    h: Box
    d: Box
    linear: Box

    @classmethod
    def of(cls, measured: Distribution, tangent: Tangent, ends: Box) -> Known:
        """Sort bounds of forms; differences are never wider than those of both gaps.

        Args:
            measured: what is measured.
            tangent: where its linear part was taken.
            ends: bounds of the forms of `_asked`, shape [P, 3n + 1].
        """
        n, r = measured.size, measured.reference
        lower, upper = (
            ends.lower.nan_to_num(-torch.inf, torch.inf, -torch.inf),
            ends.upper.nan_to_num(torch.inf, torch.inf, -torch.inf),
        )
        d, g, h = (
            Box(lower[:, i * n : i * n + n].clone(), upper[:, i * n : i * n + n].clone()) for i in range(3)
        )
        for box in (d, g, h):
            box.lower[:, r] = box.upper[:, r] = 0.0
        apart = Box(down(g.lower - h.upper), up(g.upper - h.lower))
        apart.lower[:, r] = apart.upper[:, r] = 0.0
        d = Box(torch.maximum(d.lower, apart.lower), torch.minimum(d.upper, apart.upper))
        return cls(measured, tangent, g, h, d, Box(lower[:, -1], upper[:, -1]))

    def effect(self) -> Box:
        """Return bounds of the effect on every piece: the best of all that is known."""
        divergence = self.measured.target is None
        pieces = len(self.g.lower)
        least, most = (0.0, torch.inf) if divergence else (-1.0, 1.0)
        best = Box(torch.full((pieces,), least).double(), torch.full((pieces,), most).double())
        sure = torch.stack([side.isfinite().all(-1) for box in (self.g, self.h) for side in box]).all(0)
        if not bool(sure.any()):
            return best
        g, h, d, linear = (
            Box(box.lower[sure], box.upper[sure]) for box in (self.g, self.h, self.d, self.linear)
        )
        some = Known(self.measured, self.tangent, g, h, d, linear)
        found = [*(some._divergence() if divergence else some._probability()), some._along_tangent()]
        inner = Box(best.lower[sure], best.upper[sure])
        for box in found:
            lower = box.lower.nan_to_num(-torch.inf, torch.inf, -torch.inf)
            upper = box.upper.nan_to_num(torch.inf, torch.inf, -torch.inf)
            low, high, *_ = tighter(
                (inner.lower, inner.upper), (lower, upper), Guarantee.PROVED, "a distribution"
            )
            inner = Box(low, high)
        best.lower[sure], best.upper[sure] = inner.lower, inner.upper
        return best

    @property
    def _shares(self) -> tuple[Box, Box]:
        """Boxes of s and s′, of all gaps between what is known and the tangent's."""
        hulls = []
        for box, at in ((self.g, self.tangent.g0), (self.h, self.tangent.h0)):
            hulls.append(weight_box(torch.minimum(box.lower, at), torch.maximum(box.upper, at)))
        return hulls[0], hulls[1]

    def _ratio(self) -> Box:
        """R = Σ s_j e^{−d_j} = 1 / Σ s′_j e^{d_j}, the better of both; no end is below 0, which R is not."""
        s, other = weight_box(*self.g), weight_box(*self.h)
        lower, upper = exp_down(-self.d.upper), exp_up(-self.d.lower)
        direct = Box(minimise(lower, *s).clamp_min(0.0), maximise(upper, *s))
        lower, upper = exp_down(self.d.lower), exp_up(self.d.upper)
        inverse = Box(minimise(lower, *other).clamp_min(0.0), maximise(upper, *other))
        return Box(
            torch.fmax(direct.lower, down(1.0 / inverse.upper)),
            torch.fmin(direct.upper, up(1.0 / inverse.lower)),
        )

    def _probability(self) -> list[Box]:
        """p − p′ from both alone, as p(1 − 1/R) and as p′(R − 1)."""
        r, ratio = self.measured.reference, self._ratio()
        p, other = (
            Box(box.lower[:, r], box.upper[:, r]) for box in (weight_box(*self.g), weight_box(*self.h))
        )
        grown = Box(down(ratio.lower - 1.0), up(ratio.upper - 1.0))
        kept = Box(down(1.0 - up(1.0 / ratio.lower)), up(1.0 - down(1.0 / ratio.upper)))
        alone = Box(down(p.lower - other.upper), up(p.upper - other.lower))
        return [alone, multiply(p, kept), multiply(other, grown)]

    def _divergence(self) -> list[Box]:
        """KL = log R + Σ s_j d_j, and what Hoeffding's lemma says of it."""
        s, ratio = weight_box(*self.g), self._ratio()
        low = down(log_down(ratio.lower) + minimise(self.d.lower, *s))
        high = up(log_up(ratio.upper) + maximise(self.d.upper, *s))
        width = up(self.d.upper.amax(-1) - self.d.lower.amin(-1))
        below = torch.full_like(width, -torch.inf)
        return [Box(low, high), Box(below, up(up(width * width) / 8.0))]

    def _along_tangent(self) -> Box:
        """The tangent's form, and the second order beyond it."""
        tangent, (s, other) = self.tangent, self._shares
        U, V = (_furthest(box, at) for box, at in ((self.g, tangent.g0), (self.h, tangent.h0)))
        off = up(sum_up(tangent.off_a * U, extra=1) + sum_up(tangent.off_b * V, extra=1))
        constant = tangent.constant
        Eu, Ev = _mean_square(s, U), _mean_square(other, V)
        if self.measured.target is not None:
            r = self.measured.reference
            half = 0.5 * up(up(s.upper[:, r] * Eu) + up(other.upper[:, r] * Ev))
            beyond = Box(-half, half)
        else:
            gap = Box(down(tangent.g0 - tangent.h0), up(tangent.g0 - tangent.h0))
            d = Box(torch.minimum(self.d.lower, gap.lower), torch.maximum(self.d.upper, gap.upper))
            Q = up(d.upper.amax(-1) - d.lower.amin(-1))
            W = torch.maximum(up(self.d.upper - gap.lower), up(gap.upper - self.d.lower)).clamp_min(0.0)
            third = up(Q * Eu)
            below = up(third + _mean_square(s, V))
            above = up(up(third + _mean_square(s, torch.minimum(W, up(U + V)))) + Ev)
            beyond = Box(-0.5 * below, 0.5 * above)
        low = down(down(constant.lower + self.linear.lower) + down(beyond.lower - off))
        return Box(low, up(up(constant.upper + self.linear.upper) + up(beyond.upper + off)))


def _furthest(box: Box, at: Float[Tensor, " n"]) -> Float[Tensor, "P n"]:
    """How far gaps may be from given ones."""
    return torch.maximum(up(box.upper - at), up(at - box.lower)).clamp_min(0.0)


def _mean_square(shares: Box, most: Float[Tensor, "P n"]) -> Float[Tensor, " P"]:
    """An upper bound of Σ s_j u_j² for |u_j| ≤ most_j: a program over the box of s and the simplex."""
    return maximise(up(most * most), *shares)
