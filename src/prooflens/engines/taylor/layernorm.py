"""Norms as sites of `taylor`: LayerNorm (centred) and RMSNorm.

The output moves by J u + r(u) for u = Aα + e. `shape` gives an ellipsoid of r(u), all directions at once, and `bound`
gives sup ±v·r(u) for a given covector v. Let m be the (centred) input, q = dσ² = ‖m‖² + d·eps and η = d·eps/q, mostly
tiny. **A norm hardly sees what moves its input along m**, so u is split: Pu = ym + u⊥ with u⊥ = Πu ⊥ m. With
κ = ‖u⊥‖²/q, R = (1 − η)(1 + y)² + κ + η, s = R^{-½} − 1 and G = (1 + y)R^{-½} − 1,

    r = γ ⊙ [u⊥ s + m(G − ηy)]/σ,      s = −(1 − η)y + s′,
    −½((1 − η)y² + κ) ≤ s′ ≤ (1 − η)y²/(1 + y),          G = (1 + D)^{-½} − 1,  D = κ/(1 + y)² + η((1 + y)^{-2} − 1).

So m's part is of second order in u⊥ alone, but for η: with |y| ≤ Y, G − ηy = −½κ − (3/2)η(1 − η)y² + third order, and

    |third order of G| ≤ ½κ((1 − Y)^{-2} − 1) + 2ηY³(1 − Y)^{-5} + ⅜(1 − 2ηY)^{-2.5}D² + (3/2)η²Y².

A token that is nearly 0 (η ≥ ½) is not split: Π = P, ℓ = 2m·u/q, κ = ‖Pu‖²/q, τ = ℓ + κ, R = 1 + τ, and
r = γ ⊙ [Pu s + m s′]/σ with s = R^{-½} − 1 and s′ = s + ℓ/2 ∈ [−κ/2, ⅜θτ²]. Where both cases are written as one, ℓ is
2(1 − η)y.

Rounding of the computed output and of the computed covector is added where it happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, raised, support, supports, total, trace, without
from prooflens.engines.relaxations.norms import (
    bilinear,
    cholesky_factor,
    frobenius,
    grow,
    identity,
    largest,
    length,
    product_error,
)
from prooflens.engines.taylor.squares import Squares
from prooflens.engines.taylor.values import Value
from prooflens.models.sites import Norm
from prooflens.numerics import gamma

LARGEST = 2.0**200
"""The largest input of a norm, and the largest 1/σ, that are worked with."""

C2 = 1.1548
"""An upper bound of √(4/3): sup ‖D²n[u,u]‖ of a norm before γ is at most C2/(√d σ²) for unit u; for rounding only."""


@dataclass(eq=False)
class NormSite:
    """A norm in a chain.

    Attributes:
        step: the norm.
        source: the value that it reads.
    """

    step: Norm
    source: Value

    def __post_init__(self) -> None:
        u, d = self.source.u, self.source.u.shape[-1]
        self.d = d
        self.m = u - u.mean(-1, keepdim=True) if self.step.centred else u
        size = torch.linalg.vector_norm(self.m, dim=-1)
        self.lost = gamma(4 * d + 32) * length(u)
        """A bound of the error of m: a mean of d terms and a difference, of at most 2‖u‖ together."""
        shortest = (size * (1.0 - gamma(d + 8)) - self.lost).clamp(min=0.0)
        least = (shortest - self.source.reach[:, 0]).clamp(min=0.0)
        # Here and below 2⁻⁴⁰ = 8192u covers a sum of d squares and a few operations, for d up to 8000.
        low = ((least.square() / d + self.step.eps) * (1.0 - 2.0**-40)).sqrt()
        # Beyond these sizes powers of σ leave float64. With nothing to divide by, all that follows is infinite.
        self.least = torch.where((low > 1.0 / LARGEST) & (length(u) < LARGEST), low, 0.0)
        self.sigma = (size.square() / d + self.step.eps).sqrt()
        self.q = d * self.sigma.square() * (1.0 - 2.0**-40)
        self.eta = grow(d * self.step.eps / (shortest.square() + d * self.step.eps))
        self.split = self.eta < 0.5
        weight = self.step.weight
        self.gain = torch.ones_like(u[0]) if weight is None else weight

    @cached_property
    def rho_m(self) -> Float[Tensor, " S"]:
        """sup |m·Aα|."""
        rows = torch.einsum("sn,snd->sd", self.m, self.source.J)
        N = self.source.root.N
        half_widths = self.source.root.half_widths
        exact = torch.einsum("sd,sdp->sp", rows, N).abs() @ half_widths
        size = length(self.m) * frobenius(self.source.J) * frobenius(N)
        exact = exact + self.lost * self.source.tau[:, 0]
        return grow(exact + gamma(4 * self.d + N.shape[-1] + 64) * size * length(half_widths))

    @cached_property
    def rho_e(self) -> Float[Tensor, " S"]:
        """sup |m·e|."""
        return grow(supports(self.source.shape_e, self.m) + self.lost * self.source.e[:, 0])

    @cached_property
    def unit(self) -> Float[Tensor, "S d"]:
        """m at length 1, or 0 for a token that is not split."""
        # Not by `length`, which is raised by far more than units.
        size = torch.linalg.vector_norm(self.m, dim=-1, keepdim=True).clamp(min=2.0**-500)
        found: Tensor = self.m / size * self.split[:, None]
        return found

    def _across(self, M: Float[Tensor, "S d d"]) -> Float[Tensor, "S d d"]:
        """Return ΠMΠ, raised."""
        if self.step.centred:
            M = without(M, torch.full_like(self.m, self.d**-0.5))
        return without(M, self.unit)

    @cached_property
    def across_a(self) -> Float[Tensor, "S d d"]:
        """The shape of ΠAα."""
        return self._across(self.source.shape_a)

    def _crosswise(self, w: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F d"]:
        """Return Πw."""
        w = w - w.mean(-1, keepdim=True) if self.step.centred else w
        crosswise: Tensor = w - (w @ self.unit[t])[:, None] * self.unit[t]
        return crosswise

    @cached_property
    def reaches(self) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
        """sup ‖ΠAα‖ and sup ‖Πe‖; Π errs by units and by what m errs by."""
        source, error = self.source, gamma(8 * self.d + 128) * self.stretch
        shapes = (self.across_a, source.tau[:, 0]), (self._across(source.shape_e), source.e[:, 0])
        a, e = (largest(M).sqrt() + error * most for M, most in shapes)
        return grow(a), grow(e)

    @cached_property
    def _bias_noise(self) -> Tensor:
        bias = self.step.bias
        return self.m.new_zeros(()) if bias is None else gamma(8) * length(bias)

    @cached_property
    def centring(self) -> Float[Tensor, "d d"]:
        """The projection P that takes the mean away; the identity for RMSNorm."""
        eye = identity(self.m, self.d)
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
        """sup |ℓ| of the linear part and of e, sup κ, and inf R."""
        l_a, l_e = grow(2.0 * self.rho_m / self.q), grow(2.0 * self.rho_e / self.q)
        a, e = self.reaches
        kappa = grow((a + e).square() / self.q)
        # R ≥ (σ at its least / σ)², also ≥ 1 − ℓ, and (1 − η)(1 + y)² + η.
        bottom = torch.maximum((self.least / self.sigma).square(), 1.0 - l_a - l_e)
        turned = (1.0 - self.eta) * (1.0 - self._along(l_a + l_e)).clamp(min=0.0).square()
        bottom = torch.where(self.split, torch.maximum(bottom, turned), bottom)
        return l_a, l_e, kappa, bottom * (1.0 - 2.0**-40)

    def _along(self, ell: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return sup |y| from sup |ℓ|; at least 1 means that nothing is known."""
        return grow(0.5 * ell / (1.0 - self.eta))

    @cached_property
    def bend(self) -> Float[Tensor, " S"]:
        """sup |s′|."""
        l_a, l_e, kappa, bottom = self.ranges
        most = l_a + l_e + kappa
        whole = torch.maximum(0.5 * kappa, 0.375 * bottom**-2.5 * most.square())
        Y = self._along(l_a + l_e)
        split = torch.maximum(Y.square() / (1.0 - Y), 0.5 * (Y.square() + kappa))
        split = torch.where(Y < 1.0, split, torch.inf)
        return grow(torch.where(self.split, split, whole))

    @cached_property
    def twist(self) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
        """sup of m's scalar, |G − ηy| or |s′|, and sup of what its second order leaves of it at u."""
        l_a, l_e, kappa, bottom = self.ranges
        most = l_a + l_e + kappa
        swerve = torch.maximum(bottom**-2.5 - 1.0, 1.0 - (1.0 + most) ** -2.5)
        whole = 0.375 * (swerve * most.square() + 2.0 * l_a * (l_e + kappa) + (l_e + kappa).square())
        eta, Y, Y_e = self.eta, self._along(l_a + l_e), self._along(l_e)
        far = (1.0 - Y) ** -2 - 1.0
        D = kappa * (1.0 + far) + eta * far
        third = 0.5 * kappa * far + 2.0 * eta * Y**3 * (1.0 - Y) ** -5
        third = third + 0.375 * (1.0 - 2.0 * eta * Y) ** -2.5 * D.square() + 1.5 * (eta * Y).square()
        first = third + 0.5 * kappa + 1.5 * eta * Y.square()
        # (3/2)η(1 − η)y² at u less at Aα; what κ differs by is asked elsewhere.
        third = third + 1.5 * eta * Y_e * (Y + Y)
        known = (Y < 1.0) & (2.0 * eta * Y < 1.0)
        first, third = (torch.where(known, x, torch.inf) for x in (first, third))
        pairs = (first, self.bend), (third, whole)
        one, other = (grow(torch.where(self.split, x, y)) for x, y in pairs)
        return one, other

    @cached_property
    def slope(self) -> Float[Tensor, " S"]:
        """sup |s|."""
        l_a, l_e, kappa, bottom = self.ranges
        # The power errs by 8u relative: 2⁻⁴⁵ = 256u covers it up to 32, and `grow` beyond.
        return grow(torch.maximum(bottom**-0.5 - 1.0 + 2.0**-45, 0.5 * (l_a + l_e + kappa)))

    @cached_property
    def shape(self) -> Float[Tensor, "S d d"]:
        """An ellipsoid of the remainder, rounding included."""
        slope = self.slope
        least = self.sigma * (1.0 - 2.0**-40)
        U, d = self.source.shape, self.d
        V = self._across(U)
        V = raised(self.gain[:, None] * V * self.gain, gamma(16) * self.gain.abs().max() ** 2 * frobenius(V))
        # ℓ ⊗ Πu, symmetrised: half of |ℓ|²V and half of what it has along ℓ.
        m = self.m * (2.0 / (d * least.square()))[:, None]
        along = (U @ m[..., None])[..., 0]
        along = along - along.mean(-1, keepdim=True) if self.step.centred else along
        along = self.gain * (along - (along * self.unit).sum(-1, keepdim=True) * self.unit)
        pair = supports(U, m).square()[:, None, None] * V + along[:, :, None] * along[:, None, :]
        size = self.gain.square().sum() * (frobenius(U) * length(m)).square()
        pair = raised(0.125 * pair, product_error(8 * d, 4.0 * size))
        apart = total([pair, V * grow(self.bend.square())[:, None, None]])
        together = V * grow(slope.square())[:, None, None]
        moving = torch.where((trace(apart) < trace(together))[:, None, None], apart, together)
        moving = moving / least.square()[:, None, None]
        m = self.gain * self.m
        fixed = raised(m[:, :, None] * m[:, None, :], gamma(8) * length(m).square())
        twist = self.twist[0]
        fixed = fixed * grow((twist / least).square())[:, None, None]
        return total([moving, fixed, ball(self.blur, d)])

    @cached_property
    def blur(self) -> Float[Tensor, " S"]:
        """The radius of what rounding adds to the remainder."""
        d, slope, most_gain = self.d, self.slope, self.gain.abs().max()
        # As in `noise`, for all covectors at once; then rounding of the input, through a Jacobian of norm ≤ gain/σ.
        noise = gamma(64 * d + 512) * 16.0 * most_gain * self.stretch
        noise = noise * (1.0 + self.moved / self.least) * (1.0 + slope + self.bend + self.twist[0])
        least = self.sigma * (1.0 - 2.0**-40)
        noise = noise + self._bias_noise + 2.0 * most_gain / least * self.source.noise
        return grow(noise + product_error(2 * d, frobenius(self.jacobian) * self.source.stretch))

    @cached_property
    def inner(self) -> Float[Tensor, " S"]:
        """sup |ΠAα·e|: one eigenvalue per token."""
        moved = self.across_a
        slip = gamma(8 * self.d + 128) * self.stretch * self.source.tau[:, 0] * self.source.e[:, 0]
        return grow(bilinear(moved, cholesky_factor(moved), self.source.shape_e) + slip)

    def pull(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F d"]:
        """Return the covector at the input.

        Args:
            v: covectors at the output, shape [F, d].
            t: the token.
        """
        w = v * self.gain
        w = w - self.m[t] * ((w @ self.m[t]) / (self.d * self.sigma[t].square()))[:, None]
        w = w - w.mean(-1, keepdim=True) if self.step.centred else w
        back: Tensor = w / self.sigma[t]
        return back

    def bound(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F 2"]:
        """Bound v·r and −v·r over the region, with rounding."""
        return grow(0.5 * self._second(v, t) + (self._third(v, t) + self.noise(v, t))[:, None])

    def quadratic(
        self, v: Float[Tensor, "F d"], t: int, J: Float[Tensor, "d n"] | None = None
    ) -> tuple[Float[Tensor, "F n n"], Float[Tensor, " F"]]:
        """Return Q with ½xᵀQx the second order of v·r for a move x of the root, and its rounding in the 2-norm.

        Args:
            v: covectors at the output, shape [F, d].
            t: the token.
            J: the Jacobian of the norm's input by x; None for that by the root.
        """
        d, m, sigma = self.d, self.m[t], self.sigma[t]
        J = self.source.J[t] if J is None else J
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
        """Bound |v·r − ½xᵀQx|, rounding of v included."""
        return grow(self._third(v, t) + self.noise(v, t))

    def secant(
        self, v: Float[Tensor, "F d"], t: int, J: Float[Tensor, "d n"] | None = None
    ) -> tuple[Float[Tensor, "F n n"], Float[Tensor, " F"]]:
        """Return the second order, as `quadratic` does: `squares` bounds what that leaves.

        Args:
            v: covectors at the output, shape [F, d].
            t: the token.
            J: the Jacobian of the norm's input by x; None for that by the root.
        """
        return self.quadratic(v, t, J)

    def squares(self, v: Float[Tensor, "F d"], t: int) -> Squares:
        """Bound |v·r − ½uᵀQu| for the whole move u = Aα + e of the input by a square of u, rounding of v included.

        That is |w·u⊥ s′ + w·m G₃|/σ, w = γ ⊙ v: |w·u⊥| ≤ V, |s′| ≤ (1 − η)y²/(1 − Y) + ½κ and, with D ≤ D̄ in one of
        the two factors of D², |G₃| ≤ (½f + cD̄(1 + f))κ + constants, f = (1 − Y)⁻² − 1. y = m·u/(q(1 − η)) and κ =
        ‖Πu‖²/q are squares of u. A token that is not split keeps a constant.
        """
        d, eta, q = self.d, self.eta[t], self.q[t]
        alone = self._third(v, t, whole=True)
        if not bool(self.split[t]):
            return Squares.none(d, grow(alone + self.noise(v, t)))
        l_a, l_e, kappa, _ = self.ranges
        Y, kappa = self._along(l_a + l_e)[t], kappa[t]
        if not bool((Y < 1.0) & (2.0 * eta * Y < 1.0)):
            return Squares.none(d, torch.full_like(alone, torch.inf))
        w_a, w_e, along = self._reads(v, t)
        most = w_a + w_e
        far = (1.0 - Y) ** -2 - 1.0
        bent = 0.375 * (1.0 - 2.0 * eta * Y) ** -2.5
        D = kappa * (1.0 + far) + eta * far
        # Cancellation in m makes σ, y and κ err by a share of themselves.
        scale = (1.0 + gamma(64 * d + 512) * 16.0 * self.stretch[t]) / (self.sigma[t] * (1.0 - 2.0**-40))
        by_length = grow(2.0 * scale * (most / (1.0 - Y)) / ((1.0 - eta) * q.square()))
        by_turn = grow(2.0 * scale * (0.5 * most + along * (0.5 * far + bent * D * (1.0 + far))) / q)
        rest = 2.0 * eta * Y**3 * (1.0 - Y) ** -5 + bent * D * eta * far + 1.5 * (eta * Y).square()
        m, unit = self.m[t], self.unit[t]
        across = self.centring - unit[:, None] * unit
        R = by_length[:, None, None] * (m[:, None] * m) + by_turn[:, None, None] * across
        # m errs by a share `stretch` of γ_{4d+32}, and so does Π, which counts twice; 8d + 128 and 8 are to spare.
        size = by_length * length(m).square() + by_turn
        error = gamma(8 * d + 128) * 8.0 * self.stretch[t] * size
        return Squares(R, grow(error), grow(scale * along * rest + self.noise(v, t)))

    def turning(self, t: int) -> tuple[Tensor, Tensor]:
        """Return g₁ and g₀ with |G − ηy| ≤ g₁κ + g₀, as in `squares`; (0, its largest value) of a token not split.

        Args:
            t: the token.
        """
        l_a, l_e, kappa, _ = self.ranges
        eta, Y, kappa = self.eta[t], self._along(l_a + l_e)[t], kappa[t]
        far = (1.0 - Y) ** -2 - 1.0
        bent = 0.375 * (1.0 - 2.0 * eta * Y) ** -2.5
        D = kappa * (1.0 + far) + eta * far
        scale = 1.0 + gamma(64 * self.d + 512) * 16.0 * self.stretch[t]
        g1 = (0.5 + 0.5 * far + bent * D * (1.0 + far)) * scale
        g0 = 1.5 * eta * Y.square() + 2.0 * eta * Y**3 * (1.0 - Y) ** -5
        g0 = (g0 + bent * D * eta * far + 1.5 * (eta * Y).square()) * scale
        known = self.split[t] & (Y < 1.0) & (2.0 * eta * Y < 1.0)
        return torch.where(known, grow(g1), 0.0), torch.where(known, grow(g0), self.twist[0][t])

    def projection(self, t: int) -> Float[Tensor, "d d"]:
        """Return Π, raised over its rounding and what m errs by.

        Args:
            t: the token.
        """
        unit = self.unit[t]
        made = self.centring - unit[:, None] * unit
        return raised(made, gamma(8 * self.d + 128) * 8.0 * self.stretch[t])

    def noise(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, " F"]:
        """Bound the rounding of the output at the centre and of the covector, seen over the region.

        m, σ, the output and the covector err by at most γ_{4d+32} of sizes that `moved`/`least` and `stretch` bound.
        γ of 64d + 512 = 16(4d + 32) roundings and the factor 16 leave 256 times that, for their sum and for errors of
        errors.
        """
        size = gamma(64 * self.d + 512) * 16.0 * length(v * self.gain) * self.stretch[t]
        size = size * (1.0 + self.moved[t] / self.least[t]) * (1.0 + self.slope[t])
        return grow(size + length(v) * self._bias_noise)

    def _second(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F 2"]:
        """Bound the second-order form on E(P), and its negative: twice the form, with σ.

        −(ℓ/2)(Πw·u) + (w·m)(−κ/2 + bℓ²), b = −⅜η/(1 − η) or, without a split, ⅜.
        """
        d, m, sigma, P = self.d, self.m[t], self.sigma[t], self.source.shape_a[t]
        w = v * self.gain
        crosswise = self._crosswise(w, t)
        inner, outer = (crosswise @ P) @ m, support(P, crosswise) * support(P, m)
        share = (w @ m) / (d * sigma**3)
        ends = torch.stack((outer - inner, outer + inner), -1).clamp(min=0.0) / (d * sigma**3)
        signed = torch.stack((-share, share), -1)
        peak = torch.where(self.split[t], -self.eta[t] / (1.0 - self.eta[t]), torch.ones_like(sigma))
        spike = -3.0 * peak * signed * (support(P, m).square() / (d * sigma.square()))
        size = length(w) * C2 / (d**0.5 * self.least[t].square()) * frobenius(P)
        noise = gamma(64 * d + 512) * 64.0 * size * self.stretch[t]
        lengths = signed.clamp(min=0.0) * self.reaches[0][t].square()
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

    def _third(self, v: Float[Tensor, "F d"], t: int, whole: bool = False) -> Float[Tensor, " F"]:
        """Bound what the second-order part at Aα, or at the whole of u, leaves of v·r."""
        sigma = self.sigma[t]
        w_a, w_e, along = self._reads(v, t)
        l_a, l_e, _, _ = (x[t] for x in self.ranges)
        third = (w_a + w_e) * self.bend[t] + along * self.twist[1][t]
        if not whole:
            third = third + 0.5 * (w_a * l_e + w_e * (l_a + l_e))
            third = third + along * ((self.inner[t] + 0.5 * self.reaches[1][t].square()) / self.q[t])
        # Cancellation in m makes σ, ℓ and κ err by a share of themselves.
        third = third * (1.0 + gamma(64 * self.d + 512) * 16.0 * self.stretch[t])
        return grow(third / (sigma * (1.0 - 2.0**-40)))

    def _reads(self, v: Float[Tensor, "F d"], t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return sup |w·ΠAα|, sup |w·Πe| and |w·m|, w = γ ⊙ v."""
        w = v * self.gain
        crosswise = self._crosswise(w, t)
        w_a, w_e = (support(M[t], crosswise) for M in (self.source.shape_a, self.source.shape_e))
        return w_a, w_e, (w @ self.m[t]).abs() + gamma(self.d + 8) * length(w) * length(self.m[t])
