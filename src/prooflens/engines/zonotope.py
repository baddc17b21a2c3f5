r"""Engine `zonotope`: affine arithmetic through the transformer (DeepT, Bonaert et al. 2021), for ℓ∞ regions.

Every value is c + Σ_k ε_k L_k, ε ∈ [−1, 1], the noise symbols ε shared by all values of a walk: the tensor sets of
`tensor_sets.tensor_set` without quadratic generators, so affine steps and rounding are theirs.

**Dot products** c₁c₂ + c₁ℓ₂ + ℓ₁c₂ + ℓ₁ℓ₂, the last term boxed: *precise*, Σ_{k≤l} |M_kl + M_lk| with ε_k² ∈ [0, 1],
where the coefficients fit in memory (`tensor_sets.products`); *fast*, the product of the two radii, where they do
not. Forms of scores are always precise, after differences are taken.

**One-dimensional functions** lie in a strip, φ(x) ∈ λx + [μ̲, μ̄]. For a convex φ and any λ the upper end is at an
end of [l, u]; below, the tangent at any t gives φ(x) − λx ≥ φ(t) − φ'(t)t + min over x ∈ {l, u} of (φ'(t) − λ)x, best
where φ'(t) = λ.

**Softmax** s_j = 1/Σ_k e^{a_k − a_j}: differences, a strip for e^x, a sum, a strip for 1/Z, cut by the box that the
differences allow. **Its sum**: the real weights satisfy Σ s = 1, so s_j = s_j + w_j(1 − Σ_k s_k) for any w. On the
set that is an affine map; w follows the squared radii, so that noise which all weights share cancels. Where it does
not narrow a weight the weight stays.

Symbols are reduced to a budget after each step (largest ℓ1 norm kept), and what is boxed becomes a fresh symbol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prooflens.engines.bounds import FormBounds, Guarantee
from prooflens.engines.forms import Forms
from prooflens.engines.protocol import EngineBase, EngineOptions, register
from prooflens.engines.relaxations.activations import LIBM, Relaxation
from prooflens.engines.tensor_sets.relax import apply
from prooflens.engines.tensor_sets.steps import Rules, SetOptions, Unbounded
from prooflens.engines.tensor_sets.tensor_set import TensorSet
from prooflens.engines.tensor_sets.walk import bound_from, propagate, read_names, score_steps
from prooflens.models import OUTPUT
from prooflens.models.sites import Softmax
from prooflens.numerics import gamma
from prooflens.numerics.rounding import TINY
from prooflens.problem import Problem
from prooflens.queries.simplex import Box
from prooflens.queries.weights import weight_box

AFFINE = SetOptions(simplex=False, norm=False, taylor=False, k=0)
"""The options of affine arithmetic: no quadratic generators and none of the paper's constraints."""

WIDEST = 300.0
"""Score differences beyond this are not given to exponentials: their weights are boxes."""


def strip(
    function: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    c: Tensor,
    box: Box,
    slope: Tensor,
    touch: Tensor,
) -> Relaxation:
    """Return φ(x) ∈ value + λ(x − c) ± error for a convex φ, for any slope λ and any touching point.

    Args:
        function: φ, computed to 32 roundings.
        derivative: φ', computed to 32 roundings.
        c: where the line is centred.
        box: the interval of x.
        slope: λ.
        touch: where the tangent below φ touches.
    """
    low, high = box
    touch = torch.minimum(torch.maximum(touch, low), high)
    at = torch.stack((low, high))
    ends = function(at) - slope * (at - c)
    value, tilt = function(touch), derivative(touch)
    below = value - tilt * (touch - c) + ((tilt - slope) * (at - c)).amin(0)
    size = function(at).abs().amax(0) + value.abs()
    size = size + (slope.abs() + tilt.abs()) * (low.abs() + high.abs() + c.abs())
    slack = 4.0 * LIBM * size + TINY
    above, below = ends.amax(0) + slack, below - slack
    middle = 0.5 * above + 0.5 * below
    error = torch.maximum(above - middle, middle - below) * (1.0 + gamma(8)) + TINY
    return Relaxation(middle, slope, torch.zeros_like(slope), error)


class AffineRules(Rules):
    """The steps of `polyzono` in affine arithmetic: no quadratic part, and DeepT's softmax."""

    def _softmax(self, step: Softmax, a: TensorSet) -> TensorSet:
        mask = step.mask
        other = mask[..., :, None] & mask[..., None, :]
        other = other & ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        d = a.linear(
            lambda x: (x[..., None, :] - x[..., :, None]) * other,
            lambda x: (x[..., None, :] + x[..., :, None]) * other,
            1,
        )
        hull = d.hull()
        if not bool((hull.lower.isfinite() & hull.upper.isfinite()).all()):
            raise Unbounded
        box = weight_box(differences=hull.upper.mT, mask=mask.expand(a.c.shape))
        fine = ((hull.upper <= WIDEST) & (hull.lower >= -WIDEST)).all(-1) & mask
        ends = Box(*(end.clamp(-WIDEST, WIDEST) for end in hull))
        width = (ends.upper - ends.lower).clamp(min=TINY)
        secant = (ends.upper.exp() - ends.lower.exp()) / width
        secant = torch.minimum(torch.maximum(secant, ends.lower.exp()), ends.upper.exp())
        e = apply(d, strip(torch.exp, torch.exp, d.c, ends, secant, secant.log()), 0)
        Z = e.linear(
            lambda x: (x * other).sum(-1),
            lambda x: (x * other).sum(-1),
            mask.shape[-1],
            torch.ones_like(a.c),
        )
        ranges = Z.hull()
        low = torch.maximum(ranges.lower, (1.0 / box.upper.clamp(min=TINY)) * (1.0 - gamma(8)))
        low = torch.where(fine, low, 1.0).clamp(min=1.0 - gamma(8))
        high = torch.minimum(ranges.upper, (1.0 / box.lower.clamp(min=TINY)) * (1.0 + gamma(8)))
        high = torch.maximum(torch.where(fine, high, 1.0), low)
        Z = Z.absorbed(self.factors)
        slope = -1.0 / (low * high)
        how = strip(
            torch.reciprocal,
            lambda z: -z.reciprocal().square(),
            Z.c,
            Box(low, high),
            slope,
            (low * high).sqrt(),
        )
        s = apply(Z, how, 0).absorbed(self.factors)
        middle = 0.5 * box.lower + 0.5 * box.upper
        half = torch.maximum(box.upper - middle, middle - box.lower) * (1.0 + gamma(8)) + TINY
        s = replace(
            s,
            c=torch.where(fine, s.c, middle) * mask,
            L=torch.where(fine, s.L, 0.0),
            r=torch.where(fine, s.r, half) * mask,
        ).absorbed(self.factors)
        return self.on_simplex(s).within(box)

    def on_simplex(self, s: TensorSet) -> TensorSet:
        """Replace s by s + w(1 − Σ s), weight by weight, where that is narrower."""
        before = s.hull()
        square = (before.upper - before.lower).square()
        w = square / square.sum(-1, keepdim=True).clamp(min=TINY)
        # Whatever w is, it multiplies 1 − Σ s, which is 0 for the real weights.
        moved = s.linear(
            lambda x: x - w * x.sum(-1, keepdim=True),
            lambda x: x + w * x.sum(-1, keepdim=True),
            2 * s.c.shape[-1] + 8,
            w,
        )
        after = moved.hull()
        better = (after.upper - after.lower) < (before.upper - before.lower)
        return replace(
            s,
            c=torch.where(better, moved.c, s.c),
            L=torch.where(better, moved.L, s.L),
            r=torch.where(better, moved.r, s.r),
        )


@register("zonotope")
@dataclass(frozen=True)
class ZonotopeEngine(EngineBase):
    """Bound linear forms of any scores and outputs by affine arithmetic (zonotopes, as DeepT); the bounds are proved.

    Attributes:
        name: the engine's name in the registry.
        guarantee: proved.
        symbols: how many noise symbols are kept from step to step.

    Example:
        >>> import prooflens as pl
        >>> from prooflens.queries import Row
        >>> model = pl.load("toy")
        >>> problem = Problem(model, pl.Ball(0.02).around(model.example()))
        >>> margin = Forms.of([(0, Row(0, 1, 3), 2, 1.0), (0, Row(0, 1, 3), 0, -1.0)], size=1)
        >>> found = ZonotopeEngine().bound_forms(problem, margin)
        >>> 0.32 < found.lower.item() < found.upper.item() < 0.40
        True
    """

    name: str = "zonotope"
    guarantee: Guarantee = Guarantee.PROVED
    symbols: int = 1024
    """Noise symbols that are kept from step to step; at least two per coordinate of the input are kept."""

    def _bound(self, problem: Problem, forms: Forms, options: EngineOptions) -> FormBounds:
        """Bound every form; ±∞ where a set has left the float numbers."""
        steps = score_steps(problem, forms)
        names = read_names(steps)
        names |= {OUTPUT} if forms.logits is not None else set()
        program = problem.model.program(problem.n_tokens, sorted(names), problem.padding)
        limit = max(self.symbols, 2 * problem.region.center.numel())
        walk = propagate(program, problem.region, AFFINE, sorted(names), AffineRules, limit)
        return bound_from(walk.sets, problem, forms, steps, lemma=True)
