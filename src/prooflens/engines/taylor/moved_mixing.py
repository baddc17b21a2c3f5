"""What a softmax mixing leaves once moving covectors hold its third order, and what is linear in α and in e.

Of the terms in `taylor.mixing` these are gone (`taylor.third_order`), as far as e_q, e_k and e_V stand in them to first
order:

    Σ c b b_e  +  Σ s b_e W_O A_vα  +  Σ s b W_O e_V  +  scale Σ c (A_qα·e_k + e_q·A_kα),

with b_e = scale(q·e_k + e_q·k), centred. What is cubic in α is gone as well. With π = scale(A_qα)·(A_kα), and for a
covector u at the output, c = s u·W_O(V − z) and p = u·W_OA_vα, it is

    Σ_j b_j² ℓ_j + Σ_j π_j γ_j,     ℓ_j = ⅙ c_j b_j − ½ s_j Σ c b + ½ s_j (p_j − Σ s p),
                                    γ_j = c_j b_j + s_j (p_j − Σ c b − Σ s p):

two more sums of forms that move with the factors, ℓ and γ, against quadratic ones, in the ellipsoids of b² and of π.
What stays are boxes of what e adds to products, scale Σ c e_q·e_k, and all that is of second order in e or of fourth.
"""

from __future__ import annotations

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
    weighted_sum,
)
from prooflens.engines.relaxations.norms import grow, product_error
from prooflens.engines.taylor.chain import Chain, MovedShapes
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.mixing import MixShape
from prooflens.engines.taylor.next_root import tokens_at_once
from prooflens.engines.taylor.softmax_budget import SoftmaxBudget, against_e, beyond, with_e


def moved_shapes(chain: Chain, memory: int = 2**32) -> MovedShapes:
    """Return the shapes of what the mixing of a chain leaves, and of its quadratic forms of scores.

    Args:
        chain: a chain with a mixing, of a walk that is not quick.
        memory: bytes that may be used.
    """
    names, mix = chain.segment.attention, chain.mix
    assert names is not None
    assert mix is not None
    q, k, v = (chain.values[name] for name in (names.q, names.k, names.v))
    size, grams = tokens_at_once(mix, len(mix.out), memory), Grams(mix, memory // 8)
    tokens = chain.goes_on
    parts = [
        MovedMixShape(mix, q, k, v, tokens[start : start + size], grams).moved()
        for start in range(0, len(tokens), size)
    ]
    return MovedShapes(*(torch.cat(part) for part in zip(*parts, strict=True)))


class MovedMixShape(MixShape):
    """Ellipsoids of what second order and moving covectors leave of a mixing, for some query tokens."""

    def moved(self) -> MovedShapes:
        """Return the shapes of everything beyond second order that no moving covector holds, of b² and of π."""
        products = self._products()
        K_e = self._nonlinear(products)
        at = SoftmaxBudget.of(self.mix, self.tokens, self.seen, K_e)
        by_e = self._linear_in_e(at, K_e)
        # In place of what holds all of b_e: Σ c b b_e and Σ s b_e W_O A_vα for products with e alone.
        E = self._asked(self.mix.E_cross)
        by_e[0] = weighted_sum(self.g, (at.s * E.square() * at.W).flatten(1))
        by_e[4] = self._sum_values(grow(at.s * E), self.v.blocks("shape_a")[self.seen])
        rest = [*self._fourth(), self._cross_e(), *by_e]
        rest += self._sized(at, with_e(at).plus(beyond(at)), "shape")
        rest += self._sized(at, against_e(at), "shape_e")
        noise = self.mix.noise[self.tokens] * torch.exp(2.0 * at.beta.flatten(1).amax(1))
        squares, products = (self._by_all_keys(M) for M in (hadamard(self.K, self.K), products))
        rest.append(ball(noise, len(self.out)))
        return MovedShapes(total(rest), squares, products, at.W_head[..., 0], at.W_e_head[..., 0])

    def _by_all_keys(self, M: Float[Tensor, "T n n"]) -> Float[Tensor, "T m m"]:
        """Return a shape by head and key with keys that no token here reads, as 0."""
        (T, H, K), S = self.s.shape, len(self.mix.z)
        made = M.new_zeros(T, H, S, H, S)
        made[:, :, self.seen, :, self.seen] = M.reshape(T, H, K, H, K)
        return made.reshape(T, H * S, H * S)

    def _cross_e(self) -> Float[Tensor, "T d d"]:
        """Return scale Σ c e_q·e_k."""
        forms, size = self._against_keys(self.q.shape_e[self.tokens])
        forms = raised(forms, product_error(self.c**2, size))
        columns = self.columns.reshape(self.T, -1, self.H, self.S).permute(0, 3, 1, 2)
        return total_along(image(columns, forms)) * self.mix.scale**2
