r"""The remainder of softmax mixing as an ellipsoid (`taylor_attention` has the identity; this is its vector form).

At query token t the next root moves, beyond first order in q, k and v, by sums over heads h and keys j. With
g = W_O(V_j − z), c = s g, b = b_lin + b_e the centred scores (|b_e| ≤ E) and V₂ = Σ_j s b² per head:

    second order   ½ Σ c b²  +  Σ s b W_O A_vα  +  scale Σ c (A_qα)·(A_kα)
    third order    ⅙ Σ c (b³ − 3bV₂)  +  ½ Σ s (b² − V₂) W_O A_vα
    with e         what b_e for b, e_V for A_vα, and e_q, e_k for A_qα, A_kα change in these
    beyond         Σ g σ⁗/24  +  Σ σ‴/6 W_O δV         at weights σ on the way from the centre.

In b = b_lin the first two lines are polynomials in α, with shapes from Gram matrices (`taylor_shapes`). The others
share budgets: (√s b_lin) over all heads and keys lies in a ball of squared radius sup Σ s b_lin² (one eigenvalue), and
on the way σb̂² summed over h and j is at most W = sup Σ s⁺b², where b̂ = b − Σσb. The derivatives of a softmax weight
are σ″ = σ(b̂² − V₂), σ‴ = σ(b̂³ − 3b̂V₂ − V₃), σ⁗ = σ(b̂⁴ − 6b̂²V₂ − 4b̂V₃ − V₄ + 6V₂²).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor_attention import MixSite, budget
from prooflens.engines.taylor_norms import frobenius, grow, product_error
from prooflens.engines.taylor_shapes import (
    ball,
    box,
    image,
    raised,
    spread,
    total,
    trace,
    weights_of_sum,
)
from prooflens.engines.taylor_values import Value
from prooflens.numerics import gamma


@dataclass(eq=False)
class MixShape:
    """Ellipsoids of what a mixing's tangent misses, token by token."""

    mix: MixSite
    q: Value
    k: Value
    v: Value

    def __post_init__(self) -> None:
        self.S, self.H, self.c = self.mix.z.shape
        self.out = self.mix.out.flatten(1)
        self.groups = [self.mix.factors.group == g for g in range(self.mix.factors.count)]
        A_k = self.mix.scores.k.A
        A_v = self.mix.v.A
        self.rows_k = A_k[:, :: self.H // self.k.heads].flatten(0, 2)
        self.rows_v = A_v[:, :: self.H // self.v.heads].flatten(0, 2)

    @cached_property
    def key_grams(self) -> Float[Tensor, "G n n"]:
        """A_kA_kᵀ, group by group of factors."""
        return torch.stack([_live_gram(self.rows_k[:, own]) for own in self.groups])

    @cached_property
    def value_grams(self) -> Float[Tensor, "G n n"]:
        """A_vA_vᵀ, group by group of factors."""
        return torch.stack([_live_gram(self.rows_v[:, own]) for own in self.groups])

    def _pairs(self, value: Value, grams: Float[Tensor, "G n n"], t: int) -> Float[Tensor, "H H jl ce"]:
        """Inner products of rows as token t weighs factors, [(h, k), (j, l), (c, e)], raised by twice the rounding."""
        S, g, c = self.S, value.heads, self.c
        w = self.mix.weights[t]
        squares = torch.stack([w[own][0].square() for own in self.groups])
        K = torch.einsum("gnm,g->nm", grams, squares)
        p = len(w)
        K = raised(K, 2.0 * product_error(p + 64, trace(K)))
        K = K.reshape(S, g, c, S, g, c).permute(1, 4, 0, 3, 2, 5).reshape(g, g, S * S, c * c)
        share = self.H // g
        return K.repeat_interleave(share, 0).repeat_interleave(share, 1)

    def _blocks(self, value: Value, M: Float[Tensor, "n n"]) -> Float[Tensor, "H H ce"]:
        """A shape of all heads of a token, by pairs of reading heads."""
        g, c = value.heads, self.c
        split = M.reshape(g, c, g, c).permute(0, 2, 1, 3).reshape(g, g, c * c)
        return split.repeat_interleave(self.H // g, 0).repeat_interleave(self.H // g, 1)

    def shape(self, t: int) -> Float[Tensor, "d d"]:
        """Everything beyond first order at query token t, rounding included."""
        mix = self.mix
        s, E, high = (x[:, t] for x in (mix.s, mix.E, mix.high))
        hat = grow((mix.beta + mix.mean)[:, t])
        g = torch.einsum("dhc,hjc->dhj", mix.out, mix.spread[:, t]).flatten(1)
        c = g * s.flatten()
        rows = mix.weighted(t).flatten(0, 1)
        K = raised(rows @ rows.T, 2.0 * product_error(rows.shape[-1] + 8, frobenius(rows).square()))
        values, keys = self._pairs(self.v, self.value_grams, t), self._pairs(self.k, self.key_grams, t)
        parts = [self._second(c, s, rows, K, values, t), self._products(c, keys, t)]
        parts += self._third(c, s, K, values)
        # With e.
        shared = budget(s.flatten(), rows)
        e_part = (high * E.square()).sum(-1)
        W = grow(budget(high.flatten(), rows).sqrt() + e_part.sum().sqrt()).square()
        W_head = grow(mix.swing[:, t] + e_part.sqrt()).square()[:, None]
        both = grow(mix.rho[:, t] + E)
        change = grow(2.0 * both * E)
        moved = (s * change).sum(-1, keepdim=True)
        parts += [spread(g, (s * E.square()).flatten()) * shared, box(g, (0.5 * s * E.square()).flatten())]
        parts.append(box(g, (0.5 * s * (both.square() * E + E * W_head + both * moved)).flatten()))
        parts.append(self._cross(c, keys, t))
        parts.append(self._sum_values(s * (E + 0.5 * (change + moved)), self.v.blocks("shape")))
        half, one = grow((0.5 * W).square()), torch.ones_like(s)
        parts += [
            self._choose_values(x, self.v.blocks("shape_e")) for x in (s * shared, half * one, half * s)
        ]
        parts += self._beyond(g, high, hat, (W, W_head), mix.ds[:, t])
        noise = mix.noise(t) * (1.0 + hat.amax()) ** 4
        return total([*parts, ball(noise, g.shape[0])])

    def _beyond(
        self, g: Tensor, high: Tensor, hat: Tensor, budgets: tuple[Tensor, Tensor], ds: Tensor
    ) -> list[Float[Tensor, "d d"]]:
        """Fourth order of the weights, and third order of the weights against the values."""
        W, W_head = budgets
        peak = hat.amax(-1, keepdim=True)
        alone = grow((hat.square() + 6.0 * W_head) * (W / 24.0)).square()
        slanted = grow(high * W_head * (peak * (W / 6.0)).square())
        shifted = grow((peak.square() + 6.0 * W_head) * (W / 24.0) * ds)
        parts = [spread(g, alone.flatten()), spread(g, slanted.flatten()), box(g, shifted.flatten())]
        sixth = grow((W / 6.0).square())
        squares = (hat.square() * sixth, 9.0 * high * W_head * sixth, high * peak.square() * sixth)
        return parts + [self._choose_values(grow(x), self.v.blocks("shape")) for x in squares]

    def _second(
        self,
        c: Float[Tensor, "d n"],
        s: Float[Tensor, "H S"],
        rows: Float[Tensor, "n p"],
        K: Float[Tensor, "n n"],
        pairs: Float[Tensor, "H H jl ce"],
        t: int,
    ) -> Float[Tensor, "d d"]:
        """½ Σ c b² + Σ s b W_O A_vα: one quadratic map, so one Gram matrix of both kinds of forms, symmetrised."""
        H, S, width = self.H, self.S, self.c
        mixed = ((rows * self.mix.weights[t]) @ self.rows_v.T).reshape(H * S, S, -1, width)
        mixed = mixed.repeat_interleave(H // mixed.shape[2], 2)
        squares = 0.25 * K * K
        across = 0.5 * torch.einsum("nkl,kl,nlkc->nkc", K.reshape(-1, H, S), s, mixed).flatten(1)
        own = s.flatten()[:, None] * K * s.flatten()
        straight = self._straight(own, pairs)
        weighted = (
            (s.flatten()[:, None, None, None] * mixed).reshape(H, S, S, H, width).permute(0, 3, 1, 2, 4)
        )
        crossed = torch.einsum("hkjle,khljc->hkce", weighted, weighted).permute(0, 2, 1, 3)
        values = 0.5 * (straight + crossed.reshape(H * width, -1))
        whole = torch.cat((torch.cat((squares, across), 1), torch.cat((across.T, values), 1)), 0)
        size = frobenius(K).square() + frobenius(own) * torch.linalg.vector_norm(pairs)
        size = size + torch.linalg.vector_norm(mixed) * (frobenius(K) + torch.linalg.vector_norm(mixed))
        whole = raised(whole, product_error(4 * S * S + 64, 2.0 * size))
        return image(torch.cat((c, self.out), 1), whole)

    def _third(
        self, c: Float[Tensor, "d n"], s: Float[Tensor, "H S"], K: Float[Tensor, "n n"], pairs: Tensor
    ) -> list[Float[Tensor, "d d"]]:
        """⅙ Σ c (b³ − 3bV₂) and ½ Σ s (b² − V₂) W_O A_vα, as cubic forms."""
        squares = raised(K * K, gamma(8) * frobenius(K).square())
        eye = torch.eye(self.S).to(s)
        mean = [torch.block_diag(*(eye - w * row.expand(self.S, -1) for row in s)) for w in (1.0, 3.0)]
        bent = image(mean[1], squares)
        cubic = raised(K * bent, gamma(8) * frobenius(K) * frobenius(bent)) / 36.0
        centred = image(mean[0], squares)
        own = 0.25 * s.flatten()[:, None] * centred * s.flatten()
        size = frobenius(own) * torch.linalg.vector_norm(pairs)
        form = raised(self._straight(own, pairs), product_error(4 * self.S**2 + 64, 2.0 * size))
        return [image(c, cubic), image(self.out, form)]

    def _straight(self, own: Float[Tensor, "n n"], pairs: Float[Tensor, "H H jl ce"]) -> Float[Tensor, "m m"]:
        """Σ_jl own[hj, kl] pairs[hjc, kle]."""
        H, S, width = self.H, self.S, self.c
        weights = own.reshape(H, S, H, S).permute(0, 2, 1, 3).reshape(H, H, 1, S * S)
        return (weights @ pairs).reshape(H, H, width, width).permute(0, 2, 1, 3).reshape(H * width, -1)

    def _products(self, c: Float[Tensor, "d n"], K: Tensor, t: int) -> Float[Tensor, "d d"]:
        """scale Σ c (A_qα)·(A_kα); symmetrised."""
        H, S, width = self.H, self.S, self.c
        w = self.mix.weights[t]
        A = self.mix.scores.q.A[t].flatten(0, 1) * w
        own = raised(A @ A.T, 2.0 * product_error(A.shape[-1], frobenius(A).square()))
        blocks = own.reshape(H, width, H, width).permute(0, 2, 1, 3).reshape(H, H, width * width)
        straight = (K @ blocks[..., None]).reshape(H, H, S, S)
        mixed = (
            ((A * w) @ self.rows_k.T).reshape(H, width, S, -1, width).repeat_interleave(H // self.k.heads, 3)
        )
        mixed = mixed.permute(0, 3, 2, 1, 4)
        crossed = torch.einsum("hklce,khjec->hkjl", mixed, mixed)
        both = (0.5 * (straight + crossed)).permute(0, 2, 1, 3).reshape(H * S, H * S)
        size = frobenius(own) * torch.linalg.vector_norm(K) + torch.linalg.vector_norm(mixed).square()
        found = image(c, raised(both, product_error(4 * width**2, 2.0 * size)))
        return found * self.mix.scale**2

    def _cross(self, c: Float[Tensor, "d n"], K: Tensor, t: int) -> Float[Tensor, "d d"]:
        """scale Σ c (δq·e_k + e_q·A_kα)."""
        H, S = self.H, self.S
        e_q = self._blocks(self.q, self.q.shape_e[t])
        form = (K @ e_q[..., None]).reshape(H, H, S, S).permute(0, 2, 1, 3).reshape(H * S, H * S)
        size = frobenius(self.q.shape_e[t]) * torch.linalg.vector_norm(K)
        parts = [image(c, raised(form, product_error(self.c**2, size)))]
        moved = self._blocks(self.q, self.q.shape[t])
        columns = c.reshape(-1, H, S)
        for j in range(S):
            e_k = self._blocks(self.k, self.k.shape_e[j])
            form = (moved * e_k).sum(-1)
            size = frobenius(self.q.shape[t]) * frobenius(self.k.shape_e[j]) * H
            parts.append(image(columns[:, :, j], raised(form, product_error(self.c**2, size))))
        return total(parts) * self.mix.scale**2

    def _choose_values(self, squares: Float[Tensor, "H S"], shapes: Float[Tensor, "S g c c"]) -> Tensor:
        """Σ x_hj W_O δ_hj with Σ x²/squares ≤ 1, or Σ |x|/√squares ≤ 1."""
        shared = shapes.repeat_interleave(self.H // shapes.shape[1], 1)
        blocks = torch.einsum("hj,jhce->hce", squares, shared)
        size = torch.einsum("hj,jh->h", squares, frobenius(shared))
        return image(self.out, torch.block_diag(*raised(blocks, gamma(self.S + 8) * size)))

    def _sum_values(self, X: Float[Tensor, "H S"], shapes: Float[Tensor, "S g c c"]) -> Tensor:
        """Σ x_hj W_O δ_hj with |x_hj| ≤ X_hj."""
        shared = shapes.repeat_interleave(self.H // shapes.shape[1], 1)
        sizes = X * trace(shared).T.sqrt() * self.mix.out_size[:, None]
        c = weights_of_sum(sizes.flatten()).reshape(X.shape)
        return self._choose_values(grow(X.square() * c), shapes)


def _live_gram(X: Float[Tensor, "n p"]) -> Float[Tensor, "n n"]:
    """XXᵀ; in the first layer most rows do not depend on a group and are 0."""
    live = (X != 0).any(1).nonzero()[:, 0]
    if len(live) == len(X):
        return X @ X.T
    found = X.new_zeros(len(X), len(X))
    found[live[:, None], live] = X[live] @ X[live].T
    return found
