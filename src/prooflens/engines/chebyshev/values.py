"""Values of `chebyshev`: a polynomial through the model's own runs, and an ellipsoid of what it misses.

A value on a piece of the region is P(α) + e. P goes through the runs (`grid`), and

    e = Σ_s F_s r_s + b,      r_s ∈ E(M_s),   |b_n| ≤ box_n,

token by token. The r_s are *atoms*: errors that were made once, at the site that made them, and that later steps only
move by linear maps F_s, which lose nothing. An atom may be *composite*: the error of a normed stream is one vector with
a shape of its own, and is known as a sum of other atoms as well. Where streams are added, composite atoms are written
out, so that what a block does to the error that it is added to is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prooflens.engines.chebyshev.grid import Grid
from prooflens.engines.relaxations.ellipsoids import image, raised, total, trace, weighted_sum, weights_of_sum
from prooflens.engines.relaxations.norms import UNDERFLOW, frobenius, grow, length, product_error
from prooflens.numerics import gamma


@dataclass(frozen=True, eq=False)
class RankOne:
    """The map diag(scale) − column rowᵀ of every token: what a norm does to small errors.

    Attributes:
        scale: shape [b, S, n].
        column: shape [b, S, n].
        row: shape [b, S, n].
    """

    scale: Float[Tensor, "b S n"]
    column: Float[Tensor, "b S n"]
    row: Float[Tensor, "b S n"]

    def dense(self) -> Float[Tensor, "b S n n"]:
        """The map as a matrix."""
        return torch.diag_embed(self.scale) - self.column[..., None] * self.row[..., None, :]

    def image(self, M: Float[Tensor, "b S n n"]) -> Float[Tensor, "b S n n"]:
        """The shape of the image of an ellipsoid: no product of matrices is needed."""
        read = (M @ self.row[..., None])[..., 0]
        mixed = (self.scale * read)[..., None] * self.column[..., None, :]
        found = M * self.scale[..., None]
        found.mul_(self.scale[..., None, :])
        found.sub_(mixed).sub_(mixed.mT)
        twice = (read * self.row).sum(-1)
        found.add_((twice[..., None] * self.column)[..., None] * self.column[..., None, :])
        size = (self.scale.abs().amax(-1) + length(self.column) * length(self.row)).square() * frobenius(M)
        return raised(found, product_error(4 * M.shape[-1] + 32, 4.0 * size))

    def size(self) -> Float[Tensor, "b S"]:
        """A bound of the Frobenius norm."""
        return grow(length(self.scale) + length(self.column) * length(self.row))


Factor = Tensor | RankOne | None
"""A linear map of an atom: a matrix [b, S, n, m] (or with 1 for b and S), a `RankOne`, or None for the identity."""


@dataclass(eq=False)
class Atom:
    """An error that was made once.

    Attributes:
        shape: M, [b, S, m, m], or the diagonal of a diagonal one, [b, S, m].
        parts: the atoms that it is a sum of, each with its map; None if it is no sum.
    """

    shape: Tensor
    parts: dict[str, Factor] | None = None

    @property
    def is_diagonal(self) -> bool:
        """Whether the shape is a diagonal."""
        return self.shape.ndim == 3

    def image(self, factor: Factor) -> Float[Tensor, "b S n n"]:
        """The shape of a linear image of the atom."""
        if factor is None:
            return torch.diag_embed(self.shape) if self.is_diagonal else self.shape
        if isinstance(factor, RankOne):
            return factor.image(torch.diag_embed(self.shape) if self.is_diagonal else self.shape)
        found = weighted_sum(factor, self.shape) if self.is_diagonal else image(factor, self.shape)
        return found.expand(*self.shape.shape[:2], *found.shape[2:])

    def reach(self, factor: Factor) -> Float[Tensor, "b S n"]:
        """sup |F r| per coordinate."""
        if factor is None:
            square = self.shape if self.is_diagonal else self.shape.diagonal(dim1=-2, dim2=-1)
            return grow(square.clamp(min=0.0).sqrt())
        if isinstance(factor, RankOne):
            return grow(self.image(factor).diagonal(dim1=-2, dim2=-1).sqrt())
        if self.is_diagonal:
            return grow((factor.square() @ self.shape[..., None])[..., 0].sqrt())
        square = ((factor @ self.shape) * factor).sum(-1).clamp(min=0.0)
        n = factor.shape[-1]
        error = product_error(2 * n, factor.square().sum(-1) * frobenius(self.shape)[..., None])
        return grow((square + 2.0 * error + UNDERFLOW).sqrt())

    @cached_property
    def size(self) -> Float[Tensor, "b S"]:
        """A bound of ‖r‖₂."""
        return grow((self.shape.sum(-1) if self.is_diagonal else trace(self.shape)).sqrt())


@dataclass(eq=False)
class Piece:
    """What the values of one walk share: the grid, and all atoms by name."""

    grid: Grid
    atoms: dict[str, Atom] = field(default_factory=dict)

    def forget(self, values: Iterable[object]) -> None:
        """Drop all atoms that these values do not read.

        Args:
            values: what later steps may read.
        """
        used: set[str] = set()
        for value in (value for value in values if isinstance(value, Value)):
            for held in (value, *(gate.base for gate in value.gates)):
                for name in held.terms:
                    used |= {name, *(self.atoms[name].parts or ())}
        for name in set(self.atoms) - used:
            del self.atoms[name]


def box_diagonal(box: Float[Tensor, "b S n"]) -> Float[Tensor, "b S n"]:
    """The diagonal of an ellipsoid around {|x_n| ≤ box_n}."""
    return grow(box.square() * weights_of_sum(box)) + UNDERFLOW


@dataclass(frozen=True, eq=False)
class Gate:
    """Errors of another value times numbers that change on the piece: (scale + Σ_i α_i slopes_i) ⊙ e.

    Attributes:
        base: the value whose errors they are.
        scale: at the centre, shape [b, S, n].
        slopes: per factor, shape [k, b, S, n].
    """

    base: Value
    scale: Float[Tensor, "b S n"]
    slopes: Float[Tensor, "k b S n"]


@dataclass(eq=False)
class Value:
    """A value of a piece, for all tokens that are walked.

    Attributes:
        name: the value's name in the program.
        piece: the grid and the atoms.
        runs: the value at the points of the grid, shape [b, N, S, n].
        terms: the maps F_s of the atoms that it has errors of.
        box: the half-widths of its own errors, shape [b, S, n].
        heads: how many heads the value has.
        gates: errors of other values that it has, times numbers per coordinate; activations and gates have these.
    """

    name: str
    piece: Piece
    runs: Float[Tensor, "b N S n"]
    terms: dict[str, Factor]
    box: Float[Tensor, "b S n"]
    heads: int = 1
    gates: tuple[Gate, ...] = ()

    @cached_property
    def coefficients(self) -> tuple[Float[Tensor, "b N S n"], Float[Tensor, "b S n"]]:
        """The coefficients of P, and by how much they may be off."""
        return self.piece.grid.coefficients(self.runs)

    @property
    def center(self) -> Float[Tensor, "b S n"]:
        """c₀ as computed: the point where steps are replaced by linear maps. Any point would do."""
        return self.coefficients[0][:, 0]

    @cached_property
    def moves(self) -> Float[Tensor, "b S n"]:
        """sup |P − c₀| per coordinate."""
        return self.piece.grid.moves(*self.coefficients)

    @cached_property
    def own(self) -> Float[Tensor, "b S n"]:
        """The diagonal of an ellipsoid around b."""
        return box_diagonal(self.box)

    @cached_property
    def shape(self) -> Float[Tensor, "b S n n"]:
        """The shape of e."""
        assert not self.gates, "only an affine map reads an activation"
        parts = [self.piece.atoms[name].image(factor) for name, factor in self.terms.items()]
        return total([*parts, torch.diag_embed(self.own)] if self.has_own or not parts else parts)

    @cached_property
    def has_own(self) -> bool:
        """Whether it has errors of its own."""
        return bool((self.box > 0.0).any())

    @cached_property
    def reach(self) -> Float[Tensor, "b S n"]:
        """sup |e| per coordinate."""
        found = self.box
        for name, factor in self.terms.items():
            found = found + self.piece.atoms[name].reach(factor)
        for gate in self.gates:
            found = found + (gate.scale.abs() + gate.slopes.abs().sum(0)) * gate.base.reach
        return grow(found)

    @cached_property
    def linear(self) -> Float[Tensor, "k b S n"]:
        """The coefficients of P at the factors themselves."""
        return self.coefficients[0][:, list(self.piece.grid.linear)].movedim(1, 0)

    @cached_property
    def bends(self) -> Float[Tensor, "b S n"]:
        """sup |P − c₀ − Σ_i α_i linear_i| per coordinate."""
        return grow((self.moves - self.linear.abs().sum(0)).clamp(min=0.0) + gamma(64) * self.moves)

    @cached_property
    def most(self) -> Float[Tensor, "b S n"]:
        """sup |P| per coordinate."""
        return grow(self.center.abs() + self.moves)

    def blocks(self) -> Float[Tensor, "b S h c c"]:
        """The shape of e of every head."""
        b, S, n = self.box.shape
        c = n // self.heads
        split = self.shape.reshape(b, S, self.heads, c, self.heads, c)
        return split.diagonal(dim1=2, dim2=4).movedim(-1, 2)

    def written_out(self) -> dict[str, Factor]:
        """The maps of all atoms that are no sums, composite ones written out."""
        assert not self.gates, "only an affine map reads an activation"
        found: dict[str, Factor] = {}
        for name, factor in self.terms.items():
            parts = self.piece.atoms[name].parts
            for part, inner in ({name: None} if parts is None else parts).items():
                join(found, part, compose(factor, inner), self.box)
        return found

    def writing_noise(self) -> Float[Tensor, "b S"]:
        """Bound, in the 2-norm, the rounding of the maps that `written_out` multiplies."""
        found = torch.zeros_like(self.box[..., 0])
        n = self.box.shape[-1]
        for name, factor in self.terms.items():
            atom = self.piece.atoms[name]
            outer = factor_size(factor, n)
            for part, inner in (atom.parts or {}).items():
                size = outer * factor_size(inner, n) * self.piece.atoms[part].size
                found = found + product_error(4 * n + 32, 4.0 * size)
        return grow(found)

    def settled(self) -> Value:
        """The same value with all its errors as one new atom."""
        atom = Atom(self.shape)
        self.piece.atoms[self.name] = atom
        nothing = torch.zeros_like(self.box)
        return Value(self.name, self.piece, self.runs, {self.name: None}, nothing, self.heads)


def compose(outer: Factor, inner: Factor) -> Factor:
    """The product of two maps."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    matrix = dense(outer)
    if isinstance(inner, RankOne):
        pulled = (matrix @ inner.column[..., None]) * inner.row[..., None, :]
        return matrix * inner.scale[..., None, :] - pulled
    return matrix @ inner


def dense(factor: Tensor | RankOne) -> Tensor:
    """A map as a matrix."""
    return factor.dense() if isinstance(factor, RankOne) else factor


def factor_size(factor: Factor, n: int) -> Tensor | float:
    """A bound of the Frobenius norm of a map of n coordinates."""
    if factor is None:
        return math.sqrt(n) * (1.0 + 2.0**-32)
    found: Tensor = factor.size() if isinstance(factor, RankOne) else frobenius(factor)
    return found


def join(terms: dict[str, Factor], name: str, factor: Factor, like: Float[Tensor, "b S n"]) -> None:
    """Add a map of an atom to those that are there.

    Args:
        terms: maps by the names of their atoms; changed.
        name: the atom.
        factor: its map.
        like: a value that the maps make, for the size of an identity.
    """
    if name not in terms:
        terms[name] = factor
        return
    eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)[None, None]
    there, more = (eye if part is None else dense(part) for part in (terms[name], factor))
    terms[name] = there + more


def slip(value: Value, weight: Float[Tensor, "n m"], inner: int) -> Float[Tensor, "b S"]:
    """Bound, in the 2-norm, what rounding in the maps of a linear image of a value amounts to.

    Args:
        value: what is mapped.
        weight: the linear map.
        inner: the length of its sums.
    """
    found = torch.zeros_like(value.box[..., 0])
    size = frobenius(weight)
    for name, factor in value.terms.items():
        if factor is not None:
            most = factor_size(factor, weight.shape[-1])
            found = found + product_error(inner, size * most) * value.piece.atoms[name].size
    return grow(found)


def stacked(M: Float[Tensor, "b S h c c"]) -> Float[Tensor, "b S n n"]:
    """The shape of vectors that are stacked, each in its own ellipsoid."""
    b, S, h, c, _ = M.shape
    if h == 1:
        return M[:, :, 0]
    w = weights_of_sum(trace(M).sqrt())
    found = M.new_zeros(b, S, h, c, h, c)
    places = torch.arange(h, device=M.device)
    found[:, :, places, :, places] = grow(w[..., None, None] * M).movedim(2, 0)
    return found.reshape(b, S, h * c, h * c)
