"""Feed-forward networks as sites: W_d φ(W_u x + b_u) + b_d, or W_d (φ(W_g x + b_g) ⊙ (W_u x + b_u)) + b_d.

Neuron by neuron the activation is replaced by a float polynomial (`activations`) around a float pre-activation ĥ; u
is how far the real pre-activation is from ĥ, b its bound. Plainly, the remainder is

    r = W_d(a₂u² + a₃u³ + x),   |x| ≤ rest,

where u lies in an ellipsoid of shape K: a₂u² + a₃u³ has the Gram matrices K∘K and K∘K∘K. With a gate, û + w the other
factor,

    (φ̂ + φ̂′u + a₂u² + a₃u³ + x)(û + w) − φ̂û − φ̂′ûu − φ̂w = a₂ûu² + φ̂′uw  +  [(a₃u³ + x)û + (a₂u² + a₃u³ + x)w],

and the bracket is kept as a box.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prooflens.checker.depth.activations import expansion
from prooflens.checker.depth.quadratics import Quadratic
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    box,
    frobenius,
    gamma,
    hadamard,
    image,
    length,
    raised,
    support,
    supports,
    total,
    up,
)
from prooflens.checker.depth.values import Value

Affine = tuple[Array, Array]
"""A weight [o, n] and a bias [o]."""


@dataclass(eq=False)
class NetworkSite:
    """A feed-forward network of a value, for all tokens.

    Attributes:
        source: what it reads.
        function: the name of the activation.
        bent: the map to what the activation reads.
        down: the map to the output.
        other: the map to what is gated; None without a gate.
    """

    source: Value
    function: str
    bent: Affine
    down: Affine
    other: Affine | None = None

    def __post_init__(self) -> None:
        self.h, self.b, delta = self._hidden(*self.bent)
        at, b = expansion(self.function, self.h, self.b), self.b
        self.at, self.post, self.slope, self.third = at, at.value, at.slope, at.third
        second, third, slope = np.abs(at.second), np.abs(at.third), np.abs(at.slope)
        # The site's input moves by x and the neuron by u = Wx + δ; u² and u³ differ from (Wx)² and (Wx)³ by at most 3δb
        # and 6δb².
        slip = delta * (slope + 3.0 * second * b + 6.0 * third * b**2)
        self.rest_box = up(at.rest + slip)
        if self.other is not None:
            g, w, tilt = self._hidden(*self.other)
            size, low = np.abs(g), third * b**3 + at.rest
            self.post, self.slope, self.other_slope = at.value * g, at.slope * g, at.value
            self.gated, self.third = g, np.zeros_like(b)
            bracket = low * size + (second * b**2 + low) * w
            slip = slip * (size + w) + tilt * (np.abs(at.value) + slope * b)
            # Products of floats round once each: post, slope and the coefficients of second order.
            slip = slip + gamma(8) * (
                np.abs(at.value) * size + slope * (b * size + b * w) + second * b**2 * size
            )
            self.rest_box = up(up(bracket + slip))

    def _hidden(self, W: Array, bias: Array) -> tuple[Array, Array, Array]:
        """Float pre-activations ĥ, how far the real ones may be from them on the region, and at the centre."""
        y = self.source
        h = y.c @ W.T + bias
        apart, joint = supports(y.E, W), supports(y.whole, W)
        rows = W @ y.J
        moves = zip(rows, y.chain.N, y.chain.ends, strict=True)
        exact = np.stack([np.abs(row @ N[:, :end]).sum(-1) for row, N, end in moves])
        sizes = length(W) * (frobenius(y.J) * y.chain.reach)[:, None]
        exact = exact + gamma(sum(y.chain.N.shape[1:]) + W.shape[1] + 16) * sizes
        error = up(gamma(W.shape[1] + 8) * (length(W) * length(y.c)[:, None] + np.abs(bias)))
        # By factors and e, or by both at once.
        return h, up(np.minimum(up(exact + apart), joint) + error), error

    @cached_property
    def jacobian(self) -> Array:
        """The stand-in's slope [S, o, d], as it is computed."""
        W_d = self.down[0]
        found = (W_d * self.slope[:, None, :]) @ self.bent[0]
        if self.other is not None:
            found = found + (W_d * self.other_slope[:, None, :]) @ self.other[0]
        return np.asarray(found)

    @cached_property
    def _blur(self) -> Array:
        """Rounding of the output at the centre, and of the Jacobian over moves of the input."""
        W_d, bias = self.down
        n, d = len(self.bent[0]), self.bent[0].shape[1]
        most = frobenius(W_d)
        slopes = frobenius(np.abs(self.slope)[..., None] * self.bent[0])
        if self.other is not None:
            slopes = slopes + frobenius(np.abs(self.other_slope)[..., None] * self.other[0])
        centre = gamma(n + 16) * (most * length(self.post) + length(bias))
        return up(centre + gamma(n + d + 64) * 4.0 * most * slopes * self.source.size)

    @cached_property
    def noise(self) -> Array:
        """Rounding of the output and of its Jacobians, and what was there before."""
        return up(self._blur + frobenius(self.jacobian) * self.source.noise)

    def made(self, name: str) -> Value:
        """The output as a value; its remainder, rounding included, is a source of that name."""
        source, o = self.source, len(self.down[0])
        source.chain.shapes[name] = total([self.shape, ball(self.noise, o)])
        held = {s: self.jacobian @ J for s, J in source.jacobians.items()}
        held[name] = np.broadcast_to(np.eye(o), (len(self.h), o, o))
        return Value(source.chain, self.post @ self.down[0].T + self.down[1], held, np.zeros(len(self.h)))

    def quadratic(self, t: int) -> Quadratic:
        """The second order in a move of the input of token t."""
        W_d, W = self.down[0], self.bent[0]
        if self.other is None:
            return Quadratic(W_d * self.at.second[t], W, W)
        C = np.concatenate((W_d * (self.at.second[t] * self.gated[t]), W_d * self.at.slope[t]), 1)
        neurons = np.arange(len(W))
        left, right = np.concatenate((neurons, neurons)), np.arange(2 * len(W))
        return Quadratic.among(C, np.concatenate((W, self.other[0])), left, right)

    @cached_property
    def shape(self) -> Array:
        """An ellipsoid of the whole remainder."""
        return np.stack([self._shape(t) for t in range(len(self.h))])

    def _shape(self, t: int) -> Array:
        if not np.isfinite(self.rest_box[t]).all():
            return np.full((len(self.down[0]),) * 2, np.inf)
        parts = [box(self.down[0], self.rest_box[t])]
        if self.other is not None:
            return total([*parts, self.quadratic(t).shape(self.source.whole[t])])
        K = image(self.bent[0], self.source.whole[t])
        square, second = hadamard(K, K), self.at.second[t]
        parts.append(self._weighed(square, second))
        parts += [self._weighed(hadamard(square, K), self.third[t])] if self.third[t].any() else []
        return total(parts)

    def _weighed(self, M: Array, a: Array) -> Array:
        """W_d diag(a) M diag(a) W_dᵀ."""
        held = raised(a[:, None] * M * a, gamma(8) * float(np.abs(a).max()) ** 2 * frobenius(M))
        return image(self.down[0], held)

    def _cubic(self, t: int) -> Array:
        """The shape of W_d a₃u³."""
        K = image(self.bent[0], self.source.whole[t])
        return self._weighed(hadamard(hadamard(K, K), K), self.third[t])

    @cached_property
    def _rests(self) -> list[Array | None]:
        return [None] * len(self.h)

    def _rest_shape(self, t: int) -> Array:
        """An ellipsoid of what second order at Aα leaves, without the box."""
        held = self._rests[t]
        if held is None:
            form, source = self.quadratic(t), self.source
            parts = [form.cross(source.P[t], source.E[t]), form.shape(source.E[t])]
            parts += [self._cubic(t)] if self.third[t].any() else []
            self._rests[t] = held = total(parts)
        return held

    def rest(self, v: Array, t: int) -> float:
        """At least |v·r − v·q(Aα)| for a covector v [o] at token t, r the source that `made` makes."""
        if not np.isfinite(self.rest_box[t]).all():
            return np.inf
        return float(up(np.asarray(float(support(self._rest_shape(t), v)) + self._boxed(v, t))))

    def rest_alone(self, v: Array, t: int) -> float:
        """At least |v·r − v·q(Aα + e)|: what is beyond second order, wherever the input is."""
        if not np.isfinite(self.rest_box[t]).all():
            return np.inf
        cubic = float(support(self._cubic(t), v)) if self.third[t].any() else 0.0
        return float(up(np.asarray(cubic + self._boxed(v, t))))

    def _boxed(self, v: Array, t: int) -> float:
        """What a covector sees of the box and of rounding."""
        weights = np.abs(v @ self.down[0]) + gamma(len(v) + 8) * float(length(v)) * length(self.down[0].T)
        return float(up(np.asarray(weights @ self.rest_box[t] + float(length(v)) * float(self.noise[t]))))
