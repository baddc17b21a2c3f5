"""SoLU as a site: y_k = x_k s_k with s = softmax(x) over the neurons of a token.

Around c write x = c + u, s⁰ = softmax(c), b = u − Σ s⁰u (so Σ s⁰b = 0), w = Σ s⁰b². As s = s⁰e^b/Z with Z = Σ s⁰e^b,

    y_k = s⁰_k c_k + s⁰_k (u_k + c_k b_k) + q_k(u) + s⁰_k ((c_k + u_k)τ_k + ½u_k(b_k² − w)),
    q_k = s⁰_k (u_k b_k + ½c_k(b_k² − w)),      τ_k = e^{b_k}/Z − 1 − b_k − ½(b_k² − w).

Let |u| ≤ U, |b| ≤ W, w ≤ ω, and e^b = 1 + b + ½b² + t with |t| ≤ T = e^W W³/6. Then ζ = Z − 1 = ½w + Σ s⁰t is at
least 0 (Jensen) and at most ½ω + Σ s⁰T, and since 1/Z = 1 − ζ/(1 + ζ),

    |τ_k| = |t_k − Σ s⁰t + ζ²/(1 + ζ) − (e^{b_k} − 1)ζ/(1 + ζ)| ≤ T_k + Σ s⁰T + (ζ + W_k e^{W_k}) ζ/(1 + ζ).

Floats ŝ within σ of s⁰ stand for s⁰ in slope and second order; what that changes, term by term, joins the box.
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
    box,
    frobenius,
    gamma,
    image,
    largest,
    length,
    support,
    supports,
    total,
    up,
)
from prooflens.checker.depth.values import Value

FAR = 300.0
"""Neurons that move further from their mean are not given to exponentials: nothing is known there."""


@dataclass(eq=False)
class SoluSite:
    """A SoLU of a value, for all tokens.

    Attributes:
        source: the neurons.
    """

    source: Value

    def __post_init__(self) -> None:
        c = self.source.c
        self.n = c.shape[-1]
        x = Ball(c)
        e = (x - c.max(-1, keepdims=True)).each(arb.exp)
        s = e * e.sum().each(lambda v: 1 / v)
        out = s * c
        self.s, self.output = s.mid, out.mid
        self.sigma = up(s.rad + gamma(8) * s.mid)
        """At least |s⁰ − ŝ|, and four roundings of ŝ."""
        slopes = s * (x + 1.0)
        jacobians = []
        for t in range(len(c)):
            pulled = out[t][:, None] * s[t][None]
            jacobians.append(slopes[t][:, None] * np.eye(self.n) - pulled)
        self.jacobian = np.stack([J.mid for J in jacobians])
        self.slant = np.array([float(frobenius(J.rad)) for J in jacobians])
        self.blur = up(length(out.rad) + self.slant * self.source.size)

    @cached_property
    def centring(self) -> Array:
        """The floats that map u to b [S, n, n]."""
        return np.asarray(np.eye(self.n) - self.s[:, None, :])

    @cached_property
    def moves(self) -> tuple[Array, Array, Array]:
        """U, W, and at least |b̂ − b|, b̂ the move that the floats of `centring` give."""
        U = self._reach([np.eye(self.n)] * len(self.s), 1.0)
        off = (self.sigma * U).sum(-1) + gamma(8) * (U.max(-1) + (self.s * U).sum(-1))
        W = self._reach(list(self.centring), 2.0) + up(off)[:, None]
        return U, up(W), up(off)

    def _reach(self, rows: list[Array], most: float) -> Array:
        """sup |rows·(u(α) − c)| token by token: by factors and e, or by both at once; rows are at most `most` long."""
        y = self.source
        found = []
        for t, R in enumerate(rows):
            exact = np.abs((R @ y.J[t]) @ y.chain.N[t]).sum(-1)
            size = most * float(frobenius(y.J[t]) * y.chain.reach[t])
            exact = exact + gamma(sum(y.chain.N.shape[1:]) + self.n + 16) * size
            apart, joint = supports(y.E[t], R), supports(y.whole[t], R)
            found.append(np.minimum(up(exact + apart), joint))
        return up(np.stack(found))

    @cached_property
    def omega(self) -> Array:
        """At least w: an eigenvalue, since neurons cannot all be far from their mean at once, or neuron by neuron."""
        _, W, off = self.moves
        root = np.sqrt(self.s) * (1.0 + 2.0**-40)
        K = np.stack(
            [image(r[:, None] * B, M) for r, B, M in zip(root, self.centring, self.source.whole, strict=True)]
        )
        joint = (np.sqrt(up(largest(K))) + 1.01 * off) ** 2 + (self.sigma * W**2).sum(-1)
        apart = ((self.s + self.sigma) * W**2).sum(-1)
        return up(up(np.minimum(joint, apart)))

    @cached_property
    def rest_box(self) -> Array:
        """What slope and second order leave of every neuron, and what their floats are off by."""
        U, W, off = self.moves
        w, c, delta = self.omega[:, None], np.abs(self.source.c), off[:, None]
        known = (W < FAR).all(-1) & np.isfinite(U).all(-1) & np.isfinite(self.omega)
        W = np.where(known[:, None], W, 0.0)
        grown = Ball(W).each(arb.exp).high
        T = up(grown * W**3 / 6.0)
        s, sigma = self.s + self.sigma, self.sigma
        mean = (s * T).sum(-1, keepdims=True)
        zeta = up(0.5 * w + mean)
        tau = up(T + mean + (zeta + W * grown) * zeta / (1.0 + zeta))
        beyond = s * ((c + U) * tau + 0.5 * U * np.maximum(W**2, w))
        # The floats of second order: ŝ for s⁰, b̂ for b, and a few roundings of each coefficient.
        far = U + (s * U).sum(-1, keepdims=True)
        spread = (s * far**2).sum(-1, keepdims=True)
        changed = (sigma * far**2).sum(-1, keepdims=True) + 2.0 * delta * (s * far).sum(-1, keepdims=True)
        slip = sigma * U * far + s * U * delta
        slip = slip + 0.5 * c * (sigma * (far**2 + spread) + s * (2.0 * far * delta + changed))
        slip = slip + gamma(16) * s * (U * far + c * (far**2 + spread))
        return np.where(known[:, None], up(up(beyond + slip)), np.inf)

    @cached_property
    def noise(self) -> Array:
        """Rounding of the output and of its Jacobians, and what was there before."""
        source, most = self.source, frobenius(self.jacobian)
        earlier = (most + self.slant) * source.noise
        return up(self.blur + earlier + gamma(self.n + 16) * most * 2.0 * source.size)

    def made(self, name: str) -> Value:
        """The output as a value; its remainder, rounding included, is a source of that name."""
        source, n = self.source, self.n
        source.chain.shapes[name] = total([self.shape, ball(self.noise, n)])
        held = {s: self.jacobian @ J for s, J in source.jacobians.items()}
        held[name] = np.broadcast_to(np.eye(n), (len(self.s), n, n))
        return Value(source.chain, self.output, held, np.zeros(len(self.s)))

    def quadratic(self, t: int) -> Quadratic:
        """The second order q of token t, in a move of its neurons."""
        s, drag, B = self.s[t], self.s[t] * self.source.c[t], self.centring[t]
        curve = 0.5 * (np.diag(drag) - drag[:, None] * s)
        return Quadratic(
            np.concatenate((np.diag(s), curve), 1),
            np.concatenate((np.eye(self.n), B)),
            np.concatenate((B, B)),
        )

    @cached_property
    def shape(self) -> Array:
        """An ellipsoid of the whole remainder."""
        found = []
        for t, rest in enumerate(self.rest_box):
            if np.isfinite(rest).all():
                second = self.quadratic(t).shape(self.source.whole[t])
                found.append(total([second, box(np.eye(self.n), rest)]))
            else:
                found.append(np.full((self.n, self.n), np.inf))
        return np.stack(found)

    @cached_property
    def _rests(self) -> list[Array]:
        """Ellipsoids of what second order at Aα leaves, without the box."""
        source, found = self.source, []
        for t in range(len(self.s)):
            form = self.quadratic(t)
            found.append(total([form.cross(source.P[t], source.E[t]), form.shape(source.E[t])]))
        return found

    def rest(self, v: Array, t: int) -> float:
        """At least |v·r − v·q(Aα)| for a covector v [n] at token t, r the source that `made` makes."""
        if not np.isfinite(self.rest_box[t]).all():
            return np.inf
        return float(up(np.asarray(float(support(self._rests[t], v)) + self.rest_alone(v, t))))

    def rest_alone(self, v: Array, t: int) -> float:
        """At least |v·r − v·q(Aα + e)|: what is beyond second order, wherever the neurons are."""
        found = np.abs(v) @ self.rest_box[t] + float(length(v)) * float(self.noise[t])
        return float(up(np.asarray(found))) if np.isfinite(found) else np.inf
