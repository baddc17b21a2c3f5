"""The token-wise sites of `taylor`: what a covector v at the output becomes at the input, and what it may miss.

A site's output moves by J u + r(u) for u = Aα + e. `bound` gives sup ±v·r(u):

- **norm**, w = P(γ ⊙ v), m the (centred) input, q = dσ²: everything but one scalar per token is affine. With
  ℓ = 2m·u/q, κ = ‖Pu‖²/q ≥ 0, τ = ℓ + κ and (1 + τ)^{-½} = 1 − τ/2 + ⅜θτ²,

      v·r = [(w·u)(−τ/2 + ⅜θτ²) + (w·m)(−κ/2 + ⅜θτ²)]/σ.

  Second order at u = Aα: −[2(m·u)(w·u) + (m·w)‖Pu‖²]/(dσ³) + 3(m·w)(m·u)²/(d²σ⁵), halved: rank two, a multiple of PJ's
  Gram matrix, and rank one. What is left is bounded through the ranges of w·u, m·u and ‖u‖.
- **network**, a = W_dᵀv: φ(h + u) − φ(h) − φ′u ≤ ½u²(φ″ + κ), κ = |φ‴|b/3 + sup|φ⁗|b²/12, for |u| ≤ b, so
  v·r ≤ ½ξᵀLᵀW_uᵀ diag(aφ″ + |a|κ) W_uLξ over the ellipsoid Lξ of the input: *one* eigenvalue holds second order, third
  order and all cross terms, and neurons cancel before it is taken. A gate g ⊙ u adds 2aφ′ between h and u, raised
  likewise; a ReLU whose kink is in reach adds what it may miss, neuron by neuron.

Rounding of the computed output and of the computed covector is added where it happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.smooth import DERIVATIVE_ERROR, FOURTH, THIRD, derivatives
from prooflens.engines.taylor_norms import (
    frobenius,
    grow,
    length,
    product_error,
    top_eigenvalue,
)
from prooflens.engines.taylor_segments import Network
from prooflens.engines.taylor_values import Value
from prooflens.models.sites import ACTIVATIONS, Affine, Norm
from prooflens.numerics import gamma

C2 = 1.1548
"""√(4/3) < C2: sup ‖D²n[u,u]‖ of a norm before γ is at most C2/(√d σ²) for unit u; used for rounding only."""


@dataclass(eq=False)
class NormSite:
    """A norm in a chain; ρ_m and E_m are the ranges of m·Aα and m·e."""

    step: Norm
    source: Value
    E_m: Float[Tensor, " S"]

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
    def _bias_noise(self) -> Tensor:
        bias = self.step.bias
        return torch.zeros(()).to(self.m) if bias is None else gamma(8) * length(bias)

    def tangent(self) -> Float[Tensor, "S d d"]:
        """The Jacobian of the output by the root."""
        J = self.source.J
        along = torch.einsum("sd,sdn->sn", self.m, J) / (self.d * self.sigma.square())[:, None]
        moved = J - J.mean(1, keepdim=True) if self.step.centred else J
        scale = self.gain[:, None] / self.sigma[:, None, None]
        made: Tensor = (moved - self.m[:, :, None] * along[:, None, :]) * scale
        return made

    def pull(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F d"]:
        """The covector at the input."""
        w = v * self.gain
        w = w - self.m[t] * ((w @ self.m[t]) / (self.d * self.sigma[t].square()))[:, None]
        w = w - w.mean(-1, keepdim=True) if self.step.centred else w
        back: Tensor = w / self.sigma[t]
        return back

    @cached_property
    def gram(self) -> Float[Tensor, "S d d"]:
        """(PJ)ᵀPJ in whitened coordinates."""
        J = self.source.white
        moved = J - J.mean(1, keepdim=True) if self.step.centred else J
        gram = moved.mT @ moved
        return 0.5 * (gram + gram.mT)

    @cached_property
    def gram_top(self) -> Float[Tensor, " S"]:
        """λ_max of `gram`."""
        rounding = product_error(8 * self.d + 64, 4.0 * self.source.white_size.square())
        return grow(top_eigenvalue(self.gram) + rounding)

    def bound(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F 2"]:
        """sup of v·r and of −v·r over the region, with rounding."""
        return grow(0.5 * self._second(v, t) * self.source.root.turn[t].square() + self._third(v, t)[:, None])

    def _second(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, "F 2"]:
        """λ_max of the second-order form and of its negative: rank two, a multiple of `gram`, and rank one."""
        d, m, sigma, J = self.d, self.m[t], self.sigma[t], self.source.white[t]
        w = v * self.gain
        centred = w - w.mean(-1, keepdim=True) if self.step.centred else w
        along = w @ m
        a, b = m @ J, centred @ J
        inner, outer = b @ a, length(a) * length(b)
        share = along / (d * sigma**3)
        ends = torch.stack((outer - inner, outer + inner), -1).clamp(min=0.0) / (d * sigma**3)
        signed = torch.stack((-share, share), -1)
        spike = -3.0 * signed * (length(a).square() / (d * sigma.square()))
        size = length(w) * C2 / (d**0.5 * self.least[t].square()) * self.source.white_size[t].square()
        noise = gamma(64 * d + 512) * 64.0 * size * self.stretch[t]
        return grow(ends + signed.clamp(min=0.0) * self.gram_top[t] + spike.clamp(min=0.0) + noise[:, None])

    @cached_property
    def stretch(self) -> Float[Tensor, " S"]:
        """How much cancellation there may be in m: its terms' size by σ√d, squared."""
        found: Tensor = 1.0 + (self.source.size / (self.least * self.d**0.5)).square()
        return found

    def _third(self, v: Float[Tensor, "F d"], t: int) -> Float[Tensor, " F"]:
        """What the second-order part at Aα leaves of v·r, and rounding."""
        d, source, least, sigma = self.d, self.source, self.least[t], self.sigma[t]
        w = v * self.gain
        centred = w - w.mean(-1, keepdim=True) if self.step.centred else w
        tau, e, reach = source.tau[t, 0], source.e[t, 0], source.reach[t, 0]
        w_a, w_e = source.ranges(centred, t)
        along = (w @ self.m[t]).abs() + gamma(d + 8) * length(w) * length(self.m[t])
        q = d * sigma.square() * (1.0 - 2.0**-40)
        l_a, l_e, kappa = 2.0 * self.rho_m[t] / q, 2.0 * self.E_m[t] / q, reach.square() / q
        most = l_a + l_e + kappa
        # 1 + τ ≥ (σ at its least / σ)², and also ≥ 1 − ℓ.
        bottom = torch.maximum((least / sigma).square(), 1.0 - l_a - l_e) * (1.0 - 2.0**-40)
        theta = bottom**-2.5
        swerve = torch.maximum(theta - 1.0, 1.0 - (1.0 + most) ** -2.5)
        bend = 0.5 * kappa + 0.375 * theta * most.square()
        square = swerve * most.square() + 2.0 * l_a * (l_e + kappa) + (l_e + kappa).square()
        third = (w_a + w_e) * bend + 0.5 * (w_a * l_e + w_e * (l_a + l_e))
        third = third + along * ((tau * e + 0.5 * e.square()) / q + 0.375 * square)
        third = third / (sigma * (1.0 - 2.0**-40))
        noise = gamma(64 * d + 512) * 16.0 * length(w) * self.stretch[t] * (1.0 + source.size[t] / least)
        return grow(third + noise + length(v) * self._bias_noise)


@dataclass(eq=False)
class NetworkSite:
    """A feed-forward network in a chain; its source lies in an ellipsoid u + L{‖ξ‖ ≤ 1} for each token."""

    step: Network
    source: Value

    def __post_init__(self) -> None:
        step, y = self.step, self.source
        self.h, self.b = self._hidden(step.bent)
        self.first, self.second, third = derivatives(step.function, self.h)
        self.post = ACTIVATIONS[step.function](self.h)
        b = self.b
        self.d_second = grow(
            (third.abs() + DERIVATIVE_ERROR) * b / 3.0
            + FOURTH[step.function] * b.square() / 12.0
            + DERIVATIVE_ERROR
        )
        # max(0, h + u) minus its tangent lies in [0, b − |h|]; other activations have no kink.
        self.kink = (b - self.h.abs()).clamp(min=0.0) if step.function == "relu" else torch.zeros_like(b)
        if step.gate is not None:
            self.other, self.b_other = self._hidden(step.up)
            self.d_first = grow(
                (self.second.abs() + DERIVATIVE_ERROR) * b
                + 0.5 * THIRD[step.function] * b.square()
                + DERIVATIVE_ERROR
            )
        self.rows = step.bent.weight @ y.ellipsoid
        self.row_sizes = grow(length(step.bent.weight) * frobenius(y.ellipsoid)[:, None])
        self.other_rows = step.up.weight @ y.ellipsoid if step.gate is not None else None
        self.other_sizes = grow(length(step.up.weight) * frobenius(y.ellipsoid)[:, None])

    def _hidden(self, affine: Affine) -> tuple[Tensor, Tensor]:
        """Pre-activations, and how far each may move: the ellipsoid's support function, and rounding."""
        y, W = self.source, affine.weight
        h = torch.nn.functional.linear(y.u, W, affine.bias)
        far = length(W @ y.ellipsoid) + product_error(W.shape[1], length(W) * frobenius(y.ellipsoid)[:, None])
        noise = gamma(W.shape[1] + 16) * (length(W) * y.size[:, None] + h.abs())
        if affine.bias is not None:
            noise = noise + gamma(8) * affine.bias.abs()
        return h, grow(far + noise)

    @cached_property
    def down(self) -> Tensor:
        """W_d."""
        down = self.step.down
        return torch.eye(self.h.shape[-1]).to(self.h) if down is None else down.weight

    @property
    def output(self) -> Tensor:
        """The network's output at the centre."""
        post = self.post if self.step.gate is None else self.post * self.other
        return post if self.step.down is None else self.step.down(post)

    @cached_property
    def jacobian(self) -> Float[Tensor, "S o i"]:
        """The Jacobian of the output by the network's input."""
        step = self.step
        inner = self.first if step.gate is None else self.first * self.other
        B = (self.down * inner[:, None, :]) @ step.bent.weight
        return B if step.gate is None else B + (self.down * self.post[:, None, :]) @ step.up.weight

    @property
    def far(self) -> Float[Tensor, " S"]:
        """A crude bound of how far the output moves."""
        step = self.step
        slope = 1.2 * frobenius(step.bent.weight)
        if step.gate is not None:
            slope = slope * (self.other.abs() + self.b_other).amax(-1)
            slope = slope + (self.post.abs() + 1.2 * self.b).amax(-1) * frobenius(step.up.weight)
        return grow(frobenius(self.down) * slope * self.source.far)

    def tangent(self) -> Float[Tensor, "S o d"]:
        """The Jacobian of the output by the root."""
        return self.jacobian @ self.source.J

    def pull(self, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, "F i"]:
        """The covector at the input."""
        a = v @ self.down
        if self.step.gate is None:
            return (a * self.first[t]) @ self.step.bent.weight
        back = (a * (self.first[t] * self.other[t])) @ self.step.bent.weight
        return back + (a * self.post[t]) @ self.step.up.weight

    def bound(self, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, "F 2"]:
        """sup of v·r and of −v·r over the ellipsoid, from one d × d matrix per covector and sign, with rounding."""
        a = v @ self.down
        a_noise = gamma(len(self.down) + 16) * length(self.down.T) * length(v)[:, None]
        size = a.abs() + a_noise
        rows = self.rows[t]
        raise_ = size * self.d_second[t] + a_noise * self.second[t].abs() + DERIVATIVE_ERROR * size
        weights = a * self.second[t]
        cross = None
        if self.step.gate is not None:
            weights = weights * self.other[t]
            moved = self.other[t].abs()
            raise_ = raise_ * moved + (size * (self.second[t].abs() + self.d_second[t])) * 2.0**-45
            cross = a * self.first[t]
            d_cross = size * self.d_first[t] + a_noise * self.first[t].abs() + gamma(8) * cross.abs()
        raise_ = raise_ + gamma(8) * weights.abs()
        sides = []
        for sign in (1.0, -1.0):
            raised = sign * weights + raise_
            if cross is None:
                form, error = gram(rows, self.row_sizes[t], raised)
            else:
                assert self.other_rows is not None
                sizes = self.row_sizes[t], self.other_sizes[t]
                form, error = gated_gram(
                    rows, self.other_rows[t], sizes, raised + d_cross, sign * cross, d_cross
                )
            sides.append(top_eigenvalue(form) + error)
        kinks = torch.stack((size + a, size - a), -1).mT @ self.kink[t] * 0.5
        noise = self._noise(v, a, t) + DERIVATIVE_ERROR * (size @ self.sway[t])
        return grow(0.5 * torch.stack(sides, -1) + kinks + noise[:, None])

    @cached_property
    def sway(self) -> Float[Tensor, "S n"]:
        """What a neuron moves by per unit of error in φ′ and φ."""
        if self.step.gate is None:
            return self.b
        return grow(self.b * self.other.abs() + self.b_other * (1.0 + self.post.abs()))

    def _noise(self, v: Tensor, a: Tensor, t: int) -> Tensor:
        """Rounding of the output at the centre and of the covector, seen over the region."""
        y, step = self.source, self.step
        n = sum(self.down.shape) + step.bent.weight.shape[1] + 64
        size = frobenius(step.bent.weight) * y.size[t]
        if step.bent.bias is not None:
            size = size + length(step.bent.bias)
        slope = 1.2 * (1.0 + self.b[t])
        if step.gate is not None:
            size = size + frobenius(step.up.weight) * y.size[t]
            slope = slope * (1.0 + self.other[t].abs() + self.b_other[t]) + self.post[t].abs()
        peak = 1.0 + slope.amax()
        inner = frobenius(self.down) * length(v) * peak * (size + 1.0)
        bias = 0.0 if step.down is None or step.down.bias is None else length(step.down.bias)
        return gamma(8 * n) * (4.0 * inner + length(a * slope) * (size + 1.0)) + gamma(8) * length(v) * bias


def gram(
    rows: Float[Tensor, "n d"], sizes: Float[Tensor, " n"], weights: Float[Tensor, "F n"]
) -> tuple[Float[Tensor, "F d d"], Float[Tensor, " F"]]:
    """rowsᵀ diag(w) rows, symmetric, and its rounding in the 2-norm; sizes ≥ the rows' terms, so theirs as well."""
    form = (rows.T * weights[:, None, :]) @ rows
    return 0.5 * (form + form.mT), product_error(4 * sum(rows.shape), weights.abs() @ sizes.square())


def gated_gram(
    rows: Float[Tensor, "n d"],
    others: Float[Tensor, "n d"],
    sizes: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    a: Tensor,
    b: Tensor,
    c: Tensor,
) -> tuple[Float[Tensor, "F d d"], Float[Tensor, " F"]]:
    """Σ a_n g_n² + 2 b_n g_n u_n + c_n u_n² as a matrix, and its rounding."""
    form = rows.T @ (a[:, :, None] * rows + 2.0 * b[:, :, None] * others)
    form = form + (others.T * c[:, None, :]) @ others
    g, u = sizes
    size = a.abs() @ g.square() + 2.0 * b.abs() @ (g * u) + c.abs() @ u.square()
    return 0.5 * (form + form.mT), product_error(8 * sum(rows.shape), size)


def affine_noise(step: Affine, source: Value, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, " F"]:
    """Rounding of an affine map at the centre and of the covector that goes back through it."""
    size = frobenius(step.weight) * (2.0 * source.size[t])
    bias = 0.0 if step.bias is None else length(step.bias)
    return grow(gamma(sum(step.weight.shape) + 16) * length(v) * (2.0 * size + bias))
