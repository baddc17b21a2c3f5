"""What a site leaves beyond second order, majorised by a square of its input's move (`taylor.third_order`).

A site's own third order is cubic in u, and one factor of each cube is known to be small: a neuron moves by at most b,
so |c₃u³| ≤ |c₃|b·u², and a norm sees u⊥ along its covector by at most V, so |w·u⊥|κ ≤ Vκ, a square again. As squares
they join the forms of the factors before a bound is taken, where a constant stands for a maximum that hardly any two
of them attain at the same α. `taylor.fourth_order` takes them from the whole move u = Aα + e to the factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import trace
from prooflens.engines.relaxations.norms import (
    cholesky_factor,
    frobenius,
    grow,
    product_error,
    spectral,
)


class Squares(NamedTuple):
    """½uᵀRu + (uᵀBu)^½ + rest is at least |v·r − ½uᵀQu| for the move u of a site's input, for several v.

    Attributes:
        R: symmetric matrices, shape [F, n, n], positive semidefinite but for their rounding.
        error: bounds of their error in the 2-norm.
        rest: what no square holds.
        B: symmetric matrices, shape [F, n, n], positive semidefinite but for their rounding; None for 0.
        missed: bounds of their error in the 2-norm.
    """

    R: Float[Tensor, "F n n"]
    error: Float[Tensor, " F"]
    rest: Float[Tensor, " F"]
    B: Float[Tensor, "F n n"] | None = None
    missed: Float[Tensor, " F"] | None = None

    @classmethod
    def none(cls, n: int, rest: Float[Tensor, " F"]) -> Squares:
        """Return a constant bound.

        Args:
            n: how many coordinates the site's input has.
            rest: the bound.
        """
        return cls(rest.new_zeros(len(rest), n, n), torch.zeros_like(rest), rest)


def half_form(R: Float[Tensor, "F n n"], x: Float[Tensor, "F n"]) -> Float[Tensor, " F"]:
    """Return ½xᵀRx of shapes, at least 2⁻³⁰⁰.

    Args:
        R: shapes, [F, n, n].
        x: points, [F, n].
    """
    found: Tensor = 0.5 * ((R @ x[..., None])[..., 0] * x).sum(-1).clamp(min=2.0**-300)
    return found


def remainder_form(
    M: Float[Tensor, "n n"], Q: Float[Tensor, "F n n"], error: Float[Tensor, " F"]
) -> Float[Tensor, " F"]:
    """Bound ½|eᵀQe| for e in E(M), by the 2-norm of LᵀQL.

    Args:
        M: the shape of e.
        Q: symmetric matrices, shape [F, n, n].
        error: bounds of their error in the 2-norm, shape [F].
    """
    L = cholesky_factor(M)
    turned = L.T @ Q @ L
    # Two products of inner length n err by γ_2n‖L‖²‖Q‖; 4 and 4 are to spare.
    slip = product_error(4 * len(M), 4.0 * frobenius(L).square() * frobenius(Q))
    return grow(0.5 * (spectral(0.5 * (turned + turned.mT)) + slip + error * trace(M)))
