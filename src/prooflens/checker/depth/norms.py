"""Norms as sites: LayerNorm, which takes the mean away first (P), and RMSNorm (P the identity).

Let m = Pc, q = ‖m‖² + d·eps = dσ², η = d·eps/q. A move u of the input is split, Pu = ym + u⊥ with u⊥ = Πu ⊥ m,
because **a norm hardly sees what moves its input along m**. With κ = ‖u⊥‖²/q and R = (1 − η)(1 + y)² + κ + η the
output is γ ⊙ (m(1 + y) + u⊥)/(σ√R) + β, its tangent γ ⊙ (ηy m + u⊥)/σ, and what the tangent misses is exactly

    r = γ ⊙ [u⊥(R^(−½) − 1) + m((1 + y)R^(−½) − 1 − ηy)]/σ.

Let |y| ≤ Y < 1, κ ≤ κ̄. Convexity of R^(−½) gives R^(−½) − 1 = −(1 − η)y + s with −½(y² + κ) ≤ s ≤ y²/(1 + y). And (1
+ y)R^(−½) = (1 + D)^(−½) with D = κ(1 + y)^(−2) + η((1 + y)^(−2) − 1) ≥ −2ηY, so it is 1 − ½D + g, 0 ≤ g ≤ ⅜(1 −
2ηY)^(−5/2)D²; with the Taylor series of (1 + y)^(−2) the second bracket is −½κ + t,

    |t| ≤ T = ½κ̄f + (3/2)ηY² + 2ηY³(1 − Y)^(−5) + ⅜(1 − 2ηY)^(−5/2)(κ̄(1 + f) + ηf)²,      f = (1 − Y)^(−2) − 1.

So r = γ ⊙ [−(m·u)Πu/q − ½κm]/σ (second order, as (1 − η)y = m·u/q) + γ ⊙ [Πu s + m t]/σ.

Where the input may turn around (Y is not small, or m is 0, as where a cut edge leaves nothing), one bound is left: the
norm's derivative is γ ⊙ (P − mmᵀ/q)/σ at every point, σ ≥ √eps, so ‖r‖ ≤ 2 max|γ|‖u‖/√eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flint import arb

from prooflens.checker.balls import Ball
from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    frobenius,
    gamma,
    largest,
    length,
    meeting,
    raised,
    scaled,
    support,
    total,
    up,
)
from prooflens.checker.depth.values import Value


@dataclass(eq=False)
class NormSite:
    """A norm of a value, for all tokens.

    Attributes:
        source: what is normed.
        gain: γ [d].
        bias: β [d].
        eps: the constant under the root.
        centred: whether the mean is taken away.
    """

    source: Value
    gain: Array
    bias: Array
    eps: float
    centred: bool

    def __post_init__(self) -> None:
        c, d = self.source.c, self.source.c.shape[-1]
        x = Ball(c)
        m = x - x.mean() if self.centred else x
        square = (m * m).sum()
        q = square + Ball(float(d)) * self.eps
        n = (q * Ball(float(d)).each(lambda v: 1 / v)).each(arb.rsqrt)
        out = m * n * self.gain + self.bias
        self.d, self.m, self.output = d, m.mid, out.mid
        self.m_error = length(m.rad)
        self.q, self.q_low = q.mid[:, 0], q.low[:, 0]
        self.inverse = n.high[:, 0]
        """At least 1/σ."""
        self.eta = up((d * self.eps) / np.maximum(q.low[:, 0], 2.0**-900))
        self.m_square = np.maximum(square.low[:, 0], 0.0)
        self.most_gain = float(np.abs(self.gain).max())
        eye = np.eye(d)
        P = Ball(eye) - Ball(eye).mean() if self.centred else Ball(eye)
        jacobians = []
        for t in range(len(c)):
            along = m[t][:, None] * m[t][None] * q[t].each(lambda v: 1 / v)
            jacobians.append((P - along) * n[t] * Ball(self.gain[:, None]))
        self.jacobian = np.stack([J.mid for J in jacobians])
        self.slant = np.array([float(frobenius(J.rad)) for J in jacobians])
        # The output's own rounding, and that of the Jacobian over moves of the input.
        self.blur = up(length(out.rad) + self.slant * self.source.size)

    @cached_property
    def noise(self) -> Array:
        """Rounding of the output and of its Jacobians, and what was there before: ‖γ ⊙ (P − mmᵀ/q)/σ‖₂ ≤ max|γ|/σ."""
        source, most = self.source, frobenius(self.jacobian)
        earlier = (self.most_gain * self.inverse + self.slant) * source.noise
        return up(self.blur + earlier + gamma(self.d + 16) * most * 2.0 * source.size)

    def made(self, name: str) -> Value:
        """The output as a value; its remainder, rounding included, is a source of that name."""
        source, d = self.source, self.d
        source.chain.shapes[name] = total([self.shape, ball(self.noise, d)])
        held = {s: self.jacobian @ J for s, J in source.jacobians.items()}
        held[name] = np.broadcast_to(np.eye(d), (len(self.m), d, d))
        return Value(source.chain, self.output, held, np.zeros(len(self.m)))

    @cached_property
    def unit(self) -> Array:
        """m at length 1, up to rounding."""
        size = np.sqrt(np.square(self.m).sum(-1, keepdims=True))
        return np.asarray(self.m / np.maximum(size, 2.0**-400))

    @cached_property
    def tilt(self) -> Array:
        """At least ‖Π − Π̂‖, the computed projection against the real one.

        Π = P − uuᵀ with u = m/‖m‖, and û errs by at most 2‖m − m̂‖/‖m‖ + γ_{d+8}; uuᵀ by thrice that. Applying Π̂ rounds
        by γ_{4d}.
        """
        return up(
            6.0 * self.m_error / np.sqrt(np.maximum(self.m_square, 2.0**-900)) + gamma(16 * self.d + 64)
        )

    def _across(self, x: Array) -> Array:
        """Π̂x along the last axis."""
        x = x - x.mean(-1, keepdims=True) if self.centred else x
        along = (x * self.unit.reshape(len(self.m), *(1,) * (x.ndim - 2), self.d)).sum(-1, keepdims=True)
        return np.asarray(x - along * self.unit.reshape(len(self.m), *(1,) * (x.ndim - 2), self.d))

    @cached_property
    def projection(self) -> Array:
        """Π̂ [S, d, d]."""
        eye = np.broadcast_to(np.eye(self.d), (len(self.m), self.d, self.d))
        return self._across(eye)

    @cached_property
    def across(self) -> tuple[Array, Array]:
        """The shapes of ΠAα and of Πe."""
        parts = (self.source.P, self.source.tau), (self.source.E, self.source.epsilon)
        found = [self._without(M, most) for M, most in parts]
        return found[0], found[1]

    def _without(self, M: Array, most: Array) -> Array:
        """The shape of Πx for x ∈ E(M), ‖x‖ ≤ most: ΠMΠ, by rows and then by columns, and what Π̂ is off by.

        Each of the two steps subtracts a mean and a multiple of û, and rounds by γ_{8d} of ‖M‖_F.
        """
        across = self._across(np.swapaxes(self._across(M), -1, -2))
        found = raised(across, gamma(16 * self.d + 64) * 4.0 * frobenius(M))
        return total([found, ball(self.tilt * most, self.d)])

    @cached_property
    def ranges(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """sup |m·Aα|/q and |m·e|/q, sup ‖ΠAα‖, ‖Πe‖, Y and κ̄."""
        source = self.source
        a, e = source.along(self.m)
        slips = self.m_error * source.tau, self.m_error * source.epsilon
        low = np.maximum(self.q_low, 2.0**-900)
        l_a, l_e = up((a + slips[0]) / low), up((e + slips[1]) / low)
        far_a, far_e = (up(np.sqrt(largest(M))) for M in self.across)
        Y = up((a + e + slips[0] + slips[1]) / np.maximum(self.m_square, 2.0**-900))
        return l_a, l_e, far_a, far_e, Y, up((far_a + far_e) ** 2 / low)

    @cached_property
    def beyond(self) -> tuple[Array, Array]:
        """sup |s| and T; infinite where the input may turn around."""
        *_, Y, kappa = self.ranges
        safe = np.minimum(Y, 0.5)
        eta = self.eta
        s = np.maximum(0.5 * (safe**2 + kappa), safe**2 / (1.0 - safe))
        f = up((1.0 - safe) ** -2) - 1.0 + 2.0**-40
        D = kappa * (1.0 + f) + eta * f
        bottom = np.maximum(1.0 - 2.0 * eta * safe, 2.0**-20) * (1.0 - 2.0**-40)
        T = (
            0.5 * kappa * f
            + 1.5 * eta * safe**2
            + 2.0 * eta * safe**3 * (1.0 - safe) ** -5
            + 0.375 * bottom**-2.5 * D**2
        )
        known = (Y < 0.5) & (2.0 * eta * Y < 0.9) & np.isfinite(kappa)
        return np.where(known, up(up(s)), np.inf), np.where(known, up(up(T)), np.inf)

    def quadratic(self, t: int) -> Quadratic:
        """The second order in a move of the input, −γ ⊙ [(m·u)Πu + ½‖Πu‖²m]/(qσ): its floats, as they are computed."""
        scale = self.inverse[t] / self.q[t]
        Pi, d = self.projection[t], self.d
        C = np.concatenate(
            (np.diag(-scale * self.gain), np.tile((-0.5 * scale * self.gain * self.m[t])[:, None], d)), 1
        )
        L = np.concatenate((np.tile(self.m[t], (d, 1)), Pi))
        return Quadratic(C, L, np.concatenate((Pi, Pi)))

    def quadratic_error(self, v: Array, t: int, far: float) -> float:
        """What v·q(x) is off by, ‖x‖ ≤ far, because the floats of `quadratic` are not the real numbers.

        m, Π, q and 1/σ each err by a small share: ‖m − m̂‖/‖m‖, the tilt, and 2⁻⁴⁰ for what `Ball` gives to fewer than
        10⁴ roundings; together at most 2(m_error/‖m‖ + tilt + 2⁻⁴⁰) of ‖γ ⊙ v‖(3/2)‖m‖‖x‖²/(qσ).
        """
        size = np.sqrt(np.maximum(self.m_square[t], 2.0**-900))
        share = 2.0 * (self.m_error[t] / size + self.tilt[t] + 2.0**-40)
        most = float(length(v * self.gain)) * 2.0 * float(length(self.m[t])) * far**2
        return float(
            up(np.asarray(4.0 * share * most * self.inverse[t] / np.maximum(self.q_low[t], 2.0**-900)))
        )

    @cached_property
    def shape(self) -> Array:
        """An ellipsoid of the whole remainder r."""
        l_a, l_e, _, _, _, kappa = self.ranges
        s, T = self.beyond
        whole = self.source.whole
        V = self._without(whole, self.source.tau + self.source.epsilon)
        V = raised(self.gain[:, None] * V * self.gain, gamma(8) * self.most_gain**2 * frobenius(V))
        pair = self._pair(whole)
        far, low = self.source.tau + self.source.epsilon, np.maximum(self.q_low, 2.0**-900)
        off = (self.tilt * (l_a + l_e) * far + self.m_error * far**2 / low) * self.most_gain
        pair = total([pair, ball(up(off), self.d)])
        # (m·u)Πu/q as a product of forms, or as a scalar of at most l_a + l_e times Πu.
        together = scaled(V, up((l_a + l_e) ** 2))
        less = np.trace(pair, axis1=1, axis2=2) < np.trace(together, axis1=1, axis2=2)
        moved = total([np.where(less[:, None, None], pair, together), scaled(V, up(s**2))])
        gm = self.gain * self.m
        fixed = raised(gm[:, :, None] * gm[:, None, :], gamma(8) * length(gm) ** 2)
        slip = ball(up(self.m_error * self.most_gain * (0.5 * kappa + T)), self.d)
        fixed = total([scaled(fixed, up((0.5 * kappa + T) ** 2)), slip])
        found = scaled(total([moved, fixed]), up(self.inverse**2))
        return np.where(np.isfinite(s)[:, None, None], found, ball(self.steepest, self.d))

    @cached_property
    def steepest(self) -> Array:
        """At least ‖r‖, whatever the input does."""
        if not self.eps > 0.0:
            return np.full(len(self.m), np.inf)
        return up(2.0 * self.most_gain * up(self.source.tau + self.source.epsilon) / np.sqrt(self.eps))

    def _pair(self, P: Array) -> Array:
        """The shape of γ ⊙ (m·u)Πu/q for u ∈ E(P): ½(mPm·V + hhᵀ), V = ΓΠPΠΓ and h = ΓΠPm (`quadratics`)."""
        V = self._across(np.swapaxes(self._across(P), -1, -2)) * (self.gain[:, None] * self.gain)
        h = self._across((P @ self.m[..., None])[..., 0][:, None])[:, 0] * self.gain
        mPm = up(support(P, self.m) ** 2)
        found = 0.5 * (mPm[:, None, None] * V + h[:, :, None] * h[:, None, :])
        error = gamma(32 * self.d + 128) * 8.0 * self.most_gain**2 * (frobenius(P) * length(self.m)) ** 2
        return scaled(raised(found, error), up(1.0 / np.maximum(self.q_low, 2.0**-400) ** 2))

    @cached_property
    def inner(self) -> Array:
        """sup ΠAα·Πe."""
        a, e = self.across
        return meeting(a, e)

    def _seen(self, v: Array, t: int) -> tuple[float, float, float, float]:
        """At least |γ ⊙ v ⊥ m|·Aα and ·e over the region, |γ ⊙ v·m|, and ‖γ ⊙ v‖."""
        source, w = self.source, v * self.gain
        crosswise = w - w.mean() if self.centred else w
        crosswise = crosswise - (crosswise @ self.unit[t]) * self.unit[t]
        size = float(length(w))
        a = support(source.P[t], crosswise) + self.tilt[t] * size * source.tau[t]
        e = support(source.E[t], crosswise) + self.tilt[t] * size * source.epsilon[t]
        along = abs(float(w @ self.m[t])) + size * (
            self.m_error[t] + gamma(self.d + 8) * float(length(self.m[t]))
        )
        return float(a), float(e), float(along), size

    def rest(self, v: Array, t: int) -> float:
        """At least |v·r − v·q(Aα)| for a covector v [d] at token t, r the source that `made` makes."""
        source, (a, e, along, size) = self.source, self._seen(v, t)
        l_a, l_e, _, far_e, _, _ = (x[t] for x in self.ranges)
        s, T = (x[t] for x in self.beyond)
        low = np.maximum(self.q_low[t], 2.0**-900)
        found = (a + e) * (s + l_e) + e * l_a
        found = found + along * (T + (self.inner[t] + 0.5 * far_e**2) / low)
        off = self.quadratic_error(v, t, source.tau[t]) + float(length(v)) * float(self.noise[t])
        if not np.isfinite(found):
            # |v·r| and |v·q(Aα)| by themselves; the latter is ‖γ ⊙ v‖(3/2)‖m‖‖Aα‖²/(qσ) at most.
            second = size * 2.0 * float(length(self.m[t])) * source.tau[t] ** 2 * self.inverse[t] / low
            return float(up(np.asarray(float(length(v)) * self.steepest[t] + second + off)))
        return float(up(np.asarray(found * self.inverse[t] + off)))

    def rest_alone(self, v: Array, t: int) -> float:
        """At least |v·r − v·q(Aα + e)|: what is beyond second order, wherever the input is."""
        source, (a, e, along, _) = self.source, self._seen(v, t)
        s, T = (x[t] for x in self.beyond)
        off = self.quadratic_error(v, t, source.tau[t] + source.epsilon[t])
        found = ((a + e) * s + along * T) * self.inverse[t] + off + float(length(v)) * float(self.noise[t])
        return float(up(np.asarray(found))) if np.isfinite(found) else np.inf
