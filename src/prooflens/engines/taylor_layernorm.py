"""Norms as sites of `taylor`: LayerNorm (centred) and RMSNorm.

The output moves by J u + r(u) for u = Aα + e. `shape` gives an ellipsoid of r(u), all directions at once, and `bound`
gives sup ±v·r(u) for a given covector v. With w = P(γ ⊙ v), m the (centred) input and q = dσ², everything but one
scalar per token is affine: for ℓ = 2m·u/q, κ = ‖Pu‖²/q ≥ 0, τ = ℓ + κ and (1 + τ)^{-½} = 1 − τ/2 + ⅜θτ²,

    v·r = [(w·u)(−τ/2 + ⅜θτ²) + (w·m)(−κ/2 + ⅜θτ²)]/σ.

Second order at u = Aα: −[2(m·u)(w·u) + (m·w)‖Pu‖²]/(dσ³) + 3(m·w)(m·u)²/(d²σ⁵), halved: rank two, a multiple of ‖Pu‖²,
and rank one. What is left is bounded through the ranges of w·u, m·u and ‖u‖. As a vector, r = γ ⊙ [Pu s + m s′]/σ with
two scalars, s = (1 + τ)^{-½} − 1 and s′ = s + ℓ/2 ∈ [−κ/2, ⅜θτ²].

Rounding of the computed output and of the computed covector is added where it happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.taylor_norms import bilinear, frobenius, grow, half, length, product_error
from prooflens.engines.taylor_shapes import ball, image, raised, support, supports, total, trace
from prooflens.engines.taylor_values import Value
from prooflens.models.sites import Norm
from prooflens.numerics import gamma

C2 = 1.1548
"""√(4/3) < C2: sup ‖D²n[u,u]‖ of a norm before γ is at most C2/(√d σ²) for unit u; used for rounding only."""


@dataclass(eq=False)
class NormSite:
    """A norm in a chain."""

    step: Norm
    source: Value

    def __post_init__(self) -> None:
        u, d = self.source.u, self.source.u.shape[-1]
        self.d = d
        self.m = u - u.mean(-1, keepdim=True) if self.step.centred else u
        size = torch.linalg.vector_norm(self.m, dim=-1)
        lost = gamma(4 * d + 32) * length(u)
        shortest = (size * (1.0 - gamma(d + 8)) - lost - self.source.reach[:, 0]).clamp(min=0.0)
        self.least = ((shortest.square() / d + self.step.eps) * (1.0 - 2.0**-40)).sqrt()
        self.sigma = (size.square() / d + self.step.eps).sqrt()
        weight = self.step.weight
        self.gain = torch.ones_like(u[0]) if weight is None else weight

    @cached_property
    def rho_m(self) -> Float[Tensor, " S"]:
        """Range of m·Aα."""
        rows = torch.einsum("sn,snd->sd", self.m, self.source.J)
        N = self.source.root.N
        half = self.source.root.half
        exact = torch.einsum("sd,sdp->sp", rows, N).abs() @ half
        size = length(self.m) * frobenius(self.source.J) * frobenius(N)
        return grow(exact + gamma(4 * self.d + N.shape[-1] + 64) * size * length(half))

    @cached_property
    def rho_e(self) -> Float[Tensor, " S"]:
        """Range of m·e."""
        return supports(self.source.shape_e, self.m)

    @cached_property
    def _bias_noise(self) -> Tensor:
        bias = self.step.bias
        return torch.zeros(()).to(self.m) if bias is None else gamma(8) * length(bias)

    @cached_property
    def centring(self) -> Float[Tensor, "d d"]:
        """P."""
        eye = torch.eye(self.d).to(self.m)
        return eye - 1.0 / self.d if self.step.centred else eye

    @cached_property
    def jacobian(self) -> Float[Tensor, "S d d"]:
        """The Jacobian of the output by the input."""
        along = self.m / (self.d * self.sigma.square())[:, None]
        scale = self.gain[:, None] / self.sigma[:, None, None]
        made: Tensor = (self.centring - self.m[:, :, None] * along[:, None, :]) * scale
        return made

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """sup |ℓ| of the linear part and of e, sup κ, and how low 1 + τ may get."""
        q = self.d * self.sigma.square() * (1.0 - 2.0**-40)
        l_a, l_e = grow(2.0 * self.rho_m / q), grow(2.0 * self.rho_e / q)
        kappa = grow(self.source.reach[:, 0].square() / q)
        # 1 + τ ≥ (σ at its least / σ)², and also ≥ 1 − ℓ.
        bottom = torch.maximum((self.least / self.sigma).square(), 1.0 - l_a - l_e) * (1.0 - 2.0**-40)
        return l_a, l_e, kappa, bottom

    @cached_property
    def bend(self) -> Float[Tensor, " S"]:
        """sup |s′|."""
        l_a, l_e, kappa, bottom = self.ranges
        most = l_a + l_e + kappa
        return grow(torch.maximum(0.5 * kappa, 0.375 * bottom**-2.5 * most.square()))

    @cached_property
    def shape(self) -> Float[Tensor, "S d d"]:
        """An ellipsoid of the remainder, rounding included."""
        l_a, l_e, kappa, bottom = self.ranges
        slope = grow(torch.maximum(bottom**-0.5 - 1.0 + 2.0**-45, 0.5 * (l_a + l_e + kappa)))
        least = self.sigma * (1.0 - 2.0**-40)
        U, d = self.source.shape, self.d
        gained = self.gain[:, None] * self.centring
        V = image(gained.expand_as(U), U)
        # ℓ ⊗ Pu, symmetrised: half of |ℓ|²V and half of what it has along ℓ.
        m = self.m * (2.0 / (d * least.square()))[:, None]
        along = (gained @ (U @ m[..., None]))[..., 0]
        pair = supports(U, m).square()[:, None, None] * V + along[:, :, None] * along[:, None, :]
        size = gained.square().sum() * (frobenius(U) * length(m)).square()
        pair = raised(0.125 * pair, product_error(8 * d, 4.0 * size))
        apart = total([pair, V * grow(self.bend.square())[:, None, None]])
        together = V * grow(slope.square())[:, None, None]
        moving = torch.where((trace(apart) < trace(together))[:, None, None], apart, together)
        moving = moving / least.square()[:, None, None]
        m = self.gain * self.m
        fixed = raised(m[:, :, None] * m[:, None, :], gamma(8) * length(m).square())
        fixed = fixed * grow((self.bend / least).square())[:, None, None]
        most_gain = self.gain.abs().max()
        noise = gamma(64 * d + 512) * 16.0 * most_gain * self.stretch
        noise = noise * (1.0 + self.moved / self.least) * (1.0 + slope + self.bend)
        noise = noise + self._bias_noise + 2.0 * most_gain / least * self.source.noise
        noise = noise + product_error(2 * d, frobenius(self.jacobian) * self.source.stretch)
        return total([moving, fixed, ball(grow(noise), d)])

    @cached_property
    def inner(self) -> Float[Tensor, " S"]:
        """sup |Aα·Pe|: one eigenvalue per token."""
        shape_a = self.source.shape_a
        moved = image(self.centring.expand_as(shape_a), shape_a)
        return bilinear(moved, half(moved), self.source.shape_e)

    def pull(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F d"]:
        """The covector at the input."""
        w = v * self.gain
        w = w - self.m[t] * ((w @ self.m[t]) / (self.d * self.sigma[t].square()))[:, None]
        w = w - w.mean(-1, keepdim=True) if self.step.centred else w
        back: Tensor = w / self.sigma[t]
        return back

    def bound(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F 2"]:
        """sup of v·r and of −v·r over the region, with rounding."""
        return grow(0.5 * self._second(v, t) + (self._third(v, t) + self.noise(v, t))[:, None])

    def quadratic(
        self, v: Float[Tensor, "F d"], t: int
    ) -> tuple[Float[Tensor, "F n n"], Float[Tensor, " F"]]:
        """Q with ½xᵀQx the second order of v·r for a move x of the root, and its rounding in the 2-norm."""
        d, m, sigma, J = self.d, self.m[t], self.sigma[t], self.source.J[t]
        w = v * self.gain
        along = (w @ m)[:, None, None]
        centred = w - w.mean(-1, keepdim=True) if self.step.centred else w
        moved = J - J.mean(0) if self.step.centred else J
        across, mJ = centred @ J, m @ J
        pair = mJ[:, None] * across[:, None, :]
        Q = -(pair + pair.mT + along * (moved.T @ moved)) / (d * sigma**3)
        Q = Q + along * (3.0 * mJ[:, None] * mJ / (d**2 * sigma**5))
        size = length(w) * C2 / (d**0.5 * self.least[t].square()) * frobenius(J).square()
        return 0.5 * (Q + Q.mT), grow(gamma(64 * d + 512) * 128.0 * size * self.stretch[t])

    def rest(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, " F"]:
        """sup |v·r − ½xᵀQx|, rounding of v included."""
        return grow(self._third(v, t) + self.noise(v, t))

    def noise(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, " F"]:
        """Rounding of the output at the centre and of the covector, seen over the region."""
        size = gamma(64 * self.d + 512) * 16.0 * length(v * self.gain) * self.stretch[t]
        return grow(size * (1.0 + self.moved[t] / self.least[t]) + length(v) * self._bias_noise)

    def _second(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F 2"]:
        """sup of the second-order form on E(P), and of its negative: rank two, a multiple of ‖Pu‖², and rank one."""
        d, m, sigma, P = self.d, self.m[t], self.sigma[t], self.source.shape_a[t]
        w = v * self.gain
        centred = w - w.mean(-1, keepdim=True) if self.step.centred else w
        along = w @ m
        b = centred @ P
        inner, outer = b @ m, support(P, centred) * support(P, m)
        share = along / (d * sigma**3)
        ends = torch.stack((outer - inner, outer + inner), -1).clamp(min=0.0) / (d * sigma**3)
        signed = torch.stack((-share, share), -1)
        spike = -3.0 * signed * (support(P, m).square() / (d * sigma.square()))
        size = length(w) * C2 / (d**0.5 * self.least[t].square()) * frobenius(P)
        noise = gamma(64 * d + 512) * 64.0 * size * self.stretch[t]
        lengths = signed.clamp(min=0.0) * self.source.tau[t, 0].square()
        return grow(ends + lengths + spike.clamp(min=0.0) + noise[:, None])

    @cached_property
    def stretch(self) -> Float[Tensor, " S"]:
        """How much cancellation there may be in m: its terms' size by σ√d, squared."""
        found: Tensor = 1.0 + (self.source.size / (self.least * self.d**0.5)).square()
        return found

    @cached_property
    def moved(self) -> Float[Tensor, " S"]:
        """The size of the input and of its linear parts, for rounding."""
        return grow(self.source.size + self.source.stretch)

    def _third(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, " F"]:
        """What the second-order part at Aα leaves of v·r."""
        d, source, sigma = self.d, self.source, self.sigma[t]
        w = v * self.gain
        centred = w - w.mean(-1, keepdim=True) if self.step.centred else w
        e = source.e[t, 0]
        w_a, w_e = support(source.shape_a[t], centred), support(source.shape_e[t], centred)
        along = (w @ self.m[t]).abs() + gamma(d + 8) * length(w) * length(self.m[t])
        q = d * sigma.square() * (1.0 - 2.0**-40)
        l_a, l_e, kappa, bottom = (x[t] for x in self.ranges)
        most = l_a + l_e + kappa
        theta = bottom**-2.5
        swerve = torch.maximum(theta - 1.0, 1.0 - (1.0 + most) ** -2.5)
        square = swerve * most.square() + 2.0 * l_a * (l_e + kappa) + (l_e + kappa).square()
        third = (w_a + w_e) * self.bend[t] + 0.5 * (w_a * l_e + w_e * (l_a + l_e))
        third = third + along * ((self.inner[t] + 0.5 * e.square()) / q + 0.375 * square)
        # Cancellation in m makes σ, ℓ and κ err by a share of themselves.
        third = third * (1.0 + gamma(64 * d + 512) * 16.0 * self.stretch[t])
        return grow(third / (sigma * (1.0 - 2.0**-40)))
