"""How long the remainder of a softmax mixing is in a given form, as squares of scores and of queries.

As in `taylor.source_squares`: of each polynomial of the linear parts b of the centred scores one b_j is left, and all
that it is multiplied by is bounded by Cauchy and Schwarz. With the terms of `taylor.mixing`, K and K_e the shapes of b
and b_e, X_c = cᵀXc, V = Σ s s′ ⟨W_OᵀXW_O, A_vA_vᵀ⟩ by head and key, and L the maps that take weighted means away,

    ½ Σ c b²                 ¼ X_c ∘ K                      Σ s b W_OA_vα                V
    ⅙ Σ c (b³ − 3b m₂)       X_c ∘ L(K∘K)Lᵀ/36              ½ Σ s (b² − m₂) W_OA_vα      K ∘ LᵀVL/4
    Σ c (b⁴/24 − b² m₂/4)    X_c ∘ K ∘ L(K∘K)Lᵀ             Σ s (b³/6 − b m₂/2) W_OA_vα  V ∘ L(K∘K)Lᵀ
    Σ c b m₃/6               X_c ∘ L(K∘K∘K)Lᵀ/36            Σ s m₃/6 W_OA_vα             K ∘ K ∘ LᵀVL/36
    Σ c b b_e                X_c ∘ K_e                      Σ s (b b_e − …) W_OA_vα      K_e ∘ LᵀVL
    ½ Σ c (b² − m₂) b_e      K ∘ Lᵀ(X_c ∘ K_e)L/4           Σ c b Σ s b b_e              X_c ∘ L(K∘K_e)Lᵀ

are matrices Z of squares bᵀZb, and scale Σ c (A_qα)·(A_kα) one of the query, scale² Σ X_c A_kA_kᵀ. The rest is a
constant, by an ellipsoid.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import (
    ball,
    hadamard,
    image,
    raised,
    total,
    total_along,
    weights_of_sum,
)
from prooflens.engines.relaxations.norms import frobenius, grow, product_error
from prooflens.engines.taylor.mixing import MixShape, less_mean
from prooflens.engines.taylor.softmax_budget import SoftmaxBudget, against_e, beyond, with_e
from prooflens.engines.taylor.source_squares import price, scaled, shares
from prooflens.engines.taylor.squares import remainder_form
from prooflens.numerics import gamma


class MixingSquare(NamedTuple):
    """½bᵀZb + ½qᵀYq + rest is at least ½rᵀXr for the remainder r of a mixing at one token.

    Attributes:
        Z: shapes by head and key, for the linear parts of the scores that the token reads.
        Y: shapes for the linear part of its queries, all heads.
        rest: constants.
    """

    Z: Float[Tensor, "F n n"]
    Y: Float[Tensor, "F m m"]
    rest: Float[Tensor, " F"]


class MixSquares(MixShape):
    """Squares above the remainder of a mixing, for one query token."""

    @cached_property
    def rest(self) -> Float[Tensor, "d d"]:
        """The shape of what no square of scores or queries holds."""
        at = SoftmaxBudget.of(self.mix, self.tokens, self.seen, self.K_e)
        linear = self._linear_in_e(at, self.K_e)
        # ½ Σ c b_e² and Σ s b_e W_O A_vα: of what is linear in b_e the others have a b.
        parts = [self._cross(), linear[1], linear[4], self._values_e(at)]
        parts += self._sized(at, with_e(at).plus(beyond(at)), "shape")
        parts += self._sized(at, against_e(at), "shape_e")
        noise = self.mix.noise[self.tokens] * torch.exp(2.0 * at.beta.flatten(1).amax(1))
        return total([*parts, ball(noise, len(self.out))])[0]

    @cached_property
    def K_e(self) -> Float[Tensor, "1 n n"]:  # noqa: N802
        """The shape of b_e."""
        return self._nonlinear(self._products())

    def square(self, X: Float[Tensor, "F d d"], corner: Float[Tensor, "F p"]) -> MixingSquare:
        """Majorise ½rᵀXr.

        Args:
            X: shapes at the token.
            corner: the factors at which the squares should be small.
        """
        (t,) = self.tokens
        by_scores, by_values = image(self.columns[0].T, X), self._values_in(X)
        third = self.queries_in(by_scores)
        forms = self._scores_in(by_scores, by_values)
        b = corner @ self.mix.rows[:, t, self.seen].flatten(0, 1).T
        q = corner @ self.mix.scores.q.A[t].flatten(0, 1).T
        at_query = self.q.blocks("shape_a")[t]
        own = raised(torch.block_diag(*at_query), at_query.new_zeros(()))
        sizes = torch.stack([*(price(M, b, self.K[0]) for M in forms), price(third, q, own)], -1).sqrt()
        weights = weights_of_sum(sizes)
        rest = remainder_form(self.rest, X, torch.zeros_like(sizes[:, 0]))
        one, other = shares(sizes.sum(-1).square(), rest)
        Z = scaled(one, total_along(torch.stack(forms, 1), weights[:, :-1]))
        return MixingSquare(Z, scaled(one, scaled(weights[:, -1], third)), grow(other * rest))

    def _scores_in(
        self, X: Float[Tensor, "F n n"], V: Float[Tensor, "F n n"]
    ) -> list[Float[Tensor, "F n n"]]:
        """Return the matrices of the squares of scores, term by term."""
        s, K, K_e = self.s, self.K, self.K_e
        square = hadamard(K, K)
        cube, both = hadamard(K, square), hadamard(K, K_e)
        own, mean = less_mean(s, 1.0, 1.0), less_mean(s, 0.0, 1.0)
        centred = image(own.mT, V)
        shapes = (
            0.25 * K,
            image(less_mean(s, 1.0, 3.0), square) / 36.0,
            hadamard(K, image(less_mean(s, 1.0 / 24.0, 0.25), square)),
            image(mean, cube) / 36.0,
            K_e,
            image(mean, both),
        )
        found = [hadamard(X, M) for M in shapes]
        found.append(hadamard(image(own.mT, hadamard(X, K_e)), K / 4.0))
        found += [V, hadamard(V, image(less_mean(s, 1.0 / 6.0, 0.5), square))]
        found += [hadamard(centred, M) for M in (K / 4.0, K_e)]
        found.append(hadamard(image(mean.mT, V), square / 36.0))
        return found

    def _values_in(self, X: Float[Tensor, "F d d"]) -> Float[Tensor, "F n n"]:
        """Return Σ s s′ ⟨W_OᵀXW_O, A_vA_vᵀ⟩ by head and key."""
        g, r, c, S = self.v.heads, self.H // self.v.heads, self.c, self.S
        at_heads = image(self.out.T, X)
        blocks = at_heads.reshape(-1, g, r, c, g, r, c)
        values = self.values.reshape(g, g, S, S, c, c)
        made = torch.einsum("fgrcGRe,gGjlce->fgrjGRl", blocks, values).reshape(len(X), self.n, self.n)
        made = raised(made, product_error(c * c, 2.0 * frobenius(at_heads) * _size(values)))
        made = self.weight[0][:, None] * made * self.weight[0]
        return raised(made, gamma(16) * frobenius(made))

    def queries_in(self, X: Float[Tensor, "F n n"]) -> Float[Tensor, "F m m"]:
        """Return scale² Σ X A_kA_kᵀ by head and coordinate of the query.

        Args:
            X: shapes by head and key.
        """
        k, r, c, S = self.k.heads, self.H // self.k.heads, self.c, self.S
        bent = self.mix.scale**2 * self.slopes[0][:, None] * X * self.slopes[0]
        blocks = bent.reshape(-1, k, r, S, k, r, S)
        keys = self.keys.reshape(k, k, S, S, c, c)
        made = torch.einsum("fgrjGRl,gGjlce->fgrcGRe", blocks, keys).reshape(len(X), self.H * c, -1)
        return raised(made, product_error(S * S + 16, 2.0 * frobenius(bent) * _size(keys)))


def _size(x: Float[Tensor, ...]) -> Tensor:
    return frobenius(x.flatten()[:, None])
