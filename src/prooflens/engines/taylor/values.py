"""Values of `taylor`: u(x) = u + Aα + e, with A the computed Jacobian and e in an ellipsoid.

Chains are token-wise, so A = J N: J = ∂u/∂root per token, N = ∂root/∂α. Over the box |α_k| ≤ half_widths_k

    Aα ∈ E(P),   P = J N diag(w²) Nᵀ Jᵀ,        e = Σ_s J_s r_s ∈ E(B),

with w as in `FactorBox`. The *sources* s are the root's own remainder and the remainders of the sites of the chain,
each in an ellipsoid (`relaxations.ellipsoids`), and J_s is the Jacobian of the value by the output of that site. A
remainder is made once and from then on moved by linear maps, which lose nothing. Rounding since the last site is a
ball, `noise`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prooflens.engines.relaxations.ellipsoids import ball, gram, image, total, trace, weights_of_sum
from prooflens.engines.relaxations.norms import (
    cholesky_factor,
    frobenius,
    grow,
    identity,
    largest,
    length,
    product_error,
)
from prooflens.engines.taylor.remainder_sources import RemainderSource
from prooflens.numerics.rounding import UNIT_ROUNDOFF

UNREAD = 0.01
"""The least weight of a group of factors, as a share of the mean, so that weights stay of one size."""


@dataclass(frozen=True, eq=False)
class FactorBox:
    """The box |α_k| ≤ half_widths_k and its groups.

    Factors that move one token alone are a group, and all others are another. For any w with Σ_g R_g²/w_g² ≤ 1, R_g²
    the squared length of group g's part of the box, α = w ⊙ α̂ with ‖α̂‖₂ ≤ 1. What reads few groups strongly gets
    weights of its own; half-widths even out the factors of a group.
    """

    half_widths: Float[Tensor, " p"]
    group: Int[Tensor, " p"]
    count: int

    @classmethod
    def of(cls, generators: Float[Tensor, "S d p"], half_widths: Float[Tensor, " p"]) -> FactorBox:
        """Group the factors by the tokens that each of them moves.

        Args:
            generators: shape [S, d, p].
            half_widths: shape [p].
        """
        moves = (generators != 0).any(1)
        alone = moves.sum(0) == 1
        token = torch.where(alone, moves.to(torch.int8).argmax(0), len(moves))
        used, group = token.unique(return_inverse=True)
        return cls(half_widths, group, len(used))

    @cached_property
    def squares(self) -> Float[Tensor, " G"]:
        """R_g² per group."""
        zero = self.half_widths.new_zeros(self.count)
        return grow(zero.index_add(0, self.group, self.half_widths.square()))

    def sizes(self, rows: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b G"]:
        """Return R_g times the Frobenius norm of the columns of each group."""
        columns = rows.square().sum(-2)
        zero = columns.new_zeros(*columns.shape[:-1], self.count)
        return (zero.index_add(-1, self.group, columns) * self.squares).sqrt()

    def weights(self, sizes: Float[Tensor, "*b G"]) -> Float[Tensor, "*b p"]:
        """Return w for about the least trace of the shape of what reads groups with these sizes."""
        floored = sizes + UNREAD * sizes.mean(-1, keepdim=True)
        return (self.squares * weights_of_sum(floored)).sqrt()[..., self.group]

    @staticmethod
    def own_weights(rows: Float[Tensor, "n p"], half_widths: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return w for about the least trace of rows diag(w²) rowsᵀ, with every factor as a group of its own.

        Args:
            rows: what reads the factors, shape [n, p].
            half_widths: their half-widths, shape [p].
        """
        sizes = torch.linalg.vector_norm(rows, dim=-2) * half_widths
        return half_widths * weights_of_sum(sizes + UNREAD * sizes.mean(-1, keepdim=True)).sqrt()


Columns = list[tuple[int, int]]
"""For each token the factors from first to last that move it at all, as a half-open range."""


@dataclass(eq=False)
class Root:
    """Where a chain starts: its value u, N = ∂root/∂α per token, the shape B of e, and the sources of e.

    Attributes:
        u: the value at the centre, shape [S, d].
        N: the Jacobian by the factors, shape [S, d, p].
        B: the shape of e, [S, d, d].
        factors: the box of the factors.
        columns: which columns of N may be other than 0, token by token: products leave out the others.
        origins: the sources of e.
        blur: the radius of e per token where e is rounding alone, as in the input; B is then that ball.
    """

    u: Float[Tensor, "S d"]
    N: Float[Tensor, "S d p"]
    B: Float[Tensor, "S d d"]
    factors: FactorBox
    columns: Columns = field(default_factory=list)
    origins: list[RemainderSource] = field(default_factory=list)
    blur: Float[Tensor, " S"] | None = None

    def __post_init__(self) -> None:
        self.columns = self.columns or columns_of(self.N)

    @property
    def half_widths(self) -> Float[Tensor, " p"]:
        """Half-widths of the factors."""
        return self.factors.half_widths

    @cached_property
    def gram(self) -> Float[Tensor, "S d d"]:
        """The shape of Nα, with weights of the factors for each token."""
        found = torch.empty_like(self.B)
        for t, (first, last) in enumerate(self.columns):
            N = self.N[t, :, first:last]
            found[t] = gram(N * self.factors.own_weights(N, self.half_widths[first:last]))
        return found

    @cached_property
    def stretch(self) -> Float[Tensor, " S"]:
        """A crude bound of sup ‖Nα‖₂, for rounding."""
        return grow(frobenius(self.N) * length(self.half_widths))

    @cached_property
    def reads(self) -> Float[Tensor, "S d"]:
        """The sums of N over the factors: with u they tell whether two walks start at the same point."""
        return self.N.sum(-1)

    def forget_factors(self) -> None:
        """Let go of N and B, the largest things of a root; `u`, `reads` and the factors themselves stay."""
        assert self.reads.shape == self.u.shape
        self.N, self.B = self.N.new_zeros(*self.u.shape, 0), self.B.new_zeros(0, *self.B.shape[1:])
        for name in ("gram", "stretch", "eye"):
            self.__dict__.pop(name, None)

    @cached_property
    def eye(self) -> Float[Tensor, "S d d"]:
        """The Jacobian of the root by itself."""
        S, d = self.u.shape
        return identity(self.u, d).expand(S, -1, -1)

    def linear_part(self, J: Float[Tensor, "S n d"]) -> Float[Tensor, "S n p"]:
        """Return JN, token by token; columns that are 0 are not multiplied.

        Args:
            J: matrices, shape [S, n, d].
        """
        p = self.N.shape[-1]
        if all(range_ == (0, p) for range_ in self.columns):
            return J @ self.N
        found = J.new_zeros(*J.shape[:2], p)
        for t, (first, last) in enumerate(self.columns):
            found[t, :, first:last] = J[t] @ self.N[t, :, first:last]
        return found


def times(D: Float[Tensor, "*b n d"], J: Float[Tensor, "S d m"]) -> Float[Tensor, "S n m"]:
    """Return DJ; where J is the same for all tokens, as it is just behind a site, it is multiplied once.

    Args:
        D: one matrix for all tokens, or one for each.
        J: matrices, shape [S, d, m].
    """
    if J.stride(0) != 0:
        return D @ J
    found = D @ J[0]
    return found.expand(len(J), -1, -1) if found.dim() == 2 else found


def columns_of(N: Float[Tensor, "S d p"]) -> Columns:
    """Return the range of the columns that are not 0, token by token; an empty one is (0, 0).

    Args:
        N: shape [S, d, p].
    """
    found = []
    for live in (N != 0).any(1).cpu():
        where = live.nonzero()[:, 0]
        found.append((int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0))
    return found


def input_root(
    center: Float[Tensor, "S d"],
    generators: Float[Tensor, "S d p"],
    half_widths: Float[Tensor, " p"],
    blur: float,
) -> Root:
    """Return the input as a root, by factors of the given half-widths; dividing by them rounds, which B covers.

    Args:
        center: the centre of the region, shape [S, d].
        generators: what each factor moves, shape [S, d, p].
        half_widths: half-widths of the factors, shape [p].
        blur: by how much the centre may be off, per token.
    """
    d = center.shape[1]
    radius = torch.full_like(center[:, 0], blur)
    if bool((half_widths != 1.0).any()):
        radius = radius + grow(4.0 * UNIT_ROUNDOFF * length(generators.abs().sum(-1)))
        N = generators / half_widths
    else:
        N = generators
    return Root(center, N, ball(radius, d), FactorBox.of(generators, half_widths), blur=radius)


@dataclass(eq=False)
class Value:
    """A value of a chain, for all tokens: u(x) = u + J(Nα + e_root) + Σ_s J_s r_s.

    Attributes:
        u: the value at the centre, shape [S, n].
        J: the Jacobian by the root, shape [S, n, d].
        root: where the chain starts.
        sources: the Jacobian J_s by each site of the chain before this value.
        shapes: the shapes of all remainders of the chain so far, by source.
        noise: rounding of u, J and the sources since the last site, in the 2-norm, shape [S].
        heads: how many heads the value has.
    """

    u: Float[Tensor, "S n"]
    J: Float[Tensor, "S n d"]
    root: Root
    sources: dict[str, Float[Tensor, "S n m"]]
    """The Jacobian J_s by each site of the chain before this value."""
    shapes: dict[str, Float[Tensor, "S m m"]]
    """The shapes of all remainders of the chain so far, by source."""
    noise: Float[Tensor, " S"]
    """Rounding of u, J and the sources since the last site, in the 2-norm."""
    heads: int = 1
    _blocks: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The parts of e: Jacobians and the shapes that they map."""
        found = [] if self.root.blur is not None else [(self.J, self.root.B)]
        return found + [(J, self.shapes[s]) for s, J in self.sources.items()]

    @property
    def slip(self) -> Float[Tensor, " S"]:
        """The radius of what rounding adds to e."""
        slip = product_error(self.J.shape[-1], frobenius(self.J) * self.root.stretch)
        return grow(self.noise + slip)

    @cached_property
    def shape_a(self) -> Float[Tensor, "S n n"]:
        """The shape of Aα."""
        return self._seen(self.J, self.root.gram)

    def _seen(self, J: Tensor, shape: Tensor) -> Tensor:
        """Return the image of a shape; the root itself needs no product."""
        return shape if J is self.root.eye else image(J, shape)

    @cached_property
    def shape_e(self) -> Float[Tensor, "S n n"]:
        """The shape of e."""
        parts = [self._seen(J, shape) for J, shape in self.parts]
        return total([*parts, ball(self.slip, self.u.shape[1])])

    @cached_property
    def shape(self) -> Float[Tensor, "S n n"]:
        """The shape of u(x) − u."""
        return total([self.shape_a, self.shape_e])

    def blocks(self, name: str) -> Float[Tensor, "S h c c"]:
        """Return one of the shapes head by head, made from the rows of the Jacobians that a head has.

        Args:
            name: `shape_a`, `shape_e` or `shape`.
        """
        if name not in self._blocks:
            c = self.u.shape[1] // self.heads
            if self.heads == 1:
                shapes = [getattr(self, name)[:, None]]
            elif name == "shape":
                shapes = [self.blocks("shape_a"), self.blocks("shape_e")]
            else:
                parts = [(self.J, self.root.gram)] if name == "shape_a" else self.parts
                shapes = [image(J.unflatten(1, (self.heads, c)), shape[:, None]) for J, shape in parts]
            if name == "shape_e" and self.heads > 1:
                shapes.append(ball(self.slip[:, None].expand(-1, self.heads), c))
            self._blocks[name] = total(shapes)
        return self._blocks[name]

    @cached_property
    def tau(self) -> Float[Tensor, "S h"]:
        """sup ‖Aα‖₂, head by head."""
        return grow(largest(self.blocks("shape_a")).sqrt())

    @cached_property
    def e(self) -> Float[Tensor, "S h"]:
        """sup ‖e‖₂, head by head."""
        return grow(largest(self.blocks("shape_e")).sqrt())

    @cached_property
    def reach(self) -> Float[Tensor, "S h"]:
        """sup ‖u(x) − u‖₂, head by head."""
        return grow(self.tau + self.e)

    @cached_property
    def size(self) -> Float[Tensor, " S"]:
        """A crude bound of sup ‖u(x)‖₂, for rounding: ‖JNα‖₂ ≤ ‖J‖_F sup ‖Nα‖₂, and so on."""
        found = length(self.u) + frobenius(self.J) * trace(self.root.gram).sqrt() + self.slip
        for J, shape in self.parts:
            found = found + frobenius(J) * trace(shape).sqrt()
        return grow(found)

    @cached_property
    def stretch(self) -> Float[Tensor, " S"]:
        """The size of all linear parts, for rounding."""
        found = frobenius(self.J) * self.root.stretch + self.noise
        for J, shape in self.parts:
            found = found + frobenius(J) * trace(shape).sqrt()
        return grow(found)

    @cached_property
    def ellipsoid(self) -> Float[Tensor, "S n n"]:
        """L with u(x) − u ∈ L{‖ξ‖ ≤ 1}."""
        return cholesky_factor(self.shape)
