"""Verified eigenvalues and outward radii: the arithmetic of `taylor`.

A floating product with inner length n errs by at most γ_{n+2}‖A‖_F‖B‖_F in the Frobenius norm (`product_error`). Radii
are sums, products, quotients and roots of non-negative numbers, so each computed radius has a small *relative* error,
γ_N for N roundings in sequence. `grow` covers N = 2²⁰, far more than any radius takes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.numerics import dominates, gamma

GROWTH = 1.0 + 2.0**-32
POWER_STEPS = 12
SQUARINGS = 3
"""After these, m equal eigenvalues look like one that is larger by m^(1/16)."""
CHUNK = 2**25
"""How many numbers of a batch of matrices are worked on at a time (256 MiB)."""


LEAST_NORM = 2.0**-500
"""Added to norms: squares of entries that are smaller vanish."""
UNDERFLOW = 2.0**-900
"""What products of entries below 2⁻⁵¹¹ lose, with room for the factors that they are multiplied by."""


def grow(radius: Tensor) -> Tensor:
    """A computed non-negative radius, raised over the rounding of its own computation."""
    return radius * GROWTH


def identity(like: Tensor, n: int) -> Float[Tensor, "n n"]:
    """The identity, made where it is used: copies between devices cost more than most sums."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def length(x: Float[Tensor, "... n"]) -> Float[Tensor, ...]:
    """An upper bound of ‖x‖₂ along the last dimension."""
    return grow(torch.linalg.vector_norm(x, dim=-1)) + LEAST_NORM


def frobenius(A: Float[Tensor, "... m n"]) -> Float[Tensor, ...]:
    """An upper bound of the Frobenius norm; a matrix may have more entries than `grow` covers."""
    found: Tensor = torch.linalg.vector_norm(A, dim=(-2, -1)) * (GROWTH + gamma(A.shape[-2] * A.shape[-1]))
    return found + LEAST_NORM


def product_error(inner: int, size: Tensor) -> Tensor:
    """Rounding of a product with this inner length, for the product of its factors' Frobenius norms (or lengths)."""
    return grow(gamma(inner + 8) * size)


def top_eigenvalue(K: Float[Tensor, "*batch n n"], tight: float = 0.02) -> Float[Tensor, "*batch"]:
    """A proved upper bound, at least 0, of the largest eigenvalue of symmetric matrices.

    A power iteration guesses, a factorisation proves (`dominates`); the guess grows until the proof runs through. What
    is never proved is bounded by the Frobenius norm.
    """
    flat = K.reshape(-1, *K.shape[-2:])
    n = flat.shape[-1]
    step = max(1, CHUNK // max(1, n * n))
    found = [_top_eigenvalue(flat[i : i + step], tight) for i in range(0, len(flat), step)]
    return torch.cat(found).reshape(K.shape[:-2]) if found else K.new_zeros(K.shape[:-2])


def spectral(K: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """An upper bound of the 2-norm of symmetric matrices, by powers of them or by their rows.

    ‖X‖₂² = ‖XXᵀ‖₂ for every X: what a product errs by in the 2-norm is added before each root is taken. A few squares
    tell the largest eigenvalue from all that are not near it; where many are, rows mostly say more.
    """
    flat = K.reshape(-1, *K.shape[-2:])
    step = max(1, CHUNK // max(1, K.shape[-1] ** 2))
    found = [_spectral(flat[i : i + step]) for i in range(0, len(flat), step)]
    return torch.cat(found).reshape(K.shape[:-2]) if found else K.new_zeros(K.shape[:-2])


def _spectral(K: Float[Tensor, "B n n"]) -> Float[Tensor, " B"]:
    size, rows = frobenius(K), grow(K.abs().sum(-1)).amax(-1)
    X = K / size.clamp(min=2.0**-900)[:, None, None]
    errors = []
    for _ in range(SQUARINGS):
        errors.append(product_error(X.shape[-1], frobenius(X).square()))
        X = X @ X.mT
    found = frobenius(X)
    for error in reversed(errors):
        found = grow((found + error).sqrt())
    found = torch.minimum(grow(found * size), size)
    # Squares of what is tiny vanish, and sums of rows do not; what is not finite stays so.
    fits = (size > 2.0**-400) & size.isfinite()
    return torch.where(fits, torch.minimum(found, rows), rows)


def _top_eigenvalue(K: Float[Tensor, "B n n"], tight: float) -> Float[Tensor, " B"]:
    n = K.shape[-1]
    bound = frobenius(K)
    shift = bound[:, None] / n**0.5
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(K)
    x = (x / x.norm()).expand(len(K), n)
    value = torch.zeros_like(bound)
    for _ in range(POWER_STEPS):
        # Shifted, so that a large negative eigenvalue does not win.
        y = (K @ x[..., None])[..., 0] + shift * x
        size = torch.linalg.vector_norm(y, dim=-1).clamp(min=2.0**-900)
        x = y / size[:, None]
        value = size - shift[:, 0]
    guess = value * (1.0 + tight) + bound * 1e-9
    open_ = (guess < bound) & (bound > 0)
    for attempt in range(8):
        if not bool(open_.any()):
            break
        chosen = open_.nonzero()[:, 0]
        candidate = guess[chosen] * 1.12**attempt
        proved = dominates(candidate[:, None].expand(-1, n), K[chosen])
        bound[chosen[proved]] = torch.minimum(bound[chosen[proved]], candidate[proved])
        open_[chosen[proved]] = False
    return bound.clamp(min=0.0)


def cholesky_factor(M: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """L with M ⪯ LLᵀ: M is lifted, and the factor's residual is measured to be less. Infinite where it is not."""
    size = M.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sum(-1)
    lift = grow(1e-9 * size) + 2.0**-450
    lifted = M.clone()
    lifted.diagonal(dim1=-2, dim2=-1).add_(lift[..., None])
    L = torch.linalg.cholesky_ex(lifted).L
    residual = frobenius(L @ L.mT - lifted) + product_error(M.shape[-1], frobenius(L).square())
    fits = residual + gamma(16) * frobenius(lifted) < lift
    return torch.where(fits[..., None, None], L, torch.inf)


def bilinear(
    M: Float[Tensor, "*b n n"], L: Float[Tensor, "*b n n"], K: Float[Tensor, "*b n n"]
) -> Float[Tensor, "*b"]:
    """sup |x·y| over x ∈ E(M), y ∈ E(K), with L = half(M): the root of LᵀKL's largest eigenvalue, or of tr(MK)."""
    n = M.shape[-1]
    turned = L.mT @ K @ L
    slip = product_error(4 * n, 4.0 * frobenius(L).square() * frobenius(K))
    top = spectral(0.5 * (turned + turned.mT)) + slip
    crude = torch.einsum("...ij,...ij->...", M, K).clamp(min=0.0)
    crude = crude + product_error(n * n, frobenius(M) * frobenius(K))
    return grow((torch.where(top.isfinite(), torch.minimum(top, crude), crude) + UNDERFLOW).sqrt())
