"""Quadratic maps of a vector, q(x) = Σ_m C_m (L_m·x)(R_m·x): the second order of every site.

With x = Xξ, ‖ξ‖ ≤ 1 and P = XXᵀ, each (L_m·x)(R_m·x) is ⟨S_m, ξ ⊗ ξ⟩ with S_m symmetric, ‖ξ ⊗ ξ‖ ≤ 1 and inner
products ⟨S_m, S_n⟩ = ½(L_mPL_n·R_mPR_n + L_mPR_n·R_mPL_n). So q(x) ∈ E(C⟨S, S⟩Cᵀ): all directions at once, and terms
that cannot peak together do not. A covector v turns q into one quadratic form, v·q(x) = ½xᵀHx with H = Lᵀdiag(Cᵀv)R +
its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prooflens.checker.depth.shapes import Array, frobenius, gamma, image, length, raised, transposed, up

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Quadratic:
    """q(x) = Σ_m C_m (L_m·x)(R_m·x).

    Attributes:
        C: columns [o, M].
        L: left forms [M, n].
        R: right forms [M, n]; the same object as L for squares.
        forms: the forms that L and R are made of, and which of them are L and R; None if that is not known.
    """

    C: Array
    L: Array
    R: Array
    forms: tuple[Array, Places, Places] | None = None

    @classmethod
    def among(cls, C: Array, forms: Array, left: Places, right: Places) -> Quadratic:
        """Products of fewer forms than L and R have: their inner products are made once.

        Args:
            C: columns [o, M].
            forms: the forms [K, n].
            left: which of them are on the left [M].
            right: which of them are on the right [M].
        """
        return cls(C, forms[left], forms[right], (forms, left, right))

    def shape(self, P: Array) -> Array:
        """The shape of q(x) for x ∈ E(P)."""
        ll, rr, lr, error = self._inner(P)
        if self.R is self.L:
            return image(self.C, raised(ll * ll, error * frobenius(ll)))
        found = 0.5 * (ll * rr + lr * transposed(lr))
        return image(self.C, raised(found, error * (frobenius(ll) + frobenius(rr) + frobenius(lr))))

    def cross(self, P: Array, B: Array) -> Array:
        """The shape of q(x + e) − q(x) − q(e), which is bilinear, for x ∈ E(P) and e ∈ E(B)."""
        ll, rr, lr, error = self._inner(P)
        kk, ss, ks, slip = self._inner(B)
        sizes = frobenius(ll) + frobenius(rr) + frobenius(lr), frobenius(kk) + frobenius(ss) + frobenius(ks)
        if self.R is self.L:
            return image(self.C, raised(4.0 * ll * kk, 4.0 * (error * sizes[1] + slip * sizes[0])))
        mixed = lr * transposed(ks)
        found = ll * ss + rr * kk + mixed + transposed(mixed)
        return image(self.C, raised(found, 4.0 * (error * sizes[1] + slip * sizes[0])))

    def _inner(self, P: Array) -> tuple[Array, Array, Array, float]:
        """LPLᵀ, RPRᵀ, LPRᵀ, and a bound that covers the rounding of their Hadamard products.

        Each errs by γ_2n‖L‖‖R‖‖P‖ =: δ in the Frobenius norm. A Hadamard product of two of them, X∘Y, errs by at most
        δ(‖X‖ + ‖Y‖) + δ² and one rounding; the bound, times the sum of all sizes, covers a sum of four such products.
        """
        n = P.shape[-1]
        size = float(frobenius(self.L) + (0.0 if self.R is self.L else frobenius(self.R))) ** 2 * float(
            frobenius(P)
        )
        error = float(up(np.asarray(gamma(2 * n + 64) * 8.0 * size)))
        if self.forms is not None:
            X, i, j = self.forms
            K = X @ P @ X.T
            return K[np.ix_(i, i)], K[np.ix_(j, j)], K[np.ix_(i, j)], error
        left = self.L @ P
        ll = left @ self.L.T
        if self.R is self.L:
            return ll, ll, ll, error
        return ll, self.R @ P @ self.R.T, left @ self.R.T, error

    def hessian(self, v: Array) -> tuple[Array, float]:
        """H with v·q(x) = ½xᵀHx for a covector v [o], and a bound of its error in the 2-norm."""
        weights = v @ self.C
        half = (self.L.T * weights) @ self.R
        most = float(length(v)) * float(frobenius(self.C))
        size = most * float(np.sqrt(np.square(self.L).sum(-1).max(initial=0.0))) * float(frobenius(self.R))
        error = gamma(len(v) + len(self.L) + 64) * 4.0 * size
        return half + half.T, float(up(np.asarray(error)))
