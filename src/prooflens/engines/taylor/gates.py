"""Gram matrices of neurons and of gates: the matrices that a network's remainder is made of (`taylor.network`).

`gated_terms` and `gated_cross` give inner products of polynomials of a gate's pre-activations g and of what they
gate, u, as symmetric forms. `gram` and `gated_gram` give one quadratic form of the input per covector.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import product_error


class Quarters(NamedTuple):
    """Inner products of the gate's pre-activations g, of what they gate, u, and of g with u."""

    g: Float[Tensor, "T n n"]
    u: Float[Tensor, "T n n"]
    both: Float[Tensor, "T n n"]


def gated_terms(K: Tensor, M: Tensor, X: Tensor, a: Tensor, c: Tensor, order: int) -> list[Tensor]:
    """Return the Gram matrix of a gᵏ + c gᵏ⁻¹u as symmetric forms of order k, as a list of terms.

    Of the k places that u may take in the other form, one meets u.

    Args:
        K: inner products of g with g.
        M: inner products of u with u.
        X: inner products of g with u.
        a: coefficients of gᵏ.
        c: coefficients of gᵏ⁻¹u.
        order: k.
    """
    power = K ** (order - 2)
    cross = a[..., :, None] * (power * K * X) * c[..., None, :]
    straight = weighted(power * K * M / order, c)
    turned = weighted(power * X * X.mT * ((order - 1) / order), c)
    return [weighted(power * K * K, a), straight, turned, cross, cross.mT]


def gated_cross(A: Quarters, B: Quarters, a: Tensor, c: Tensor) -> list[Tensor]:
    """Return the Gram matrix of 2a x_g e_g + c (x_g e_u + x_u e_g), bilinear in x and e, as a list of terms.

    It is x_g(2a e_g + c e_u) + x_u(c e_g): products of the inner products of x with those of its partners.

    Args:
        A: inner products of x.
        B: inner products of e.
        a: coefficients of g².
        c: coefficients of g·u.
    """
    (K, M, X), (L, R, Y) = A, B
    mixed = 2.0 * a[..., :, None] * Y * c[..., None, :]
    first = [4.0 * weighted(L, a), mixed, mixed.mT, weighted(R, c)]
    turned = 2.0 * a[..., :, None] * L * c[..., None, :] + weighted(Y.mT, c)
    return [*(K * term for term in first), X * turned, (X * turned).mT, M * weighted(L, c)]


def quarters(M: Float[Tensor, "T 2n 2n"]) -> Quarters:
    """Split the inner products of g and u, stacked, into their quarters."""
    n = M.shape[-1] // 2
    return Quarters(M[:, :n, :n], M[:, n:, n:], M[:, :n, n:])


def weighted(M: Float[Tensor, "T n n"], w: Float[Tensor, "T n"]) -> Float[Tensor, "T n n"]:
    """Return diag(w) M diag(w)."""
    return w[..., :, None] * M * w[..., None, :]


def gram(
    rows: Float[Tensor, "n d"], sizes: Float[Tensor, " n"], weights: Float[Tensor, "F n"]
) -> tuple[Float[Tensor, "F d d"], Float[Tensor, " F"]]:
    """Return rowsᵀ diag(w) rows, symmetric, and its rounding in the 2-norm.

    The rows are products themselves; `sizes` bounds their terms, so that γ of four times all lengths covers both
    products.

    Args:
        rows: shape [n, d].
        sizes: at least the lengths of the rows' absolute-value chains, shape [n].
        weights: one row of weights per covector, shape [F, n].
    """
    form = (rows.T * weights[:, None, :]) @ rows
    return 0.5 * (form + form.mT), product_error(4 * sum(rows.shape), weights.abs() @ sizes.square())


def gated_gram(
    rows: Float[Tensor, "n d"],
    others: Float[Tensor, "n d"],
    sizes: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    a: Tensor,
    b: Tensor,
    c: Tensor,
) -> tuple[Float[Tensor, "F d d"], Float[Tensor, " F"]]:
    """Return Σ a_n g_n² + 2 b_n g_n u_n + c_n u_n² as a matrix, and its rounding in the 2-norm.

    Args:
        rows: the rows of g, shape [n, d].
        others: the rows of u, shape [n, d].
        sizes: at least the lengths of both rows' absolute-value chains.
        a: coefficients of g², shape [F, n].
        b: coefficients of g·u, shape [F, n].
        c: coefficients of u², shape [F, n].
    """
    form = rows.T @ (a[:, :, None] * rows + 2.0 * b[:, :, None] * others)
    form = form + (others.T * c[:, None, :]) @ others
    g, u = sizes
    size = a.abs() @ g.square() + 2.0 * b.abs() @ (g * u) + c.abs() @ u.square()
    return 0.5 * (form + form.mT), product_error(8 * sum(rows.shape), size)
