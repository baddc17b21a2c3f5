"""Gram matrices of neurons and of gates: the matrices that a network's remainder is made of (`taylor.network`).

`gated_power` and `gated_cross` give inner products of polynomials of a gate's pre-activations g and of what they
gate, u, as symmetric forms. `gram` and `gated_gram` give one quadratic form of the input per covector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import raised
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, product_error
from prooflens.numerics import gamma

ROWS = 2**15
"""How many numbers of a matrix are worked on at a time on a CPU: few enough for a cache, and for one thread."""


class Quarters(NamedTuple):
    """Inner products of the gate's pre-activations g, of what they gate, u, and of g with u."""

    g: Float[Tensor, "T n n"]
    u: Float[Tensor, "T n n"]
    both: Float[Tensor, "T n n"]


def gated_power(
    at: Quarters, a: Float[Tensor, "T n"], c: Float[Tensor, "T n"], order: int
) -> Float[Tensor, "T n n"]:
    """Return the Gram matrix of a gᵏ + c gᵏ⁻¹u as symmetric forms of order k, raised.

    Of the k places that u may take in the other form, one meets u, so an entry is

        K_nmᵏ⁻² [K_nm (a_n K_nm a_m + c_n M_nm c_m/k + a_n X_nm c_m + c_n X_mn a_m) + (k−1)/k c_n X_nm X_mn c_m].

    Rows are worked on a few at a time, so that they stay in a cache. With κ² and μ² the diagonals of K and M, |K_nm| ≤
    κ_nκ_m, |X_nm| ≤ κ_nμ_m and |M_nm| ≤ μ_nμ_m, so the terms of an entry sum to at most z_n z_m, z = |a|κᵏ + |c|κᵏ⁻¹μ.
    Each is a product of at most a dozen numbers, and at most seven are added: γ_64‖z‖² covers the rounding of all.

    Args:
        at: inner products of g and u, as raised shapes.
        a: coefficients of gᵏ.
        c: coefficients of gᵏ⁻¹u.
        order: k.
    """
    K, M, X = at
    n = K.shape[-1]
    found = torch.empty_like(K)
    step = n if K.is_cuda else max(1, ROWS // (n * len(K)))
    for start in range(0, n, step):
        some = slice(start, start + step)
        g, x, turned = K[:, some], X[:, some], X[:, :, some].mT.contiguous()
        a_n, c_n, a_m, c_m = a[:, some, None], c[:, some, None], a[:, None], c[:, None]
        part = torch.mul(g, a_n * a_m, out=found[:, some])
        part.addcmul_(M[:, some], (c_n / order) * c_m).addcmul_(x, a_n * c_m).addcmul_(turned, c_n * a_m)
        part.mul_(g).addcmul_(turned.mul_(x), (c_n * ((order - 1) / order)) * c_m)
        for _ in range(order - 2):
            part.mul_(g)
    kappa, mu = (S.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt() for S in (K, M))
    z = a.abs() * kappa**order + c.abs() * kappa ** (order - 1) * mu
    return raised(found, gamma(64) * grow(z.square().sum(-1)))


def gated_cross(A: Quarters, B: Quarters, a: Tensor, c: Tensor) -> Float[Tensor, "T n n"]:
    """Return the Gram matrix of 2a x_g e_g + c (x_g e_u + x_u e_g), bilinear in x and e, raised.

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
    return summed([*(K * term for term in first), X * turned, (X * turned).mT, M * weighted(L, c)])


def summed(terms: list[Float[Tensor, "T n n"]]) -> Float[Tensor, "T n n"]:
    """Return a sum of terms, raised; γ_64 of their sizes covers what each of them and their sum round by."""
    error = gamma(64) * torch.stack([frobenius(term) for term in terms]).sum(0)
    return raised(sum(terms[1:], terms[0]), error)


def quarters(W: Float[Tensor, "n d"], V: Float[Tensor, "n d"], M: Float[Tensor, "T d d"]) -> Quarters:
    """Return the inner products of g = Wx and u = Vx for x in ellipsoids, raised together as `image` raises them.

    Args:
        W: the map to g.
        V: the map to u.
        M: shapes of x.
    """
    both = torch.cat((W, V), -2)
    size = 2.0 * frobenius(both).square() * frobenius(M)
    error = product_error(2 * sum(both.shape[-2:]), size) + UNDERFLOW * frobenius(both)
    g, u = W @ M, V @ M
    return Quarters(raised(g @ W.mT, error), raised(u @ V.mT, error), g @ V.mT)


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
