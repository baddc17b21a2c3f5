"""What a softmax mixing leaves once moving covectors hold what is linear in α and in e (`taylor.third_order`).

Of the terms in `taylor.mixing` these are gone, as far as e_q, e_k and e_V stand in them to first order:

    Σ c b b_e  +  Σ s b_e W_O A_vα  +  Σ s b W_O e_V  +  scale Σ c (A_qα·e_k + e_q·A_kα),

with b_e = scale(q·e_k + e_q·k), centred. The products of linear parts that b_e has besides stay, and so do
scale Σ c e_q·e_k and all that is of second order in e.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, image, raised, total, total_along, weighted_sum
from prooflens.engines.relaxations.norms import grow, product_error
from prooflens.engines.taylor.chain import Chain
from prooflens.engines.taylor.grams import Grams
from prooflens.engines.taylor.mixing import MixShape, hadamard, smaller
from prooflens.engines.taylor.next_root import tokens_at_once
from prooflens.engines.taylor.softmax_budget import SoftmaxBudget, against_e, beyond, with_e


def moved_shapes(chain: Chain, memory: int = 2**32) -> Float[Tensor, "T d d"]:
    """Return the shapes of what the mixing of a chain leaves, token by token of the next root.

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
        MovedMixShape(mix, q, k, v, tokens[start : start + size], grams).moved_parts()
        for start in range(0, len(tokens), size)
    ]
    return torch.cat([total(part) for part in parts])


class MovedMixShape(MixShape):
    """Ellipsoids of what second order and moving covectors leave of a mixing, for some query tokens."""

    def moved_parts(self) -> list[Float[Tensor, "T d d"]]:
        """Return the shapes of everything beyond second order but for what is linear in both α and e."""
        products = self._products()
        K_e, K_p = self._nonlinear(products), self._nonlinear(products, moved=True)
        at = SoftmaxBudget.of(self.mix, self.tokens, K_e)
        by_e = self._linear_in_e(at, K_e)
        E = self.mix.E_products[:, self.tokens].movedim(0, 1)
        straight = weighted_sum(self.g, (at.s * E.square() * at.W).flatten(1))
        by_values = self._sum_values(grow(at.s * E), self.v.blocks("shape_a"))
        # In place of what holds all of b_e: Σ c b b_e and Σ s b_e W_O A_vα.
        by_e[0] = smaller(image(self.columns, hadamard(self.K, K_p)), straight)
        by_e[4] = smaller(self._by_values(K_p), by_values)
        rest = [*self._third(), *self._fourth(), self._cross_e(), *by_e]
        rest += self._sized(at, with_e(at).plus(beyond(at)), "shape")
        rest += self._sized(at, against_e(at), "shape_e")
        noise = self.mix.noise[self.tokens] * torch.exp(2.0 * at.beta.flatten(1).amax(1))
        return [*rest, ball(noise, len(self.out))]

    def _cross_e(self) -> Float[Tensor, "T d d"]:
        """Return scale Σ c e_q·e_k."""
        forms, size = self._against_keys(self.q.shape_e[self.tokens])
        forms = raised(forms, product_error(self.c**2, size))
        columns = self.columns.reshape(self.T, -1, self.H, self.S).permute(0, 3, 1, 2)
        return total_along(image(columns, forms)) * self.mix.scale**2
