r"""Products of tensor sets: scores, mixing, gates, variances. Exact on the factors that matter, boxed on the rest.

With x = x₀ + ℓ_x + e_x (linear part ℓ, e = quadratic part and independent radius) and a bilinear B,

    B(x, y) = B(x₀, y₀) + B(x₀, ℓ_y) + B(ℓ_x, y₀)                       kept: linear
            + B(x₀, Q_y) + B(Q_x, y₀) + Σ_{k,l ∈ K} α_kα_l B(L_k, L'_l)  kept: quadratic
            + the rest of B(ℓ_x, ℓ_y) + terms of degree three and more    boxed into r.

K holds the k factors with the largest generators (CORA's reduction of dependent generators before a bilinear
operation, `k_dep` of the paper). k = ∞ is the exact product ⊙ up to degree two. Where all p² coefficients fit in
memory the rest is bounded by |M_kl + M_lk|, after cancellation inside B; else by the product of the two parts' sizes.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prooflens.engines.tensor_sets.tensor_set import TensorSet, merge_pairs, unordered_pairs
from prooflens.numerics import gamma
from prooflens.numerics.rounding import TINY

DENSE_ELEMENTS = 2**23
"""Up to this many coefficients, all pairs of factors are written out, so that they cancel before they are boxed."""


def bilinear(x: TensorSet, y: TensorSet, equation: str, k: int, contracted: int) -> TensorSet:
    """Return B(x, y) for a bilinear map B.

    Args:
        x: the first set.
        y: the second set.
        equation: B as an einsum equation, such as `ihc,jhc->hij`.
        k: how many factors are multiplied exactly.
        contracted: how many terms the sums of the equation have.
    """
    form = _Form(equation)
    x, y = _aligned(x, y)
    c = form(x.c, y.c)
    L = form.left(x.L, y.c) + form.right(x.c, y.L)
    chosen = _leading(x, y, k)
    ll, pairs, shift, rest = _linear_products(form, x, y, chosen)
    Q = torch.cat((form.left(x.Q, y.c), form.right(x.c, y.Q), ll))
    Q, pairs = merge_pairs(Q, torch.cat((x.pairs, y.pairs, pairs)))
    lin_x, lin_y, e_x, e_y = x.linear_size, y.linear_size, x.rest_size, y.rest_size
    rest = rest + form(x.c.abs(), y.r) + form(x.r, y.c.abs())
    rest = rest + form(lin_x + e_x, e_y) + form(e_x, lin_y)
    roundings = gamma(2 * contracted + len(x.L) + 64)
    rest = (rest + roundings * form(x.magnitude, y.magnitude)) * (1.0 + roundings) + TINY
    return TensorSet(c + shift, L, x.ids, Q, pairs, rest)


def square(x: TensorSet, k: int) -> TensorSet:
    """Return (x − c)², coordinate by coordinate."""
    names = "abcdef"[: x.c.ndim]
    moved = TensorSet(torch.zeros_like(x.c), x.L, x.ids, x.Q, x.pairs, x.r)
    return bilinear(moved, moved, f"{names},{names}->{names}", k, 1)


def square_rest(x: TensorSet, k: int) -> Float[Tensor, "*shape"]:
    """Estimate the radius that `square` boxes: what a parabola costs beyond its own error. It is no bound."""
    chosen = _leading(x, x, k)
    kept, lost, e = x.L[chosen].abs().sum(0), x.L[~chosen].abs().sum(0), x.rest_size
    return (2.0 * kept + 0.5 * lost) * lost + (2.0 * (kept + lost) + e) * e


class _Form:
    """An einsum equation that also takes a batch of generators on one side."""

    def __init__(self, equation: str) -> None:
        self.inputs, self.out = equation.split("->")
        self.first, self.second = self.inputs.split(",")

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(f"{self.inputs}->{self.out}", x, y)

    def left(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(f"p{self.first},{self.second}->p{self.out}", x, y)

    def right(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(f"{self.first},p{self.second}->p{self.out}", x, y)

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(f"p{self.first},u{self.second}->pu{self.out}", x, y)


def _aligned(x: TensorSet, y: TensorSet) -> tuple[TensorSet, TensorSet]:
    """Return both sets on the union of their ids (`mergeID`)."""
    if x.ids is y.ids:
        return x, y
    ids = torch.cat((x.ids, y.ids)).unique()

    def spread(z: TensorSet) -> TensorSet:
        L = z.c.new_zeros(len(ids), *z.c.shape)
        L[torch.searchsorted(ids, z.ids)] = z.L
        return TensorSet(z.c, L, ids, z.Q, z.pairs, z.r)

    return spread(x), spread(y)


def _leading(x: TensorSet, y: TensorSet, k: int) -> Bool[Tensor, " p"]:
    """Return the k factors with the largest ‖L_x‖‖ℓ_y‖ + ‖ℓ_x‖‖L_y‖ (ℓ1 norms)."""
    u, v = x.L.abs().flatten(1).sum(1), y.L.abs().flatten(1).sum(1)
    size = u * v.sum() + v * u.sum()
    chosen = torch.zeros(len(size), dtype=torch.bool, device=size.device)
    chosen[size.topk(min(k, len(size))).indices] = True
    return chosen


def _linear_products(
    form: _Form, x: TensorSet, y: TensorSet, chosen: Bool[Tensor, " p"]
) -> tuple[Tensor, Int[Tensor, "m 2"], Tensor, Tensor]:
    """Return kept generators of B(ℓ_x, ℓ_y) with their pairs, and centre shift and radius of all others."""
    p, n_out = len(x.ids), form(x.c, y.c).numel()
    if p * p * n_out <= DENSE_ELEMENTS:
        (first, second), pairs = unordered_pairs(x.ids)
        M = form.both(x.L, y.L)
        both = M + M.transpose(0, 1)
        Q = both[first, second]
        Q[first == second] *= 0.5
        kept = chosen[first] & chosen[second]
        lost, squares = Q[~kept], (first == second)[~kept]
        half = 0.5 * lost[squares]
        radius = half.abs().sum(0) + lost[~squares].abs().sum(0)
        return Q[kept], pairs[kept], half.sum(0), radius * (1.0 + gamma(len(lost) + 16))
    (first, second), pairs = unordered_pairs(x.ids[chosen])
    M = form.both(x.L[chosen], y.L[chosen])
    both = M + M.transpose(0, 1)
    Q = both[first, second]
    Q[first == second] *= 0.5
    kept_x, kept_y = x.L[chosen].abs().sum(0), y.L[chosen].abs().sum(0)
    lost_x, lost_y = x.L[~chosen].abs().sum(0), y.L[~chosen].abs().sum(0)
    radius = form(lost_x, kept_y + lost_y) + form(kept_x, lost_y)
    shift = torch.zeros_like(radius)
    if x is y and form.first == form.second:
        # A sum of squares: (ℓ_lost)² lies in [0, size²], so half of it is centre.
        shift = 0.5 * form(lost_x, lost_y)
        radius = radius - shift * (1.0 - gamma(64))
    return Q, pairs, shift, radius * (1.0 + gamma(p + 64))
