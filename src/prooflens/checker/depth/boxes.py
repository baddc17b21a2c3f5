"""Quadratic forms of the factors on their box: the largest a·α + ½αᵀHα with |α_k| ≤ 1, by a diagonal D ⪰ H."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import Array, frobenius, gamma, top_eigenvalue, up

EVEN = 0.05
"""Rows of H shorter than this share of the mean are weighed as if they were not."""
SHAPES = 3
"""How many shapes of D are tried one after the other."""
NEAR = 1.01
"""A bound that is no more than this above a value that is attained is near enough."""
STEPS = 12
"""Steps towards the highest point of what is left, and of a power iteration."""


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
    """At least a·α + ½αᵀHα for |α_k| ≤ 1: at most ½ΣD + ½zᵀMz + ‖a − Mz‖₁ for D ⪰ H, M = D − H and any z.

    What H exceeds D by is a concave form, and so is not above its tangent at z. The next shape of D has the slopes
    added that the ends of the box have to spare.
    """
    H, p = form.H, len(a)
    lengths = np.sqrt(np.square(H).sum(-1))
    x = lengths + EVEN * lengths.mean() + 2.0**-300
    best, z = np.inf, np.where(a >= 0.0, 1.0, -1.0)
    for _ in range(SHAPES):
        root = np.sqrt(x)
        even = H / root[:, None] / root
        # The quotients round, and so does x against root²: γ_16 of each entry.
        D = (top_eigenvalue(0.5 * (even + even.T)) + gamma(16) * float(frobenius(even))) * x
        for point in (z, _highest(a, H, D, z)):
            if (found := _tangent(a, form, D, point)) < best:
                best, z = found, point
        if best - 0.5 * p * form.error <= NEAR * (float(a @ z) + 0.5 * float(z @ (H @ z))):
            break
        x = D + np.abs(a - D * z + H @ z) + 2.0**-300
    return min(best, _tangent(a, form, D, np.zeros(p)))


def _tangent(a: Array, form: Quadric, D: Array, z: Array) -> float:
    """½ΣD + ½zᵀMz + ‖a − Mz‖₁ and its rounding, for |z_k| ≤ 1."""
    H, p = form.H, len(a)
    bent, blur = H @ z, gamma(p + 8) * np.abs(H).sum()
    M = D * z - bent
    value = 0.5 * D.sum() + 0.5 * (z * M).sum() + np.abs(a - M).sum()
    # Sums of p terms; H @ z errs by `blur`, which counts at most three halves times.
    rounding = gamma(4 * p + 64) * 4.0 * (np.abs(a).sum() + np.abs(bent).sum() + D.sum()) + 2.0 * blur
    # ½αᵀΔα ≤ ½p‖Δ‖ for an error Δ of H.
    return float(up(np.asarray(value + rounding + 0.5 * p * form.error)))


def _highest(a: Array, H: Array, D: Array, z: Array) -> Array:
    """About where a·z − ½zᵀMz is highest in the box; any point is valid."""
    scale = D + EVEN * D.mean() + 2.0**-300
    root, x, far = np.sqrt(scale), np.cos(np.arange(len(a))), 1.0
    for _ in range(STEPS):
        x = x / max(float(np.sqrt(np.square(x).sum())), 2.0**-400)
        x = (D * (x / root) - H @ (x / root)) / root
        far = max(1.0, float(np.sqrt(np.square(x).sum())))
    step = 1.0 / (1.1 * far * scale)
    for _ in range(STEPS):
        z = np.clip(z + step * (a - D * z + H @ z), -1.0, 1.0)
    return np.nan_to_num(z)
