"""Ellipsoids by their shape matrices: E(M) = {x : x = M^{½}ξ, ‖ξ‖₂ ≤ 1}, with support function √(wᵀMw).

What `taylor` keeps of a remainder is a vector-valued polynomial of few known vectors. For e = T(ξ ⊗ ξ) with ‖ξ‖ ≤ 1,
‖ξ ⊗ ξ‖ ≤ 1 as well, so **e ∈ E(TTᵀ)**, and TTᵀ is made of Hadamard products: if the n-th entry is a_n(g_n·ξ)²,
(TTᵀ)_nm = a_n a_m (g_n·g_m)². Cubes give (g_n·g_m)³, products of two forms their symmetrised Gram matrices. One
matrix holds all directions at once and knows which coordinates cannot peak together, and linear maps act on it
exactly.

    sum        E(M₁) + E(M₂) ⊂ E(c₁M₁ + c₂M₂)        for 1/c₁ + 1/c₂ ≤ 1
    choice     conv(E(M₁) ∪ E(M₂)) ⊂ E(M₁ + M₂)      what shares a budget Σ|λ_i| ≤ 1 is added, not summed
    box        {|x_n| ≤ X_n} ⊂ E(diag(c_nX_n²))      for Σ 1/c_n ≤ 1

Rounding: a computed matrix is raised on the diagonal by a bound of its error in the 2-norm, so it lies above the real
one in the Loewner order. All the constructions above are monotone in that order (Hadamard products by Schur's
theorem).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, length, product_error
from prooflens.numerics import gamma

SUM = 1.0 + 2.0**-32
"""The factor that makes the weights of a sum satisfy Σ 1/c ≤ 1 in spite of rounding, for up to 2²⁰ summands.

c = (Σ sizes)/size: the float sum of k sizes may be short by γ_k, and quotient and product round once each. 1 + 2⁻³²
exceeds 1 + γ_{k+2} for k ≤ 2²⁰.
"""
LEAST_SHARE = 1e-30
"""Summands are weighted as if none were smaller than this share of the whole; any positive weights are valid."""


def trace(M: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b"]:
    """Return the sum of the squared half-axes, raised over its rounding."""
    return grow(M.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sum(-1))


def raised(M: Float[Tensor, "*b n n"], error: Tensor) -> Float[Tensor, "*b n n"]:
    """Return a computed symmetric matrix plus the bound of its error, so that it lies above the real one.

    Symmetrising and adding to the diagonal round once each; callers leave room for that in `error`.

    Args:
        M: computed matrices, shape [..., n, n].
        error: bounds of their error in the 2-norm, shape [...].
    """
    found = (M + M.mT).mul_(0.5)
    found.diagonal(dim1=-2, dim2=-1).add_(grow(error)[..., None] + UNDERFLOW)
    return found


def without(M: Float[Tensor, "*b n n"], unit: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n n"]:
    """Return (I − uuᵀ)M(I − uuᵀ), raised: the shape of what is left without a direction, in n² steps.

    It is M − u hᵀ − h uᵀ with h = Mu − ½(uᵀMu)u. For ‖u‖ ≤ 1 + 2⁻³², Mu errs by γ_n‖M‖_F and uᵀMu by γ_2n‖M‖_F; the
    three terms are at most 2‖M‖_F each. γ of 4n + 64 and the factor 8 cover all of it.

    Args:
        M: shapes, [..., n, n].
        unit: u of length 1, or 0 to leave everything, shape [..., n].

    Example:
        >>> M = without(2.0 * torch.eye(2).double(), torch.tensor([0.6, 0.8]).double())
        >>> [round(x, 6) for x in M.flatten().tolist()]
        [1.28, -0.96, -0.96, 0.72]
    """
    n = M.shape[-1]
    moved = (M @ unit[..., None])[..., 0]
    half = moved - 0.5 * (moved * unit).sum(-1, keepdim=True) * unit
    sides = torch.stack((unit, half), -1), torch.stack((half, unit), -2)
    return raised(M - sides[0] @ sides[1], product_error(4 * n + 64, 8.0 * frobenius(M)))


def gram(A: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b n n"]:
    """Return AAᵀ, raised."""
    return raised(A @ A.mT, product_error(A.shape[-1], frobenius(A).square()))


def image(D: Float[Tensor, "*b m n"], M: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b m m"]:
    """Return DMDᵀ, raised: the shape of a linear image.

    The two products err by γ_n‖D‖²‖M‖ each. The bound is at least twice that, which leaves room for a D whose entries
    are rounded themselves, by a few u each.

    Args:
        D: the linear map, shape [..., m, n].
        M: the shape, [..., n, n].

    Example:
        >>> M = image(torch.tensor([[2.0, 0.0]]).double(), torch.eye(2).double())
        >>> round(M.item(), 9)
        4.0
    """
    most = frobenius(D)
    error = product_error(2 * (D.shape[-1] + D.shape[-2]), 2.0 * most.square() * frobenius(M))
    return raised(D @ M @ D.mT, error + UNDERFLOW * most)


def ball(radius: Float[Tensor, "*b"], n: int) -> Float[Tensor, "*b n n"]:
    """Return the shape of a ball.

    Args:
        radius: radii, shape [...].
        n: the dimension.
    """
    square = grow(radius.square()) + UNDERFLOW
    return torch.diag_embed(square[..., None].expand(*radius.shape, n))


def box(columns: Float[Tensor, "*b m n"], X: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m m"]:
    """Return the shape of {Σ_n x_n columns_n : |x_n| ≤ X_n}.

    Args:
        columns: vectors as columns, shape [..., m, n].
        X: half-widths, shape [..., n].
    """
    each = grow(X * torch.linalg.vector_norm(columns, dim=-2))
    return weighted_sum(columns, X.square() * weights_of_sum(each))


def weighted_sum(columns: Float[Tensor, "*b m n"], squares: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m m"]:
    """Return Σ_n squares_n columns_n columns_nᵀ, raised.

    `size` is the trace of the result, so γ_{n+1}·size bounds the error of the sum. Twice as many roundings and the
    factor 4 cover the rounding of `size` and a few roundings in each of `squares`.

    Args:
        columns: vectors as columns, shape [..., m, n].
        squares: weights ≥ 0, shape [..., n].
    """
    found = (columns * squares[..., None, :]) @ columns.mT
    size = (columns.square().sum(-2) * squares).sum(-1)
    return raised(found, product_error(2 * squares.shape[-1], 4.0 * size))


def weights_of_sum(sizes: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
    """Return weights c with Σ 1/c ≤ 1 along the last dimension, inverse to the sizes: the sum's trace is then least.

    The 2⁻³⁰⁰ keeps quotients finite if all sizes are 0. Any positive sizes give valid weights.

    Args:
        sizes: roots of the traces of the summands, shape [..., m].

    Example:
        >>> c = weights_of_sum(torch.tensor([1.0, 3.0]).double())
        >>> [round(x, 6) for x in c.tolist()]  # 4/1 and 4/3
        [4.0, 1.333333]
    """
    total = sizes.sum(-1, keepdim=True)
    floored = torch.maximum(sizes, LEAST_SHARE * total) + 2.0**-300
    return floored.sum(-1, keepdim=True) / floored * SUM


def total(
    shapes: Sequence[Float[Tensor, "*b n n"]], c: Float[Tensor, "*b k"] | None = None
) -> Float[Tensor, "*b n n"]:
    """Return the shape of a sum of members of ellipsoids.

    Products and sums of k matrices err by γ_k Σ c‖M‖_F; γ_{4k+8} also covers the rounding of that size and `raised`.

    Args:
        shapes: the summands' shapes, each [..., n, n].
        c: weights with Σ 1/c ≤ 1, shape [..., k]; None for those of least trace.

    Example:
        >>> one, three = torch.tensor([[1.0]]).double(), torch.tensor([[9.0]]).double()
        >>> round(total([one, three]).item(), 6)  # (1 + 3)²
        16.0
    """
    if c is None:
        if len(shapes) == 1:
            return shapes[0]
        c = weights_of_sum(torch.stack([trace(M).sqrt() for M in shapes], -1))
    found = c[..., 0, None, None] * shapes[0]
    size = c[..., 0] * frobenius(shapes[0])
    for i, M in enumerate(shapes[1:], 1):
        found.addcmul_(c[..., i, None, None], M)
        size = size + c[..., i] * frobenius(M)
    # Summands are symmetric to the last bit, and so is their sum.
    found.diagonal(dim1=-2, dim2=-1).add_(grow(gamma(4 * len(shapes) + 8) * size)[..., None] + UNDERFLOW)
    return found


def total_along(
    shapes: Float[Tensor, "*b k n n"], c: Float[Tensor, "*b k"] | None = None
) -> Float[Tensor, "*b n n"]:
    """Return the shape of a sum of k members, one of each ellipsoid.

    Args:
        shapes: the summands' shapes, [..., k, n, n].
        c: weights with Σ 1/c ≤ 1, shape [..., k]; None for those of least trace.
    """
    c = weights_of_sum(trace(shapes).sqrt()) if c is None else c
    found = torch.einsum("...k,...knm->...nm", c, shapes)
    size = (c * frobenius(shapes)).sum(-1)
    return raised(found, gamma(4 * shapes.shape[-3] + 8) * size)


def smaller(M: Float[Tensor, "T d d"], N: Float[Tensor, "T d d"]) -> Float[Tensor, "T d d"]:
    """Return, of two shapes of the same, the one with the lesser trace, token by token.

    Args:
        M: one shape for each token.
        N: the other.
    """
    return torch.where((trace(M) <= trace(N))[:, None, None], M, N)


def hadamard(M: Float[Tensor, "T n n"], K: Float[Tensor, "T n n"]) -> Float[Tensor, "T n n"]:
    """Return the Hadamard product of two shapes, raised.

    Args:
        M: one factor.
        K: the other.
    """
    return raised(M * K, gamma(8) * frobenius(M) * frobenius(K))


def support(M: Float[Tensor, "n n"], w: Float[Tensor, "*f n"]) -> Float[Tensor, "*f"]:
    """Return √(wᵀMw) ≥ sup |w·x| for one matrix and many covectors.

    Args:
        M: the shape, [n, n].
        w: covectors, shape [..., n].

    Example:
        >>> M, w = torch.diag(torch.tensor([4.0, 1.0]).double()), torch.tensor([[1.0, 0.0]]).double()
        >>> round(support(M, w).item(), 6)
        2.0
    """
    square = ((w @ M) * w).sum(-1).clamp(min=0.0)
    return _root(square, w, frobenius(M))


def supports_of(M: Float[Tensor, "*b n n"], w: Float[Tensor, "f n"]) -> Float[Tensor, "*b f"]:
    """Return √(wᵀMw) of every matrix with every covector.

    Args:
        M: shapes, [..., n, n].
        w: covectors, shape [f, n].
    """
    square = ((w @ M) * w).sum(-1).clamp(min=0.0)
    return _root(square, w, frobenius(M)[..., None])


def supports(M: Float[Tensor, "*b n n"], w: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return √(wᵀMw) with a matrix of its own for each covector.

    Args:
        M: shapes, [..., n, n].
        w: covectors, shape [..., n].
    """
    square = ((M @ w[..., None])[..., 0] * w).sum(-1).clamp(min=0.0)
    return _root(square, w, frobenius(M))


def _root(square: Tensor, w: Float[Tensor, "... n"], size: Tensor) -> Tensor:
    """Return √(wᵀMw) from the computed square and ‖M‖_F, with rounding and underflow added.

    wᵀM and (wᵀM)w are sums of n terms each, so the square errs by γ_{2n}‖w‖²‖M‖_F.
    """
    most = length(w)
    error = product_error(2 * w.shape[-1], most.square() * size) + UNDERFLOW * (1.0 + most)
    return grow((square + error).sqrt())
