"""What a site leaves beyond second order, majorised by a square of its input's move (`taylor.third_order`).

A site's own third order is cubic in u, and one factor of each cube is known to be small: a neuron moves by at most b,
so |c₃u³| ≤ |c₃|b·u², and a norm sees u⊥ along its covector by at most V, so |w·u⊥|κ ≤ Vκ, a square again. As squares
they join the forms of the factors before a bound is taken, where a constant stands for a maximum that hardly any two
of them attain at the same α. With u = Aα + e,

    uᵀRu ≤ (1 + δ) (Aα)ᵀR(Aα) + (1 + 1/δ) eᵀRe,      R ⪰ 0,

for any δ > 0: the first is a square of the factors, and the second a constant, by an eigenvalue on the ellipsoid of e.
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
from prooflens.engines.taylor.values import Value
from prooflens.numerics import gamma

LEAST_SHARE = 0.3
"""t at least, as a share of the largest value of the root: J is at most so many times steeper than what it is above."""


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

    def at_root(self, source: Value, t: int) -> Squares:
        """Return the same for moves of the root, u = Jx + e, without B; δ and t are what random corners would choose.

        With u = x + e, (uᵀBu)^½ ≤ (xᵀBx)^½ + (eᵀBe)^½, and the first is at most ½(xᵀBx/t + t).

        Args:
            source: the value that the site reads.
            t: the token.
        """
        J = source.J[t]
        size, spans = frobenius(J).square(), source.spans(t)
        beside = remainder_form(source.shape_e[t], self.R, self.error)
        delta = (beside / likely(self.R, spans)).sqrt().clamp(2.0**-20, 1.0)
        whole, error = self.R * (1.0 + delta)[:, None, None], self.error * (1.0 + delta)
        rest = self.rest + (1.0 + 1.0 / delta) * beside
        if self.B is not None and self.missed is not None:
            most = (2.0 * remainder_form(source.shape[t], self.B, self.missed)).sqrt()
            far = torch.maximum((2.0 * likely(self.B, spans)).sqrt(), LEAST_SHARE * most) + 2.0**-300
            whole, error = whole + self.B / far[:, None, None], error + self.missed / far
            rest = rest + 0.5 * far + (2.0 * remainder_form(source.shape_e[t], self.B, self.missed)).sqrt()
        error = error + gamma(16) * frobenius(whole)
        slip = product_error(4 * sum(J.shape), 4.0 * size * frobenius(whole)) + error * size
        R = J.T @ whole @ J
        return Squares(0.5 * (R + R.mT), grow(slip), grow(rest))


def likely(R: Float[Tensor, "F n n"], spans: Float[Tensor, "n n"]) -> Float[Tensor, " F"]:
    """Return ½xᵀRx at random corners, on average; at least 2⁻³⁰⁰."""
    found: Tensor = 0.5 * torch.einsum("fij,ij->f", R, spans).clamp(min=2.0**-300)
    return found


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
