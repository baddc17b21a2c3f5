"""Feed-forward networks as sites of `taylor`: what becomes of covectors, and what they may miss.

The output moves by J u + r(u) for u = Aα + e. `shape` gives an ellipsoid of r(u), all directions at once, and `bound`
gives sup ±v·r(u) for a given v, which is tighter and costs an eigenvalue per covector.

- For a covector, a = W_dᵀv: φ(h + u) − φ(h) − φ′u = ½c(u)u² with |c(u) − c̄| ≤ κ for |u| ≤ b (`derivatives.secants`),
  so v·r ≤ ½ξᵀLᵀW_uᵀ diag(ac̄ + |a|κ) W_uLξ over the ellipsoid Lξ of the input: *one* eigenvalue holds second order,
  third order and all cross terms, and neurons cancel before it is taken. A gate g ⊙ u adds 2aφ′ between h and u,
  raised likewise. In the factors, ½Σ ac̄u² joins a form's Hessian and ½Σ |a|κu² what is above it (`taylor.squares`).
- A ReLU whose kink is in reach has no useful tangent. Its stand-in is the chord over |u| ≤ b, lowered by half its
  height over the kink: slope (b + h)/2b, at the centre (b − |h|)²/4b above φ(h), and never off by more than
  (b² − h²)/4b, which is added neuron by neuron.
- The jump of features, 1 above 0 and 0 elsewhere, is a constant where 0 is out of reach. Its stand-in is ½ where 0 is
  in reach, rounding of h included, and never off by more than ½, added neuron by neuron.
- ReLU² is its own second order up to the kink. Beyond it (h + u)² ≤ (b − |h|)² is missed, and φ″ changes by 2.
- As a vector, r = W_d(½φ″u² + au³ + bu⁴ + x) with x in a box (`derivatives.expansions`; neurons that move far stop at
  an earlier order): with K the shape of the pre-activations, a term auᵏ has the shape W_d diag(a) K^∘ᵏ diag(a) W_dᵀ.

Rounding of the computed output and of the computed covector is added where it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.relaxations.derivatives import (
    DERIVATIVE_ERROR,
    THIRD,
    Secants,
    derivatives,
    expansions,
    kinked,
    secants,
)
from prooflens.engines.relaxations.ellipsoids import (
    ball,
    box,
    image,
    support,
    supports_of,
    total,
    weights_of_sum,
)
from prooflens.engines.relaxations.norms import (
    CHUNK,
    frobenius,
    grow,
    identity,
    length,
    product_error,
)
from prooflens.engines.taylor.gates import (
    gated_cross,
    gated_power,
    quarters,
    summed,
    weighted,
)
from prooflens.engines.taylor.network_forms import covector_bound, second_order, squares_above
from prooflens.engines.taylor.segments import FeedForward
from prooflens.engines.taylor.squares import Squares
from prooflens.engines.taylor.values import UNREAD, Value, times
from prooflens.models.sites import ACTIVATIONS, Affine
from prooflens.numerics import gamma


class Orders(NamedTuple):
    """Coefficients of g³ and g⁴, and with a gate of g²u and g³u, of each neuron, and a bound of what is beyond."""

    cubic: Float[Tensor, "T n"]
    quartic: Float[Tensor, "T n"]
    third: Float[Tensor, "T n"] | None
    fourth: Float[Tensor, "T n"] | None
    rest: Float[Tensor, "T n"]


WIDEST_ON_CPU = 4096
"""On a CPU, matrices of more neurons take longer than what they gain is worth."""

Part = Literal["whole", "beyond Aα"]
"""A part of a remainder: all of it, or without its second order at Aα."""


@dataclass(eq=False)
class NetworkSite:
    """A feed-forward network in a chain; its source lies in an ellipsoid u + L{‖ξ‖ ≤ 1} for each token.

    Attributes:
        step: the network.
        source: the value that it reads.
    """

    step: FeedForward
    source: Value

    def __post_init__(self) -> None:
        step = self.step
        self._boxes: dict[int, Tensor] = {}
        self.h, self.b, self.b_e = self._hidden(step.bent)
        known = derivatives(step.function, self.h)
        self.first, self.second, self.third, _ = known
        found = expansions(step.function, self.h, self.b, known)
        self.cubics, self.quartics, self.gaps = (torch.stack(part) for part in zip(*found, strict=True))
        # The order that leaves least, neuron by neuron; second order is always kept.
        self.order = self.gaps[1:].argmin(0) + 2
        self.post = ACTIVATIONS[step.function](self.h)
        b = self.b
        self.curve, *_, spread = secants(step.function, self.h, b, known)
        self.spread = grow(spread)
        self.kink = torch.zeros_like(b)
        if step.function == "relu":
            self._chords()
        if step.function == "jump":
            still = b < self.h.abs()  # NaN is not still
            self.post = torch.where(still, self.post, 0.5)
            self.kink = torch.where(still, self.kink, 0.5)
        if step.function == "relu2":
            # All orders from the second on are the same.
            self.order = torch.full_like(self.order, 4)
        if step.gate is not None:
            self.other, self.b_other, self.other_e = self._hidden(step.up)
            self.d_first = grow(
                (self.second.abs() + DERIVATIVE_ERROR) * b
                + 0.5 * THIRD[step.function] * b.square()
                + DERIVATIVE_ERROR
            )
            if step.function == "relu2":
                self.d_first = grow(self.d_first + 2.0 * kinked(self.h, b))

    @cached_property
    def rows(self) -> Float[Tensor, "S n d"]:
        """The rows of the pre-activations, by the ellipsoid of the input."""
        return self.step.bent.weight @ self.source.ellipsoid

    @cached_property
    def row_sizes(self) -> Float[Tensor, "S n"]:
        """Bounds of the lengths of the rows, term by term."""
        return grow(length(self.step.bent.weight) * frobenius(self.source.ellipsoid)[:, None])

    @cached_property
    def other_rows(self) -> Float[Tensor, "S n d"]:
        """The rows of what is gated."""
        return self.step.up.weight @ self.source.ellipsoid

    @cached_property
    def other_sizes(self) -> Float[Tensor, "S n"]:
        """Bounds of the lengths of the rows of what is gated, term by term."""
        return grow(length(self.step.up.weight) * frobenius(self.source.ellipsoid)[:, None])

    def _chords(self) -> None:
        """Take chords for tangents where a kink is in reach; where the reach is not finite nothing is known."""
        h, b = self.h, self.b
        bent = b > h.abs()
        width = torch.where(bent & b.isfinite(), b, 1.0)
        self.first = torch.where(bent, (0.5 * (h / width + 1.0)).clamp(0.0, 1.0), self.first)
        self.post = torch.where(bent, self.post + (width - h.abs()).square() / (4.0 * width), self.post)
        # The slope rounds by a few u, over |u| ≤ width, and so does the height of the stand-in at the centre: γ_16.
        height = grow((width - h.abs()) * (width + h.abs()) / (4.0 * width)) + gamma(16) * width
        self.kink = torch.where(bent, torch.where(b.isfinite(), height, torch.inf), self.kink)

    def _hidden(self, affine: Affine) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre-activations, how far each may move, by exact linear part plus e or by both at once, and its e."""
        y, W = self.source, affine.weight
        half_widths, N, columns = y.root.half_widths, y.root.N, y.root.columns
        h = torch.nn.functional.linear(y.u, W, affine.bias)
        joint, apart = (supports_of(M, W) for M in (y.shape, y.shape_e))
        size = length(W) * (frobenius(y.J) * frobenius(N) * length(half_widths))[:, None]
        exact = torch.stack(
            [
                (row @ part[:, first:last]).abs_() @ half_widths[first:last]
                for row, part, (first, last) in zip(times(W, y.J), N, columns, strict=True)
            ]
        )
        # WJ, (WJ)N and the sum over factors are sums of W.shape[1], d and p terms.
        rounding = gamma(2 * sum(N.shape[1:]) + W.shape[1] + 64) * size
        far = torch.minimum(joint, grow(exact + rounding + apart))
        size = length(W) * y.size[:, None] + h.abs()
        size = size if affine.bias is None else size + affine.bias.abs()
        return h, grow(far + gamma(W.shape[1] + 16) * size), grow(apart + rounding)

    @cached_property
    def down(self) -> Tensor:
        """W_d."""
        down = self.step.down
        return identity(self.h, self.h.shape[-1]) if down is None else down.weight

    @property
    def output(self) -> Tensor:
        """The network's output at the centre."""
        post = self.post if self.step.gate is None else self.post * self.other
        return post if self.step.down is None else self.step.down(post).flatten(1)

    @cached_property
    def jacobian(self) -> Float[Tensor, "S o i"]:
        """The Jacobian of the output by the network's input."""
        step = self.step
        inner = self.first if step.gate is None else self.first * self.other
        B = (self.down * inner[:, None, :]) @ step.bent.weight
        return B if step.gate is None else B + (self.down * self.post[:, None, :]) @ step.up.weight

    @cached_property
    def shape(self) -> Float[Tensor, "S o o"]:
        """An ellipsoid of the remainder, rounding included."""
        return torch.cat([self._shape(some, "whole") for some in self._chunks()])

    @cached_property
    def rest_shape(self) -> Float[Tensor, "S o o"]:
        """An ellipsoid of what the second order at Aα leaves of the remainder, rounding included."""
        return torch.cat([self._shape(some, "beyond Aα") for some in self._chunks()])

    def box_shape(self, t: int) -> Float[Tensor, "o o"]:
        """Return an ellipsoid of what the expansions of all neurons leave of the remainder, rounding included.

        Args:
            t: the token.
        """
        if t not in self._boxes:
            rest = self.orders(torch.tensor([t])).rest[0]
            self._boxes[t] = total([box(self.down, rest), ball(self.blur[t], len(self.down))])
        return self._boxes[t]

    def _chunks(self) -> Sequence[Tensor]:
        """Split the tokens so that the neurons' matrices of a chunk fit into memory."""
        n = self.h.shape[1] * (1 if self.step.gate is None else 2)
        room = 8 * CHUNK if self.h.is_cuda else CHUNK // 4
        found: Sequence[Tensor] = torch.arange(len(self.h)).split(max(1, room // (n * n)))
        return found

    def orders(self, t: Int[Tensor, " T"]) -> Orders:
        """Return each neuron's expansion beyond second order for some tokens.

        φ against the move of what it gates is expanded to one order less.

        Args:
            t: the tokens.
        """
        b, order, kink = self.b[t], self.order[t], self.kink[t]
        slack = DERIVATIVE_ERROR * (b + b.square() + b**3 + b**4)
        cubic, quartic, rest = self._expansion(order, t)
        rest = rest + slack + kink
        if self.step.gate is None:
            return Orders(cubic, quartic, None, None, grow(rest))
        other = self.other[t]
        lower, _, less = self._expansion(order - 1, t)
        rest = rest * other.abs() + self.b_other[t] * (less + kink + slack + DERIVATIVE_ERROR)
        third = 0.5 * self.second[t] * (order >= 3)
        return Orders(cubic * other, quartic * other, third, lower, grow(rest))

    def _shape(self, t: Int[Tensor, " T"], part: Part) -> Float[Tensor, "T o o"]:
        step, first, second = self.step, self.first[t], self.second[t]
        source, W, U = self.source, step.bent.weight, self.source.shape[t]
        cubic, quartic, third, fourth, rest = self.orders(t)
        if third is None or fourth is None:
            K = image(W, U)
            square = K * K
            terms = [summed([weighted(square * K, cubic)]), summed([weighted(square * square, quartic)])]
            if part == "whole":
                terms.append(summed([weighted(square, 0.5 * second)]))
            elif part == "beyond Aα":
                A, B = image(W, source.shape_a[t]), image(W, source.shape_e[t])
                terms += [summed([weighted(A * B, second)]), summed([weighted(B * B, 0.5 * second)])]
        else:
            both = quarters(W, step.up.weight, U)
            terms = [gated_power(both, cubic, third, 3), gated_power(both, quartic, fourth, 4)]
            a, c = 0.5 * second * self.other[t], first
            if part == "whole":
                terms.append(gated_power(both, a, c, 2))
            elif part == "beyond Aα":
                x, e = (quarters(W, step.up.weight, M[t]) for M in (source.shape_a, source.shape_e))
                terms += [gated_cross(x, e, a, c), gated_power(e, a, c, 2)]
        found = self._at_output(terms, rest)
        return total([found, ball(self.blur[t], len(self.down))])

    @cached_property
    def blur(self) -> Float[Tensor, " S"]:
        """The radius of what rounding adds to the remainder."""
        source, J = self.source, frobenius(self.jacobian)
        noise = product_error(2 * self.step.bent.weight.shape[1], J * source.stretch) + J * source.noise
        return grow(noise + self._centre_noise)

    def _expansion(
        self, order: Int[Tensor, "T n"], t: Int[Tensor, " T"]
    ) -> tuple[Float[Tensor, "T n"], Float[Tensor, "T n"], Float[Tensor, "T n"]]:
        """Return the coefficients of u³ and u⁴ in each neuron's expansion of its order, and what that leaves."""
        parts = (self.cubics, self.quartics, self.gaps)
        cubic, quartic, gap = (part[:, t].gather(0, order[None] - 1)[0] for part in parts)
        return cubic, quartic, gap

    def _at_output(
        self, shapes: list[Float[Tensor, "T n n"]], rest: Float[Tensor, "T n"]
    ) -> Float[Tensor, "T o o"]:
        """Return the shape of W_d times a sum of members of ellipsoids and of a box, weighed by their sizes there."""
        sizes = self._overlap.diagonal().sqrt()
        alone = grow(rest.square() * weights_of_sum(rest * sizes))
        spans = [torch.einsum("tnm,nm->t", M, self._overlap).clamp(min=0.0) for M in shapes]
        spans = [alone @ sizes.square(), *spans]
        c = weights_of_sum(torch.stack(spans, -1).sqrt())
        M = total(shapes, c[:, 1:])
        M.diagonal(dim1=-2, dim2=-1).add_(grow(c[:, :1] * alone))
        return M if self.step.down is None else image(self.step.down.weight, M)

    @cached_property
    def _overlap(self) -> Float[Tensor, "n n"]:
        """W_dᵀW_d, to compare sizes at the output; neurons that are hardly read count as if they were read a little.

        Else they would get so much weight that the rounding of it exceeds all the rest.
        """
        found = self.down.T @ self.down
        found.diagonal().add_(UNREAD**2 * found.diagonal().mean())
        return found

    def pull(self, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, "F i"]:
        """Return the covector at the input.

        Args:
            v: covectors at the output, shape [F, o].
            t: the token.
        """
        a = v @ self.down
        if self.step.gate is None:
            return (a * self.first[t]) @ self.step.bent.weight
        back = (a * (self.first[t] * self.other[t])) @ self.step.bent.weight
        return back + (a * self.post[t]) @ self.step.up.weight

    def quadratic(
        self, v: Float[Tensor, "F o"], t: int, J: Float[Tensor, "i n"] | None = None
    ) -> tuple[Float[Tensor, "F n n"], Float[Tensor, " F"]]:
        """Return Q with ½xᵀQx the second order of v·r for a move x of the root, and its rounding in the 2-norm.

        Args:
            v: covectors at the output, shape [F, o].
            t: the token.
            J: the Jacobian of the network's input by x; None for that by the root.
        """
        return second_order(self, v, t, self.source.J[t] if J is None else J, self.second)

    def rest(self, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, " F"]:
        """Bound |v·r − ½xᵀQx|, rounding of v included."""
        return support(self.rest_shape[t], v) + self.noise(v, t)

    def secant(
        self, v: Float[Tensor, "F o"], t: int, J: Float[Tensor, "i n"] | None = None
    ) -> tuple[Float[Tensor, "F n n"], Float[Tensor, " F"]]:
        """Return Q with ½xᵀQx in the middle of what v·r may be, neuron by neuron, and its rounding in the 2-norm.

        Args:
            v: covectors at the output, shape [F, o].
            t: the token.
            J: the Jacobian of the network's input by x; None for that by the root.
        """
        return second_order(self, v, t, self.source.J[t] if J is None else J, self.bent.middle)

    @cached_property
    def bent(self) -> Secants:
        """The secants of all neurons by parabolas, or by constants where there are too many neurons for a CPU."""
        function, few = self.step.function, self.h.is_cuda or self.h.shape[1] <= WIDEST_ON_CPU
        known = derivatives(function, self.h)
        found = secants(function, self.h, self.b, known, few)
        return found._replace(spread=grow(found.spread))

    def squares(self, v: Float[Tensor, "F o"], t: int) -> Squares:
        """Bound |v·r − ½uᵀQu| for the whole move u = Aα + e of the input and Q of `secant` by a square of u."""
        return squares_above(self, v, t)

    def bound(self, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, "F 2"]:
        """Bound v·r and −v·r over the ellipsoid, from one d × d matrix per covector and sign, with rounding."""
        return covector_bound(self, v, t)

    @cached_property
    def sway(self) -> Float[Tensor, "S n"]:
        """What a neuron moves by per unit of error in φ′ and φ."""
        if self.step.gate is None:
            return self.b
        return grow(self.b * self.other.abs() + self.b_other * (1.0 + self.post.abs()))

    def noise(self, v: Float[Tensor, "F o"], t: int) -> Float[Tensor, " F"]:
        """Bound the rounding of the output at the centre and of the covector, seen over the region."""
        a = v @ self.down
        a_noise = gamma(len(self.down) + 16) * length(self.down.T) * length(v)[:, None]
        found = length(v) * self._centre_noise[t]
        return grow(found + DERIVATIVE_ERROR * ((a.abs() + a_noise) @ self.sway[t]))

    @cached_property
    def _centre_noise(self) -> Float[Tensor, " S"]:
        """The part of `noise` that is the same for all covectors of length 1.

        Every product is a sum of at most n terms, and fewer than eight stand between the input and the output or the
        covector: γ_8n. They err by units of the size of a neuron, which reach the output through |W_d|. Output,
        Jacobian and covector each count at most twice, which the factor 8 covers.
        """
        y, step = self.source, self.step
        n = sum(self.down.shape) + step.bent.weight.shape[1] + 64
        moved = (y.size + y.stretch)[:, None]
        size = 1.0 + length(step.bent.weight) * moved
        if step.bent.bias is not None:
            size = size + step.bent.bias.abs()
        # φ′ + φ″b + 3|cubic|b² + 4|quartic|b³: how strongly the remainder's terms read an error of the pre-activation.
        cubic, quartic = self.cubics.abs().amax(0), self.quartics.abs().amax(0)
        slope = 1.2 * (1.0 + self.b) ** 3 + 3.0 * cubic * self.b.square() + 4.0 * quartic * self.b**3
        if step.function == "relu2":
            slope = slope + 2.0 * (self.h.abs() + self.b)
        if step.gate is not None:
            size = size + length(step.up.weight) * moved
            if step.up.bias is not None:
                size = size + step.up.bias.abs()
            slope = slope * (1.0 + self.other.abs() + self.b_other) + self.post.abs()
        reached = length(grow((1.0 + slope) * size) @ self.down.abs().T)
        bias = 0.0 if step.down is None or step.down.bias is None else length(step.down.bias)
        return grow(gamma(8 * n) * (8.0 * reached + bias))
