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

**Rounding.** f(s) and G are sums of products through a chain of at most N roundings, so they err by at most
γ_N times the same chain with absolute values (and (1+η)⁴ where η bounds the relative error of n): both are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.base import FormBounds, Forms, Guarantee, Problem, register
from prooflens.engines.first_layer import FirstLayer
from prooflens.errors import EngineError
from prooflens.numerics import gamma, up
from prooflens.numerics.rounding import TINY

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


def _maximise(view: FirstLayer, forms: Forms) -> tuple[Tensor, Tensor]:
    """Proved upper bounds of the forms and their corners, chunk by chunk."""
    step = max(1, CHUNK_ELEMENTS // view.center.numel())
    bounds, corners = [], []
    for start in range(0, forms.size, step):
        chosen = torch.arange(start, min(start + step, forms.size))
        bound, corner = _maximise_chunk(view, _Entries.of(view, forms.select(chosen)))
        bounds.append(bound)
        corners.append(corner)
    if not bounds:
        return view.center.new_zeros(0), view.center.new_zeros(0, view.problem.region.n_factors)
    return torch.cat(bounds), torch.cat(corners)


def _maximise_chunk(view: FirstLayer, entries: _Entries) -> tuple[Tensor, Tensor]:
    region = view.problem.region
    x = view.center.expand(entries.size, *view.center.shape)
    _, slope, _ = _evaluate(view, entries, x)
    gradient = region.pullback(slope)
    best = torch.full((entries.size,), -torch.inf).to(view.center)
    corner = torch.zeros_like(gradient)
    kept: tuple[Tensor, Tensor] = (slope, slope)
    for _ in range(SIGN_STEPS):
        signs = torch.where(gradient >= 0, 1.0, -1.0).to(gradient)
        value, slope, read = _evaluate(view, entries, region.point(signs))
        gradient = region.pullback(slope)
        better = value > best
        best = torch.where(better, value, best)
        corner = torch.where(better[:, None], signs, corner)
        kept = (
            torch.where(better[:, None, None], slope, kept[0]),
            torch.where(better[:, None, None], read, kept[1]),
        )
    slope, read = kept
    G = corner * region.pullback(slope)
    roundoff = view.roundoff(entries.longest)
    error = up(roundoff * _pullback_size(view, entries.slope_size(view)))
    excess = 2.0 * up(_curvature(view, entries, slope, read) + up(error - G)).clamp(min=0.0)
    slack = up(excess.sum(-1) * (1.0 + gamma(2 * excess.shape[-1] + 16)) + TINY)
    bound = up(up(best + up(roundoff * entries.value_size(view) + TINY)) + slack)
    return torch.where(best.isfinite() & bound.isfinite(), bound, torch.inf), corner


def _pullback_size(view: FirstLayer, size: Float[Tensor, "F S d"]) -> Float[Tensor, "F p"]:
    """|G|ᵀ|v|: how large the terms of a pulled-back covector are."""
    region = view.problem.region
    if region.generators is not None:
        return torch.einsum("fsd,psd->fp", size, region.generators.abs())
    return region.pullback(size)


@dataclass(frozen=True, eq=False)
class _Entries:
    """The forms of one chunk, entry by entry and grouped by head."""

    size: int
    form: Tensor
    head: Tensor
    position: Tensor
    key: Tensor
    weight: Tensor

    @classmethod
    def of(cls, view: FirstLayer, forms: Forms) -> _Entries:
        """Move the forms' columns to the model's device."""
        columns = (forms.index, forms.head, forms.position, forms.key, forms.weight)
        return cls(forms.size, *(column.to(view.center.device) for column in columns))

    @cached_property
    def longest(self) -> int:
        """The largest number of entries of one form."""
        return int(self.form.bincount().max()) if len(self.form) else 0

    @cached_property
    def by_head(self) -> list[tuple[int, Tensor]]:
        """Entry numbers of each head that occurs."""
        return [(head, (self.head == head).nonzero()[:, 0]) for head in self.head.unique().tolist()]

    def value_size(self, view: FirstLayer) -> Float[Tensor, " F"]:
        """Σ|w| of the absolute-value chain of each score."""
        q = view.q_size[self.position, self.head]
        terms = (q * view.k_size[self.key, self.head]).sum(-1) * abs(view.scores.scale)
        if view.scores.bias is not None:
            terms = terms + view.scores.bias[self.head, self.position, self.key].abs()
        return self._add(terms * self.weight.abs())

    def _add(self, terms: Tensor) -> Tensor:
        return terms.new_zeros(self.size).index_add(0, self.form, terms)

    def slope_size(self, view: FirstLayer) -> Float[Tensor, "F S d"]:
        """The absolute-value chain of ∂f/∂x."""
        size = view.center.new_zeros(self.size, *view.center.shape)
        for head, chosen in self.by_head:
            weight = (self.weight[chosen].abs() * abs(view.scores.scale))[:, None]
            form, i, j = self.form[chosen], self.position[chosen], self.key[chosen]
            k, q = view.k_size[j, head], view.q_size[i, head]
            if view.rotary is not None:
                k, q = view.turned_size(k), view.turned_size(q)
            _scatter(size, form, i, weight * k @ view.head_weight(view.q, head).abs())
            _scatter(size, form, j, weight * q @ view.head_weight(view.k, head).abs())
        if view.norm is None:
            return size
        size = size if view.norm.weight is None else size * view.norm.weight.abs()
        n = view.n_high[:, None]
        along = (view.size * size).mean(-1, keepdim=True)
        if view.norm.centred:
            size = size + size.mean(-1, keepdim=True)
        return n * (size + view.size * n.square() * along)


def _scatter(
    target: Float[Tensor, "F S d"], form: Tensor, token: Tensor, values: Float[Tensor, "N d"]
) -> None:
    """Add rows of values at (form, token), in place."""
    target.view(-1, target.shape[-1]).index_add_(0, form * target.shape[1] + token, values)


def _evaluate(
    view: FirstLayer, entries: _Entries, x: Float[Tensor, "F S d"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, "F S d"], Float[Tensor, "F S d"]]:
    """Each form at its own point: value, ∂f/∂x, and v = ∂F/∂y (γ ⊙ ∂f/∂z) for the norm's curvature."""
    norm = view.norm
    if norm is None:
        z, n, m = x, None, None
    else:
        m = x - x.mean(-1, keepdim=True) if norm.centred else x
        n = torch.rsqrt(m.square().mean(-1, keepdim=True) + norm.eps)
        z = m * n if norm.weight is None else m * n * norm.weight
        z = z if norm.bias is None else z + norm.bias
    value = x.new_zeros(entries.size)
    slope = torch.zeros_like(x)
    scale = view.scores.scale
    for head, chosen in entries.by_head:
        form, i, j = entries.form[chosen], entries.position[chosen], entries.key[chosen]
        weight = entries.weight[chosen]
        WQ, WK = view.head_weight(view.q, head), view.head_weight(view.k, head)
        q = view.turn(torch.nn.functional.linear(z[form, i], WQ, view.head_bias(view.q, head)), i)
        k = view.turn(torch.nn.functional.linear(z[form, j], WK, view.head_bias(view.k, head)), j)
        score = (q * k).sum(-1) * scale
        if view.scores.bias is not None:
            score = score + view.scores.bias[head, i, j]
        value = value.index_add(0, form, weight * score)
        pull = (scale * weight)[:, None]
        _scatter(slope, form, i, view.turn(pull * k, i, back=True) @ WQ)
        _scatter(slope, form, j, view.turn(pull * q, j, back=True) @ WK)
    if norm is None or n is None or m is None:
        return value, slope, slope
    read = slope if norm.weight is None else slope * norm.weight
    read = read - read.mean(-1, keepdim=True) if norm.centred else read
    slope = n * read - n.pow(3) * m * (m * read).mean(-1, keepdim=True)
    return value, slope, read


def _curvature(
    view: FirstLayer, entries: _Entries, slope: Float[Tensor, "F S d"], read: Float[Tensor, "F S d"]
) -> Float[Tensor, "F p"]:
    """D ≥ 0 with ∇²f ⪯ diag(D) in the factors, over the whole region."""
    sigma, low, high = view.spectra
    i, j, form = entries.position, entries.key, entries.form
    S = view.center.shape[0]
    own = i == j
    cross = sigma[entries.head, i, j]
    weight = entries.weight.abs()
    tilt = _tilt(view, entries, slope)[form]
    eigenvalue = torch.where(entries.weight > 0, high[entries.head], low[entries.head])
    widest = torch.maximum(low, high)[entries.head]
    base = view.center.new_zeros(entries.size, S)
    at_i = weight * torch.where(own, eigenvalue, cross * tilt)
    at_j = weight * torch.where(own, torch.zeros_like(cross), cross / tilt)
    base = base.index_put((form, i), at_i, accumulate=True).index_put((form, j), at_j, accumulate=True)
    base = up(base * (1.0 + gamma(S + 16)))
    norm = view.norm
    if norm is not None:
        d = view.center.shape[-1]
        n = view.n_high
        moved = 2.0 * n * view.reach
        wander = view.center.new_zeros(entries.size, S)
        step_i = weight * torch.where(own, widest, cross) * moved[j]
        step_j = weight * torch.where(own, torch.zeros_like(cross), cross) * moved[i]
        wander = wander.index_put((form, i), step_i, accumulate=True)
        wander = wander.index_put((form, j), step_j, accumulate=True)
        length = read.square().sum(-1).sqrt() * (1.0 + gamma(d + 8))
        length = length + view.roundoff(entries.longest) * _read_size(view, entries)
        bend = 2.0**0.5 * (3.0 * norm.eps * n.square()).clamp(min=1.0) * n.square() * d**-0.5
        base = up((n.square() * base + bend * (length + wander)) * (1.0 + gamma(S + 64)))
    return _to_factors(view, base)


def _read_size(view: FirstLayer, entries: _Entries) -> Float[Tensor, "F S"]:
    """A bound of the length of v's absolute-value chain, for the rounding of ‖Pv‖."""
    total = view.center.new_zeros(entries.size, view.center.shape[0])
    gain = 1.0 if view.norm is None or view.norm.weight is None else float(view.norm.weight.abs().max())
    for head, chosen in entries.by_head:
        weight = entries.weight[chosen].abs() * abs(view.scores.scale) * gain * 4.0
        form, i, j = entries.form[chosen], entries.position[chosen], entries.key[chosen]
        q, k = view.q_size[i, head].norm(dim=-1), view.k_size[j, head].norm(dim=-1)
        to_i = weight * k * view.head_weight(view.q, head).norm()
        to_j = weight * q * view.head_weight(view.k, head).norm()
        total = total.index_put((form, i), to_i, accumulate=True)
        total = total.index_put((form, j), to_j, accumulate=True)
    return total


def _tilt(view: FirstLayer, entries: _Entries, slope: Float[Tensor, "F S d"]) -> Float[Tensor, " F"]:
    """τ per form: a coordinate's share of the slack grows like D²/slope, so curvature goes where slopes are steep."""
    steep = (slope.abs() * view.problem.region.spread()).mean(-1)
    at_query = steep[entries.form, entries.position]
    at_key = steep[entries.form, entries.key]
    of_query = steep.new_zeros(entries.size).index_add(0, entries.form, at_query)
    of_key = steep.new_zeros(entries.size).index_add(0, entries.form, at_key)
    ratio = (of_query / of_key.clamp(min=TINY) / 2.0).clamp(min=2.0**-8, max=2.0**8)
    return ratio.pow(0.25)


def _to_factors(view: FirstLayer, per_token: Float[Tensor, "F S"]) -> Float[Tensor, "F p"]:
    """Curvature of the factors from a curvature per token: D = Σ_t c_t · (row sums of |G_tG_tᵀ|)."""
    region = view.problem.region
    if region.generators is None:
        token = torch.div(region.moving, view.center.shape[-1], rounding_mode="floor")
        return up(per_token[:, token] * region.scale.square() * (1.0 + gamma(4)))
    products = torch.einsum("psd,qsd->spq", region.generators, region.generators).abs().sum(-1)
    slack = torch.einsum("psd,qsd->spq", region.generators.abs(), region.generators.abs()).sum(-1)
    rows = products + gamma(view.center.shape[-1] + 4) * slack
    return up(per_token @ rows * (1.0 + gamma(2 * sum(products.shape) + 16)))
