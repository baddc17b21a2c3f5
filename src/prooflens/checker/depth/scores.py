"""Attention scores as a site: a_ij = scale·q_i·k_j + bias_ij, a product of two values of a chain.

With q = q₀ + δq and k = k₀ + δk, δ = Aα + e, a score moves by scale·(q₀·δk + δq·k₀ + δq·δk): a linear part (`rows`),
what e adds to that, and products. Keys may have fewer heads than queries; head h then reads group h // share. Where a
model caps its scores, all of this is times the cap's slope λ, and what the cap adds stands apart (`caps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prooflens.checker.depth.caps import Caps, capped
from prooflens.checker.depth.shapes import (
    Array,
    ball,
    frobenius,
    gamma,
    gram,
    image,
    length,
    meeting,
    support,
    total,
    up,
)
from prooflens.checker.depth.values import Value, factor_weights


@dataclass(eq=False)
class Heads:
    """A value cut into heads.

    Attributes:
        value: the value [S, G·c].
        count: G.
        readers: how many query heads there are; each group serves readers // G of them.
    """

    value: Value
    count: int
    readers: int

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each query head."""
        return np.arange(self.readers) // (self.readers // self.count)

    @property
    def width(self) -> int:
        """c."""
        return int(self.value.c.shape[1]) // self.count

    @cached_property
    def c(self) -> Array:
        """Per query head [S, H, c]."""
        return self.value.c.reshape(len(self.value.c), self.count, -1)[:, self.groups]

    @cached_property
    def A(self) -> Array:  # noqa: N802
        """The linear parts, each group once [S, G, c, p]."""
        return self.value.linear.reshape(*self.c.shape[:1], self.count, self.width, -1)

    def blocks(self, name: str) -> Array:
        """The shapes `P`, `E` or `whole` head by head [S, H, c, c]."""
        return {"P": self.own, "E": self.rest, "whole": self.whole}[name]

    @cached_property
    def rest(self) -> Array:
        """The shapes of what is not linear [S, H, c, c]."""
        n = self.width
        if self.value.parent is None:
            M = self.value.E
            parts = [M[:, g * n : (g + 1) * n, g * n : (g + 1) * n] for g in range(self.count)]
        else:
            source, W = self.value.parent
            slip = ball(self.value.slip, n)
            rows = [W[g * n : (g + 1) * n] for g in range(self.count)]
            parts = [total([image(row, source.E), slip]) for row in rows]
        return np.stack(parts, 1)[:, self.groups]

    @cached_property
    def whole(self) -> Array:
        """The shapes of all moves [S, H, c, c]."""
        return total([self.own, self.rest])

    @cached_property
    def own(self) -> Array:
        """The shapes of the linear parts, with weights of the factors for each head [S, H, c, c]."""
        found = np.stack([[gram(A * factor_weights(A)) for A in token] for token in self.A])
        return total([found, ball(self.value.slip, self.width)[:, None]])[:, self.groups]

    @cached_property
    def A_size(self) -> Array:  # noqa: N802
        """‖A‖_F√p by token and query head: at least sup ‖Aα‖."""
        return up(frobenius(self.A) * self.A.shape[-1] ** 0.5)[:, self.groups]


@dataclass(eq=False)
class ScoreSite:
    """All scores of a layer.

    Attributes:
        q: queries.
        k: keys.
        scale: the factor of q·k.
        bias: added to scores [H, S, S].
        mask: whether query i of head h may attend to key j [H, S, S].
        cap: the number that scores are capped at; None if they are not.
    """

    q: Heads
    k: Heads
    scale: float
    bias: Array
    mask: NDArray[np.bool_]
    cap: float | None = None

    @cached_property
    def raw(self) -> Array:
        """Scores at the centre in front of the cap, as they are computed [H, S, S]."""
        return np.asarray(np.einsum("ihc,jhc->hij", self.q.c, self.k.c) * self.scale + self.bias)

    @cached_property
    def caps(self) -> Caps | None:
        """What the cap makes of the scores; None without one."""
        if self.cap is None:
            return None
        rows = [np.abs(self.raw_rows(i)).sum(-1) for i in range(len(self.q.c))]
        rho = up(np.stack(rows, 1) * (1.0 + gamma(self.q.A.shape[-1] + 8)))
        met = [self._met(i) for i in range(len(self.q.c))]
        E = up(self._raw_noise + sum(self._raw_products) + self.scale * np.stack(met, 1))
        return capped(self.cap, self.raw, rho, E, self.mask)

    def _met(self, i: int) -> Array:
        """At least |q₀·e_k| + |k₀·e_q| of the scores of a query [H, S]."""
        near = support(self.q.blocks("E")[i][:, None], self.k.c.swapaxes(0, 1))
        return near + support(self.k.blocks("E").swapaxes(0, 1), self.q.c[i][:, None])

    @cached_property
    def center(self) -> Array:
        """Scores at the centre, as they are computed [H, S, S]."""
        return self.raw if self.caps is None else self.caps.value

    @cached_property
    def factors(self) -> Array:
        """What products of moves of queries and keys are times, score by score [H, S, S]."""
        return np.full(self.mask.shape, self.scale) if self.caps is None else self.scale * self.caps.slope

    def row(self, h: int, i: int, j: int) -> Array:
        """The linear part of one score [p]."""
        return (
            self.raw_row(h, i, j) if self.caps is None else self.caps.slope[h, i, j] * self.raw_row(h, i, j)
        )

    def raw_row(self, h: int, i: int, j: int) -> Array:
        """The linear part of one score in front of the cap [p]."""
        g = int(self.k.groups[h])
        return np.asarray(self.scale * (self.q.c[i, h] @ self.k.A[j, g] + self.k.c[j, h] @ self.q.A[i, h]))

    def rows(self, i: int) -> Array:
        """The linear parts of the scores of a query [H, S, p]; 0 where the mask hides a key."""
        return self.raw_rows(i) if self.caps is None else self.caps.slope[:, i, :, None] * self.raw_rows(i)

    def raw_rows(self, i: int) -> Array:
        """The linear parts of the scores of a query in front of the cap [H, S, p]; 0 where the mask hides a key."""
        H, S, _ = self.mask.shape
        found = np.zeros((H, S, self.q.A.shape[-1]))
        for h, g in enumerate(self.k.groups):
            keys = np.flatnonzero(self.mask[h, i])
            found[h, keys] = self.q.c[i, h] @ self.k.A[keys, g] + self.k.c[keys, h] @ self.q.A[i, h]
        return np.asarray(self.scale * found)

    @cached_property
    def noise(self) -> Array:
        """Rounding of a score at the centre and of its linear part over the factors [H, S, S].

        A cap takes what a score rounds by times λ ≤ 1, and the product of λ and a row rounds once more.
        """
        return self._raw_noise if self.caps is None else 2.0 * self._raw_noise

    @cached_property
    def _raw_noise(self) -> Array:
        """The same in front of the cap."""
        n = gamma(2 * self.q.width + 16)
        q, k = (length(x.c).T for x in (self.q, self.k))
        far_q, far_k = self.q.A_size.T, self.k.A_size.T
        sizes = q[:, :, None] * (k + 2.0 * far_k)[:, None] + 2.0 * far_q[:, :, None] * k[:, None]
        return up(n * (self.scale * sizes + np.abs(self.bias)))

    @cached_property
    def products(self) -> tuple[Array, Array]:
        """At least λ·scale·|A_qα·A_kα|, and what e adds to the product of moves, by head, query and key [H, S, S]."""
        first, beyond = self._raw_products
        return (
            (first, beyond)
            if self.caps is None
            else (up(self.caps.slope * first), up(self.caps.slope * beyond))
        )

    @cached_property
    def _raw_products(self) -> tuple[Array, Array]:
        """The same in front of the cap."""
        names = ("P", "E", "whole")
        q, k = ({name: x.blocks(name).swapaxes(0, 1) for name in names} for x in (self.q, self.k))
        pairs = [(q["P"], k["P"]), (q["whole"], k["E"]), (q["E"], k["P"])]
        first, far, near = (meeting(x[:, :, None], y[:, None]) for x, y in pairs)
        return up(self.scale * first * self.mask), up(self.scale * (far + near) * self.mask)
