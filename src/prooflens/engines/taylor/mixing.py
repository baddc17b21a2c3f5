r"""The remainder of softmax mixing as an ellipsoid (`taylor.attention` has the identity; this is its vector form).

At query token t the next root moves, beyond first order in q, k and v, by sums over heads h and keys j. With
g = W_O(V_j − z), c = s g, b = b_lin + b_e the centred scores (|b| ≤ β, |b_e| ≤ E) and m_k = Σ_j s b^k per head, the
weights are σ = s e^b/(1 + q) with **q = Σ s (e^b − 1) ≥ 0** (Jensen), so that N = Σ c (e^b − 1) becomes N/(1 + q):

    second order   ½ Σ c b²  +  Σ s b W_O A_vα  +  scale Σ c λ (A_qα)·(A_kα)  +  ½ Σ c φ″ℓ²
    third order    ⅙ Σ c (b³ − 3b m₂)  +  ½ Σ s (b² − m₂) W_O A_vα
    fourth order   Σ c (b⁴/24 − b² m₂/4 − b m₃/6)  +  Σ s (b³/6 − b m₂/2 − m₃/6) W_O A_vα
    with b_e       what b_e for b_lin changes in these, b_e the products of A_qα and A_kα and all that e_q, e_k add
    with e         e_V for A_vα, and e_q, e_k for A_qα, A_kα
    beyond         fifth order of N/(1 + q), fourth order of the weights against δV

λ is 1 without a cap of scores, and the last term of second order is 0; else λ, φ″ and ℓ are those of `taylor.caps`,
whose rest x adds Σ c x. In b = b_lin the first three are polynomials in α, with shapes from Gram matrices
(`relaxations.ellipsoids`); b_e lies in an ellipsoid as well, and what is linear in it has such shapes too. The others
share budgets (`taylor.softmax_budget`). Several query tokens are worked on at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import (
    ball,
    box,
    hadamard,
    image,
    raised,
    smaller,
    total,
    total_along,
    trace,
    weighted_sum,
    weights_of_sum,
)
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, identity, length, product_error
from prooflens.engines.taylor.attention import MixSite, seen_keys
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.softmax_budget import Sizes, SoftmaxBudget, against_e, at_once, beyond, with_e
from prooflens.engines.taylor.values import UNREAD, Value
from prooflens.numerics import gamma

JOINT = 4.0
"""How many kinds of rows (scores, queries, keys, values) share one Gram matrix.

Between two kinds it errs by at most √(e_i e_j), e_i the error within kind i. As (Σ √e_i x_i)² ≤ 4 Σ e_i x_i², raising
each kind's own block by 4e_i covers all of it.
"""


@dataclass(eq=False)
class MixShape:
    """Ellipsoids of what a mixing's tangent misses, for some query tokens T.

    Keys and values may have fewer heads than queries: a head h is (g, r), the r-th reader of group g. Rounding: sums
    over pairs of keys have S² terms, over pairs of coordinates c², and `product_error` counts at least as many.
    """

    mix: MixSite
    q: Value
    k: Value
    v: Value
    tokens: list[int]
    grams: Grams

    def __post_init__(self) -> None:
        mix, t = self.mix, self.tokens
        _, self.H, self.c = mix.z.shape
        self.seen = seen_keys(mix.mask[..., t, :])
        self.S = len(range(len(mix.z))[self.seen])
        self.T, self.n = len(t), self.H * self.S
        self.out = mix.out.flatten(1)
        self.squares = mix.weights[t][:, self.grams.first].square()
        self.moving = self._factors()
        self.w = mix.weights[t][:, None, self.moving]
        self.s = self._asked(mix.s)
        self.live = self._asked(mix.mask.expand(self.H, -1, -1)).flatten(1).to(self.s)
        self.slopes = self.live * self._asked(mix.slopes).flatten(1)
        self.A_q = mix.scores.q.A[t][..., self.moving].flatten(1, 2)
        self.rows_k, self.rows_v = (
            x.A[self.seen, ..., self.moving].flatten(0, 2) for x in (mix.scores.k, mix.v)
        )
        self.e_k, self.e_v = (x.shape_e[self.seen] for x in (self.k, self.v))
        self.g = torch.einsum("dhc,thjc->tdhj", mix.out, self._asked(mix.deviations)).flatten(2)
        self.weight = self.s.flatten(1)
        self.columns = self.g * self.weight[:, None]
        rows = self._asked(mix.rows[..., self.moving]).flatten(1, 2) * self.w
        self.weighted = rows * self.w
        self.bent, self.bent_rest = self._caps()
        self.K = raised(rows @ rows.mT, JOINT * product_error(rows.shape[-1] + 8, frobenius(rows).square()))

    def _factors(self) -> slice:
        """Return the range of the factors that move these tokens or what they read: in a causal model, the first."""
        columns = self.q.root.columns
        own = [columns[t] for t in [*self.tokens, *range(len(columns))[self.seen]]]
        own = [range_ for range_ in own if range_ != (0, 0)] or [(0, 1)]
        return slice(min(range_[0] for range_ in own), max(range_[1] for range_ in own))

    def _asked(self, x: Float[Tensor, "H S S *rest"]) -> Float[Tensor, "T H K *rest"]:
        """Return what belongs to these query tokens and to the keys that they read."""
        return x[:, self.tokens, self.seen].movedim(0, 1)

    def _caps(self) -> tuple[Float[Tensor, "T n n"] | None, Float[Tensor, "T n"] | None]:
        """Return the shape of ½φ″ℓ² of capped scores, and bounds of what caps add beyond; None without a cap."""
        bent = self.mix.scores.capped
        if bent is None:
            return None, None
        rows = self._asked(self.mix.scores.rows[..., self.moving]).flatten(1, 2) * self.w
        K = raised(rows @ rows.mT, product_error(rows.shape[-1] + 8, frobenius(rows).square()))
        half, rest = (self._asked(x).flatten(1) * self.live for x in (0.5 * bent.curve, bent.rest))
        form = half[:, :, None] * (K * K) * half[:, None]
        return raised(form, gamma(16) * (half.abs().amax(1) * frobenius(K)).square()), rest

    @cached_property
    def keys(self) -> Float[Tensor, "T g g jl ce"]:
        """Inner products of keys as each token weighs factors, [(g, G), (j, l), (c, e)], raised."""
        return self._pairs(self.k.heads, self.grams.keys(self.seen, self.squares))

    @cached_property
    def values(self) -> Float[Tensor, "T g g jl ce"]:
        """Inner products of values as each token weighs factors, [(g, G), (j, l), (c, e)], raised."""
        return self._pairs(self.v.heads, self.grams.values(self.seen, self.squares))

    def _pairs(self, g: int, K: Float[Tensor, "T m m"]) -> Float[Tensor, "T g g jl ce"]:
        """Return inner products of keys or values of g heads by pairs of heads, of tokens and of coordinates."""
        S, c = self.S, self.c
        K = raised(K, JOINT * product_error(self.w.shape[-1] + 64, trace(K)))
        K = K.reshape(-1, S, g, c, S, g, c).permute(0, 2, 5, 1, 4, 3, 6)
        return K.reshape(-1, g, g, S * S, c * c)

    def _split(self, M: Float[Tensor, "*b n n"], heads: int) -> Float[Tensor, "*b g c g c"]:
        return M.reshape(*M.shape[:-2], heads, self.c, heads, self.c)

    def parts(self) -> tuple[Float[Tensor, "T d d"], list[Float[Tensor, "T d d"]]]:
        """Return the shapes of what the tokens miss: the second order of Aα, and all the rest, rounding included."""
        products = self._products()
        rest = self._third() + self._fourth()
        rest.append(self._cross())
        if self.bent_rest is not None:
            rest.append(box(self.g, grow(self.weight * self.bent_rest)))
        K_e = self._nonlinear(products)
        at = SoftmaxBudget.of(self.mix, self.tokens, self.seen, K_e)
        rest += self._linear_in_e(at, K_e)
        rest += self._sized(at, with_e(at).plus(beyond(at)), "shape")
        rest += [self._values_e(at), *self._sized(at, against_e(at), "shape_e")]
        noise = self.mix.noise[self.tokens] * torch.exp(2.0 * at.beta.flatten(1).amax(1))
        return self._second(products), [*rest, ball(noise, len(self.out))]

    def quick(self) -> list[Float[Tensor, "T d d"]]:
        """Return the shapes of what the tokens miss in few steps: by budgets, products of scores by their sizes."""
        at = SoftmaxBudget.of(self.mix, self.tokens, self.seen)
        E = self._asked(self.mix.E_products)
        most = (self.s * E.square()).flatten(1).sum(1)[:, None]
        noise = self.mix.noise[self.tokens] * torch.exp(2.0 * at.beta.flatten(1).amax(1))
        parts = [weighted_sum(self.g, grow(self.weight * most)), ball(noise, len(self.out))]
        return parts + self._sized(at, at_once(at), "shape")

    def _nonlinear(self, products: Float[Tensor, "T n n"]) -> Float[Tensor, "T n n"]:
        """Return the shape of b_e: products of linear parts, q·e_k + e_q·k, and a box of second order in e.

        It is read against c = s g, so the weights of its parts follow what they do there.
        """
        mix, t, (H, S) = self.mix, self.tokens, (self.H, self.S)
        size = self.weight * torch.linalg.vector_norm(self.g, dim=1)
        size = size + UNREAD * size.mean(-1, keepdim=True) + 2.0**-300
        centring = less_mean(self.s, 1.0, 1.0)
        e_k, queries = self._split(self.e_k, self.k.heads), mix.scores.q.u[t]
        each = queries.reshape(self.T, self.k.heads, -1, self.c)
        forms = torch.einsum("tgrc,jgcGe,tGRe->tjgrGR", each, e_k, each).reshape(self.T, S, H, H)
        slip = length(queries).square().sum(-1)[:, None] * frobenius(self.e_k) * H
        forms = raised(forms, product_error(2 * self.c, slip))
        by_key = size.reshape(self.T, H, S).movedim(1, 2).square()
        spans = (by_key * forms.diagonal(dim1=-2, dim2=-1)).sum(-1).sqrt()
        forms = weights_of_sum(spans)[..., None, None] * forms
        shared = forms.new_zeros(self.T, H, S, H, S)
        shared.diagonal(dim1=2, dim2=4).copy_(forms.permute(0, 2, 3, 1))
        shared = raised(shared.reshape(self.T, self.n, self.n), gamma(4) * frobenius(forms.flatten(1, 2)))
        far = image(centring * self.live[:, :, None] * self.slopes[:, None], shared)
        keys, e_q = self._asked(mix.keys), self._split(self.q.shape_e[t], H)
        own = torch.einsum("thjc,thcke,tkle->thjkl", keys, e_q, keys).reshape(self.T, self.n, self.n)
        slip = keys.flatten(1).square().sum(1) * frobenius(self.q.shape_e[t]) * H
        own = raised(own, product_error(2 * self.c, 2.0 * slip))
        left = self._asked(mix.E_cross).flatten(1)
        alone = torch.diag_embed(grow(left.square() * weights_of_sum(left * size)) + UNDERFLOW)
        found = [image(centring, products), mix.scale**2 * far, mix.scale**2 * own, alone]
        if self.bent is not None:
            found.append(image(centring, self.bent))
        parts = torch.stack(found, 1)
        spans = (size.square()[:, None] * parts.diagonal(dim1=-2, dim2=-1).clamp(min=0.0)).sum(-1).sqrt()
        return total_along(parts, weights_of_sum(spans))

    def _linear_in_e(self, at: SoftmaxBudget, K_e: Float[Tensor, "T n n"]) -> list[Float[Tensor, "T d d"]]:
        """Return what is linear in b_e of orders up to three, and ½ Σ c b_e², by b_e's ellipsoid or by |b_e| ≤ E.

        Σ c b b_e,  ½ Σ c b_e²,  ½ Σ c (b² − m₂) b_e,  Σ c b Σ s b b_e,  Σ s b_e W_O A_vα,
        Σ s (b b_e − Σ s b b_e) W_O A_vα.
        """
        s, E, beta, K = at.s, at.E, at.beta, self.K
        d1 = (s * beta * E).sum(-1, keepdim=True)
        both = hadamard(K, K_e)
        bent = hadamard(image(less_mean(s, 1.0, 1.0), hadamard(K, K)), K_e) / 4.0
        mean = hadamard(K, image(less_mean(s, 0.0, 1.0), both))
        parts = [image(self.columns, M) for M in (both, hadamard(K_e, K_e) / 4.0, bent, mean)]
        parts += [self._by_values(M) for M in (K_e, image(less_mean(s, 1.0, 1.0), both))]
        alone = 0.5 * E.square(), 0.5 * (beta.square() + at.W_head) * E, beta * d1
        others = [weighted_sum(self.g, (s * E.square() * at.W).flatten(1))]
        others += [box(self.g, grow(s * x).flatten(1)) for x in alone]
        others += [
            self._sum_values(grow(s * x), self.v.blocks("shape_a")[self.seen]) for x in (E, beta * E + d1)
        ]
        return [smaller(M, N) for M, N in zip(parts, others, strict=True)]

    def _values_e(self, at: SoftmaxBudget) -> Float[Tensor, "T d d"]:
        """Return Σ s b W_O e_V, by the budget of b, or token by token by the inner products of the heads' scores."""
        chosen = self._choose_values(grow(at.straight.square()), self.v.blocks("shape_e")[self.seen])
        g, T, S = self.v.heads, self.T, self.S
        own = self.weight[:, :, None] * self.K * self.weight[:, None]
        own = own.reshape(T, self.H, S, self.H, S).diagonal(dim1=2, dim2=4).movedim(-1, 1)
        heads = own.reshape(T, S, g, self.H // g, g, self.H // g)
        form = torch.einsum("tjgrGR,jgcGe->tjgrcGRe", heads, self._split(self.e_v, g))
        size = frobenius(own) * frobenius(self.e_v) * self.H
        form = raised(form.reshape(T, S, self.H * self.c, -1), gamma(16) * size)
        return smaller(chosen, total_along(image(self.out, form)))

    def _sized(self, at: SoftmaxBudget, sizes: Sizes, name: str) -> list[Float[Tensor, "T d d"]]:
        """Return the shapes of sums of such sizes: x g, and x W_O δ for δ in one of the values' shapes."""
        blocks = self.v.blocks(name)[self.seen]
        alone = [x for x in (sizes.g, sizes.g_e) if x is not None]
        squares = [sizes.v.square(), sizes.v_e.square()]
        squares += [at.s * x.square() for x in (sizes.head, sizes.head_e) if x is not None]
        parts = [weighted_sum(self.g, grow(x.square()).flatten(1)) for x in alone]
        return parts + [self._choose_values(grow(x), blocks) for x in squares]

    def _second(self, products: Float[Tensor, "T n n"]) -> Float[Tensor, "T d d"]:
        """Return ½ Σ c b² + Σ s b W_O A_vα + scale Σ c (A_qα)·(A_kα), symmetrised.

        It is one quadratic map, so one Gram matrix of all three kinds of forms, with the inner products between them.
        """
        T, n, S, K, g = self.T, self.n, self.S, self.K, self.v.heads
        mixed = (self.weighted @ self.rows_v.T).reshape(T, n, S, g, self.c)
        scores = (K * self.weight[:, None]).reshape(T, n, g, self.H // g, S)
        across = 0.5 * torch.einsum("tngrl,tnlgc->tngrc", scores, mixed).flatten(2)
        own = self.weight[:, :, None] * K * self.weight[:, None]
        turned = (self.weight[:, :, None, None, None] * mixed).reshape(T, g, self.H // g, S, S, g, self.c)
        crossed = torch.einsum("tgrjlGe,tGRljgc->tgrcGRe", turned, turned)
        values = 0.5 * (self._straight(own) + crossed.reshape(T, self.H * self.c, -1))
        by_scores, by_values, size = self._products_against()
        squares = 0.25 * K * K + products + by_scores + by_scores.mT
        across = across + by_values
        whole = torch.cat((torch.cat((squares, across), 2), torch.cat((across.mT, values), 2)), 1)
        size = size + frobenius(K).square() + frobenius(own) * _size(self.values)
        size = size + _size(mixed) * (frobenius(K) + _size(mixed))
        whole = raised(whole, product_error(4 * S * S + 4 * self.c + 64, 2.0 * size + frobenius(products)))
        found = image(torch.cat((self.columns, self.out.expand(T, -1, -1)), 2), whole)
        return found if self.bent is None else total([found, image(self.columns, self.bent)])

    def _products_against(
        self,
    ) -> tuple[Float[Tensor, "T n n"], Float[Tensor, "T n m"], Float[Tensor, " T"]]:
        """Return inner products of ½b² and of Σ s b A_vα with scale (A_qα)·(A_kα), and their size, for rounding.

        As symmetric forms, b ⊗ b meets x ⊗ y in (b·x)(b·y), and b ⊗ v in ½[(b·x)(v·y) + (b·y)(v·x)].
        """
        T, H, S, width, scale = self.T, self.H, self.S, self.c, self.mix.scale
        g, k = self.v.heads, self.k.heads
        b_q = (self.weighted @ self.A_q.mT).reshape(T, self.n, k, H // k, width)
        b_k = (self.weighted @ self.rows_k.T).reshape(T, self.n, S, k, width)
        by_scores = torch.einsum("tngrc,tnjgc->tngrj", b_q, b_k).reshape(T, self.n, self.n)
        by_scores = (0.5 * scale) * by_scores * self.slopes[:, None]
        v_k = self.grams.across(self.seen, self.squares)
        v_k = v_k.reshape(T, S, g, width, S, k, width)
        v_q = self.rows_v @ (self.A_q * self.w.square()).mT
        v_q = v_q.reshape(T, S, g, width, k, H // k, width)
        weights = self.s.reshape(T, g, H // g, S, 1, 1, 1)
        b_q, b_k = (weights * x.reshape(T, g, H // g, S, *x.shape[2:]) for x in (b_q, b_k))
        found = torch.einsum("tgrjGRc,tjgaJGc->tGRJgra", b_q, v_k)
        found = found + torch.einsum("tgrjJGc,tjgaGRc->tGRJgra", b_k, v_q)
        by_values = (0.5 * scale) * found.reshape(T, self.n, H * width) * self.slopes[:, :, None]
        size = _size(b_q) * _size(v_k) + _size(b_k) * _size(v_q) + _size(by_scores)
        sizes = _size(self.weighted).square() * _size(self.A_q) * frobenius(self.rows_k)
        return by_scores, by_values, scale * (size + sizes)

    def _third(self) -> list[Float[Tensor, "T d d"]]:
        """Return ⅙ Σ c (b³ − 3b m₂) and ½ Σ s (b² − m₂) W_O A_vα, as cubic forms."""
        K, s = self.K, self.s
        squares = hadamard(K, K)
        cubic = hadamard(K, image(less_mean(s, 1.0, 3.0), squares)) / 36.0
        return [
            image(self.columns, cubic),
            self._by_values(image(less_mean(s, 1.0, 1.0), squares) / 4.0),
        ]

    def _fourth(self) -> list[Float[Tensor, "T d d"]]:
        """Return the four parts of fourth order as quartic forms.

        Σ c (b⁴/24 − b² m₂/4), Σ c b m₃/6, Σ s (b³/6 − b m₂/2) W_O A_vα and Σ s m₃/6 W_O A_vα.
        """
        K, s = self.K, self.s
        squares = hadamard(K, K)
        cubes = image(less_mean(s, 0.0, 1.0), hadamard(K, squares)) / 36.0
        even = hadamard(squares, image(less_mean(s, 1.0 / 24.0, 0.25), squares))
        odd = hadamard(K, image(less_mean(s, 1.0 / 6.0, 0.5), squares))
        alone = [image(self.columns, form) for form in (even, hadamard(K, cubes))]
        return alone + [self._by_values(form) for form in (odd, cubes)]

    def _by_values(self, own: Float[Tensor, "T n n"]) -> Float[Tensor, "T d d"]:
        """Return Σ s x W_O A_vα for polynomials x with these inner products."""
        own = self.weight[:, :, None] * own * self.weight[:, None]
        size = frobenius(own) * _size(self.values)
        return image(self.out, raised(self._straight(own), product_error(4 * self.S**2 + 64, 2.0 * size)))

    def _straight(self, own: Float[Tensor, "T n n"]) -> Float[Tensor, "T m m"]:
        """Return Σ_jl own[hj, kl] values[hjc, kle]."""
        T, S, g, r, c = self.T, self.S, self.v.heads, self.H // self.v.heads, self.c
        weights = own.reshape(T, g, r, S, g, r, S).permute(0, 1, 4, 2, 5, 3, 6)
        found = weights.reshape(T, g, g, r * r, S * S) @ self.values
        found = found.reshape(T, g, g, r, r, c, c).permute(0, 1, 3, 5, 2, 4, 6)
        return found.reshape(T, self.H * c, self.H * c)

    def _by_keys(self, M: Float[Tensor, "T m m"]) -> Float[Tensor, "T n n"]:
        """Return Σ_ce M[hc, ke] keys[hjc, kle]."""
        T, S, g, r, c = self.T, self.S, self.k.heads, self.H // self.k.heads, self.c
        blocks = M.reshape(T, g, r, c, g, r, c).permute(0, 1, 4, 2, 5, 3, 6)
        found = blocks.reshape(T, g, g, r * r, c * c) @ self.keys.mT
        found = found.reshape(T, g, g, r, r, S, S).permute(0, 1, 3, 5, 2, 4, 6)
        return found.reshape(T, self.n, self.n)

    def _products(self) -> Float[Tensor, "T n n"]:
        """Return the shape of scale (A_qα)·(A_kα), symmetrised."""
        T, k, r, width = self.T, self.k.heads, self.H // self.k.heads, self.c
        A = self.A_q * self.w
        own = raised(A @ A.mT, JOINT * product_error(A.shape[-1], frobenius(A).square()))
        mixed = ((A * self.w) @ self.rows_k.T).reshape(T, k, r, width, self.S, k, width)
        crossed = torch.einsum("tgrclGe,tGRejgc->tgrjGRl", mixed, mixed).reshape(T, self.n, self.n)
        both = 0.5 * (self._by_keys(own) + crossed)
        size = frobenius(own) * _size(self.keys) + _size(mixed).square()
        found = raised(both, product_error(4 * width**2, 2.0 * size))
        return found * (self.slopes[:, :, None] * self.slopes[:, None] * self.mix.scale**2)

    def _cross(self) -> Float[Tensor, "T d d"]:
        """Return scale Σ c (δq·e_k + e_q·A_kα)."""
        T, t, S, H = self.T, self.tokens, self.S, self.H
        form = self._by_keys(self.q.shape_e[t])
        size = frobenius(self.q.shape_e[t]) * _size(self.keys)
        columns = self.columns * self.slopes[:, None]
        first = image(columns, raised(form, product_error(self.c**2, size)))
        forms, size = self._against_keys(self.q.shape[t])
        forms = raised(forms, product_error(self.c**2, size))
        columns = columns.reshape(T, -1, H, S).permute(0, 3, 1, 2)
        whole = torch.cat((first[:, None], image(columns, forms)), 1)
        return total_along(whole) * self.mix.scale**2

    def _against_keys(
        self, M: Float[Tensor, "T m m"]
    ) -> tuple[Float[Tensor, "T S H H"], Float[Tensor, "T S"]]:
        """Return the inner products of x·e_k over heads, key by key, for queries' moves x of shape M, and sizes."""
        T, S, H, k = self.T, self.S, self.H, self.k.heads
        moves = M.reshape(T, k, H // k, self.c, k, H // k, self.c)
        e_k = self._split(self.e_k, k)
        forms = torch.einsum("tgrcGRe,jgcGe->tjgrGR", moves, e_k).reshape(T, S, H, H)
        return forms, frobenius(M)[:, None] * frobenius(self.e_k) * H

    def _choose_values(
        self, squares: Float[Tensor, "T H S"], shapes: Float[Tensor, "S g c c"]
    ) -> Float[Tensor, "T d d"]:
        """Return Σ x_hj W_O δ_hj with Σ x²/squares ≤ 1, or Σ |x|/√squares ≤ 1."""
        g = shapes.shape[1]
        grouped = squares.reshape(self.T, g, self.H // g, self.S)
        blocks = torch.einsum("tgrj,jgce->tgrce", grouped, shapes).flatten(1, 2)
        size = torch.einsum("tgrj,jg->tgr", grouped, frobenius(shapes)).flatten(1)
        blocks = raised(blocks, gamma(self.S + 8) * size)
        found = torch.einsum("dhc,thce->tdhe", self.mix.out, blocks).flatten(2) @ self.out.T
        size = 2.0 * frobenius(self.out).square() * _size(blocks)
        return raised(found, product_error(2 * sum(self.out.shape), size))

    def _sum_values(
        self, X: Float[Tensor, "T H S"], shapes: Float[Tensor, "S g c c"]
    ) -> Float[Tensor, "T d d"]:
        """Return Σ x_hj W_O δ_hj with |x_hj| ≤ X_hj."""
        sizes = trace(shapes).T.sqrt().repeat_interleave(self.H // shapes.shape[1], 0)
        sizes = X * sizes * self.mix.out_size[:, None]
        c = weights_of_sum(sizes.flatten(1)).reshape(X.shape)
        return self._choose_values(grow(X.square() * c), shapes)


def _size(x: Float[Tensor, "T ..."]) -> Float[Tensor, " T"]:
    """Return the Frobenius norm of everything that belongs to a token."""
    return frobenius(x.flatten(1)[:, None])


def less_mean(s: Float[Tensor, "T H S"], own: float, mean: float) -> Float[Tensor, "T n n"]:
    """Return the matrices of own x − mean Σ s x, head by head."""
    T, H, S = s.shape
    made = s.new_zeros(T, H, S, H, S)
    blocks = own * identity(s, S) - mean * s[:, :, None, :].expand(-1, -1, S, -1)
    made.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return made.reshape(T, H * S, H * S)
