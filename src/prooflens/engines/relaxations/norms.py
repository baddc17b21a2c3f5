"""Verified eigenvalues and norms that are rounded up: the arithmetic of `taylor`.

A floating product with inner length n errs by at most γ_n‖A‖_F‖B‖_F in the Frobenius norm (`product_error`). Radii
are sums, products, quotients and roots of non-negative numbers, so each computed radius has a small *relative* error,
γ_N for N roundings in sequence (`grow`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.numerics import dominates, gamma

GROWTH = 1.0 + 2.0**-32
"""The factor by which `grow` raises a radius, for N = 2²⁰ roundings in sequence, far more than any radius takes.

For N = 2²⁰, γ_N < 2⁻³³(1 + 2⁻³²). A computed radius r̂ of a real r then satisfies r ≤ r̂/(1 − γ_N) < r̂(1 + 2⁻³² −
2⁻³⁴), and 2⁻³⁴ is left for the rounding of r̂·GROWTH itself; 1 + 2⁻³² is exact in float64.
"""
POWER_STEPS = 12
"""Steps of the power iteration that guesses an eigenvalue."""
SQUARINGS = 3
"""How often `spectral` squares a matrix; m equal eigenvalues then look like one that is larger by m^(1/16)."""
FACTORISED = 128
"""From this width on a CPU finds eigenvalues by factorisations."""
LEAST_PROVED = 2.0**-400
"""Matrices with a smaller Frobenius norm, as of tokens that stand still, are bounded by it: `dominates` proves none."""
CHUNK = 2**25
"""How many numbers of a batch of matrices are worked on at a time (256 MiB)."""


LEAST_NORM = 2.0**-500
"""Added to norms for squares that underflow.

Each such square loses at most 2⁻¹⁰⁷⁵, so n of them move a norm by at most √n·2⁻⁵³⁷. That is below 2⁻⁵⁰⁰ for n ≤ 2⁷⁴.
"""
UNDERFLOW = 2.0**-900
"""Added to sums of products for products that underflow.

Each loses at most 2⁻¹⁰⁷⁵. A sum of n of them that is multiplied by factors of size s loses at most n·s·2⁻¹⁰⁷⁵, which
is below 2⁻⁹⁰⁰ as long as n·s ≤ 2¹⁷⁵.
"""


def grow(radius: Tensor) -> Tensor:
    """Raise a computed non-negative radius over the rounding of its own computation."""
    return radius * GROWTH


def identity(like: Tensor, n: int) -> Float[Tensor, "n n"]:
    """Return the identity matrix on the device of `like`: copies between devices cost more than most sums."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def length(x: Float[Tensor, "... n"]) -> Float[Tensor, ...]:
    """Return an upper bound of ‖x‖₂ along the last dimension.

    Example:
        >>> 5.0 <= length(torch.tensor([3.0, 4.0], dtype=torch.float64)).item() < 5.0 + 1e-8
        True
    """
    return grow(torch.linalg.vector_norm(x, dim=-1)) + LEAST_NORM


def frobenius(A: Float[Tensor, "... m n"]) -> Float[Tensor, ...]:
    """Return an upper bound of the Frobenius norm; γ_mn is for matrices with more entries than `grow` covers."""
    found: Tensor = torch.linalg.vector_norm(A, dim=(-2, -1)) * (GROWTH + gamma(A.shape[-2] * A.shape[-1]))
    return found + LEAST_NORM


def product_error(inner: int, size: Tensor) -> Tensor:
    """Bound the rounding of a matrix product in the Frobenius norm.

    The product itself errs by γ_n of the factors' norms. Eight more roundings are for what follows at once: scaling,
    symmetrising, or adding to a diagonal.

    Args:
        inner: n, the inner length of the product.
        size: the product of the Frobenius norms (or lengths) of the factors.
    """
    return grow(gamma(inner + 8) * size)


def top_eigenvalue(K: Float[Tensor, "*batch n n"], tight: float = 0.02) -> Float[Tensor, "*batch"]:
    """Return a proved upper bound, at least 0, of the largest eigenvalue of symmetric matrices.

    A power iteration guesses, and a factorisation proves (`dominates`); the guess grows until the proof succeeds.
    What is never proved is bounded by the Frobenius norm.

    Args:
        K: exactly symmetric matrices, shape [..., n, n].
        tight: how far above the guess the first attempt goes, relative to it.

    Example:
        >>> bound = top_eigenvalue(torch.tensor([[0.0, 2.0], [2.0, 0.0]], dtype=torch.float64)).item()
        >>> 2.0 <= bound < 2.1
        True
    """
    flat = K.reshape(-1, *K.shape[-2:])
    n = flat.shape[-1]
    step = max(1, CHUNK // max(1, n * n))
    found = [_top_eigenvalue(flat[i : i + step], tight) for i in range(0, len(flat), step)]
    return torch.cat(found).reshape(K.shape[:-2]) if found else K.new_zeros(K.shape[:-2])


def spectral(K: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound of the 2-norm of symmetric matrices, by powers of them or by their rows.

    ‖X‖₂² = ‖XXᵀ‖₂ for every X; what a product errs by in the 2-norm is added before each root is taken. A few
    squarings separate the largest eigenvalue from all that are not near it; if many are near it, row sums mostly say
    more.

    Args:
        K: exactly symmetric matrices, shape [..., n, n].

    Example:
        >>> bound = spectral(torch.tensor([[0.0, 2.0], [2.0, 0.0]], dtype=torch.float64)).item()
        >>> 2.0 <= bound < 2.1
        True
    """
    flat = K.reshape(-1, *K.shape[-2:])
    step = max(1, CHUNK // max(1, K.shape[-1] ** 2))
    found = [_spectral(flat[i : i + step]) for i in range(0, len(flat), step)]
    return torch.cat(found).reshape(K.shape[:-2]) if found else K.new_zeros(K.shape[:-2])


def largest(K: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound of the largest eigenvalue of shapes, the cheaper one to have.

    A factorisation takes a twentieth of the time of a few squarings. On a GPU, and for small matrices, it takes more.

    Args:
        K: exactly symmetric matrices, shape [..., n, n].
    """
    return spectral(K) if K.is_cuda or K.shape[-1] < FACTORISED else top_eigenvalue(K)


def _spectral(K: Float[Tensor, "B n n"]) -> Float[Tensor, " B"]:
    size, rows = frobenius(K), grow(K.abs().sum(-1)).amax(-1)
    # The quotient rounds, by u‖X‖_F ≤ u in the 2-norm: √(s² + 8u) ≥ s + u, so `product_error`'s spare 8u cover it.
    X = K / size.clamp(min=2.0**-900)[:, None, None]
    errors = []
    for _ in range(SQUARINGS):
        errors.append(product_error(X.shape[-1], frobenius(X).square()))
        X = X @ X.mT
    found = frobenius(X)
    for error in reversed(errors):
        found = grow((found + error).sqrt())
    found = torch.minimum(grow(found * size), size)
    # Squares of tiny entries underflow, and row sums do not. What is not finite stays so.
    fits = (size > 2.0**-400) & size.isfinite()
    return torch.where(fits, torch.minimum(found, rows), rows)


def guessed_eigenvalue(
    K: Float[Tensor, "B n n"], tight: float = 0.02, scale: Float[Tensor, "B n"] | None = None
) -> Float[Tensor, " B"]:
    """Guess the largest eigenvalue of symmetric matrices by a power iteration, or at most their Frobenius norm.

    Args:
        K: symmetric matrices, shape [B, n, n].
        tight: how far above what the iteration finds the guess is, relative to it.
        scale: the diagonals X of X^{-½}KX^{-½}, whose eigenvalue is guessed without making that matrix; None for K.
    """
    n = K.shape[-1]
    root = None if scale is None else scale.sqrt()
    bound = frobenius(K) if root is None else length(length(K / root[:, None]) / root)
    shift = bound[:, None] / n**0.5
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(K)
    x = (x / x.norm()).expand(len(K), n)
    value = torch.zeros_like(bound)
    for _ in range(POWER_STEPS):
        # Shifted, so that a large negative eigenvalue does not win.
        read = x if root is None else x / root
        y = (K @ read[..., None])[..., 0]
        y = (y if root is None else y / root) + shift * x
        size = torch.linalg.vector_norm(y, dim=-1).clamp(min=2.0**-900)
        x = y / size[:, None]
        value = size - shift[:, 0]
    # 1e-9 is for values near 0.
    return torch.minimum(value * (1.0 + tight) + bound * 1e-9, bound)


def _top_eigenvalue(K: Float[Tensor, "B n n"], tight: float) -> Float[Tensor, " B"]:
    n = K.shape[-1]
    bound = frobenius(K)
    # Any guess will do, since `dominates` has to prove it.
    guess = guessed_eigenvalue(K, tight)
    open_ = (guess < bound) & (bound > LEAST_PROVED)
    for attempt in range(8):
        if not bool(open_.any()):
            break
        chosen = open_.nonzero()[:, 0]
        candidate = guess[chosen] * 1.12**attempt
        proved = dominates(candidate[:, None].expand(-1, n), K if len(chosen) == len(K) else K[chosen])
        bound[chosen[proved]] = torch.minimum(bound[chosen[proved]], candidate[proved])
        open_[chosen[proved]] = False
    return bound.clamp(min=0.0)


def cholesky_factor(M: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Return L with M ⪯ LLᵀ, or infinite entries where that is not proved.

    M is lifted on its diagonal by 10⁻⁹ of its trace and factorised, and the residual of the factor is measured: LLᵀ −
    M = lift·I + residual ⪰ 0 if the residual is smaller than the lift. So 10⁻⁹ decides only whether the proof
    succeeds: it exceeds the residual, about 2n·u of the trace, for n up to 10⁶, and adds at most a share n·10⁻⁹ to
    the trace. The 2⁻⁴⁵⁰ is for M = 0, where the `LEAST_NORM` in the residual would exceed the lift.

    Args:
        M: symmetric matrices, shape [..., n, n].
    """
    size = M.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sum(-1)
    lift = grow(1e-9 * size) + 2.0**-450
    lifted = M.clone()
    lifted.diagonal(dim1=-2, dim2=-1).add_(lift[..., None])
    L = torch.linalg.cholesky_ex(lifted).L
    residual = frobenius(L @ L.mT - lifted) + product_error(M.shape[-1], frobenius(L).square())
    # Lifting rounds by u per diagonal entry; the rest of γ_16 is for the sums in this test.
    fits = residual + gamma(16) * frobenius(lifted) < lift
    return torch.where(fits[..., None, None], L, torch.inf)


def bilinear(
    M: Float[Tensor, "*b n n"], L: Float[Tensor, "*b n n"], K: Float[Tensor, "*b n n"]
) -> Float[Tensor, "*b"]:
    """Bound sup |x·y| over x ∈ E(M), y ∈ E(K): the root of LᵀKL's largest eigenvalue, or of tr(MK).

    Args:
        M: the shape of x, shape [..., n, n].
        L: `cholesky_factor(M)`.
        K: the shape of y, shape [..., n, n].
    """
    n = M.shape[-1]
    turned = L.mT @ K @ L
    # Two products of inner length n err by γ_2n‖L‖²‖K‖; 4 and 4 are to spare.
    slip = product_error(4 * n, 4.0 * frobenius(L).square() * frobenius(K))
    top = spectral(0.5 * (turned + turned.mT)) + slip
    crude = torch.einsum("...ij,...ij->...", M, K).clamp(min=0.0)
    crude = crude + product_error(n * n, frobenius(M) * frobenius(K))
    return grow((torch.where(top.isfinite(), torch.minimum(top, crude), crude) + UNDERFLOW).sqrt())
