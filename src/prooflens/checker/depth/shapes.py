"""Ellipsoids by their shapes: E(M) = {x : w·x ≤ √(wᵀMw) for all w}, M symmetric and positive semidefinite.

    image      L E(M) = E(LMLᵀ)
    sum        E(M) + E(N) ⊂ E(cM + dN)                          for 1/c + 1/d ≤ 1  (Cauchy and Schwarz)
    box        {Σ_n x_n g_n : |x_n| ≤ X_n} ⊂ E(Σ c_nX_n² g_ng_nᵀ)  for Σ 1/c_n ≤ 1
    budget     {Σ_n x_n g_n : Σ x_n²/Z_n² ≤ 1} ⊂ E(Σ Z_n² g_ng_nᵀ)
    product    {K(x ⊗ y)}, x and y in the unit ball, ⊂ E(KKᵀ)      since ‖x ⊗ y‖ ≤ 1

Rounding: a float product of inner length n errs by at most γ_n‖A‖_F‖B‖_F in the Frobenius norm. A computed shape is
raised on its diagonal by a bound of its error, so that it lies above the real one (M ⪯ M̂), and every rule above only
grows with its shapes. Radii are made of sums, products, quotients and roots of non-negative floats: `up` covers their
own rounding, up to 2²⁰ operations in a row, and underflow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
U = 2.0**-53
LEAST = 2.0**-500
"""Added to norms: squares below 2⁻¹⁰⁷⁴ vanish, and n of them move a norm by √n·2⁻⁵³⁷ at most."""
SMALL = 256
"""Up to this width eigenvalues are guessed by a full decomposition, beyond it by a factorisation."""


def gamma(n: int) -> float:
    """γ_n = nu/(1 − nu), the relative error of a sum of n products, a little raised."""
    return 1.001 * n * U / (1.0 - n * U)


def up(radius: Array) -> Array:
    """At least the real number that a computed radius stands for."""
    return np.asarray(radius * (1.0 + 2.0**-32) + 2.0**-900)


def length(x: Array) -> Array:
    """At least ‖x‖₂ along the last axis."""
    return np.asarray(up(np.sqrt(np.square(x).sum(-1))) + LEAST)


def frobenius(M: Array) -> Array:
    """At least the Frobenius norm over the last two axes."""
    return np.asarray(up(np.sqrt(np.square(M).sum((-2, -1)))) * (1.0 + gamma(M.shape[-1] * M.shape[-2])) + LEAST)


def transposed(M: Array) -> Array:
    """The last two axes swapped."""
    return np.swapaxes(M, -1, -2)


def raised(M: Array, error: Array | float) -> Array:
    """M, made symmetric, plus a bound of its error in the 2-norm (8 roundings of M are counted here)."""
    found = 0.5 * (M + transposed(M))
    lift = up(np.asarray(error + gamma(8) * frobenius(M)))
    index = np.arange(M.shape[-1])
    found[..., index, index] += lift[..., None] + LEAST
    return found


def trace(M: Array) -> Array:
    """At least the trace of a shape."""
    return up(np.trace(M, axis1=-2, axis2=-1).clip(0.0))


def ball(radius: Array, n: int) -> Array:
    """The shape of a ball in n dimensions."""
    return up(np.square(np.asarray(radius)))[..., None, None] * np.eye(n)


def gram(A: Array) -> Array:
    """AAᵀ: the shape of {Aα̂ : ‖α̂‖ ≤ 1}."""
    return raised(A @ transposed(A), gamma(A.shape[-1]) * frobenius(A) ** 2)


def image(L: Array, M: Array) -> Array:
    """LMLᵀ."""
    error = gamma(2 * M.shape[-1]) * 2.0 * frobenius(L) ** 2 * frobenius(M)
    return raised(L @ M @ transposed(L), error)


def hadamard(M: Array, N: Array) -> Array:
    """M∘N, which is positive semidefinite and grows with M and N (Schur)."""
    return raised(M * N, gamma(4) * frobenius(M) * frobenius(N))


def scaled(M: Array, factor: Array | float) -> Array:
    """factor·M for a factor ≥ 0."""
    return raised(np.asarray(factor)[..., None, None] * M, 0.0)


def shares(sizes: Array) -> Array:
    """Weights c with Σ 1/c ≤ 1 along the last axis, inverse to sizes ≥ 0: those of the sum of least trace.

    Any positive sizes are valid. The factor 1 + 2⁻³² covers the rounding of the sum and of the quotients.
    """
    floored = np.maximum(sizes, 1e-30 * sizes.sum(-1, keepdims=True)) + 2.0**-300
    return np.asarray(floored.sum(-1, keepdims=True) / floored * (1.0 + 2.0**-32))


def total(shapes: Sequence[Array]) -> Array:
    """The shape of a sum of members of ellipsoids, weighed for the least trace."""
    if len(shapes) == 1:
        return shapes[0]
    c = shares(np.stack(np.broadcast_arrays(*(np.sqrt(trace(M)) for M in shapes)), -1))
    found = sum((c[..., i, None, None] * M for i, M in enumerate(shapes)), np.zeros(()))
    size = sum((c[..., i] * frobenius(M) for i, M in enumerate(shapes)), np.zeros(()))
    return raised(np.asarray(found), gamma(2 * len(shapes) + 8) * size)


def spread(columns: Array, squares: Array) -> Array:
    """Σ_n squares_n g_ng_nᵀ, for columns g [..., m, n] and squares ≥ 0."""
    found = (columns * squares[..., None, :]) @ transposed(columns)
    size = (np.square(columns).sum(-2) * squares).sum(-1)
    return raised(found, up(gamma(2 * squares.shape[-1] + 8) * 2.0 * size))


def box(columns: Array, X: Array) -> Array:
    """The shape of {Σ_n x_n g_n : |x_n| ≤ X_n}, weighed for the least trace."""
    sizes = X * np.sqrt(np.square(columns).sum(-2))
    return spread(columns, up(np.square(X) * shares(sizes)))


def support(M: Array, w: Array) -> Array:
    """At least √(wᵀMw) = sup w·x over E(M); the batch axes of M and w [..., n] broadcast."""
    moved = (M @ w[..., None])[..., 0]
    size = length(w)
    square = (moved * w).sum(-1).clip(0.0) + gamma(2 * w.shape[-1] + 8) * size**2 * frobenius(M)
    return np.asarray(up(np.sqrt(up(square))) + LEAST)


def supports(M: Array, W: Array) -> Array:
    """sup w·x over E(M) for every row w of W: M is [..., n, n], W is [f, n], the result [..., f]."""
    square = ((W @ M) * W).sum(-1).clip(0.0)
    square = square + gamma(2 * W.shape[-1] + 8) * length(W) ** 2 * frobenius(M)[..., None]
    return np.asarray(up(np.sqrt(up(square))) + LEAST)


def largest(M: Array) -> Array:
    """At least the largest eigenvalue of symmetric matrices, and at least 0; no eigenvalue routine is trusted."""
    if M.shape[-1] > SMALL:
        flat = M.reshape(-1, *M.shape[-2:])
        return np.array([_factorised(K) for K in flat]).reshape(M.shape[:-2])
    if not np.isfinite(M).all():
        return np.full(M.shape[:-2], np.inf)
    # M = QΛQᵀ + R for whatever Q and Λ: xᵀMx ≤ λ‖Qᵀx‖² + ‖R‖‖x‖², and ‖Qᵀx‖² ≤ (1 + ‖QQᵀ − I‖)‖x‖².
    values, Q = np.linalg.eigh(M)
    n, most = M.shape[-1], values[..., -1].clip(0.0)
    rest = frobenius(M - (Q * values[..., None, :]) @ transposed(Q))
    skew = frobenius(Q @ transposed(Q) - np.eye(n)) + gamma(n + 8) * frobenius(Q) ** 2
    size = np.abs(values).max(-1)
    return up(most * (1.0 + skew) + rest + gamma(2 * n + 16) * frobenius(Q) ** 2 * size)


def _factorised(M: Array) -> float:
    """A bound λ with λI − M = LLᵀ + R: then the largest eigenvalue is at most λ + ‖R‖_F."""
    n, most = len(M), float(frobenius(M))
    if not np.isfinite(most):
        return float("inf")
    x, value = np.random.default_rng(0).standard_normal(n), 0.0
    for _ in range(24):
        y = M @ x + (most / n**0.5) * x
        value = float(np.sqrt((y * y).sum() / max((x * x).sum(), 2.0**-900)))
        x = y / max(float(np.abs(y).max()), 2.0**-900)
    for factor in (1.02, 1.1, 1.3, 2.0):
        guess = max(value - most / n**0.5, 0.0) * factor + 1e-9 * most
        if guess >= most:
            break
        try:
            K = guess * np.eye(n) - M
            L = np.linalg.cholesky(K)
        except np.linalg.LinAlgError:
            continue
        rest = frobenius(K - L @ L.T) + gamma(n + 8) * frobenius(L) ** 2 + gamma(4) * (frobenius(K) + guess)
        return min(most, float(up(guess + rest)))
    return most


def meeting(M: Array, N: Array) -> Array:
    """At least sup x·y over x ∈ E(M), y ∈ E(N); batched.

    For LLᵀ ⪰ M, sup (x·y)² = sup xᵀNx ≤ λ(LᵀNL). L is a guess, L = Q√Λ of an eigendecomposition of M raised a little; what
    M − LLᵀ has left adds sup‖y‖ times the root of its norm.
    """
    values, Q = np.linalg.eigh(M)
    L = Q * np.sqrt(values.clip(0.0))[..., None, :]
    n = M.shape[-1]
    rest = frobenius(M - L @ transposed(L)) + gamma(n + 8) * frobenius(L) ** 2
    turned = raised(transposed(L) @ N @ L, gamma(2 * n + 8) * 2.0 * frobenius(L) ** 2 * frobenius(N))
    # E(M) ⊂ E(LLᵀ + rest·I) ⊂ E(LLᵀ) + ball(√rest).
    return up(np.sqrt(largest(turned)) + np.sqrt(rest * largest(N)))
