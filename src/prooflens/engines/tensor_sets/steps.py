r"""What every step of a program does to a tensor set (the paper's "CPZ Propagation Through the Transformer Block").

**Softmax** (soundness.md, row 4). With s⁰ the weights at the centre, b = a − a⁰ and b̃ = b − Σ s⁰b,

    s_j = s⁰_j (1 + b̃_j + ρ_j),    ρ_j = (e^{b̃_j} − 1 − b̃_j)/Z − (1 + b̃_j)(Z − 1)/Z,    Z = Σ s⁰e^{b̃} ≥ 1,

so with b̃ ∈ [l, u], E_j = max(e^x − 1 − x) over it and w = ζ/(1 + ζ), ζ = Σ s⁰E:

    −max(0, (1 + u_j) w) ≤ ρ_j ≤ E_j − min(0, (1 + l_j) w).

The polynomial b̃ is kept (score differences cancel in it), ρ becomes one independent factor per weight. Where the
interval softmax of the same ranges is narrower than the Taylor form, it is used alone: the centre–residual form.

**Constraints.** *simplex*: weights are tightened by the LP of `prop:lp_simplex`, outputs are written around a
constant v̄ (Σ s_j v_j = v̄ + Σ s_j (v_j − v̄) holds because Σ s_j = 1) and cut by the LP hull of `prop:lp_simplex`.
*norm*: |y_k − β_k| ≤ |γ_k|√(d − 1) (`thm:ln`; √d for RMSNorm). Without them the walk is PZ.

**Norm.** m = Px is linear, v = ‖m‖²/d + ε a square, n = v^{-½} a scalar relaxation per token, y = m n a product: the
second-order Taylor expansion with the generator-aware remainder comes out of these four.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prooflens.engines.relaxations.affine import through_affine, through_rotary
from prooflens.engines.relaxations.interval_steps import LEAST_VARIANCE
from prooflens.engines.tensor_sets.products import bilinear
from prooflens.engines.tensor_sets.relax import activation, inverse_root, softcap, solu
from prooflens.engines.tensor_sets.tensor_set import FactorIds, TensorSet
from prooflens.models import sites
from prooflens.models.sites import Affine, AnyStep, Mix, Norm, Rotary, Scores, Softmax, share_heads
from prooflens.numerics import down, gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.queries.simplex import Box, output_hull
from prooflens.queries.weights import from_scores, weight_box

LEAST_WEIGHT = 2.0**-300
"""Weights below this have no usable Taylor form: their rows take the interval softmax."""

STRUCTURE = (Affine, Rotary, sites.Shift, sites.Add, sites.Pool)
"""Linear steps: nothing is lost in them, so nothing is reduced or absorbed after them."""


class Unbounded(Exception):  # noqa: N818  (a message to the walk, never seen outside)
    """The set has left the floating-point numbers: nothing is known from here on."""


@dataclass(frozen=True)
class SetOptions:
    """What the propagation keeps.

    Attributes:
        simplex: use that weights sum to 1.
        norm: use that |y_k − β_k| ≤ |γ_k|√(d − 1) for a norm's output.
        taylor: keep the first-order dependence of weights on scores; without it weights are intervals
            (centre–residual).
        k: how many factors are multiplied exactly in products.
        order: how many linear generators are kept per dimension.
    """

    simplex: bool = True
    norm: bool = True
    taylor: bool = True
    k: int = 48
    order: int = 30


@dataclass(eq=False)
class Rules:
    """What each step does to sets in one walk: options, fresh factors, most linear generators."""

    options: SetOptions
    factors: FactorIds
    limit: int

    def __call__(self, step: AnyStep, *sets: TensorSet) -> tuple[TensorSet, TensorSet]:
        """Return the image as it comes out, and as it goes on: reduced, its radii absorbed."""
        made = self._apply(step, *sets)
        if not made.finite:
            raise Unbounded
        return made, made if isinstance(step, STRUCTURE) else self.settle(made)

    def settle(self, x: TensorSet) -> TensorSet:
        """Reduce the order and absorb radii."""
        room = max(self.limit - x.c.numel(), x.c.numel())
        return x.reduced(room, self.options.k**2).absorbed(self.factors)

    def _apply(self, step: AnyStep, *sets: TensorSet) -> TensorSet:
        match step:
            case Affine():
                return affine(step, *sets)
            case Rotary():
                return sets[0].linear(step, through_rotary(step), 3)
            case sites.Shift():
                return sets[0].plus(step.offset)
            case sites.Add():
                return sets[0] + sets[1]
            case Norm():
                return self._norm(step, *sets)
            case Scores():
                return self._scores(step, *sets)
            case Softmax():
                return self._softmax(step, *sets)
            case Mix():
                return self._mix(*sets)
            case sites.Elementwise():
                return activation(step.function, sets[0], self.options.k)
            case sites.Solu():
                return solu(sets[0])
            case sites.Softcap():
                return softcap(step.cap, sets[0], self.options.k)
            case sites.Product():
                return bilinear(sets[0], sets[1], "sc,sc->sc", self.options.k, 1)
            case sites.Pool():
                weights = step.weights
                return sets[0].linear(
                    lambda x: torch.einsum("s,...sd->...d", weights, x),
                    lambda x: torch.einsum("s,...sd->...d", weights.abs(), x),
                    len(weights),
                )

    def _norm(self, step: Norm, x: TensorSet) -> TensorSet:
        if x.c.ndim == 3:  # head by head: every head of a token is a token of its own
            heads = x.c.shape[-2]
            flat = x.linear(lambda t: t.flatten(-3, -2), lambda t: t.flatten(-3, -2), 0)
            made = self._norm(step, flat)
            return made.linear(
                lambda t: t.unflatten(-2, (-1, heads)), lambda t: t.unflatten(-2, (-1, heads)), 0
            )
        d, k = x.c.shape[-1], self.options.k
        m = x
        if step.centred:
            m = x.linear(
                lambda t: t - t.mean(-1, keepdim=True), lambda t: t + t.mean(-1, keepdim=True), d + 4
            )
        v = bilinear(m, m, "sc,sc->s", k, d).scaled(1.0 / d)
        v = v.plus(torch.full_like(v.c, step.eps)).absorbed(self.factors)
        floor = step.eps * (1.0 - gamma(4))
        if floor < LEAST_VARIANCE and not bool((v.hull().lower > LEAST_VARIANCE).all()):
            raise Unbounded
        n = inverse_root(v, k, max(floor, LEAST_VARIANCE)).absorbed(self.factors)
        y = bilinear(m, n, "sc,s->sc", k, 1)
        weight = torch.ones_like(x.c[0]) if step.weight is None else step.weight
        bias = torch.zeros_like(x.c[0]) if step.bias is None else step.bias
        y = y.linear(lambda t: t * weight, lambda t: t * weight.abs(), 1, bias.expand(y.c.shape))
        if not self.options.norm:
            return y
        reach = up(up(math.sqrt(d - 1 if step.centred else d)) * weight.abs())
        if not y.finite:
            return TensorSet.point(bias.expand(y.c.shape)).widened(reach)
        return y.within(Box(down(bias - reach).expand(y.c.shape), up(bias + reach).expand(y.c.shape)))

    def _scores(self, step: Scores, q: TensorSet, k: TensorSet) -> TensorSet:
        keys = shared(k, q.c.shape[-2])
        a = bilinear(q, keys, "ihc,jhc->hij", self.options.k, q.c.shape[-1]).scaled(step.scale)
        return a if step.bias is None else a.plus(step.bias)

    def _softmax(self, step: Softmax, a: TensorSet) -> TensorSet:
        mask = step.mask.expand(a.c.shape)
        s0 = torch.softmax(a.c.masked_fill(~mask, -torch.inf), -1)
        S = a.c.shape[-1]
        depth = (a.c - a.c.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)).abs() * mask
        moved = TensorSet(torch.zeros_like(a.c), a.L, a.ids, a.Q, a.pairs, a.r)
        b = moved.linear(
            lambda x: (x - (s0 * x).sum(-1, keepdim=True)) * mask,
            lambda x: (x + (s0 * x).sum(-1, keepdim=True)) * mask,
            2 * S + 16,
        )
        hull = b.hull()
        box = self._weights(up(a.c + hull.upper), down(a.c + hull.lower), mask)
        # s⁰ in floats is the softmax of centres that are off by this much.
        b = b.widened(gamma(2 * S + 64) * (1.0 + depth) * 2.0 * mask)
        low, high = b.hull()
        E = torch.maximum(_above_tangent(low), _above_tangent(high))
        zeta = (s0 * E).sum(-1, keepdim=True) * (1.0 + gamma(4 * S + 128))
        w = up(zeta / (1.0 + zeta)).clamp(max=1.0)
        rho_low = -((1.0 + high) * w).clamp(min=0.0)
        rho_high = E - ((1.0 + low) * w).clamp(max=0.0)
        rho = 0.5 * rho_low + 0.5 * rho_high
        # |1 + b̃ + ρ| is at most four times this; s⁰ and what is made of it err by that many roundings.
        size = 1.0 + E + high.abs() + low.abs()
        half = torch.maximum(rho_high - rho, rho - rho_low) + gamma(8 * S + 256) * size
        poor = torch.full_like(mask[..., :1], not self.options.taylor)
        poor = poor | ((s0 < LEAST_WEIGHT) & mask).any(-1, keepdim=True) | ~E.isfinite().all(-1, keepdim=True)
        rho, half = torch.where(poor, 0.0, rho), torch.where(poor | ~mask, 0.0, half)
        s = b.plus(1.0 + rho).widened(half * (1.0 + gamma(8))).scaled(s0)
        middle = 0.5 * box.lower + 0.5 * box.upper
        radius = up(torch.maximum(box.upper - middle, middle - box.lower)) + TINY
        s = TensorSet(
            torch.where(poor, middle, s.c),
            torch.where(poor, 0.0, s.L),
            s.ids,
            torch.where(poor, 0.0, s.Q),
            s.pairs,
            torch.where(poor, radius, s.r) * mask,
        )
        return s.within(box)

    def _weights(self, upper: Tensor, lower: Tensor, mask: Tensor) -> Box:
        if not bool((lower.isfinite() & upper.isfinite()).all()):
            raise Unbounded
        of: Callable[..., Box] = weight_box if self.options.simplex else from_scores
        return of(lower, upper, mask=mask)

    def _mix(self, s: TensorSet, v: TensorSet) -> TensorSet:
        values = shared(v, s.c.shape[0])
        values = values.linear(lambda x: x.transpose(-3, -2), lambda x: x.transpose(-3, -2), 0)
        c = values.c[:, None].expand(*s.c.shape, values.c.shape[-1])
        around = torch.zeros_like(c[:, :, 0])
        if self.options.simplex:
            around = torch.einsum("hij,hjc->hic", s.c, values.c)
        D = c - around[:, :, None]
        by_weight = s.linear(
            lambda x: torch.einsum("...hij,hijc->...hic", x, D),
            lambda x: torch.einsum("...hij,hijc->...hic", x, D.abs()),
            s.c.shape[-1] + 2,
            around,
        )
        moved = TensorSet(torch.zeros_like(values.c), values.L, values.ids, values.Q, values.pairs, values.r)
        z = by_weight + bilinear(s, moved, "hij,hjc->hic", self.options.k, s.c.shape[-1])
        if self.options.simplex:
            weights, hull = s.hull(), values.hull()
            lower, upper = (end[:, None].expand(c.shape) for end in hull)
            z = z.within(Box(*output_hull(*weights, lower, upper)))
        return z.linear(lambda x: x.transpose(-3, -2), lambda x: x.transpose(-3, -2), 0)


def affine(step: Affine, x: TensorSet) -> TensorSet:
    """Return the image under an affine step, exact but for rounding."""
    offset = None
    if step.bias is not None:
        shape = (*x.c.shape[: x.c.ndim - step.in_dims], *step.out_shape)
        offset = step.bias.reshape(step.out_shape).expand(shape)
    maps = through_affine(step, step.weight), through_affine(step, step.weight.abs())
    return x.linear(*maps, step.weight.shape[1], offset)


def shared(x: TensorSet, n_heads: int) -> TensorSet:
    """Give every query head its key-value head. Exact."""
    if x.c.shape[-2] == n_heads:
        return x
    return TensorSet(
        share_heads(x.c, n_heads),
        share_heads(x.L, n_heads),
        x.ids,
        share_heads(x.Q, n_heads),
        x.pairs,
        share_heads(x.r, n_heads),
    )


def _above_tangent(x: Tensor) -> Tensor:
    """Bound e^x − 1 − x from above: the smaller of ½x²e^{max(x,0)} and the value itself with its rounding."""
    square = 0.5 * x.square() * x.clamp(min=0.0).exp() * (1.0 + gamma(64))
    value = torch.expm1(x) - x + gamma(64) * (1.0 + x.abs() + x.exp())
    return torch.minimum(square + TINY, value)
