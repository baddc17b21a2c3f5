"""Bounds of some forms by a walk that is done: values, linear parts and remainders of their covectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.engines.forms import Forms
from prooflens.engines.relaxations.norms import frobenius, grow, length
from prooflens.engines.taylor.chain import Chain, Seeds
from prooflens.engines.taylor.hessian import LINEAR_SHARE
from prooflens.engines.taylor.remainder_bounds import Supports
from prooflens.engines.taylor.values import Value
from prooflens.engines.taylor.walk import TaylorWalk
from prooflens.numerics import down, gamma, up
from prooflens.problem import Problem

LEAST_SPREAD = 2.0**-400
"""No bound is tighter than this: radii are roots of squares, and squares below 2⁻¹⁰⁷⁴ vanish."""


class FormBatch(NamedTuple):
    """Bounds of some forms, and the signs of their linear parts."""

    lower: Float[Tensor, " F"]
    upper: Float[Tensor, " F"]
    corner: Float[Tensor, "F p"]
    provable: Bool[Tensor, " F"]
    """Whether the linear part alone, and the form at its corners, leave the sign open to a proof."""

    def decided(self) -> Bool[Tensor, " F"]:
        """Return whether the sign of each form is known."""
        return (self.lower > 0.0) | (self.upper < 0.0)

    def promise(self) -> Float[Tensor, " F"]:
        """Return how far the middle of each range is from 0 in units of its half width: 1 is decided."""
        spread = self.upper - self.lower
        return torch.where(spread.isfinite(), (self.upper + self.lower).abs() / spread, 0.0)

    def open(self) -> Int[Tensor, " M"]:
        """Return the forms whose sign is not known yet, but may be."""
        return (~self.decided() & self.provable).nonzero()[:, 0]

    def improve(self, chosen: Int[Tensor, " M"], again: FormBatch) -> None:
        """Take over new bounds of some forms, where they are better."""
        self.lower[chosen] = torch.maximum(self.lower[chosen], again.lower)
        self.upper[chosen] = torch.minimum(self.upper[chosen], again.upper)


def nothing_of(size: int, like: FormBatch) -> FormBatch:
    """Return bounds that say nothing of so many forms, and that nobody need try to improve."""
    infinite, nowhere = (
        like.lower.new_full((size,), torch.inf),
        like.corner.new_zeros(size, like.corner.shape[1]),
    )
    return FormBatch(-infinite, infinite, nowhere, torch.zeros_like(infinite, dtype=torch.bool))


class Collected(NamedTuple):
    """What a walk knows of some forms: values at the centre, their rounding, remainders for + and −, linear parts."""

    value: Float[Tensor, " F"]
    noise: Float[Tensor, " F"]
    missed: Float[Tensor, "F 2"]
    linear: Float[Tensor, "F p"]

    def plus(self, other: Collected) -> Collected:
        """Return the same of the sums of two lists of forms of the same factors; adding up values rounds."""
        rounding = gamma(8) * (self.value.abs() + other.value.abs())
        return Collected(
            self.value + other.value,
            self.noise + other.noise + rounding,
            self.missed + other.missed,
            self.linear + other.linear,
        )


def bound_part(walk: TaylorWalk, problem: Problem, forms: Forms, reading: Supports) -> FormBatch:
    """Return f(0) ± (‖a‖₁ + all remainders).

    Args:
        walk: the walk forward.
        problem: the model and the region.
        forms: what is bounded.
        reading: how remainders are bounded.
    """
    return assembled(
        collect(walk, problem, forms, reading), walk.chains[0].root.half_widths, problem, reading
    )


def collect(walk: TaylorWalk, problem: Problem, forms: Forms, reading: Supports) -> Collected:
    """Return values, linear parts and remainders of forms.

    Args:
        walk: the walk forward.
        problem: the model and the region.
        forms: what is bounded.
        reading: how remainders are bounded.
    """
    center = problem.region.center
    F = forms.size
    value, missed = center.new_zeros(F), center.new_zeros(F, 2)
    noise = center.new_zeros(F)
    a = center.new_zeros(F, len(walk.chains[0].root.half_widths))
    for chain in walk.chains:
        if chain.scores is not None and chain.segment.layer in forms.layers:
            found, own, seeds = _score_seeds(chain, forms, reading.products(chain, forms))
            value, missed = value + found, missed + own[:, None]
            noise = noise + gamma(64) * found.abs()
            rest, linear = walk.remainder(chain, seeds, reading)
            a, missed = a + linear, missed + rest
    if forms.logits is not None:
        found, rounding, chain, seeds = _output_seeds(walk, problem, forms)
        value, noise = value + found, noise + rounding
        rest, linear = walk.remainder(chain, seeds, reading)
        a, missed = a + linear, missed + rest
    reading.moving(walk, forms, a)
    return Collected(value, noise, missed, a)


def assembled(
    found: Collected, half_widths: Float[Tensor, " p"], problem: Problem, reading: Supports
) -> FormBatch:
    """Return f(0) ± (‖a‖₁ + all remainders) of what was collected.

    Args:
        found: values, linear parts and remainders.
        half_widths: half-widths of the factors.
        problem: the model and the region.
        reading: how remainders were bounded.
    """
    value, noise, missed, a = found
    slope = a * half_widths
    spread = grow(reading.linear_range(slope) + missed + noise[:, None] + LEAST_SPREAD)
    spread = torch.where(spread.isfinite() & value.isfinite()[:, None], spread, torch.inf)
    value = torch.where(value.isfinite(), value, 0.0)
    corner = torch.where(a >= 0, 1.0, -1.0).to(value)[:, : problem.region.n_factors]
    provable = value.abs() > LINEAR_SHARE * slope.abs().sum(-1)
    return FormBatch(down(value - spread[:, 1]), up(value + spread[:, 0]), corner, provable)


def last_value(walk: TaylorWalk, problem: Problem) -> tuple[Value, int]:
    """Return the value that the head reads, or the output itself, and its token."""
    chain = walk.chains[-1]
    assert chain.segment.final is not None
    one = problem.model.architecture.pool != "none" or len(chain.root.u) == 1
    return chain.values[chain.segment.final], 0 if one else last_token(problem)


def last_token(problem: Problem) -> int:
    """Return the token whose output is meant in a model with one per token."""
    return problem.n_tokens - 1 if problem.padding is None else int(problem.padding.nonzero().max())


def _score_seeds(
    chain: Chain, forms: Forms, products: Float[Tensor, "H S S"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"], Seeds]:
    """Return the forms' part in one layer's scores: value, remainder of the products, covectors of q and k."""
    scores = chain.scores
    assert scores is not None
    q, k, step = scores.q, scores.k, scores.step
    here = forms.layer == chain.segment.layer
    device = q.u.device
    form, h, i, j = (x[here].to(device) for x in (forms.index, forms.head, forms.position, forms.key))
    weight = forms.weight[here].to(q.u)
    each, slope = scores.values[h, i, j], scores.slopes[h, i, j]
    zero = q.u.new_zeros(forms.size)
    value = zero.index_add(0, form, weight * each)
    # Adding up a form's entries rounds as well.
    rounding = gamma(2 * len(form) + 64) * (
        each.abs() + (q.n + q.reach)[i, h] * (k.n + k.reach)[j, h] * step.scale + (scores.cap or 0.0)
    )
    own = zero.index_add(0, form, weight.abs() * (products[h, i, j] + rounding))
    S, H, c = q.u.shape
    groups = chain.values[scores.names[1]].heads
    at_q = q.u.new_zeros(forms.size, S, H, c)
    weight = weight * step.scale * slope
    at_q.index_put_((form, i, h), weight[:, None] * k.u[j, h], accumulate=True)
    at_k = q.u.new_zeros(forms.size, S, groups, c)
    at_k.index_put_((form, j, h * groups // H), weight[:, None] * q.u[i, h], accumulate=True)
    seeds: Seeds = {}
    for name, part in zip(scores.names, (at_q, at_k), strict=True):
        for t in range(S):
            if bool((part[:, t] != 0).any()):
                seeds.setdefault(t, {})[name] = part[:, t].flatten(1)
    if not seeds:
        seeds[0] = {scores.names[0]: at_q[:, 0].flatten(1)}
    return value, grow(own), seeds


def _output_seeds(
    walk: TaylorWalk, problem: Problem, forms: Forms
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"], Chain, Seeds]:
    """Return the forms' part in the output: value, rounding, the chain that ends in it, and covectors there."""
    chain = walk.chains[-1]
    segment = chain.segment
    assert segment.final is not None
    assert forms.logits is not None
    last, t = last_value(walk, problem)
    weights = forms.logits.to(last.u)
    covectors, size = weights, length(weights) * last.size[t]
    if segment.head is not None:
        head = segment.head
        covectors = weights @ head.weight
        used = (weights != 0).any(0)
        most = frobenius(head.weight[used])
        size = length(weights) * (most * last.size[t] * 2.0 + 1.0)
        if head.bias is not None:
            size = size + weights.abs() @ head.bias.abs()
    value = covectors @ last.u[t]
    if segment.head is not None and segment.head.bias is not None:
        value = value + weights @ segment.head.bias
    terms = int((weights != 0).sum(-1).max()) + covectors.shape[-1] + 64
    return value, grow(gamma(4 * terms) * size), chain, {t: {segment.final: covectors}}
