"""Values along a chain: how each token's vector depends on the factors, and what is left.

A chain starts at a *root*, x(α) = c + Nα + e with |α_k| ≤ 1 and e ∈ E(B), and goes token by token through norms and
networks. A value of the chain is

    u(α) = c + J·(Nα) + Σ_s J_s r_s + noise,

where s runs over the sources of the chain: the root's own e and the remainder r_s of every site before the value,
each known to lie in an ellipsoid. c, N and all J are floats and exact by definition; the *noise*, a ball, holds what
rounding makes of that equation. So linear maps act on remainders exactly, and residual connections cancel what they
do.

**Weights of factors.** If Σ 1/w_k² ≤ 1, then |α_k| ≤ 1 for all k implies α = w ⊙ α̂ with ‖α̂‖₂ ≤ 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from prooflens.checker.depth.origins import Origin, carried_on, kept_apart
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    frobenius,
    gamma,
    gram,
    image,
    length,
    shares,
    support,
    total,
    trace,
    up,
)

ROOT = "root"
"""The name of the source that a root's own e is."""
FLOOR = 0.01
"""Columns shorter than this share of the mean are weighed as if they were not; any positive weights are valid."""


def factor_weights(rows: Array) -> Array:
    """w with Σ 1/w² ≤ 1 for which rows·diag(w²)·rowsᵀ has about the least trace; rows is [..., n, p]."""
    sizes = np.sqrt(np.square(rows).sum(-2))
    return np.sqrt(shares(sizes + FLOOR * sizes.mean(-1, keepdims=True))) * (1.0 + 2.0**-40)


@dataclass(eq=False)
class Chain:
    """A root and the remainders of the sites behind it.

    Attributes:
        c: the root at the centre [S, d].
        N: its linear part [S, d, p].
        shapes: the shapes of the sources by name, each [S, m, m].
        origins: what the root's own e is made of; none if it is known by its shape alone.
        keeps: whether the origins are needed again behind the next root, since two networks go on from here.
    """

    c: Array
    N: Array
    shapes: dict[str, Array] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    keeps: bool = False

    @cached_property
    def spread(self) -> Array:
        """The shape of Nα, with weights of the factors for each token."""
        found = [gram(N * factor_weights(N)) for N in self._live]
        return np.stack(found)

    @cached_property
    def ends(self) -> list[int]:
        """By token, behind which factor none moves it: in causal networks later tokens' do not."""
        moved = [np.flatnonzero(N.any(0)) for N in self.N]
        return [int(factors[-1]) + 1 if len(factors) else 1 for factors in moved]

    @property
    def _live(self) -> list[Array]:
        return [N[:, np.any(N != 0.0, 0)] if N.any() else N[:, :1] for N in self.N]

    @cached_property
    def reach(self) -> Array:
        """At least sup ‖Nα‖₂ and ‖N‖_F√p, by token: for rounding."""
        return up(frobenius(self.N) * self.N.shape[-1] ** 0.5)

    def followed_by(self, c: Array, N: Array, own: Array, A: Array) -> Chain:
        """The chain that begins where tokens of this one are mixed; its root's e comes by its origins.

        Args:
            c: the new root at the centre [T, d].
            N: its linear part [T, d, p].
            own: the shapes of what its tokens miss, but for this root's e [T, d, d].
            A: its Jacobian by this root [T, d, S, n].
        """
        if ROOT not in self.shapes:
            return Chain(c, N, {ROOT: own}, [Origin(own)], self.keeps)
        held = list(self.origins) if self.keeps else self.origins
        carried = carried_on(held or [Origin(self.shapes[ROOT])], A)
        own = total([own, ball(carried.noise, c.shape[1])])
        return Chain(c, N, {ROOT: total([own, *carried.reached])}, kept_apart(carried, own), self.keeps)

    @cached_property
    def start(self) -> Value:
        """The root as a value."""
        S, d = self.c.shape
        return Value(self, self.c, {ROOT: np.broadcast_to(np.eye(d), (S, d, d))}, np.zeros(S))


@dataclass(eq=False)
class Value:
    """u(α) = c + J Nα + Σ_s J_s r_s + noise, for all tokens.

    Attributes:
        chain: the root and the sources.
        c: at the centre [S, n].
        jacobians: by source [S, n, m]; that of the root maps both Nα and the root's e.
        noise: the radius of rounding [S].
    """

    chain: Chain
    c: Array
    jacobians: Mapping[str, Array]
    noise: Array
    parent: tuple[Value, Array] | None = None
    """The value that this one is a linear map of, and the map, the same for all tokens [n, m]."""

    @property
    def J(self) -> Array:  # noqa: N802
        """The Jacobian by the root."""
        return self.jacobians[ROOT]

    @cached_property
    def linear(self) -> Array:
        """A = JN as it is computed [S, n, p]; `slip` is what that rounds by."""
        N, (S, n, _) = self.chain.N, self.J.shape
        found = np.zeros((S, n, N.shape[-1]))
        for t, end in enumerate(self.chain.ends):
            found[t, :, :end] = self.J[t] @ N[t, :, :end]
        return found

    @cached_property
    def slip(self) -> Array:
        """Noise, and the rounding of the product JN over the factors."""
        return up(self.noise + gamma(self.J.shape[-1] + 8) * frobenius(self.J) * self.chain.reach)

    @cached_property
    def P(self) -> Array:  # noqa: N802
        """The shape of the linear part, as it is and as it is computed."""
        found = (
            image(self.J, self.chain.spread)
            if self.parent is None
            else image(self.parent[1], self.parent[0].P)
        )
        return total([found, ball(self.slip, self.c.shape[-1])])

    @cached_property
    def E(self) -> Array:  # noqa: N802
        """The shape of what is not linear, rounding included."""
        slip = ball(self.slip, self.c.shape[-1])
        if self.parent is not None:
            return total([image(self.parent[1], self.parent[0].E), slip])
        parts = [image(J, self.chain.shapes[s]) for s, J in self.jacobians.items() if s in self.chain.shapes]
        return total([*parts, slip])

    @cached_property
    def whole(self) -> Array:
        """The shape of u(α) − c."""
        return total([self.P, self.E])

    @cached_property
    def tau(self) -> Array:
        """At least sup ‖JNα‖₂, for rounding."""
        return up(np.sqrt(trace(self.P)))

    @cached_property
    def epsilon(self) -> Array:
        """At least sup ‖u(α) − c − JNα‖₂, for rounding."""
        return up(np.sqrt(trace(self.E)))

    @cached_property
    def spans(self) -> dict[str, Array]:
        """‖J_s‖_F sup ‖r_s‖ by source, for rounding."""
        shapes = self.chain.shapes
        return {
            s: up(frobenius(J) * np.sqrt(trace(shapes[s]))) for s, J in self.jacobians.items() if s in shapes
        }

    @cached_property
    def missed(self) -> Array:
        """At least sup ‖u(α) − c − JNα‖₂, source by source and with what every number rounds by: for rounding."""
        return up(sum(self.spans.values(), self.slip))

    @cached_property
    def size(self) -> Array:
        """At least sup ‖u(α)‖₂, ‖c‖₂ + ‖J‖_F sup‖Nα‖₂ and the like: for rounding."""
        moves = sum(self.spans.values(), frobenius(self.J) * self.chain.reach)
        return up(length(self.c) + moves + self.noise)

    def mapped(self, W: Array, bias: Array | float = 0.0, most: Array | float | None = None) -> Value:
        """Wu + bias, W [o, n] for all tokens or [S, o, n]; `most` bounds the 2-norms of W and |W| (None: Frobenius)."""
        c = (W @ self.c[..., None])[..., 0] + bias
        most = frobenius(W) if most is None else most
        shift = length(np.atleast_1d(bias)).max()
        noise = most * self.noise + gamma(W.shape[-1] + 16) * (2.0 * most * self.size + shift)
        held = {s: W @ J for s, J in self.jacobians.items()}
        return Value(self.chain, c, held, up(noise), (self, W) if W.ndim == 2 else None)

    def plus(self, other: Value) -> Value:
        """The sum of two values of a chain."""
        held = dict(self.jacobians)
        for s, J in other.jacobians.items():
            held[s] = held[s] + J if s in held else J
        noise = self.noise + other.noise + gamma(8) * (self.size + other.size)
        return Value(self.chain, self.c + other.c, held, up(noise))

    def shifted(self, offset: Array) -> Value:
        """u + offset."""
        noise = up(self.noise + gamma(4) * (length(self.c) + length(offset)))
        return Value(self.chain, self.c + offset, self.jacobians, noise)

    def blurred(self, radius: Array) -> Value:
        """The same value, known to a ball around it only.

        Args:
            radius: the radius of the ball, by token.
        """
        if not radius.any():
            return self
        return Value(self.chain, self.c, self.jacobians, up(self.noise + radius), self.parent)

    def rows(self, w: Array) -> Array:
        """At least sup |w·(JNα)| for w [S, n], one covector per token: the exact sum over the factors."""
        read = (w[:, None, :] @ self.J) @ self.chain.N
        error = (
            gamma(sum(self.chain.N.shape[1:]) + self.J.shape[1] + 16)
            * length(w)
            * frobenius(self.J)
            * self.chain.reach
        )
        return up(np.abs(read[:, 0]).sum(-1) + error)

    def along(self, w: Array) -> tuple[Array, Array]:
        """At least sup |w·(JNα)| and sup |w·e|, for w [S, n]."""
        return self.rows(w), support(self.E, w)


def sum_of(values: Sequence[Value]) -> Value | None:
    """The sum of values of a chain; None of none.

    Args:
        values: the values.
    """
    found = None
    for value in values:
        found = value if found is None else found.plus(value)
    return found
