"""Quadratic forms of the factors on their box: the largest a·α + ½αᵀHα with |α_k| ≤ 1, by a diagonal D ⪰ H."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import Array, frobenius, gamma, top_eigenvalue, up

EVEN = 0.05
"""Rows of H shorter than this share of the mean are weighed as if they were not."""


@dataclass(frozen=True, eq=False)
class Quadric:
    """H, symmetric, as it is computed, and a bound of its error in the 2-norm."""

    H: Array
    error: float

    def plus(self, form: Quadratic, v: Array, A: Array | None = None) -> Quadric:
        """With v·q(Ax) added; A is the identity where it is not given."""
        own = Quadric(*form.hessian(v))
        return self.with_image(own, A) if A is not None else self._sum(own)

    def with_image(self, other: Quadric, A: Array) -> Quadric:
        """With ½(Ax)ᵀH(Ax) of another form added."""
        size = float(frobenius(A)) ** 2
        error = other.error * size + gamma(2 * len(A) + 16) * 2.0 * float(frobenius(other.H)) * size
        return self._sum(Quadric(A.T @ other.H @ A, float(up(np.asarray(error)))))

    def _sum(self, other: Quadric) -> Quadric:
        H = self.H + 0.5 * (other.H + other.H.T)
        error = self.error + other.error + gamma(8) * (frobenius(other.H) + frobenius(H))
        return Quadric(H, float(up(np.asarray(error))))


def largest_on_box(a: Array, form: Quadric) -> float:
    """At least a·α + ½αᵀHα for |α_k| ≤ 1."""
    H, p = form.H, len(a)
    lengths = np.sqrt(np.square(H).sum(-1))
    x = lengths + EVEN * lengths.mean() + 2.0**-300
    root = np.sqrt(x)
    even = H / root[:, None] / root
    # The quotients round, and so does x against root²: γ_16 of each entry.
    D = (top_eigenvalue(0.5 * (even + even.T)) + gamma(16) * float(frobenius(even))) * x
    steep, s = np.abs(a).sum(), np.where(a >= 0.0, 1.0, -1.0)
    y = s * (H @ s)
    blur = gamma(p + 8) * np.abs(H).sum(-1)
    G = np.abs(a) + y - blur
    flat = steep + 0.5 * D.sum()
    corner = steep + 0.5 * (y + blur).sum() + 2.0 * np.maximum(D - G, 0.0).sum()
    rounding = gamma(4 * p + 64) * (steep + np.abs(y).sum() + D.sum() + np.abs(G).sum())
    # ½αᵀΔα ≤ ½p‖Δ‖ for an error Δ of H.
    return float(up(np.asarray(min(flat, corner) + rounding + 0.5 * p * form.error)))
