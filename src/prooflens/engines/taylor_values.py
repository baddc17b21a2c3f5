"""Values of `taylor`: u(x) = u + Aα + e, with A the computed Jacobian and |e| ≤ E.

Chains are token-wise, so A = J N: J = ∂u/∂root per token, N = ∂root/∂α. Over the box |α_k| ≤ half_k

    τ ≥ ‖Aα‖₂,    ρ_c = Σ|A_ck| half_k ≥ |(Aα)_c|,    reach = τ + e ≥ ‖u(x) − u‖₂.

τ is far below √Σρ²: coordinates cannot all peak at once. With N = LQ, ‖Aα‖ ≤ ‖JL‖ sup‖Qα‖. E_c ≥ |e_c| comes
from walking the covector c back to the input (`taylor_walk`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor_norms import frobenius, grow, length, product_error, spectral_norm
from prooflens.numerics import gamma


@dataclass(eq=False)
class Root:
    """Where a chain starts: its value, N per token, and |e| ≤ E in an orthonormal basis (columns)."""

    u: Float[Tensor, "S d"]
    N: Float[Tensor, "S d p"]
    E: Float[Tensor, "S d"]
    basis: Float[Tensor, "S d d"]
    half: Float[Tensor, " p"]
    """Half-widths of the factors: α is scaled so that what reads it does so evenly (`Walk._widths`)."""

    @cached_property
    def support(self) -> Float[Tensor, " S"]:
        """Squared length of the box of those factors that a token's root depends on."""
        return grow((self.N != 0).any(1).to(self.N) @ self.half.square())

    @cached_property
    def factor(self) -> Float[Tensor, "S d d"]:
        """A triangular factor of about NNᵀ; nothing depends on how near it is."""
        gram = self.N @ self.N.mT
        mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=2.0**-900)
        gram = 0.5 * (gram + gram.mT)
        gram.diagonal(dim1=-2, dim2=-1).add_(1e-3 * mean[:, None])
        found: Tensor = torch.linalg.cholesky(gram)
        return found

    @cached_property
    def turn(self) -> Float[Tensor, " S"]:
        """g ≥ sup ‖L⁻¹Nα‖₂ over the box: L⁻¹N = Q + L⁻¹(N − LQ), and the residual is measured, not assumed."""
        eye = torch.eye(self.factor.shape[-1]).to(self.factor)
        n = self.factor.shape[-1]
        Q = torch.linalg.solve_triangular(self.factor, self.N, upper=False)
        missing = frobenius(self.N - self.factor @ Q) + product_error(
            n, frobenius(self.factor) * frobenius(Q)
        )
        inverse = torch.linalg.solve_triangular(self.factor, eye.expand_as(self.factor), upper=False)
        off = frobenius(self.factor @ inverse - eye) + product_error(
            n, frobenius(self.factor) * frobenius(inverse)
        )
        size = torch.where(off < 0.5, 2.0 * frobenius(inverse), torch.inf)
        return grow((spectral_norm(Q) + missing * size) * self.support.sqrt())


def slant(basis: Float[Tensor, "S n n"]) -> Float[Tensor, " S"]:
    """‖UᵀU − I‖ of a computed basis, measured: nothing is assumed of the routine that made it. ∞ if it is no basis."""
    n = basis.shape[-1]
    off = frobenius(basis.mT @ basis - torch.eye(n).to(basis)) + product_error(n, frobenius(basis).square())
    return torch.where(off < 0.25, off, torch.inf)


@dataclass(eq=False)
class Value:
    """A value of a chain. E is filled in when a site needs it, in the coordinates of `basis` if it has one."""

    u: Float[Tensor, "S n"]
    J: Float[Tensor, "S n d"]
    root: Root
    far: Float[Tensor, " S"]
    """A crude bound of ‖u(x) − u‖₂, read only where it is multiplied by the unit roundoff."""
    heads: int = 1
    E: Float[Tensor, "S n"] | None = None
    basis: Float[Tensor, "S n n"] | None = None

    @cached_property
    def white(self) -> Float[Tensor, "S n d"]:
        """The value by whitened coordinates of its root."""
        return self.J @ self.root.factor

    @cached_property
    def white_error(self) -> Float[Tensor, " S"]:
        """Rounding of `white` in the 2-norm."""
        return product_error(self.J.shape[-1], self.white_size)

    @cached_property
    def tau(self) -> Float[Tensor, "S h"]:
        """τ, head by head where there are heads."""
        S, n, d = self.J.shape
        norms = (
            spectral_norm(self.white.reshape(S, self.heads, n // self.heads, d)) + self.white_error[:, None]
        )
        return grow(norms * self.root.turn[:, None])

    @cached_property
    def rho(self) -> Float[Tensor, "S n"]:
        """ρ with the rounding of the products."""
        found = []
        turned = self.J if self.basis is None else self.basis.mT @ self.J
        for J, N in zip(turned, self.root.N, strict=True):
            half = self.root.half
            size = frobenius(J) * frobenius(N) * length(half) * len(J) ** 0.5
            rounding = gamma(2 * sum(N.shape) + len(J) + 64) * size
            found.append((J @ N).abs() @ half + rounding)
        return grow(torch.stack(found))

    @property
    def rest(self) -> Float[Tensor, "S n"]:
        """E, which must be known by now."""
        assert self.E is not None
        return self.E

    @cached_property
    def e(self) -> Float[Tensor, "S h"]:
        """A bound of ‖e‖₂, head by head: Uᵀe is bounded, and ‖e‖² ≤ ‖Uᵀe‖²/(1 − slant)."""
        found = length(self.rest.reshape(len(self.u), self.heads, -1))
        return found if self.basis is None else grow(found * (1.0 + 2.0 * self.slant[:, None]))

    @cached_property
    def slant(self) -> Float[Tensor, " S"]:
        """How far the basis is from orthonormal."""
        assert self.basis is not None
        return slant(self.basis)

    @cached_property
    def white_size(self) -> Float[Tensor, " S"]:
        """‖J‖_F‖L‖_F ≥ ‖JL‖_F: what the rounding of `white` and of all that is made of it is measured by."""
        return grow(frobenius(self.J) * frobenius(self.root.factor))

    @cached_property
    def reach(self) -> Float[Tensor, "S h"]:
        """sup ‖u(x) − u‖₂, head by head."""
        return grow(self.tau + self.e)

    @cached_property
    def size(self) -> Float[Tensor, " S"]:
        """sup ‖u(x)‖₂, crudely."""
        return grow(length(self.u) + self.far)

    def choose_basis(self) -> None:
        """The eigenvectors of about AAᵀ: both Aα and e live mostly in few of them."""
        gram = self.white @ self.white.mT
        self.basis = torch.linalg.eigh(0.5 * (gram + gram.mT)).eigenvectors

    def ranges(self, w: Float[Tensor, "F n"], t: int) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
        """Bounds of |w·Aα| and |w·e| for covectors at one token (values without heads)."""
        n, size = w.shape[-1], length(w)
        tau, e = size * self.tau[t, 0], size * self.e[t, 0]
        sides, off = w.abs(), torch.zeros(()).to(w)
        if self.basis is not None:
            # w = U(Uᵀw) + what the slant of U leaves out.
            sides = (w @ self.basis[t]).abs() + gamma(n + 8) * 2.0 * size[:, None]
            off = 2.0 * self.slant[t]
        linear = torch.minimum(tau, grow(sides @ self.rho[t] + off * tau))
        return linear, torch.minimum(e, grow(sides @ self.rest[t] + off * e))

    @cached_property
    def ellipsoid(self) -> Float[Tensor, "S n n"]:
        """L with u(x) − u ∈ L{‖ξ‖ ≤ 1}.

        For every c > 0 the ellipsoid of (1 + 1/c)P + (1 + c)B holds the sum of those of P and B. The factor's
        residual is measured, and the matrix was lifted by more than it beforehand.
        """
        _, n, d = self.J.shape
        A = self.white * self.root.turn[:, None, None]
        P = A @ A.mT
        trace = P.diagonal(dim1=-2, dim2=-1).sum(-1)
        ratio = (self.tau / self.e.clamp(min=2.0**-500))[:, 0].clamp(min=1.0, max=2.0**40)
        c = torch.where(ratio < MODEST, torch.ones_like(ratio), ratio.sqrt())
        # The box |ε_c| ≤ E_c lies in the ellipsoid with squared axes E_c ΣE. In a basis with slant δ the coordinates of
        # e differ from Uᵀe by at most 2δ‖Uᵀe‖.
        E = self.rest
        if self.basis is not None:
            E = grow(E + 4.0 * self.slant[:, None] * length(E)[:, None])
        axes = grow(E * E.sum(-1, keepdim=True))
        U = torch.eye(n).to(P).expand_as(P) if self.basis is None else self.basis
        box = (U * axes[:, None, :]) @ U.mT
        M = (1.0 + 1.0 / c)[:, None, None] * 0.5 * (P + P.mT) + (1.0 + c)[:, None, None] * 0.5 * (
            box + box.mT
        )
        lift = 1e-9 * ((1.0 + 1.0 / c) * trace + (1.0 + c) * axes.sum(-1)) + 2.0**-800
        M.diagonal(dim1=-2, dim2=-1).add_(lift[:, None])
        L = torch.linalg.cholesky_ex(M).L
        residual = frobenius(L @ L.mT - M) + product_error(n, frobenius(L).square())
        slip = self.white_error * self.root.turn
        error = product_error(8 * d + 64, 4.0 * frobenius(A).square()) + 4.0 * slip * (frobenius(A) + slip)
        error = error + product_error(64 * n, (1.0 + c) * axes.sum(-1) * n**0.5)
        fits = residual + error + gamma(16) * frobenius(M) < lift
        return torch.where(fits[:, None, None], L, torch.inf)


MODEST = 50.0
"""Below this ratio of τ to e the ball is weighted for the directions in which Aα is small."""
