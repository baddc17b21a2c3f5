r"""Engine `layer0`: attention scores of the first layer, nearly exactly (Theorem `thm:margin_sound`).

A linear form f of layer-0 scores is a function of the factors α with a Hessian that is bounded on the whole region:
∇²f(α) ⪯ diag(D) for all α. Expand around a corner s ∈ {−1, 1}ᵖ. With
β_k = 1 − s_k α_k ∈ [0, 2] and G_k = s_k ∂f/∂α_k(s),

    f(α) ≤ f(s) − Σ G_k β_k + ½ Σ D_k β_k²  ≤  f(s) + Σ_k max(0, 2(D_k − G_k)).

This holds for *every* corner. At the maximiser of f the sum vanishes but for the coordinates whose slope G_k is smaller
than D_k: the bound is what the corner attains, plus that little. (At the centre, s = 0, the same inequality is
the diagonal-shift bound |∇f|₁ + ½ΣD, which pays ½D_k for every coordinate.)

**D without a norm** (post-norm models: BERT, MPNet, the paper's encoder). f is quadratic. A score q_i·k_j has
the blocks M = Q̃ᵀK̃ of rank d_h; for i ≠ j,  [0 M; Mᵀ 0] ⪯ σ(M)·diag(τ on token i, 1/τ on token j)  for every τ > 0;
for i = j, ±(M + Mᵀ) ⪯ λ±. σ and λ± come from d_h × d_h problems that `sets.bilinear` verifies; no d × d matrix is
formed. With RoPE, M depends on the distance j − i, up to the rounding of the tables, which is added.

**D with a norm** (pre-norm models: GPT-2, Llama). Scores read z = γ⊙y + β, y = Px·n, n = (‖Px‖²/d + ε)^{-½}: one scalar
per token is all that is not linear. With F the form as a function of y and v = ∂F/∂y,

    ∇²f = Jᵀ∇²F J + Σ_k v_k ∇²y_k,   ‖J‖ ≤ n,   Σ_k v_k ∇²y_k ⪯ √2 max(1, 3εn²) n²‖Pv‖/√d,

the last from D²(v·y)[u,u] = −c(3εn² a² + b²) − 2g a(e·b)  in the split of u along and across m = Px, c = v∥‖m‖n³/d,
g = ‖v⊥‖‖m‖n³/d, ‖m‖n ≤ √d. n is bounded above over the region by ‖m‖ ≥ ‖m₀‖ − sup‖Gα‖, ‖Pv‖ by its value
at the corner plus σ times how far the other tokens' y can move.

**Shaped D.** A bound that ends on the wrong side of 0 although its corner does not is refined: the main term δ_iᵀMδ_j
is majorised by σ(X_i^{-½}MX_j^{-½})·(X_i, X_j) with X ≈ |∂f/∂x| at the corner, one d_h × d_h problem per entry. Then D
is small where the slope is small, which is where it costs. What J's rank-one part and the norm add stays uniform. On
small norm-free models the Hessian of the whole form is written out instead, which keeps what its entries share.

**Rounding.** f(s) and G are sums of products through a chain of at most N roundings, so they err by at most
γ_N times the same chain with absolute values (and (1+η)⁴ where η bounds the relative error of n): both are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.base import FormBounds, Forms, Guarantee, Problem, register
from prooflens.engines.first_layer import FirstLayer
from prooflens.engines.first_layer_curvature import (
    JOINT_SIZE,
    joint_curvatures,
    shaped_curvature,
    uniform_curvature,
)
from prooflens.engines.first_layer_forms import Entries, Moves, Point
from prooflens.errors import EngineError
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY
from prooflens.regions import Region

SIGN_STEPS = 2
"""How often a corner is replaced by the signs of the gradient there; any corner gives a bound."""

CHUNK_ELEMENTS = 2**24
"""Forms are worked on so many numbers at a time (128 MiB per temporary)."""


@register("layer0")
@dataclass(frozen=True)
class Layer0:
    """Proved bounds of linear forms of layer-0 scores."""

    name: str = "layer0"
    guarantee: Guarantee = Guarantee.PROVED

    def refuses(self, problem: Problem, forms: Forms) -> str | None:
        """Only scores of layer 0, in float64."""
        if forms.logits is not None or any(layer != 0 for layer in forms.layers):
            return "layer0 bounds scores of layer 0 only"
        if problem.model.dtype != torch.float64:
            return "proofs need a float64 model"
        return None

    def bound_forms(self, problem: Problem, forms: Forms) -> FormBounds:
        """Bounds of every form, with the corners they were expanded around."""
        if reason := self.refuses(problem, forms):
            raise EngineError(reason)
        with torch.no_grad():
            view = FirstLayer.of(problem)
            upper, upper_corner = _maximise(view, forms)
            minus, lower_corner = _maximise(view, forms.negated())
        return FormBounds(-minus, upper, lower_corner, upper_corner)


def _maximise(view: FirstLayer, forms: Forms) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
    """Proved upper bounds of the forms and their corners, chunk by chunk."""
    step = max(1, CHUNK_ELEMENTS // view.center.numel())
    bounds = [view.center.new_zeros(0)]
    corners = [view.center.new_zeros(0, view.problem.region.n_factors)]
    for start in range(0, forms.size, step):
        chosen = torch.arange(start, min(start + step, forms.size))
        entries = Entries.of(view, forms.select(chosen))
        bound, corner = _maximise_chunk(entries, Moves(entries, view.problem.region))
        bounds.append(bound)
        corners.append(corner)
    return torch.cat(bounds), torch.cat(corners)


def _maximise_chunk(entries: Entries, moves: Moves) -> tuple[Float[Tensor, " F"], Float[Tensor, "F p"]]:
    best = _climb(entries, moves)
    bound = _bound(entries, moves, best, uniform_curvature(entries, best))
    # Only these can still change sides: the corner is below 0, the bound is not.
    open_ = ((best.value < 0) & (bound >= 0)).nonzero()[:, 0]
    if len(open_) and moves.region.generators is None:
        part, there = entries.select(open_), best.select(open_)
        bound = bound.index_copy(0, open_, torch.minimum(bound[open_], _refined(part, moves.region, there)))
    return bound, moves.factors(best.signs)


def _refined(entries: Entries, region: Region, point: Point) -> Float[Tensor, " F"]:
    """The best of the shaped curvatures; on small norm-free models also those of the whole Hessian."""
    moves = Moves(entries, region)
    best = _bound(entries, moves, point, shaped_curvature(entries, point))
    if entries.view.norm is None and entries.view.rotary is None and point.x[0].numel() <= JOINT_SIZE:
        for curvature in joint_curvatures(entries, point):
            best = torch.minimum(best, _bound(entries, moves, point, curvature))
    return best


def _climb(entries: Entries, moves: Moves) -> Point:
    """A good corner for each form: the signs of the gradient at the centre, then of the gradient there."""
    center = moves.region.center[entries.tokens]
    _, slope, _ = entries.evaluate(center)
    best: Point | None = None
    for _ in range(SIGN_STEPS):
        signs = torch.where(moves.pull(slope) >= 0, 1.0, -1.0).to(center)
        x = moves.point(signs)
        value, slope, read = entries.evaluate(x)
        found = Point(signs, value, x, slope, read)
        best = found if best is None else best.better_of(found)
    assert best is not None
    return best


def _bound(
    entries: Entries, moves: Moves, point: Point, curvature: Float[Tensor, "F T d"]
) -> Float[Tensor, " F"]:
    """f(s) + Σ max(0, 2(D − G)), with the rounding of f(s) and G on the safe side; ∞ where anything is not finite."""
    roundoff = entries.view.roundoff(entries.longest)
    G = point.signs * moves.pull(point.slope)
    error = up(roundoff * moves.pull_size(entries.slope_size()))
    excess = 2.0 * up(moves.curvature(curvature) + up(error - G)).clamp(min=0.0)
    slack = up(excess.sum(-1) * (1.0 + gamma(2 * excess.shape[-1] + 16)) + TINY)
    bound = up(up(point.value + up(roundoff * entries.value_size() + TINY)) + slack)
    # A slope that has overflowed would take all of the slack away.
    known = point.value.isfinite() & G.isfinite().all(-1) & bound.isfinite()
    return torch.where(known, bound, torch.inf)
