r"""The remainder of softmax mixing as an ellipsoid (`taylor_attention` has the identity; this is its vector form).

At query token t the next root moves, beyond first order in q, k and v, by sums over heads h and keys j. With
g = W_O(V_j − z), c = s g, b = b_lin + b_e the centred scores (|b| ≤ β, |b_e| ≤ E) and m_k = Σ_j s b^k per head, the
weights are σ = s e^b/(1 + q) with **q = Σ s (e^b − 1) ≥ 0** (Jensen), so that N = Σ c (e^b − 1) becomes N/(1 + q):

    second order   ½ Σ c b²  +  Σ s b W_O A_vα  +  scale Σ c (A_qα)·(A_kα)
    third order    ⅙ Σ c (b³ − 3b m₂)  +  ½ Σ s (b² − m₂) W_O A_vα
    fourth order   Σ c (b⁴/24 − b² m₂/4 − b m₃/6)  +  Σ s (b³/6 − b m₂/2 − m₃/6) W_O A_vα
    with b_e       what b_e for b_lin changes in these, b_e the products of A_qα and A_kα and all that e_q, e_k add
    with e         e_V for A_vα, and e_q, e_k for A_qα, A_kα
    beyond         fifth order of N/(1 + q), fourth order of the weights against δV

In b = b_lin the first three are polynomials in α, with shapes from Gram matrices (`taylor_shapes`); b_e lies in an
ellipsoid as well, and what is linear in it has such shapes too. The others share a budget: Σ s b² over all heads and
keys is at most W (one eigenvalue), so with R_n(b) = e^b − Σ_{k<n} b^k/k! and r_n = R_n(β)/β²

    t = s b²/W sums to at most 1,      s|b| = √(sW) √t,      s|R_n(b)| ≤ r_n √(W min(W, sβ²)) √t,

and a sum of x g with |x| ≤ Z√t lies in E(Σ Z² g gᵀ).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.smooth import exp_tail
from prooflens.engines.taylor_attention import MixSite, budget
from prooflens.engines.taylor_norms import frobenius, grow, length, product_error
from prooflens.engines.taylor_shapes import (
    UNDERFLOW,
    ball,
    box,
    image,
    raised,
    spread,
    total,
    trace,
    weights_of_sum,
)
from prooflens.engines.taylor_values import UNREAD, Value
from prooflens.numerics import gamma

JOINT = 4.0
"""Rows of four kinds (scores, queries, keys, values) are one stack: what its Gram matrix errs by between two kinds is
covered by raising the diagonal blocks of all four by four times their own error."""


@dataclass(frozen=True, eq=False)
class Budget:
    """What the centred scores of one query token share: Σ s b² ≤ W over all heads, W_head in each."""

    s: Float[Tensor, "H S"]
    E: Float[Tensor, "H S"]
    beta: Float[Tensor, "H S"]
    W: Float[Tensor, ""]
    W_head: Float[Tensor, "H 1"]

    @classmethod
    def of(cls, mix: MixSite, t: int) -> Budget:
        """From the eigenvalues of the linear parts, and E."""
        s, E, beta = (x[:, t] for x in (mix.s, mix.E, mix.beta))
        rows = mix.weighted(t)
        linear, heads = budget(s.flatten(), rows.flatten(0, 1)), budget(s, rows)
        e_part = (s * E.square()).sum(-1)
        W = grow(linear.sqrt() + e_part.sum().sqrt()).square()
        return cls(s, E, beta, grow(W), grow((heads.sqrt() + e_part.sqrt()).square())[:, None])

    @property
    def straight(self) -> Float[Tensor, "H S"]:
        """Z of s b."""
        return (self.s * self.W).sqrt()

    @property
    def curved(self) -> Float[Tensor, "H S"]:
        """Z of s b²."""
        return (self.W * torch.minimum(self.W, self.s * self.beta.square())).sqrt()

    def mean(self, r: Float[Tensor, "H S"]) -> Float[Tensor, "H 1"]:
        """sup Σ_j s b² r, head by head."""
        each = (self.s * self.beta.square() * r).sum(-1, keepdim=True)
        return grow(torch.minimum(each, r.amax(-1, keepdim=True) * self.W_head))


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

    @cached_property
    def cross_grams(self) -> Float[Tensor, "G n m"]:
        """A_vA_kᵀ, group by group of factors."""
        return torch.stack([self.rows_v[:, own] @ self.rows_k[:, own].T for own in self.groups])

    def _pairs(self, value: Value, grams: Float[Tensor, "G n n"], t: int) -> Float[Tensor, "H H jl ce"]:
        """Inner products of rows as token t weighs factors, [(h, k), (j, l), (c, e)], raised."""
        S, g, c = self.S, value.heads, self.c
        w = self.mix.weights[t]
        squares = torch.stack([w[own][0].square() for own in self.groups])
        K = torch.einsum("gnm,g->nm", grams, squares)
        p = len(w)
        K = raised(K, JOINT * product_error(p + 64, trace(K)))
        K = K.reshape(S, g, c, S, g, c).permute(1, 4, 0, 3, 2, 5).reshape(g, g, S * S, c * c)
        share = self.H // g
        return K.repeat_interleave(share, 0).repeat_interleave(share, 1)

    def _blocks(self, value: Value, M: Float[Tensor, "n n"]) -> Float[Tensor, "H H ce"]:
        """A shape of all heads of a token, by pairs of reading heads."""
        g, c = value.heads, self.c
        split = M.reshape(g, c, g, c).permute(0, 2, 1, 3).reshape(g, g, c * c)
        return split.repeat_interleave(self.H // g, 0).repeat_interleave(self.H // g, 1)

    def parts(self, t: int) -> tuple[Float[Tensor, "d d"], list[Float[Tensor, "d d"]]]:
        """What query token t misses: the second order of Aα, and all the rest, rounding included."""
        mix = self.mix
        s = mix.s[:, t]
        g = torch.einsum("dhc,hjc->dhj", mix.out, mix.spread[:, t]).flatten(1)
        c = g * s.flatten()
        rows = mix.weighted(t).flatten(0, 1)
        K = raised(rows @ rows.T, JOINT * product_error(rows.shape[-1] + 8, frobenius(rows).square()))
        values, keys = self._pairs(self.v, self.value_grams, t), self._pairs(self.k, self.key_grams, t)
        products = self._products(keys, t)
        second = self._second(c, s, K, values, products, t)
        rest = self._third(c, s, K, values) + self._fourth(c, s, K, values)
        rest.append(self._cross(c, keys, t))
        at = Budget.of(mix, t)
        rest += self._linear_in_e(g, at, K, self._nonlinear(at, g, products, t), values)
        rest += self._with_e(g, at) + self._beyond(g, at)
        noise = mix.noise(t) * torch.exp(2.0 * at.beta.amax())
        return second, [*rest, ball(noise, g.shape[0])]

    def _nonlinear(
        self, at: Budget, g: Float[Tensor, "d n"], products: Float[Tensor, "n n"], t: int
    ) -> Float[Tensor, "n n"]:
        """The shape of b_e: products of linear parts, q·e_k + e_q·k, and a box of what is of second order in e.

        It is read against c = s g, so the weights of its parts follow what they do there.
        """
        mix, (H, S, width) = self.mix, (self.H, self.S, self.c)
        size = at.s.flatten() * torch.linalg.vector_norm(g, dim=0)
        size = size + UNREAD * size.mean() + 2.0**-300
        centring = _less_mean(at.s, 1.0, 1.0)
        parts = [image(centring, products)]
        queries = mix.scores.q.u[t]
        keys = []
        for j in range(S):
            e_k = self._blocks(self.k, self.k.shape_e[j]).reshape(H, H, width, width)
            form = torch.einsum("hc,hkce,ke->hk", queries, e_k, queries)
            slip = product_error(2 * width, length(queries).square().sum() * frobenius(self.k.shape_e[j]) * H)
            keys.append(raised(form, slip))
        spans = [(size.reshape(H, S)[:, j].square() * M.diagonal()).sum().sqrt() for j, M in enumerate(keys)]
        c = weights_of_sum(torch.stack(spans))
        shared = g.new_zeros(H, S, H, S)
        for j, M in enumerate(keys):
            shared[:, j, :, j] = c[j] * M
        shared = raised(shared.reshape(H * S, H * S), gamma(4) * torch.linalg.vector_norm(shared))
        live = mix.mask[t].expand(H, S).flatten().to(g)
        parts.append(image(centring * live[:, None] * live, shared))
        shared_q = self._blocks(self.q, self.q.shape_e[t]).reshape(H, H, width, width)
        moved = torch.einsum("hjc,hkce,kle->hjkl", mix.keys[:, t], shared_q, mix.keys[:, t])
        sizes = length(mix.keys[:, t].flatten(1)).square().sum() * frobenius(self.q.shape_e[t]) * H
        parts.append(raised(moved.reshape(H * S, H * S), product_error(2 * width, sizes)))
        parts = [mix.scale**2 * M for M in parts[1:]] + parts[:1]
        left = mix.E_cross[:, t].flatten()
        parts.append(torch.diag(grow(left.square() * weights_of_sum(left * size)) + UNDERFLOW))
        spans = [(size.square() * M.diagonal().clamp(min=0.0)).sum().sqrt() for M in parts]
        c = weights_of_sum(torch.stack(spans))
        found = sum((c[i] * M for i, M in enumerate(parts[1:], 1)), c[0] * parts[0])
        most = torch.stack([frobenius(M) for M in parts]) @ c
        return raised(found, gamma(64) * most)

    def _linear_in_e(
        self,
        g: Float[Tensor, "d n"],
        at: Budget,
        K: Float[Tensor, "n n"],
        K_e: Float[Tensor, "n n"],
        pairs: Float[Tensor, "H H jl ce"],
    ) -> list[Float[Tensor, "d d"]]:
        """What is linear in b_e of orders up to three, and ½ Σ c b_e², by b_e's ellipsoid or by |b_e| ≤ E.

        Σ c b b_e,  ½ Σ c b_e²,  ½ Σ c (b² − m₂) b_e,  Σ c b Σ s b b_e,  Σ s b_e W_O A_vα,
        Σ s (b b_e − Σ s b b_e) W_O A_vα.
        """
        s, E, beta = at.s, at.E, at.beta
        c = g * s.flatten()
        d1 = (s * beta * E).sum(-1, keepdim=True)
        both = _hadamard(K, K_e)
        bent = _hadamard(image(_less_mean(s, 1.0, 1.0), _hadamard(K, K)), K_e) / 4.0
        mean = _hadamard(K, image(_less_mean(s, 0.0, 1.0), both))
        parts = [image(c, M) for M in (both, _hadamard(K_e, K_e) / 4.0, bent, mean)]
        parts += [self._by_values(M, s, pairs) for M in (K_e, image(_less_mean(s, 1.0, 1.0), both))]
        alone = 0.5 * E.square(), 0.5 * (beta.square() + at.W_head) * E, beta * d1
        others = [spread(g, (s * E.square()).flatten()) * at.W]
        others += [box(g, grow(s * x).flatten()) for x in alone]
        others += [self._sum_values(grow(s * x), self.v.blocks("shape_a")) for x in (E, beta * E + d1)]
        return [M if trace(M) <= trace(N) else N for M, N in zip(parts, others, strict=True)]

    def _with_e(self, g: Float[Tensor, "d n"], at: Budget) -> list[Float[Tensor, "d d"]]:
        """What b_e changes beyond that in the polynomials, and e_V against all of them."""
        s, E, beta, m2 = at.s, at.E, at.beta, at.W_head
        d1, d2, d3 = ((s * x).sum(-1, keepdim=True) for x in (beta * E, E.square(), 3.0 * beta.square() * E))
        peak = beta.amax(-1, keepdim=True)
        third = 0.5 * beta * (E.square() + d2) + E * d1
        fourth = beta**3 * E / 6.0 + 0.5 * beta * E * m2 + 0.5 * beta.square() * d1
        fourth = fourth + (E * m2 * peak + beta * d3) / 6.0
        parts = [box(g, grow(s * (third + fourth)).flatten())]
        parts.append(self._sum_values(grow(s * (E + beta * E + d1)), self.v.blocks("shape_e")))
        weights = 0.5 * (E.square() + d2) + 0.5 * (beta.square() * E + E * m2) + beta * d1 + d3 / 6.0
        parts.append(self._sum_values(grow(s * weights), self.v.blocks("shape")))
        own = at.straight * (1.0 + 0.5 * m2) + at.curved * (0.5 + beta / 6.0)
        shared = (at.W * m2).sqrt() * (0.5 + peak / 6.0)
        squares = grow(own.square()), grow(s * shared.square())
        return parts + [self._choose_values(x, self.v.blocks("shape_e")) for x in squares]

    def _beyond(self, g: Float[Tensor, "d n"], at: Budget) -> list[Float[Tensor, "d d"]]:
        """Fifth order of N/(1 + q), and fourth order of the weights against the values.

        N = N₁ + N₂ + N₃ + …, q = q₂ + q₃ + …, by orders of b, and from n on: N_n⁺ = Σ c R_n(b), q_n⁺ = Σ s R_n(b).

            N/(1 + q)   = … + N₅⁺ − N₁q₄⁺ − N₂q₃⁺ − N₃⁺q + N q²/(1 + q)
            e^b/(1 + q) = … + R₄(b) − q₄⁺ − b q₃⁺ − R₂(b) q + e^b q²/(1 + q)
        """
        beta, s = at.beta, at.s
        r1 = exp_tail(beta, 1, 1)
        r2, r3, r4, r5 = (exp_tail(beta, n, 2) for n in (2, 3, 4, 5))
        q2, q3, q4 = (at.mean(r) for r in (r2, r3, r4))
        small = q2 * q2.clamp(max=1.0)
        lone = at.curved * (r5 + 0.5 * q3 + r3 * q2) + at.straight * (q4 + r1 * small)
        own = at.curved * (r4 + r2 * q2) + at.straight * (q3 + r1 * small)
        most2, most4 = (r.amax(-1, keepdim=True) for r in (r2, r4))
        shared = (at.W * at.W_head).sqrt() * (most4 + most2 * q2.clamp(max=1.0))
        squares = grow(own.square()), grow(s * shared.square())
        values = [self._choose_values(x, self.v.blocks("shape")) for x in squares]
        return [spread(g, grow(lone.square()).flatten()), *values]

    def _second(
        self,
        c: Float[Tensor, "d n"],
        s: Float[Tensor, "H S"],
        K: Float[Tensor, "n n"],
        pairs: Float[Tensor, "H H jl ce"],
        products: Float[Tensor, "n n"],
        t: int,
    ) -> Float[Tensor, "d d"]:
        """½ Σ c b² + Σ s b W_O A_vα + scale Σ c (A_qα)·(A_kα), symmetrised.

        It is one quadratic map, so one Gram matrix of all three kinds of forms, with the inner products between them.
        """
        H, S, width = self.H, self.S, self.c
        weighted = self.mix.rows[:, t].flatten(0, 1) * self.mix.weights[t].square()
        mixed = (weighted @ self.rows_v.T).reshape(H * S, S, -1, width)
        mixed = mixed.repeat_interleave(H // mixed.shape[2], 2)
        across = 0.5 * torch.einsum("nkl,kl,nlkc->nkc", K.reshape(-1, H, S), s, mixed).flatten(1)
        own = s.flatten()[:, None] * K * s.flatten()
        straight = self._straight(own, pairs)
        turned = (s.flatten()[:, None, None, None] * mixed).reshape(H, S, S, H, width).permute(0, 3, 1, 2, 4)
        crossed = torch.einsum("hkjle,khljc->hkce", turned, turned).permute(0, 2, 1, 3)
        values = 0.5 * (straight + crossed.reshape(H * width, -1))
        by_scores, by_values, size = self._products_against(weighted, s, t)
        squares = 0.25 * K * K + products + by_scores + by_scores.T
        across = across + by_values
        whole = torch.cat((torch.cat((squares, across), 1), torch.cat((across.T, values), 1)), 0)
        size = size + frobenius(K).square() + frobenius(own) * torch.linalg.vector_norm(pairs)
        size = size + torch.linalg.vector_norm(mixed) * (frobenius(K) + torch.linalg.vector_norm(mixed))
        whole = raised(whole, product_error(4 * S * S + 4 * width + 64, 2.0 * size + frobenius(products)))
        return image(torch.cat((c, self.out), 1), whole)

    def _products_against(
        self, weighted: Float[Tensor, "n p"], s: Float[Tensor, "H S"], t: int
    ) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n m"], Float[Tensor, ""]]:
        """Inner products of ½b² and of Σ s b A_vα with scale (A_qα)·(A_kα), and their size, for rounding.

        As symmetric forms, b ⊗ b meets x ⊗ y in (b·x)(b·y), and b ⊗ v in ½[(b·x)(v·y) + (b·y)(v·x)].
        """
        H, S, width, scale = self.H, self.S, self.c, self.mix.scale
        g, k = self.v.heads, self.k.heads
        A_q = self.mix.scores.q.A[t].flatten(0, 1)
        b_q = (weighted @ A_q.T).reshape(H * S, k, H // k, width)
        b_k = (weighted @ self.rows_k.T).reshape(H * S, S, k, width)
        live = self.mix.mask[t].expand(H, S).to(s)
        by_scores = torch.einsum("ngrc,njgc->ngrj", b_q, b_k).reshape(H * S, H * S)
        by_scores = (0.5 * scale) * by_scores * live.flatten()
        squares = torch.stack([self.mix.weights[t][own][0].square() for own in self.groups])
        v_k = torch.einsum("gnm,g->nm", self.cross_grams, squares).reshape(S, g, width, S, k, width)
        v_q = (self.rows_v * self.mix.weights[t].square()) @ A_q.T
        v_q = v_q.reshape(S, g, width, k, H // k, width)
        b_q, b_k = (x.reshape(g, H // g, S, *x.shape[1:]) for x in (b_q, b_k))
        b_q, b_k = (s.reshape(g, H // g, S, 1, 1, 1) * x for x in (b_q, b_k))
        found = torch.einsum("grjGRc,jgaJGc->GRJgra", b_q, v_k)
        found = found + torch.einsum("grjJGc,jgaGRc->GRJgra", b_k, v_q)
        by_values = (0.5 * scale) * found.reshape(H * S, H * width) * live.flatten()[:, None]
        norm = torch.linalg.vector_norm
        size = norm(b_q) * norm(v_k) + norm(b_k) * norm(v_q) + norm(by_scores)
        sizes = torch.linalg.vector_norm(weighted) ** 2 * norm(A_q) * norm(self.rows_k)
        return by_scores, by_values, scale * (size + sizes)

    def _third(
        self, c: Float[Tensor, "d n"], s: Float[Tensor, "H S"], K: Float[Tensor, "n n"], pairs: Tensor
    ) -> list[Float[Tensor, "d d"]]:
        """⅙ Σ c (b³ − 3b m₂) and ½ Σ s (b² − m₂) W_O A_vα, as cubic forms."""
        squares = _hadamard(K, K)
        cubic = _hadamard(K, image(_less_mean(s, 1.0, 3.0), squares)) / 36.0
        return [image(c, cubic), self._by_values(image(_less_mean(s, 1.0, 1.0), squares) / 4.0, s, pairs)]

    def _fourth(
        self, c: Float[Tensor, "d n"], s: Float[Tensor, "H S"], K: Float[Tensor, "n n"], pairs: Tensor
    ) -> list[Float[Tensor, "d d"]]:
        """Σ c (b⁴/24 − b² m₂/4), Σ c b m₃/6, Σ s (b³/6 − b m₂/2) W_O A_vα and Σ s m₃/6 W_O A_vα, as quartic forms."""
        squares = _hadamard(K, K)
        cubes = image(_less_mean(s, 0.0, 1.0), _hadamard(K, squares)) / 36.0
        even = _hadamard(squares, image(_less_mean(s, 1.0 / 24.0, 0.25), squares))
        odd = _hadamard(K, image(_less_mean(s, 1.0 / 6.0, 0.5), squares))
        by_values = [self._by_values(form, s, pairs) for form in (odd, cubes)]
        return [image(c, even), image(c, _hadamard(K, cubes)), *by_values]

    def _by_values(self, own: Float[Tensor, "n n"], s: Float[Tensor, "H S"], pairs: Tensor) -> Tensor:
        """Σ s x W_O A_vα for polynomials x with these inner products."""
        own = s.flatten()[:, None] * own * s.flatten()
        size = frobenius(own) * torch.linalg.vector_norm(pairs)
        form = raised(self._straight(own, pairs), product_error(4 * self.S**2 + 64, 2.0 * size))
        return image(self.out, form)

    def _straight(self, own: Float[Tensor, "n n"], pairs: Float[Tensor, "H H jl ce"]) -> Float[Tensor, "m m"]:
        """Σ_jl own[hj, kl] pairs[hjc, kle]."""
        H, S, width = self.H, self.S, self.c
        weights = own.reshape(H, S, H, S).permute(0, 2, 1, 3).reshape(H, H, 1, S * S)
        return (weights @ pairs).reshape(H, H, width, width).permute(0, 2, 1, 3).reshape(H * width, -1)

    def _products(self, K: Float[Tensor, "H H jl ce"], t: int) -> Float[Tensor, "n n"]:
        """The shape of scale (A_qα)·(A_kα), symmetrised."""
        H, S, width = self.H, self.S, self.c
        w = self.mix.weights[t]
        A = self.mix.scores.q.A[t].flatten(0, 1) * w
        own = raised(A @ A.T, JOINT * product_error(A.shape[-1], frobenius(A).square()))
        blocks = own.reshape(H, width, H, width).permute(0, 2, 1, 3).reshape(H, H, width * width)
        straight = (K @ blocks[..., None]).reshape(H, H, S, S)
        mixed = (
            ((A * w) @ self.rows_k.T).reshape(H, width, S, -1, width).repeat_interleave(H // self.k.heads, 3)
        )
        mixed = mixed.permute(0, 3, 2, 1, 4)
        crossed = torch.einsum("hklce,khjec->hkjl", mixed, mixed)
        both = (0.5 * (straight + crossed)).permute(0, 2, 1, 3).reshape(H * S, H * S)
        size = frobenius(own) * torch.linalg.vector_norm(K) + torch.linalg.vector_norm(mixed).square()
        live = self.mix.mask[t].expand(H, S).flatten().to(both)
        found = raised(both, product_error(4 * width**2, 2.0 * size)) * live[:, None] * live
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


def _hadamard(M: Float[Tensor, "n n"], K: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    return raised(M * K, gamma(8) * frobenius(M) * frobenius(K))


def _less_mean(s: Float[Tensor, "H S"], own: float, mean: float) -> Float[Tensor, "n n"]:
    """own x − mean Σ s x, head by head, as a matrix."""
    eye = torch.eye(s.shape[1]).to(s)
    made: Tensor = torch.block_diag(*(own * eye - mean * row.expand(len(row), -1) for row in s))
    return made


def _live_gram(X: Float[Tensor, "n p"]) -> Float[Tensor, "n n"]:
    """XXᵀ; in the first layer most rows do not depend on a group and are 0."""
    live = (X != 0).any(1).nonzero()[:, 0]
    if len(live) == len(X):
        return X @ X.T
    found = X.new_zeros(len(X), len(X))
    found[live[:, None], live] = X[live] @ X[live].T
    return found
