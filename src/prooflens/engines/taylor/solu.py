r"""SoLU as a site of `taylor`: y_k = x_k s_k with s = softmax(x) over a token's neurons.

At the centre c with x = c + u, write b = u − Σ s⁰u for s⁰ = softmax(c), w = Σ s⁰b² and Z = Σ s⁰e^b ≥ 1. As s_k =
s⁰_k e^{b_k}/Z,

    y = s⁰ ⊙ (c + u + c ⊙ b) + q(u) + x,      q_k = s⁰_k (u_k b_k + ½c_k (b_k² − w)),
    x_k = s⁰_k ((c_k + u_k) τ_k + ½u_k (b_k² − w)),      τ_k = e^{b_k}/Z − 1 − b_k − ½(b_k² − w).

The first part is the tangent, and q the second order: u_k b_k + ½c_k b_k² are neurons b that gate and are gated by
themselves, so their ellipsoid is that of a gated network (`taylor.gates`), and w is one number for all neurons. With
|b_k| ≤ W_k, |u_k| ≤ U_k, e^b = 1 + b + ½b² + t, |t_k| ≤ e^{W_k}W_k³/6, T = |Σ s⁰t| and ζ = Z − 1 ≤ ½w + T,

    |τ_k| ≤ t_k + T + ζ²/(1 + ζ) + W_k e^{W_k} ζ/(1 + ζ),

because τ = t + (½w − ω) − ω(e^b − 1) for ω = ζ/(1 + ζ), and Σ s⁰b = 0. So x lies in a box. w is bounded jointly, by
one eigenvalue of the ellipsoid of the neurons, since they cannot all be far from their mean at once.

**Rounding.** Weights are used as computed. They differ from s⁰ by a share η (`relaxations.solu`), or by less than
2⁻⁹⁰⁰ where they vanish; η times the sizes of all terms of first and second order is added to the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, raised, support, total, weights_of_sum
from prooflens.engines.relaxations.norms import (
    CHUNK,
    frobenius,
    grow,
    identity,
    largest,
    length,
    product_error,
    top_eigenvalue,
)
from prooflens.engines.relaxations.solu import LARGEST, VANISHED, WIDEST
from prooflens.engines.taylor.gates import Quarters, gated_cross, gated_power, quarters
from prooflens.engines.taylor.squares import Squares
from prooflens.engines.taylor.values import Value
from prooflens.models.sites import Solu
from prooflens.numerics import gamma
from prooflens.numerics.rounding import UNIT_ROUNDOFF
from prooflens.queries.outward import LIBM_ROUNDINGS


class Spread(NamedTuple):
    """Bounds of w where neurons move by their linear part, by e, or by both."""

    a: Float[Tensor, " S"]
    e: Float[Tensor, " S"]
    whole: Float[Tensor, " S"]


@dataclass(eq=False)
class SoluSite:
    """A SoLU in a chain.

    Attributes:
        step: the step.
        source: the neurons before it.
    """

    step: Solu
    source: Value

    def __post_init__(self) -> None:
        c = self.source.u
        self.n = c.shape[-1]
        self.s = torch.softmax(c, -1)
        self.slope, self.drag = self.s * (1.0 + c), self.s * c
        self.far = (c.amax(-1, keepdim=True) - c).amax(-1)
        self.eta = (2.0 * self.far + 4.0 * self.n + 64.0 + 4.0 * LIBM_ROUNDINGS) * UNIT_ROUNDOFF

    @property
    def output(self) -> Float[Tensor, "S n"]:
        """y at the centre."""
        return self.drag

    @cached_property
    def jacobian(self) -> Float[Tensor, "S n n"]:
        """The Jacobian of the output by the neurons."""
        made: Tensor = torch.diag_embed(self.slope) - self.drag[:, :, None] * self.s[:, None, :]
        return made

    @cached_property
    def centring(self) -> Float[Tensor, "S n n"]:
        """The map from u to b, by the weights as computed."""
        return identity(self.s, self.n) - self.s[:, None, :]

    @cached_property
    def moves(self) -> tuple[Float[Tensor, "S n"], Float[Tensor, "S n"]]:
        """Bounds of |u| and of |b|, neuron by neuron: by exact linear part plus e, or by both at once."""
        source = self.source
        root, J = source.root, source.J
        size = frobenius(J) * frobenius(root.N) * length(root.half_widths)
        # BJ, (BJ)N and the sum over factors are sums of n, d and p terms; a row of |B||J| is at most 2‖J‖ long.
        slip = (gamma(2 * sum(root.N.shape[1:]) + self.n + 64) * 2.0 * size)[:, None]
        found = []
        for rows, shapes in (
            (J, (source.shape, source.shape_e)),
            (J - self.s[:, None, :] @ J, (self._centred(source.shape), self._centred(source.shape_e))),
        ):
            joint, apart = (grow(M.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()) for M in shapes)
            exact = torch.stack(
                [
                    (part @ N[:, first:last]).abs_() @ root.half_widths[first:last]
                    for part, N, (first, last) in zip(rows, root.N, root.columns, strict=True)
                ]
            )
            found.append(torch.minimum(joint, grow(exact + slip + apart)))
        U, W = found
        return grow(U), grow(W + self._turned(U)[:, None])

    def _centred(self, M: Float[Tensor, "S n n"]) -> Float[Tensor, "S n n"]:
        """The shape of b for u in an ellipsoid."""
        return torch.cat([self._quarters(M, some).g for some in self._chunks()])

    def _quarters(self, M: Float[Tensor, "S n n"], t: Int[Tensor, " T"]) -> Quarters:
        """Inner products of b and u for u in an ellipsoid."""
        return quarters(self.centring[t], identity(M, self.n).expand(len(t), -1, -1), M[t])

    def _turned(self, U: Float[Tensor, "S n"]) -> Float[Tensor, " S"]:
        """Bound how far the mean of u by computed weights is from that by real ones."""
        return grow(2.0 * self.eta * (self.s * U).sum(-1) + VANISHED * U.sum(-1))

    @cached_property
    def spread(self) -> Spread:
        """Bounds of w = Σ s⁰b²: an eigenvalue, or neuron by neuron."""
        U, W = self.moves
        turned, root = self._turned(U), self.s.sqrt()
        found = []
        for M in (self.source.shape_a, self.source.shape_e, self.source.shape):
            K = self._centred(M) * root[:, :, None] * root[:, None, :]
            # Two products with roots round by 8u of an entry at most, and entries are at most their diagonals' roots.
            top = largest(0.5 * (K + K.mT)) + gamma(32) * K.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sum(-1)
            joint = (top.sqrt() + turned).square() * (1.0 + 4.0 * self.eta)
            apart = (self.s * W.square()).sum(-1) * (1.0 + 4.0 * self.eta)
            found.append(grow(torch.minimum(joint, apart) + self.n * VANISHED * W.amax(-1).square()))
        return Spread(*found)

    @cached_property
    def sizes(self) -> tuple[Float[Tensor, "S n"], Float[Tensor, "S n"]]:
        """The terms of first and of second order with absolute values, for rounding."""
        U, _ = self.moves
        c, s = self.source.u.abs(), self.s
        moved = U + (s * U).sum(-1, keepdim=True)
        first = s * (c + (1.0 + c) * moved)
        second = s * (U * moved + 0.5 * c * (moved.square() + (s * moved.square()).sum(-1, keepdim=True)))
        return grow(first), grow(second)

    @cached_property
    def box(self) -> Float[Tensor, "S n"]:
        """|x|, and what the coefficients of first and second order round by; ∞ where nothing is known."""
        U, W = self.moves
        w, c, eta = self.spread.whole[:, None], self.source.u.abs(), self.eta[:, None]
        usable = ((W <= WIDEST) & (U <= LARGEST) & (c <= LARGEST)).all(-1) & (self.far <= LARGEST)
        W = torch.where(usable[:, None], W, 0.0)
        grown = W.exp() * (1.0 + LIBM_ROUNDINGS * 2.0 * UNIT_ROUNDOFF)
        t = grown * W**3 / 6.0
        s = self.s * (1.0 + 4.0 * eta)
        T = torch.minimum((s * t).sum(-1, keepdim=True), (W * grown).amax(-1, keepdim=True) * w / 6.0)
        zeta = 0.5 * w + T
        tau = t + T + (zeta + W * grown) * (zeta / (1.0 + zeta))
        beyond = s * ((c + U) * tau + 0.5 * U * torch.maximum(W.square(), w))
        first, second = self.sizes
        rounding = 4.0 * (eta + gamma(16)) * first + 16.0 * (eta + gamma(self.n + 64)) * second
        lost = 4.0 * VANISHED * (1.0 + c + U) * (1.0 + tau + W + U.amax(-1, keepdim=True)).square()
        return torch.where(usable[:, None], grow(beyond + rounding + lost), torch.inf)

    @cached_property
    def shape(self) -> Float[Tensor, "S n n"]:
        """An ellipsoid of the remainder, rounding included."""
        return torch.cat([self._shape(some) for some in self._chunks()])

    @cached_property
    def cross_shape(self) -> Float[Tensor, "S n n"]:
        """An ellipsoid of what e adds to the second order at Aα."""
        return torch.cat([self._cross(some) for some in self._chunks()])

    def _chunks(self) -> Sequence[Int[Tensor, " T"]]:
        """Split the tokens so that the neurons' matrices of a chunk fit into memory."""
        room = 8 * CHUNK if self.s.is_cuda else CHUNK // 4
        found: Sequence[Tensor] = torch.arange(len(self.s)).split(max(1, room // (2 * self.n * self.n)))
        return found

    def _shape(self, t: Int[Tensor, " T"]) -> Float[Tensor, "T n n"]:
        second = gated_power(self._quarters(self.source.shape, t), 0.5 * self.drag[t], self.s[t], 2)
        box = self.box[t]
        alone = torch.diag_embed(grow(box.square() * weights_of_sum(box)))
        along = self._along(t, self.spread.whole[t])
        return total([second, along, alone, ball(self.blur[t], self.n)])

    def _cross(self, t: Int[Tensor, " T"]) -> Float[Tensor, "T n n"]:
        a, e = (self._quarters(M, t) for M in (self.source.shape_a, self.source.shape_e))
        factors = 0.5 * self.drag[t], self.s[t]
        of_a, of_e = self.spread.a[t], self.spread.e[t]
        along = self._along(t, grow(2.0 * (of_a * of_e).sqrt() + of_e))
        return total([gated_cross(a, e, *factors), gated_power(e, *factors, 2), along])

    def _along(self, t: Int[Tensor, " T"], most: Float[Tensor, " T"]) -> Float[Tensor, "T n n"]:
        """The shape of ½s⁰cw for |w| up to `most`."""
        row = self.drag[t] * (0.5 * most)[:, None]
        return raised(row[:, :, None] * row[:, None, :], gamma(16) * length(row).square())

    @cached_property
    def blur(self) -> Float[Tensor, " S"]:
        """The radius of what the rounding of linear parts adds to the remainder."""
        J = frobenius(self.jacobian)
        return grow(product_error(2 * self.n, J * self.source.stretch) + J * self.source.noise)

    def pull(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F n"]:
        """Return the covector at the neurons.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
        """
        back: Tensor = v * self.slope[t] - (v @ self.drag[t])[:, None] * self.s[t]
        return back

    def pull_error(self, t: int) -> Tensor:
        """Bound the rounding of a covector's way back, per length of the covector.

        Args:
            t: the token.
        """
        most = self.slope[t].abs().amax() + length(self.drag[t]) * length(self.s[t])
        return product_error(2 * self.n, 4.0 * most)

    def quadratic(
        self, v: Float[Tensor, "F n"], t: int, J: Float[Tensor, "n m"] | None = None
    ) -> tuple[Float[Tensor, "F m m"], Float[Tensor, " F"]]:
        """Return Q with ½xᵀQx the second order v·q for a move x of the root, and its rounding in the 2-norm.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
            J: the Jacobian of the neurons by x; None for that by the root.
        """
        J = self.source.J[t] if J is None else J
        s, drag = self.s[t], self.drag[t]
        moved = J - s @ J
        own = v * drag
        curve = own - own.sum(-1, keepdim=True) * s
        Q = moved.T @ ((v * s)[:, :, None] * J) + 0.5 * moved.T @ (curve[:, :, None] * moved)
        # Rows of J, of length j, and of `moved`, of at most j + m: a sum over neurons of products of three.
        rows = length(J)
        far = rows + (s * rows).sum()
        most = (v.abs() * s) @ (rows * far) + (own.abs() + own.abs().sum(-1, keepdim=True) * s) @ far.square()
        return Q + Q.mT, product_error(8 * (self.n + J.shape[1]) + 64, 8.0 * most)

    def rest(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, " F"]:
        """Bound |v·r − ½xᵀQx|, rounding of v included.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
        """
        return grow(support(self.cross_shape[t], v) + self.own_rest(v, t))

    def own_rest(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, " F"]:
        """Bound |v·r − ½uᵀQu| for the whole move u = Aα + e of the neurons, rounding of v included.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
        """
        return grow(v.abs() @ self.box[t] + self.noise(v, t))

    def secant(
        self, v: Float[Tensor, "F n"], t: int, J: Float[Tensor, "n m"] | None = None
    ) -> tuple[Float[Tensor, "F m m"], Float[Tensor, " F"]]:
        """Return the second order, as `quadratic` does: `squares` bounds what that leaves.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
            J: the Jacobian of the neurons by x; None for that by the root.
        """
        return self.quadratic(v, t, J)

    def squares(self, v: Float[Tensor, "F n"], t: int) -> Squares:
        """Bound |v·r − ½uᵀQu| for the whole move u = Aα + e of the neurons, by a constant.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
        """
        return Squares.none(self.n, self.own_rest(v, t))

    def bound(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, "F 2"]:
        """Bound v·r and −v·r over the region by one eigenvalue per covector and sign, with rounding.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
        """
        Q, error = self.quadratic(v, t, self.source.ellipsoid[t])
        sides = torch.stack([top_eigenvalue(Q) + error, top_eigenvalue(-Q) + error], -1)
        return grow(0.5 * sides + self.own_rest(v, t)[:, None])

    def noise(self, v: Float[Tensor, "F n"], t: int) -> Float[Tensor, " F"]:
        """Bound the rounding of the covector at the neurons, seen over the region.

        Its terms are those of the first order, γ_n of them each; 8 is to spare.

        Args:
            v: covectors at the output, shape [F, n].
            t: the token.
        """
        return grow(gamma(2 * self.n + 64) * 8.0 * (v.abs() @ self.sizes[0][t]))
