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

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, image, raised, total, total_along, weighted_sum
from prooflens.engines.relaxations.norms import grow, product_error
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.mixing import MixShape, hadamard
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
    size, grams = tokens_at_once(mix, len(mix.out), memory), Grams(mix)
    tokens = chain.goes_on
    parts = [
        MovedMixShape(mix, q, k, v, tokens[start : start + size], grams).moved()
        for start in range(0, len(tokens), size)
    ]
    return MovedShapes(*(torch.cat(part) for part in zip(*parts, strict=True)))


class MovedShapes(NamedTuple):
    """Shapes of a mixing by token of the next root.

    Attributes:
        rest: of what neither second order nor moving covectors hold.
        squares: of b², by head and key.
        products: of π, by head and key.
    """

    rest: Float[Tensor, "T d d"]
    squares: Float[Tensor, "T n n"]
    products: Float[Tensor, "T n n"]


class MovedMixShape(MixShape):
    """Ellipsoids of what second order and moving covectors leave of a mixing, for some query tokens."""

    def moved(self) -> MovedShapes:
        """Return the shapes of everything beyond second order that no moving covector holds, of b² and of π."""
        products = self._products()
        K_e = self._nonlinear(products)
        at = SoftmaxBudget.of(self.mix, self.tokens, K_e)
        by_e = self._linear_in_e(at, K_e)
        # In place of what holds all of b_e: Σ c b b_e and Σ s b_e W_O A_vα for products with e alone.
        E = self.mix.E_cross[:, self.tokens].movedim(0, 1)
        by_e[0] = weighted_sum(self.g, (at.s * E.square() * at.W).flatten(1))
        by_e[4] = self._sum_values(grow(at.s * E), self.v.blocks("shape_a"))
        rest = [*self._fourth(), self._cross_e(), *by_e]
        rest += self._sized(at, with_e(at).plus(beyond(at)), "shape")
        rest += self._sized(at, against_e(at), "shape_e")
        noise = self.mix.noise[self.tokens] * torch.exp(2.0 * at.beta.flatten(1).amax(1))
        return MovedShapes(total([*rest, ball(noise, len(self.out))]), hadamard(self.K, self.K), products)

    def _cross_e(self) -> Float[Tensor, "T d d"]:
        """Return scale Σ c e_q·e_k."""
        forms, size = self._against_keys(self.q.shape_e[self.tokens])
        forms = raised(forms, product_error(self.c**2, size))
        columns = self.columns.reshape(self.T, -1, self.H, self.S).permute(0, 3, 1, 2)
        return total_along(image(columns, forms)) * self.mix.scale**2
