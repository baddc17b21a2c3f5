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
WIDE = 128
"""From this width on eigenvalues are proved by a factorisation, below it by powers."""
FULL = 300
"""Up to this width the guess of an eigenvalue is a full decomposition's."""
SQUARINGS = 7
"""How often `meeting` squares a matrix; n equal eigenvalues then look like one that is larger by n^(1/128)."""


def gamma(n: int) -> float:
    """γ_n = nu/(1 − nu), the relative error of a sum of n products, a little raised."""
    return 1.001 * n * U / (1.0 - n * U)


def up(radius: Array) -> Array:
    """At least the real number that a computed radius stands for."""
    return np.asarray(radius * (1.0 + 2.0**-32) + 2.0**-900)


def length(x: Array) -> Array:
    """At least ‖x‖₂ along the last axis."""
    return np.asarray(up(np.sqrt(np.einsum("...n,...n->...", x, x))) + LEAST)


def frobenius(M: Array) -> Array:
    """At least the Frobenius norm over the last two axes."""
    size = np.sqrt(np.einsum("...mn,...mn->...", M, M))
    return np.asarray(up(size) * (1.0 + gamma(M.shape[-1] * M.shape[-2])) + LEAST)


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
    """AAᵀ: the shape of {Aα̂ : ‖α̂‖ ≤ 1}, also for an A whose entries were rounded up to three times."""
    return raised(A @ transposed(A), gamma(A.shape[-1] + 8) * frobenius(A) ** 2)


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
    """At least √(wᵀMw) = sup w·x over E(M); the batch axes of M and w [..., n] broadcast (and ‖M‖_F ≤ tr M)."""
    moved = (M @ w[..., None])[..., 0]
    size = length(w)
    square = (moved * w).sum(-1).clip(0.0) + gamma(2 * w.shape[-1] + 8) * size**2 * trace(M)
    return np.asarray(up(np.sqrt(up(square))) + LEAST)


def supports(M: Array, W: Array) -> Array:
    """sup w·x over E(M) for every row w of W: M is [..., n, n], W is [f, n], the result [..., f]."""
    square = ((W @ M) * W).sum(-1).clip(0.0)
    square = square + gamma(2 * W.shape[-1] + 8) * length(W) ** 2 * trace(M)[..., None]
    return np.asarray(up(np.sqrt(up(square))) + LEAST)


def meeting(M: Array, N: Array) -> Array:
    """At least sup x·y over x ∈ E(M) and y ∈ E(N); batched.

    Its square is λ, the largest eigenvalue of M^½NM^½, whose eigenvalues are those of MN and not negative. So
    λ^k ≤ tr((MN)^k) for k = 2^SQUARINGS: no eigenvalue routine is trusted. Each squaring X ← X² errs by γ_n‖X‖_F² and
    by what X erred by.
    """
    X = M @ N
    n = X.shape[-1]
    error = gamma(n + 8) * frobenius(M) * frobenius(N)
    exponent = np.zeros(X.shape[:-2])
    for _ in range(SQUARINGS):
        size = frobenius(X) + error
        _, power = np.frexp(np.where(np.isfinite(size), size, 1.0))
        X, error, size = X * 2.0 ** -power[..., None, None], error * 2.0**-power, size * 2.0**-power
        X, error = X @ X, up(error * (2.0 * size + error) + gamma(n + 8) * size**2)
        exponent = 2.0 * (exponent + power)
    top = up(np.abs(np.trace(X, axis1=-2, axis2=-1)) + error * n**0.5 + gamma(n) * frobenius(X) * n**0.5)
    # The logarithm and the power of two are off by a few units; 2⁻³⁰ covers them.
    k = 2.0 ** (SQUARINGS + 1)
    root = np.exp2((np.log2(np.maximum(top, 2.0**-1000)) + exponent) / k) * (1.0 + 2.0**-30)
    return np.where(np.isfinite(top), up(root) + LEAST, np.inf)


def largest(M: Array) -> Array:
    """At least the largest eigenvalue of shapes; batched."""
    if M.shape[-1] < WIDE:
        return up(meeting(M, M))
    flat = M.reshape(-1, *M.shape[-2:])
    return np.array([top_eigenvalue(K) for K in flat]).reshape(M.shape[:-2])


def top_eigenvalue(M: Array) -> float:
    """At least the largest eigenvalue of a symmetric matrix, and at least 0.

    With λI − M = LLᵀ + R it is at most λ + ‖R‖_F, whatever λ and L are: λ is a guess, and L what a Cholesky routine
    says.
    """
    n, most = len(M), float(frobenius(M))
    if not np.isfinite(most):
        return float("inf")
    guess = _guess(M, most)
    while guess < most:
        K = guess * np.eye(n) - M
        try:
            L = np.asarray(np.linalg.cholesky(K), dtype=np.float64)
        except np.linalg.LinAlgError:
            guess *= 1.3
            continue
        rest = frobenius(K - L @ L.T) + gamma(n + 8) * frobenius(L) ** 2 + gamma(4) * (frobenius(K) + guess)
        return min(most, float(up(guess + rest)))
    return most


def _guess(M: Array, most: float) -> float:
    """About the largest eigenvalue of a matrix of Frobenius norm `most`; nothing rests on it."""
    n, least = len(M), 1e-6 * most
    if n <= FULL:
        return max(1.001 * float(np.linalg.eigvalsh(M)[-1]), least)
    x, shift, value = np.random.default_rng(0).standard_normal(n), most / n**0.5, 0.0
    for _ in range(24):
        y = M @ x + shift * x
        value = float(x @ y / max(float(x @ x), 2.0**-900)) - shift
        x = y / max(float(np.abs(y).max()), 2.0**-900)
    return max(1.02 * value, least)
