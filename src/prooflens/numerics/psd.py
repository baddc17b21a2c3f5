"""Verified positive semidefiniteness: a floating Cholesky factor guesses, its residual proves.

Rump, *Verification of positive definiteness* (BIT 46, 2006), shifts M by a bound of the factorisation's error and
asks whether Cholesky runs through. We take his shift, but prove with the residual of the factor instead of with an
error analysis of the factorisation: M = LLᵀ + (M − LLᵀ), and LLᵀ ⪰ 0 whatever L is. So nothing is assumed of the
LAPACK, MKL or cuSOLVER routine that produced L, only that a matrix product is made of dot products with error γ_n.

A True is a proof about the real numbers that the float64 entries stand for. A False means *not proved*.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prooflens.numerics.rounding import UNIT_ROUNDOFF, down, gamma, up

_SAFE_EXPONENT = 400
"""Diagonals outside 2^±400 are not proved: inside, underflow is far below the slack that the checks leave."""

_BLOCK = 512
"""On a CPU, products of larger factors are made of blocks of so many rows: what lies above the diagonal is left out."""


def is_psd(M: Float[Tensor, "*batch n n"]) -> Bool[Tensor, "*batch"]:
    """Say for each symmetric M whether it is proved positive semidefinite; False means not proved.

    With s_i = σ m_ii (σ about 3n²u) and L the floating Cholesky factor of M − diag(s), write M = LLᵀ + diag(s) + F.
    Then diag(s) + F ⪰ 0, hence M ⪰ 0, if for some w > 0 and every i s_i w_i ≥ Σ_j |F_ij| w_j (generalised diagonal
    dominance); w_i = m_ii^{-1/2} makes the test invariant under diagonal scaling. Covered: the rounding of LLᵀ (γ_n
    |L||L|ᵀ), of both subtractions, and of the test itself. Complexity: O(n³) per matrix, one Cholesky factorisation
    and one product.

    Args:
        M: exactly symmetric matrices, shape [..., n, n].

    Raises:
        ValueError: if a matrix is not symmetric.

    Example:
        >>> is_psd(torch.tensor([[[2.0, 1.0], [1.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]]]).double()).tolist()
        [True, False]
    """
    symmetric = (M.mT == M).all(dim=-1).all(dim=-1)
    if not bool(symmetric.all()) and not bool((symmetric | M.isnan().any(dim=-1).any(dim=-1)).all()):
        raise ValueError(
            "is_psd needs exactly symmetric matrices; symmetrise and account for the rounding first"
        )
    n = M.shape[-1]
    if n == 0:
        return torch.ones(M.shape[:-2], dtype=torch.bool, device=M.device)
    m = M.diagonal(dim1=-2, dim2=-1)
    if bool((m == 0).any()):
        # A row of zeros says nothing about the others: 1 on its diagonal leaves definiteness unchanged.
        M = M + torch.diag_embed((M == 0).all(dim=-1).to(M.dtype))
        m = M.diagonal(dim1=-2, dim2=-1)
    usable = ((m > 2.0**-_SAFE_EXPONENT) & (m < 2.0**_SAFE_EXPONENT)).all(dim=-1)
    m = torch.where(usable[..., None], m, torch.ones_like(m))
    s = n * gamma(3 * n + 16) * m
    L, failed = torch.linalg.cholesky_ex(_shifted(M, -s))
    if bool((failed != 0).all()):  # what is no factor of any of them proves nothing
        return usable & _diagonally_dominant(M)
    w = m.rsqrt()
    P = _squared(L.tril_())
    del L
    # (|L||L|ᵀ)_ij ≤ ‖L_i‖‖L_j‖ by Cauchy and Schwarz, and ‖L_i‖² = P_ii up to rounding.
    norms = (P.diagonal(dim1=-2, dim2=-1) * (1.0 + gamma(2 * n + 4))).sqrt()
    product_error = gamma(n + 2) * norms * (norms * w).sum(dim=-1, keepdim=True)
    F = torch.sub(M, P, out=P)
    diagonal = F.diagonal(dim1=-2, dim2=-1)
    diagonal_error = 4.0 * UNIT_ROUNDOFF * (diagonal.abs() + s) * w
    diagonal.sub_(s)
    # The subtractions err by u|F|, and by a little more on the diagonal; the last factor covers them and the test.
    total = _apply(F.abs_(), w) + diagonal_error + product_error
    holds = s * w * (1.0 - 8.0 * UNIT_ROUNDOFF) >= total * (1.0 + gamma(4 * n + 32))
    proved: Tensor = usable & holds.all(dim=-1)
    return proved if bool(proved.all()) else proved | usable & _diagonally_dominant(M)


def dominates(d: Float[Tensor, "*batch n"], H: Float[Tensor, "*batch n n"]) -> Bool[Tensor, "*batch"]:
    """Say whether diag(d) ⪰ H is proved, for symmetric H.

    The matrix handed to `is_psd` has its diagonal rounded down, so it lies below diag(d) − H in the Loewner order.

    Args:
        d: diagonals, shape [..., n].
        H: exactly symmetric matrices, shape [..., n, n].
    """
    M = -H
    M.diagonal(dim1=-2, dim2=-1).copy_(down(d - H.diagonal(dim1=-2, dim2=-1)))
    return is_psd(M)


def gershgorin_shift(H: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Return d_k ≥ H_kk + Σ_{l≠k} |H_kl|, the row sums rounded up, so that diag(d) ⪰ H by diagonal dominance.

    Args:
        H: symmetric matrices, shape [..., n, n].
    """
    n = H.shape[-1]
    diagonal = H.diagonal(dim1=-2, dim2=-1)
    radius = (H - torch.diag_embed(diagonal)).abs().sum(dim=-1)
    return up(diagonal + up(radius * (1.0 + gamma(n + 2))))


def lambda_max_upper(
    H: Float[Tensor, "*batch n n"], scale: Float[Tensor, "*batch n"] | None = None, *, attempts: int = 5
) -> Float[Tensor, "*batch"]:
    """Return λ with λ·diag(scale) ⪰ H proved: an upper bound of the largest eigenvalue of S^{-½}HS^{-½}.

    A floating eigenvalue is a guess; it is inflated until `dominates` proves it, sixteenfold at each attempt. If no
    attempt succeeds the answer is Gershgorin's, max_k (H_kk + Σ|H_kl|)/s_k. λ may be negative.

    Args:
        H: exactly symmetric matrices, shape [..., n, n].
        scale: the diagonal of S, positive, shape [..., n]; None for the identity.
        attempts: how many candidates to try.

    Example:
        >>> bound = lambda_max_upper(torch.tensor([[0.0, 2.0], [2.0, 0.0]]).double()).item()
        >>> 2.0 <= bound < 2.0 + 1e-9
        True
    """
    n = H.shape[-1]
    weights = torch.ones_like(H[..., 0]) if scale is None else scale.expand(H.shape[:-1])
    if not bool((weights > 0).all()):
        raise ValueError("lambda_max_upper needs a positive scale")
    if n == 0:
        return torch.zeros(H.shape[:-2], dtype=H.dtype, device=H.device)
    best = up(gershgorin_shift(H) / weights).amax(dim=-1)
    if not bool(H.isfinite().all()):
        return best
    scaled = H
    if scale is not None:
        root = weights.rsqrt()
        scaled = root[..., :, None] * H * root[..., None, :]
    if not bool(scaled.isfinite().all()):
        return best
    guess = torch.linalg.eigvalsh(scaled)[..., -1]
    unit = n * gamma(4 * n + 32) * scaled.abs().sum(dim=-1).amax(dim=-1)
    open_ = torch.ones_like(guess, dtype=torch.bool)
    for attempt in range(attempts):
        candidate = guess + unit * 16.0**attempt
        # λ s_k ≥ the float below fl(λ s_k), so proving that one proves λ.
        proved = dominates(down(candidate[..., None] * weights), H) & open_
        best = torch.where(proved, torch.minimum(best, candidate), best)
        open_ = open_ & ~proved
        if not bool(open_.any()):
            break
    return best


def certified_shift(
    H: Float[Tensor, "*batch n n"], scale: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """Return d = λ·scale, rounded up, with diag(d) ⪰ H proved (`lambda_max_upper`).

    Args:
        H: exactly symmetric matrices, shape [..., n, n].
        scale: positive numbers, shape [..., n]; None for ones.
    """
    weights = torch.ones_like(H[..., 0]) if scale is None else scale.expand(H.shape[:-1])
    return up(lambda_max_upper(H, weights)[..., None] * weights)


def _shifted(A: Tensor, shift: Tensor) -> Tensor:
    """Return A + diag(shift) in a fresh tensor."""
    moved = A.clone()
    moved.diagonal(dim1=-2, dim2=-1).add_(shift)
    return moved


def _squared(L: Tensor) -> Tensor:
    """Return LLᵀ of lower triangular L. Every entry is a dot product of at most n terms."""
    n = L.shape[-1]
    if L.is_cuda or n <= _BLOCK:
        return L @ L.mT
    P = torch.empty_like(L)
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        rows = L[..., start:stop, :stop]
        P[..., start:stop, :stop] = rows @ L[..., :stop, :stop].mT
        P[..., :start, start:stop] = P[..., start:stop, :start].mT
    return P


def _apply(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x[..., None])[..., 0]


def _diagonally_dominant(M: Tensor) -> Tensor:
    m = M.diagonal(dim1=-2, dim2=-1)
    off = M.abs()
    off.diagonal(dim1=-2, dim2=-1).zero_()
    radius = off.sum(dim=-1)
    dominant: Tensor = (m >= radius * (1.0 + gamma(M.shape[-1] + 4))).all(dim=-1)
    return dominant
